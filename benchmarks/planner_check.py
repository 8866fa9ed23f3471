"""The capacity planner against the embedded engine: the same requests, simulated and served.

The engine's costs by rows are measured first, in steps of real requests at several concurrencies;
then requests arrive at random while the engine runs, and the planner is given the same arrivals,
prompts and answer lengths with those costs. Plain decoding, and suffix drafts with a fixed budget.
Where the machine is not the same from minute to minute, costs measured before do not hold later;
so every cell also says how far off the plan would have been with the costs of its own steps.

    python benchmarks/planner_check.py --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.core.sampling import SamplingParams
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Completion, Engine, EngineConfig, FixedBudget
from outrider.evaluate.workloads import load_workload
from outrider.models.load import LoadedModel, load_model
from outrider.records.files import write_json
from outrider.records.manifest import RunManifest, TargetIdentity, run_manifest
from outrider.records.step import StepRecord
from outrider.rollout import planner

SLOTS = 16
DEPTH = 3
LONGEST = 1024  # tokens of a prompt
LEAST = 4  # steps that make an entry of the cost table
BAR = 0.10
WARM_UP = 0.1  # share of the requests that is not counted
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 72, 80, 96, 128, 192, 256, 320)


@dataclass
class Request:
    """Attributes:
    arrival, first, last: seconds from the start of the run.
    """

    prompt: Sequence[int]
    arrival: float
    first: float = 0.0
    last: float = 0.0
    done: Completion | None = None


def engine_of(model: LoadedModel) -> Engine:
    """A new engine, so that no drafter knows an answer."""
    return Engine(
        model.target,
        drafters={"suffix": SuffixDrafter()},
        tokenizer=model.tokenizer,
        config=EngineConfig(slots=SLOTS, context=2048, busy_chunk=64, reuse_prefix=False),
        budget=FixedBudget(DEPTH, DEPTH),
    )


def run(
    engine: Engine, requests: Sequence[Request], *, drafter: str, tokens: int, most: int = SLOTS
) -> list[StepRecord]:
    """Serve the requests as they arrive, at most so many at once; returns the steps."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    waiting, live = list(requests), {}
    begin = time.perf_counter()
    while waiting or live:
        now = time.perf_counter() - begin
        while waiting and waiting[0].arrival <= now and len(live) < most:
            request = waiting.pop(0)
            id = engine.add(request.prompt, params, drafter=drafter, tenant=str(len(waiting)))
            live[id] = request
        for update in engine.step() if live else ():
            request, now = live[update.request], time.perf_counter() - begin
            request.first = request.first or now
            request.last = now
            if update.finish_reason is not None:
                request.done = engine.take(update.request)
                del live[update.request]
    steps = {s.step: s for r in requests if r.done for s in r.done.steps}
    return list(steps.values())


def costs_of(steps: Sequence[StepRecord]) -> planner.Costs:
    """Means of what steps of about so many rows took (an answer's time is their sum, slow ones and
    all); drafting counts as the host's."""
    found: dict[int, list[StepRecord]] = defaultdict(list)
    for step in steps:
        found[bisect_left(KNOTS, step.rows)].append(step)
    table = {
        round(statistics.mean(s.rows for s in near)): statistics.mean(
            s.verify_ms + s.host_ms + s.draft_ms for s in near
        )
        for near in found.values()
        if len(near) >= LEAST
    }
    return planner.Costs(table)


def acceptance(requests: Sequence[Request]) -> planner.Acceptance:
    """What these requests accepted, each of them and together."""
    each = [[s for s in r.done.steps if s.emitted] for r in requests if r.done]
    accepted = [[sum(s.accepted >= j for s in own) for j in range(1, DEPTH + 1)] for own in each]
    rows = statistics.mean(1 + s.proposed for own in each for s in own)
    return planner.acceptance(accepted, [len(own) for own in each], rows_per_step=rows)


