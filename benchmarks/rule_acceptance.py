"""Acceptance length by rule, drafter and temperature on a real model: the evidence for decision 4.

    python benchmarks/rule_acceptance.py --target smollm2-135m --json FILE

Every rule verifies the same kind of drafts with a fixed budget, on the same prompts and seeds:
`walk` with the target's noise shared with the drafter, `walk` with a drafter that draws with noise
of its own, `reject` and `block` (chains only) with honest q. The draft model is the target without
some of its layers: a drafter that is fair and costs too much, which does not matter here. Lookups
choose their guesses, so all rules accept the same of them in law. With --head a trained head runs
as chain and as tree. Acceptance length counts the next token (plain decoding is 1).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import make_drafter, style_in
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.evaluate.workloads import load_workload
from outrider.models.heads.files import read_head
from outrider.models.load import LoadedModel, load_model
from outrider.models.native import NativeTransformer
from outrider.models.target import Target
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

CONTEXT = 2304
SLOTS = 4
DEPTH = 5
TEMPERATURES = (0.0, 0.7, 1.0)
SKIPPED = frozenset({11, 14, 17, 20, 23})


def without_layers(target: Target, skipped: frozenset[int]) -> NativeTransformer:
    """The target with layers left out; shares its weights."""
    assert isinstance(target, NativeTransformer)
    kept = [i for i in range(target.layers) if i not in skipped]
    return NativeTransformer(
        replace(target.config, layers=tuple(target.config.layers[i] for i in kept)),
        replace(target.weights, layers=tuple(target.weights.layers[i] for i in kept)),
        precision=target.precision,
        name=f"{target.name} without {len(skipped)} layers",
        fingerprint=f"{target.fingerprint}-without-{sorted(skipped)}",
        end_tokens=target.end_tokens,
    )


class OwnNoise:
    """A drafter whose draws are independent of the target's, whatever the rule."""

    def __init__(self, inner: Drafter) -> None:
        self.name = inner.name
        self.needs: Needs = inner.needs
        self._inner = inner

    def observe(self, commits: Sequence[Commit]) -> None:
        self._inner.observe(commits)

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        own = [
            SequenceView(
                view.id,
                view.tokens,
                view.prompt_length,
                view.params,
                view.ends,
                Stream(Noise(view.id).for_step(len(view.tokens)), Purpose.DRAFT),
                view.tenant,
            )
            for view in views
        ]
        return self._inner.propose(own, budgets)

    def forget(self, sequences: Sequence[int]) -> None:
        self._inner.forget(sequences)


def head_cases(
    folders: Sequence[Path], model: LoadedModel
) -> dict[str, tuple[str, Callable[[], Drafter]]]:
    """A head as chain under every rule, and as tree under those that take trees."""

    def make(folder: Path, branching: int) -> Drafter:
        return make_drafter(
            read_head(folder),
            model.target,
            source=model.source,
            shape=TreeShape(branching, 1 if branching == 1 else 4),
            sequences=SLOTS,
            length=CONTEXT,
        )

    cases: dict[str, tuple[str, Callable[[], Drafter]]] = {}
    for folder in folders:
        name = style_in(folder)
        shapes = (("tree", 4),) if name == "medusa" else (("chain", 1), ("tree", 4))
        for kind, branching in shapes:
            build = partial(make, folder, branching)
            cases[f"{name} {kind}, walk, shared noise"] = ("walk", build)
            cases[f"{name} {kind}, walk, own noise"] = ("walk", partial(_own, build))
            cases[f"{name} {kind}, reject"] = ("reject", build)
            if kind == "chain":
                cases[f"{name} {kind}, block"] = ("block", build)
    return cases


def _own(build: Callable[[], Drafter]) -> Drafter:
    return OwnNoise(build())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=40, help="prompts of the whole set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--head", type=Path, action="append", default=[], help="a head's folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.target, weights="int8", kernels="native")
    draft = without_layers(model.target, SKIPPED)
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        target=TargetIdentity(model.target.name, model.target.fingerprint, model.target.precision),
        options={k: str(v) for k, v in vars(options).items()},
    )
    prompts = [
        model.tokenizer.chat(p.chat()) for p in load_workload("builtin:all", limit=options.limit)
    ]

    def draft_model(branching: int) -> DraftModelDrafter:
        config = DraftModelConfig(branching=branching, beam=2, sequences=SLOTS, length=CONTEXT)
        return DraftModelDrafter(draft, config)

    cases: dict[str, tuple[str, Callable[[], Drafter]]] = {
        "draft chain, walk, shared noise": ("walk", lambda: draft_model(1)),
        "draft chain, walk, own noise": ("walk", lambda: OwnNoise(draft_model(1))),
        "draft chain, reject": ("reject", lambda: draft_model(1)),
        "draft chain, block": ("block", lambda: draft_model(1)),
        "draft tree, walk, shared noise": ("walk", lambda: draft_model(2)),
        "draft tree, reject": ("reject", lambda: draft_model(2)),
        "ngram, walk": ("walk", NgramDrafter),
        "ngram, reject": ("reject", NgramDrafter),
        "suffix, walk": ("walk", SuffixDrafter),
        "suffix, reject": ("reject", SuffixDrafter),
    }
    cases |= head_cases(options.head, model)
    cells: dict[str, dict[str, Any]] = {}
    for name, (rule, make) in cases.items():
        cells[name] = {}
        for temperature in TEMPERATURES:
            engine = Engine(
                model.target,
                drafters={"d": make()},
                config=EngineConfig(slots=SLOTS, context=CONTEXT, rule=rule, reuse_prefix=False),
                budget=FixedBudget(2 * DEPTH, DEPTH),
            )
            requests = []
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(
                    temperature=temperature, seed=seed, max_tokens=options.max_tokens
                )
                requests.append(engine.add(prompt, params, drafter="d", tenant=str(seed)))
            while engine.has_work:
                engine.step()
            results = [engine.take(request) for request in requests]
            steps = [s for r in results for s in r.steps if s.emitted]
            cells[name][str(temperature)] = {
                "acceptance_length": sum(s.emitted for s in steps) / len(steps),
                "steps": len(steps),
                "proposed": sum(s.proposed for s in steps),
                "accepted": sum(s.accepted for s in steps),
            }
        print(
            name, {t: round(c["acceptance_length"], 3) for t, c in cells[name].items()}, flush=True
        )
    if options.json:
        document = {
            "manifest": manifest.finish().to_dict(),
            "prompts": len(prompts),
            "cells": cells,
        }
        write_json(options.json, document)


if __name__ == "__main__":
    main()
