"""Two sweeps on the same machine: do they pick settings of the same speed?

    python benchmarks/sweep_stability.py --json FILE

Both are run through `outrider sweep`, one after the other. Where they pick different settings at a
load, each pick's speed is the mean of what both sweeps measured for it, so that neither is judged
by the luck that had it picked. The bar: within 3 % of each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from outrider.records.files import write_json
from outrider.records.manifest import run_manifest

BAR = 0.03
BASE = "baseline"


def sweep(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recommendation of one sweep."""
    words = ["sweep", options.target, "--method", options.methods, "--tokens", options.tokens]
    words += ["-c", options.concurrency, "--limit", str(options.limit), "--out", str(folder)]
    words += ["--max-tokens", str(options.max_tokens)]
    subprocess.run([sys.executable, "-m", "outrider", *words], check=True)
    found: dict[str, Any] = json.loads((folder / "recommendation.json").read_text())
    return found


def speeds(found: dict[str, Any]) -> dict[tuple[int, str], float]:
    """Speed over plain decoding, whole requests, by load and setting."""
    rows = {
        (verdict["concurrency"], verdict["setting"]): verdict["whole"]["value"]
        for verdict in found["verdicts"]
        if verdict["whole"] is not None
    }
    return rows | {(choice["concurrency"], BASE): 1.0 for choice in found["choices"]}


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every load, the settings picked and how far apart they are."""
    tables = [speeds(run) for run in runs]
    cells = []
    for first, second in zip(runs[0]["choices"], runs[1]["choices"], strict=True):
        load = first["concurrency"]
        picks = [first["setting"], second["setting"]]
        means = [mean(t[load, pick] for t in tables if (load, pick) in t) for pick in picks]
        cells.append(
            {
                "concurrency": load,
                "picked": picks,
                "speed_over_plain": [round(value, 3) for value in means],
                "apart": round(abs(means[0] / means[1] - 1), 4),
            }
        )
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--methods", default="suffix,eagle3")
    parser.add_argument("--tokens", default="4,auto")
    parser.add_argument("--concurrency", default="1")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        options={k: str(v) for k, v in vars(options).items() if k != "json"},
    )
    with tempfile.TemporaryDirectory() as home:
        runs = [sweep(Path(home) / name, options) for name in ("first", "second")]
    cells = compare(runs)
    for cell in cells:
        print(json.dumps(cell))
    if options.json:
        kept = {name: [run[name] for run in runs] for name in ("headline", "verdicts", "choices")}
        record = {"manifest": manifest.finish().to_dict(), "bar": BAR, "cells": cells, **kept}
        write_json(options.json, record)
    return int(any(cell["apart"] > BAR for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
