"""How long the capacity planner takes: a million requests, plain and speculative, on a fleet.

python benchmarks/capacity_planner.py --requests 1000000 --json results.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.records.manifest import run_manifest
from outrider.rollout.planner import Costs, Engine, Lengths, Traffic, simulate

# A 135M model in int8 on two Zen 4 cores, benchmarks/results/2026-11-29-epyc-zen4-2c-native-step.
COSTS = Costs({1: 4.5, 8: 5.3, 16: 8.1, 32: 14.0, 64: 27.0}, host_ms=0.4, draft_base_ms=0.3)
ENGINE = Engine(COSTS, (0.7, 0.5, 0.35, 0.25))
BAR_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    manifest = run_manifest(seed=0)
    rate = 3.5 * options.replicas
    traffic = Traffic(rate, Lengths(200, 0.6), Lengths(150, 0.6), requests=options.requests)
    found = {}
    for name, engine in (("plain", ENGINE.plain), ("speculative", ENGINE)):
        begin = time.perf_counter()
        outcome = simulate(traffic, engine, replicas=options.replicas)
        seconds = time.perf_counter() - begin
        found[name] = {"seconds": round(seconds, 2), "outcome": outcome.to_dict()}
        print(f"{name:12} {options.requests:,} requests in {seconds:.1f} s", flush=True)
    if options.json:
        document = {"manifest": manifest.finish().to_dict(), "bar_s": BAR_S, "results": found}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(entry["seconds"] < BAR_S for entry in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
