"""The large golden matrix: speculative output `==` plain output on a real model.

    python benchmarks/golden_matrix.py --target smollm2-135m --weights int8 --json FILE

At least 200 prompts: the built-in workloads through the chat template, and as many raw beginnings
of the same texts. Prompts take turns through temperature 0, 0.7 and 1.0, without and with
penalties; each is decoded plainly alone and then by every drafter (n-gram, suffix, the shipped
EAGLE-3 head as chain and as tree, suffix with that head, a draft model of the target's first layers
as chain and as tree), alone and four at a time, with trees of a fixed budget so that speculation
always runs. Every difference is listed; none is forgiven.

The file is written after every cell, and a cell that it holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.table import Setting, build_drafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.evaluate.workloads import load_workload
from outrider.models.load import LoadedModel, load_model
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

CONTEXT = 2560
DRAFT_LAYERS = 4
PENALTIES: dict[str, float] = {"repetition_penalty": 1.1, "presence_penalty": 0.2}
SAMPLING: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.7, "top_p": 0.95, **PENALTIES},
    {"temperature": 1.0, "min_p": 0.02, **PENALTIES},
)


@dataclass(frozen=True)
class Item:
    """A prompt with its sampling parameters."""

    name: str
    tokens: list[int]
    params: SamplingParams


def items(model: LoadedModel, limit: int | None, max_tokens: int) -> list[Item]:
    """The prompts, each with the sampling parameters whose turn it is."""
    found = []
    for number, (name, tokens) in enumerate(_prompts(model)):
        if limit is not None and number >= limit:
            break
        sampling = SAMPLING[number % len(SAMPLING)]
        params = SamplingParams(max_tokens=max_tokens, seed=number, **sampling)  # type: ignore[arg-type]
        found.append(Item(name, tokens, params))
    return found


def _prompts(model: LoadedModel) -> Iterator[tuple[str, list[int]]]:
    for prompt in load_workload("builtin:all"):
        yield prompt.id, model.tokenizer.chat(prompt.chat())
        text = prompt.messages[-1].content
        yield f"{prompt.id}/raw", model.tokenizer.encode(text[: len(text) // 2 + 1])


def drafters(model: LoadedModel, *, sequences: int) -> dict[str, Callable[[], Drafter]]:
    setting = Setting(
        model.target, model.tokenizer, sequences=sequences, context=CONTEXT, source=model.source
    )

    def draft_model(branching: int) -> DraftModelDrafter:
        config = DraftModelConfig(branching=branching, sequences=4, length=CONTEXT)
        return DraftModelDrafter(model.target.first_layers(DRAFT_LAYERS), config)

    specs = ("ngram", "suffix", "eagle3:chain", "eagle3", "hybrid:suffix+eagle3")
    return {
        **{spec: partial(build_drafter, spec, setting) for spec in specs},
        "draft_chain": lambda: draft_model(1),
        "draft_tree": lambda: draft_model(3),
    }


def decode(
    model: LoadedModel,
    work: Sequence[Item],
    name: str,
    make: Callable[[], Drafter] | None,
    slots: int,
) -> list[Completion]:
    engine = Engine(
        model.target,
        drafters={} if make is None else {name: make()},
        config=EngineConfig(slots=slots, context=CONTEXT, reuse_prefix=False),
        budget=FixedBudget(8, 5),
    )
    requests = [engine.add(item.tokens, item.params, drafter=name) for item in work]
    while engine.has_work:
        engine.step()
    return [engine.take(request) for request in requests]


def compare(
    work: Sequence[Item], plain: Sequence[Completion], results: Sequence[Completion]
) -> dict[str, Any]:
    steps = [step for result in results for step in result.steps]
    tokens = sum(len(result.tokens) for result in results)
    return {
        "identical": sum(a.tokens == b.tokens for a, b in zip(plain, results, strict=True)),
        "total": len(results),
        "different": [
            item.name
            for item, a, b in zip(work, plain, results, strict=True)
            if a.tokens != b.tokens
        ],
        "tokens": tokens,
        "proposed": sum(step.proposed for step in steps),
        "accepted": sum(step.accepted for step in steps),
        "acceptance_length": tokens / sum(step.emitted > 0 for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--drafters", help="only these, separated by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.target, weights=options.weights)
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        target=TargetIdentity(model.target.name, model.target.fingerprint, model.target.precision),
        options={k: str(v) for k, v in vars(options).items()},
    )
    work = items(model, options.limit, options.max_tokens)
    begin = time.perf_counter()
    plain = decode(model, work, "none", None, 1)
    print(f"plain: {len(work)} prompts, {time.perf_counter() - begin:.0f} s", flush=True)
    document: dict[str, Any] = {"prompts": len(work), "cells": {}}
    if options.json and options.json.exists():
        document = json.loads(options.json.read_text())
    cells = document["cells"]
    for slots in (1, 4):
        makers = {"none": None, **drafters(model, sequences=slots)}
        for name, make in makers.items():
            if options.drafters and name not in options.drafters.split(","):
                continue
            key = f"{name}, {'alone' if slots == 1 else '4 at once'}"
            if key in cells or (name, slots) == ("none", 1):
                continue
            cells[key] = compare(work, plain, decode(model, work, name, make, slots))
            print(key, {k: v for k, v in cells[key].items() if k != "different"}, flush=True)
            document["manifest"] = manifest.finish().to_dict()
            if options.json:
                write_json(options.json, document)
    if any(cell["different"] for cell in cells.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