def figures(requests: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    """Of (arrival, first, last, tokens) in seconds: percentiles in ms, and tokens per second."""
    kept = requests[int(WARM_UP * len(requests)) :]
    ttft = [1000 * (first - arrival) for arrival, first, _, _ in kept]
    tpot = [1000 * (last - first) / (n - 1) for _, first, last, n in kept if n > 1]
    span = max(last for _, _, last, _ in requests) - requests[0][0]
    return {
        "ttft_p50_ms": float(np.quantile(ttft, 0.5)),
        "ttft_p95_ms": float(np.quantile(ttft, 0.95)),
        "tpot_p50_ms": float(np.quantile(tpot, 0.5)),
        "tpot_p95_ms": float(np.quantile(tpot, 0.95)),
        "tokens_per_s": sum(n for *_, n in requests) / span,
    }


def planned(
    sent: Sequence[tuple[float, int, int]], engine: planner.Engine, *, outside_s: float = 0.0
) -> dict[str, float]:
    """What the planner makes of requests: (arrival in seconds, prompt tokens, answer tokens).

    Args:
        outside_s: how long a request takes to the engine's queue and its first token back.
    """
    tokens = np.array([n for *_, n in sent])
    work = planner.work_of(tokens - 1, engine, np.random.default_rng(0))
    arrivals = [1000 * (arrival + outside_s) for arrival, _, _ in sent]
    served = planner.serve(planner.Load(arrivals, [n for _, n, _ in sent], work.tolist()), engine)
    rows = zip(sent, served.first, served.last, strict=True)
    return figures([(at, a / 1000, b / 1000, n) for (at, _, n), a, b in rows])


def simulated(requests: Sequence[Request], engine: planner.Engine) -> dict[str, float]:
    """What the planner makes of the same requests."""
    sent = [(r.arrival, len(r.prompt), len(r.done.tokens)) for r in requests if r.done]
    return planned(sent, engine)


def ratios(planned: dict[str, float], real: dict[str, float]) -> dict[str, float]:
    return {name: round(planned[name] / real[name], 3) for name in real}


def compared(
    real: dict[str, float], planned: dict[str, float], costs: planner.Costs
) -> dict[str, Any]:
    """A cell's figures, as they are printed and kept."""
    return {
        "served": {name: round(value, 2) for name, value in real.items()},
        "planned": {name: round(value, 2) for name, value in planned.items()},
        "planned_over_served": ratios(planned, real),
        "verify_ms": {rows: round(ms, 2) for rows, ms in costs.verify_ms.items()},
        "sequence_ms": round(costs.sequence_ms, 3),
    }


def arrivals(prompts: Iterator[list[int]], *, count: int, rate: float, seed: int) -> list[Request]:
    """Poisson arrivals; at once where the rate is 0."""
    rng, now, found = random.Random(seed), 0.0, []
    for prompt in itertools.islice(prompts, count):
        now += rng.expovariate(rate) if rate else 0.0
        found.append(Request(prompt, now))
    return found


def check(
    model: LoadedModel, prompts: list[list[int]], drafter: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure costs, then compare at every rate."""
    supply = itertools.cycle(prompts)
    steps: list[StepRecord] = []
    learnt: list[Request] = []
    for at_once in (1, 2, 4, 8, 12, 16):
        requests = arrivals(supply, count=2 * at_once + 2, rate=0.0, seed=0)
        steps += run(
            engine_of(model), requests, drafter=drafter, tokens=options.max_tokens, most=at_once
        )
        learnt += requests
    costs = costs_of(steps)
    guesses = planner.Acceptance() if drafter == "none" else acceptance(learnt)
    planned_engine = planner.Engine(costs, *guesses, adaptive=False, slots=SLOTS)
    cells = []
    for rate in map(float, options.rates.split(",")):
        requests = arrivals(supply, count=options.requests, rate=rate, seed=int(10 * rate))
        own = run(engine_of(model), requests, drafter=drafter, tokens=options.max_tokens)
        ends = [
            (r.arrival, r.first, r.last, len(r.done.tokens)) for r in requests if r.done is not None
        ]
        cell: dict[str, Any] = {"drafter": drafter, "rate": rate}
        cell |= {"accepted": planned_engine.reached, "guessed": planned_engine.guessed}
        real = figures(ends)
        cell |= compared(real, simulated(requests, planned_engine), costs)
        same = replace(planned_engine, costs=costs_of(own))
        cell["by_its_own_costs"] = ratios(simulated(requests, same), real)
        print(json.dumps(cell), flush=True)
        cells.append(cell)
    return cells


def verdict(
    cells: Sequence[dict[str, Any]],
    manifest: RunManifest,
    before: Sequence[float],
    path: Path | None,
) -> int:
    """Say by how much each figure is off at most, and keep the cells; 0 where the median TPOT is
    within the bar.

    Args:
        before: the load averages at the start.
        path: of the result; `None` keeps none.
    """
    worst = {
        name: max(abs(cell["planned_over_served"][name] - 1) for cell in cells)
        for name in cells[0]["planned_over_served"]
    }
    told = ", ".join(f"{name} {value:.1%}" for name, value in worst.items())
    print(f"off by at most: {told} (bar {BAR:.0%}, judged by the median TPOT)")
    own = [cell["by_its_own_costs"] for cell in cells if "by_its_own_costs" in cell]
    if own:
        told = ", ".join(f"{n} {max(abs(c[n] - 1) for c in own):.1%}" for n in own[0])
        print(f"with the costs of the same minutes: {told}")
    if path is not None:
        document = {"manifest": manifest.finish().to_dict(), "load_before": before, "cells": cells}
        write_json(path, document)
    return int(worst["tpot_p50_ms"] > BAR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", default="none,suffix")
    parser.add_argument("--rates", default="0.5,1,1.5", help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = load_model(options.target)
    every = (model.tokenizer.chat(prompt.chat()) for prompt in load_workload("builtin:all"))
    prompts = [prompt for prompt in every if len(prompt) <= LONGEST]
    random.Random(0).shuffle(prompts)
    target = model.target
    manifest = run_manifest(
        seed=0,
        threads=torch.get_num_threads(),
        target=TargetIdentity(target.name, target.fingerprint, target.precision),
        options={k: str(v) for k, v in vars(options).items()},
    )
    before = os.getloadavg()
    cells = [
        c for name in options.drafters.split(",") for c in check(model, prompts, name, options)
    ]
    return verdict(cells, manifest, before, options.json)


if __name__ == "__main__":
    sys.exit(main())
