"""How often verdicts are wrong: false rollbacks between equal arms, harm that is missed.

Times are log-normal with sigma 0.5, as in the literature on canaries of language models; errors are
rare. Every run is a whole rollout window through `outrider.rollout.verdict.judge` with the default
settings. Prompt types are left out of the checks: they never take anything back.

    python benchmarks/rollout_verdicts.py --runs 2000 --json results.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.records.manifest import run_manifest
from outrider.rollout.config import VerdictSettings
from outrider.rollout.verdict import Looks, Observation, judge

SIGMA = 0.5
ERRORS = 0.003
SETTINGS = VerdictSettings(by_type=())


@dataclass(frozen=True)
class Case:
    """One kind of run.

    Attributes:
        arm: requests of the canary, and of its control.
        looks: evenly spread over them.
        slower: the canary's TPOT over the control's.
        bar: at most this many rollbacks (equal arms), or at least (harm).
    """

    name: str
    arm: int
    looks: int
    slower: float
    bar: float


CASES = (
    Case("A/A, 10,000 requests at 10 %", 1000, 30, 1.0, 0.02),
    Case("A/A, 10,000 requests at 50 %", 5000, 30, 1.0, 0.02),
    Case("TPOT +20 %, 300 canary samples", 300, 9, 1.2, 0.95),
    Case("TPOT +10 %, 1,000 canary samples", 1000, 30, 1.1, 0.95),
)


def arm(n: int, rng: np.random.Generator, *, slower: float = 1.0) -> list[Observation]:
    """One arm's requests."""
    tpot = slower * rng.lognormal(math.log(20), SIGMA, n)
    ttft = rng.lognormal(math.log(150), SIGMA, n)
    failed = rng.random(n) < ERRORS
    return [
        Observation(at=0.0, outcome="error")
        if bad
        else Observation(at=0.0, tpot_ms=float(t), ttft_ms=float(f))
        for t, f, bad in zip(tpot, ttft, failed, strict=True)
    ]


def taken_back(case: Case, seed: int) -> str:
    """The checks that took the canary back, joined; empty where none did."""
    rng = np.random.default_rng(seed)
    canary, control = arm(case.arm, rng, slower=case.slower), arm(case.arm, rng)
    looks = Looks()
    for k in range(1, case.looks + 1):
        size = math.ceil(case.arm * k / case.looks)
        report, looks = judge("x", canary[:size], control[:size], SETTINGS, looks=looks, at=0.0)
        if report.state == "fail":
            return "+".join(f.metric for f in report.findings if f.critical and f.state == "fail")
        if report.done:
            break
    return ""


def measure(case: Case, *, runs: int, seed: int) -> dict[str, Any]:
    """Many runs of a case."""
    reasons = Counter(taken_back(case, seed + run) for run in range(runs))
    hits = runs - reasons.pop("", 0)
    rate = hits / runs
    error = math.sqrt(max(rate * (1 - rate), 1 / runs) / runs)
    met = rate <= case.bar if case.slower == 1.0 else rate >= case.bar
    return {
        "case": case.name,
        "runs": runs,
        "taken_back": rate,
        "standard_error": error,
        "bar": case.bar,
        "met": met,
        "reasons": dict(reasons),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--only", type=int, help="One case, by its place in CASES.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    manifest = run_manifest(seed=options.seed)
    found = []
    for case in CASES if options.only is None else CASES[options.only : options.only + 1]:
        begin = time.perf_counter()
        result = measure(case, runs=options.runs, seed=options.seed)
        found.append(
            {**result, "seed": options.seed, "seconds": round(time.perf_counter() - begin, 1)}
        )
        rate, error = result["taken_back"], result["standard_error"]
        word = "met" if result["met"] else "MISSED"
        print(f"{case.name:34}{rate:7.2%} ± {error:.2%} of {options.runs}", end="  ")
        print(f"bar {case.bar:.0%} {word}  {result['reasons']}", flush=True)
    if options.json:
        document = {"manifest": manifest.finish().to_dict(), "results": found}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(result["met"] for result in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
