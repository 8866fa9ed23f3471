"""Acceptance of trained heads on prompts that training never saw: the built-in workloads.

    python benchmarks/head_acceptance.py --head DIR --families chat,code --json FILE
    python benchmarks/head_acceptance.py --head A --head B --system "Answer in verse." --chain 10

A folder is that of a head or of a draft model. Every one is served by the engine with a fixed
budget: a chain of five, and trees of at most 15 guesses (16 rows), greedy and at temperature 1,
with `walk` and the noise that drafter and target share. Medusa guesses no chains; its tree comes in
16, 32 and 64 rows (its authors' has 64). Acceptance length counts the next token.
Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import style_in
from outrider.evaluate.workloads import load_workload
from outrider.models.heads.files import read_head
from outrider.models.load import LoadedModel, load_model
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest
from outrider.train.acceptance import Build, Probe, Served, head_builder, serve

CHAIN = Probe(nodes=5, depth=5, chain=True)
TREES = {
    "tree 4x4": Probe(nodes=15, depth=6, chain=False, branching=4, beam=4),
    "tree 8x4": Probe(nodes=15, depth=6, chain=False, branching=8, beam=4),
    "tree 6x6": Probe(nodes=15, depth=6, chain=False, branching=6, beam=6),
}
MEDUSA = {
    f"tree of {rows} rows": Probe(nodes=rows - 1, depth=6, chain=False, branching=10, beam=10)
    for rows in (16, 32, 64)
}


def build_of(folder: Path, loaded: LoadedModel) -> tuple[str, Build]:
    """The style of the drafter in a folder, and how to make one for a shape."""
    if json.loads((folder / "config.json").read_text()).get("model_type") != "llama":
        build = head_builder(loaded.target, read_head(folder), source=loaded.source)
        return style_in(folder), build
    model = load_model(str(folder), weights="int8").target

    def build_model(shape: TreeShape, sequences: int, length: int) -> Drafter:
        settings = DraftModelConfig(shape.branching, shape.beam, sequences, length)
        return DraftModelDrafter(model, settings)

    return "draft_model", build_model


def cell(served: Served) -> dict[str, Any]:
    return {
        "acceptance_length": served.acceptance_length,
        "by_position": served.by_position,
        "steps": served.steps,
        "tokens": served.tokens,
        "drafted": served.drafted,
        "accepted": served.accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--head", type=Path, action="append", required=True)
    parser.add_argument("--families", default="chat,code")
    parser.add_argument("--limit", type=int, help="prompts per family")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--system", help="a system prompt instead of the template's own")
    parser.add_argument("--chain", type=int, default=CHAIN.depth, help="guesses of the chain")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.target, weights=options.weights)
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        target=TargetIdentity(model.target.name, model.target.fingerprint, model.target.precision),
        options={k: str(v) for k, v in vars(options).items() if k not in ("head", "json")},
    )
    cells: list[dict[str, Any]] = []
    for folder in options.head:
        style, build = build_of(folder, model)
        chain = replace(CHAIN, nodes=options.chain, depth=options.chain)
        probes = MEDUSA if style == "medusa" else {"chain": chain, **TREES}
        for family in options.families.split(","):
            found = load_workload(f"builtin:{family}", limit=options.limit)
            chats = [p.chat() for p in found]
            if options.system is not None:
                told = {"role": "system", "content": options.system}
                chats = [[told, *(m for m in c if m["role"] != "system")] for c in chats]
            prompts = [model.tokenizer.chat(chat) for chat in chats]
            for temperature in map(float, options.temperatures.split(",")):
                for name, probe in probes.items():
                    probe = replace(probe, max_tokens=options.max_tokens, temperature=temperature)
                    served = serve(model.target, build, prompts, probe)
                    assert served.acceptance_length > 1 and 0 < served.accepted < served.drafted
                    cells.append(
                        {
                            "head": folder.name,
                            "style": style,
                            "family": family,
                            "temperature": temperature,
                            "shape": name,
                            **cell(served),
                        }
                    )
                    shares = " ".join(f"{share:.2f}" for share in served.by_position)
                    print(
                        f"{folder.name} {family} T={temperature:g} {name}: "
                        f"{served.acceptance_length:.3f}  {shares}",
                        flush=True,
                    )
    if options.json:
        write_json(options.json, {"manifest": manifest.finish().to_dict(), "cells": cells})


if __name__ == "__main__":
    main()
