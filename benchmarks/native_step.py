"""One pass of the native kernels: milliseconds for 1 to 64 rows, prefill, and peak memory.

    python benchmarks/native_step.py --target smollm2-135m --weights int8,int4 --json FILE

Precisions and numbers of rows are interleaved over the rounds, so that other load hits all alike;
the first round warms up. A figure is the median over the rounds with the minimum beside it, and
v(n) is the ratio of medians to one row. Memory is the growth of the process's resident size from
before the first model is loaded to after a pass over four full slots of 2048 positions (int8, in a
process of its own: ``--memory``). Load averages are in the output: figures from a machine with
other work say little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

from outrider.core.tree import DraftTree
from outrider.models.cache import KVCache
from outrider.models.load import load_model
from outrider.models.target import Segment, Target
from outrider.records.files import write_json
from outrider.records.manifest import TargetIdentity, run_manifest

ROWS = (1, 2, 4, 8, 12, 16, 32, 64)
PREFILL = 512
ROUNDS = 25


def step_ms(target: Target, cache: KVCache, segment: Segment, context: int) -> float:
    """One pass behind ``context`` committed positions; its rows are dropped."""
    cache.lengths[segment.slot] = context
    start = time.perf_counter()
    target.forward([segment], cache)
    elapsed = time.perf_counter() - start
    cache.keep(segment.slot, ())
    return 1000 * elapsed


def fill(target: Target, cache: KVCache, slot: int, length: int) -> None:
    """Commit ``length`` tokens to a slot, in chunks."""
    for start in range(0, length, PREFILL):
        count = min(PREFILL, length - start)
        target.forward([Segment(slot, tuple(i % 1000 + 5 for i in range(count)))], cache)
        cache.keep(slot, range(count))


def measure(targets: dict[str, Target], context: int) -> dict[str, dict[str, dict[str, float]]]:
    caches = {name: t.new_cache(slots=1, length=context + PREFILL) for name, t in targets.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for name, target in targets.items():
        fill(target, caches[name], 0, context)
    for turn in range(ROUNDS + 1):
        for name, target in targets.items():
            for rows in ROWS:
                segment = Segment(0, (), DraftTree.chain(tuple(range(5, 5 + rows))))
                elapsed = step_ms(target, caches[name], segment, context)
                times.setdefault((name, str(rows)), []).append(elapsed)
            if turn % 5 == 0:
                segment = Segment(0, tuple(range(5, 5 + PREFILL)))
                elapsed = step_ms(target, caches[name], segment, 0)
                times.setdefault((name, f"prefill {PREFILL}"), []).append(elapsed)
                caches[name].lengths[0] = 0
                fill(target, caches[name], 0, context)
    report: dict[str, dict[str, dict[str, float]]] = {name: {} for name in targets}
    for (name, what), values in times.items():
        figures = {"median_ms": statistics.median(values[1:]), "min_ms": min(values[1:])}
        if what.isdigit():
            figures["v"] = figures["median_ms"] / statistics.median(times[name, "1"][1:])
        report[name][what] = figures
    return report


def peak_resident() -> float:
    """Megabytes of resident memory at its peak so far (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def memory(spec: str, weights: str) -> float:
    """Megabytes at the peak of loading and serving four slots of 2048, above PyTorch alone."""
    torch.empty(1)
    before = peak_resident()
    target = load_model(spec, weights=weights, kernels="native").target
    cache = target.new_cache(slots=4, length=2048)
    for slot in range(4):
        fill(target, cache, slot, 2048 - 8)
    trees = [Segment(s, (), DraftTree.chain(tuple(range(5, 13)))) for s in range(4)]
    target.forward(trees, cache)
    return peak_resident() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--weights", default="int8,int4")
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true", help="measure memory, nothing else")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = options.weights.split(",")
    if options.memory:
        print(f"{names[0]}: {memory(options.target, names[0]):.0f} MB above PyTorch")
        return
    loaded = {n: load_model(options.target, weights=n, kernels="native") for n in names}
    some = next(iter(loaded.values()))
    manifest = run_manifest(
        seed=None,
        threads=options.threads,
        target=TargetIdentity(some.target.name, some.target.fingerprint, some.choice.weights),
        options={k: str(v) for k, v in vars(options).items()},
    )
    report = measure({name: model.target for name, model in loaded.items()}, options.context)
    document = {"manifest": manifest.finish().to_dict(), "figures": report}
    for name, rows in report.items():
        print(f"{name}, {options.threads} threads, behind {options.context} positions")
        for what, figures in rows.items():
            print(f"  {what:>12}", "  ".join(f"{k} {v:8.2f}" for k, v in figures.items()))
    print("load averages", os.getloadavg())
    if options.json is not None:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
