"""The capacity planner against vLLM on CPU: the same requests, simulated and served.

    python benchmarks/interop/vllm_planner.py --json FILE      # under six minutes

vLLM is known by its answers alone. The time to the first token of one prompt of P tokens is that
of a step of P rows, and of what lies outside the engine, which a prompt of one token shows. With N
streams at once the time between tokens is that of a step of N rows, and of what each stream costs
beyond its row. Then requests arrive at random, at
shares of the rate that these costs allow, and the planner is given the same arrivals, prompts and
answer lengths, with vLLM's own bounds of a step. Plain and greedy; answers end at their bound. The
check of the embedded engine, and what both share, is in ``benchmarks/planner_check.py``. vLLM's CPU
build is installed into .peers/ if it is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE.parent), str(HERE)]

from install import vllm_python  # noqa: E402
from planner_check import compared, figures, planned, verdict  # noqa: E402
from vllm_server import server  # noqa: E402

from outrider.backends.base import Answer, Ask, Backend  # noqa: E402
from outrider.backends.connect import connect  # noqa: E402
from outrider.evaluate.load import Job, Load, Shot, run_load  # noqa: E402
from outrider.evaluate.workloads import load_workload  # noqa: E402
from outrider.models.load import find_source  # noqa: E402
from outrider.records.manifest import run_manifest  # noqa: E402
from outrider.rollout import planner  # noqa: E402

SLOTS = 16
STEP_TOKENS = 80  # as the embedded engine: 64 of prompts beside 16 sequences
CONTEXT = 1024
LONGEST = 400  # tokens of a prompt
AT_ONCE = (1, 2, 4, 8, 12, 16)
PROMPTS = (4, 8, 16, 24, 32, 48, 64)  # tokens; one step each
WHOLE_STEPS = 3  # of a prompt whose steps are full, for the mean over what came before them
REPEATS = 5
ROUNDS = 3
LEAST = 8  # gaps that make an entry of the cost table

Prompt = tuple[int, ...]


class Unmeasured(Exception):
    """vLLM's answers do not show what is asked."""


@dataclass(frozen=True)
class Measured:
    """What answers show of an engine.

    Attributes:
        costs: milliseconds of a step by rows, and for each stream.
        outside_ms: of a request, in no step: HTTP, tokens to text, the way between processes.
    """

    costs: planner.Costs
    outside_ms: float


def ask(prompt: Prompt, tokens: int) -> Ask:
    """Greedy, and exactly so many tokens; special ones are shown, so that each is a chunk."""
    shown = {"skip_special_tokens": False}
    return Ask(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, extra=shown)


def jobs(prompts: Iterator[Prompt], *, count: int, tokens: int) -> list[Job]:
    taken = enumerate(itertools.islice(prompts, count))
    return [Job(str(i), 0, ask(prompt, tokens)) for i, prompt in taken]


async def shots_of(backend: Backend, work: Sequence[Job], load: Load) -> list[Shot]:
    """In the order in which they were due.

    Raises:
        Unmeasured: a request failed.
    """
    outcome = await run_load(backend, work, replace(load, stop_when_saturated=False), watch=False)
    shots = sorted(outcome.shots, key=lambda shot: shot.due_s)
    failed = [shot.answer.error for shot in shots if shot.answer.error]
    if failed or not all(shot.answer.arrivals_s for shot in shots):
        raise Unmeasured(f"{len(failed)} of {len(shots)} requests failed: {failed[:1]}")
    return shots


def steady_ms(answers: Sequence[Answer]) -> float:
    """The time of a step while all of these streams decode.

    They all get something in every step; a chunk may be missing (a token without text) or hold
    what two steps gave, so the stream with the most chunks counts the steps.

    Raises:
        Unmeasured: too few steps, or none, with all of them.
    """
    streams = [[answer.begin + at for at in answer.arrivals_s] for answer in answers]
    begin, end = max(s[0] for s in streams), min(s[-1] for s in streams)
    inside = max(([t for t in s if begin <= t <= end] for s in streams), key=len)
    if len(inside) <= LEAST:
        raise Unmeasured(f"{len(inside)} steps with all of {len(streams)} streams; ask for more")
    return 1000 * (inside[-1] - inside[0]) / (len(inside) - 1)


async def measure(backend: Backend, prompts: Iterator[Prompt], *, tokens: int) -> Measured:
    """Costs by rows and streams, from answers alone."""
    await shots_of(backend, jobs(prompts, count=1, tokens=tokens), Load(warm_up=2))
    steps: dict[int, list[float]] = {n: [] for n in AT_ONCE}
    for _ in range(ROUNDS):  # in turns, so that a slow minute meets all of them
        for n, found in steps.items():
            work = jobs(prompts, count=n, tokens=tokens)
            shots = await shots_of(backend, work, Load(concurrency=n, warm_up=0))
            found.append(steady_ms([shot.answer for shot in shots]))
    streams = {n: statistics.median(found) for n, found in steps.items()}
    first = await first_token_ms(backend, prompts)
    outside = max(0.0, first[1] - streams[1])
    by_rows = {rows: first[rows] - outside for rows in (1, *PROMPTS)}
    by_rows[STEP_TOKENS] = (first[WHOLE_STEPS * STEP_TOKENS] - outside) / WHOLE_STEPS
    return Measured(costs_of(streams, by_rows), outside)


def costs_of(streams: Mapping[int, float], by_rows: Mapping[int, float]) -> planner.Costs:
    """What a row costs and what a stream costs beyond it.

    Args:
        streams: decoding streams to the milliseconds of a step.
        by_rows: a prompt's tokens to the milliseconds of a step.
    """
    rows = planner.Costs(by_rows)
    beyond = statistics.median((ms - rows.verify(n)) / n for n, ms in streams.items() if n > 1)
    return planner.Costs(by_rows, sequence_ms=max(0.0, beyond))


async def first_token_ms(backend: Backend, prompts: Iterator[Prompt]) -> dict[int, float]:
    """Prompt tokens to the median time to the first token, one request at a time."""
    longest = WHOLE_STEPS * STEP_TOKENS
    whole: Prompt = ()
    while len(whole) < longest:
        whole += next(prompts)
    found = {}
    for length in (1, *PROMPTS, longest):
        work = [Job(str(i), 0, ask(whole[:length], 1)) for i in range(REPEATS)]
        shots = await shots_of(backend, work, Load(warm_up=1))
        found[length] = statistics.median(1000 * shot.answer.arrivals_s[0] for shot in shots)
    return found


def capacity(costs: planner.Costs, *, prompt: float, tokens: int) -> float:
    """Requests per second with which all slots are busy, if prompts fill up their steps."""
    rows = costs.verify(SLOTS)
    decode = rows + costs.sequence_ms * SLOTS
    row = (costs.verify(STEP_TOKENS) - rows) / (STEP_TOKENS - SLOTS)
    return 1000 / (prompt * row + (tokens - 1) * decode / SLOTS)


async def check(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure costs, then compare at every share of the capacity."""
    backend = await connect(url, kind="vllm")
    try:
        supply = [await backend.tokenize(tuple(p.chat())) for p in load_workload("builtin:all")]
        prompts = [prompt for prompt in supply if prompt and len(prompt) <= LONGEST]
        random.Random(0).shuffle(prompts)
        ring = itertools.cycle(prompts)
        tokens = options.max_tokens
        measured = await measure(backend, ring, tokens=tokens)
        engine = planner.Engine(measured.costs, slots=SLOTS, step_tokens=STEP_TOKENS)
        mean = statistics.mean(map(len, prompts))
        most = capacity(measured.costs, prompt=mean, tokens=tokens)
        cells = []
        for share in map(float, options.shares.split(",")):
            load = Load("poisson", rate=share * most, warm_up=0, seed=int(100 * share))
            count = min(options.requests, max(LEAST, round(share * most * options.most_seconds)))
            work = jobs(ring, count=count, tokens=tokens)
            cells.append(await compare(backend, work, load, engine, measured))
            cells[-1] |= {"share_of_capacity": share, "requests": count}
            print(json.dumps(cells[-1]), flush=True)
        return cells
    finally:
        await backend.close()


async def compare(
    backend: Backend, work: Sequence[Job], load: Load, engine: planner.Engine, measured: Measured
) -> dict[str, Any]:
    """The same requests served and planned."""
    shots = await shots_of(backend, work, load)
    ends, sent = [], []
    for shot in shots:
        answer = shot.answer
        prompt, tokens = answer.prompt_tokens, answer.completion_tokens
        if prompt is None or tokens is None:
            raise Unmeasured("vLLM sent no usage")
        at, arrivals = shot.sent_s, answer.arrivals_s
        ends.append((at, at + arrivals[0], at + arrivals[-1], tokens))
        sent.append((at, prompt, tokens))
    assert load.rate is not None
    cell = {"engine": "vllm", "drafter": "none", "rate": round(load.rate, 3)}
    cell |= {"outside_ms": round(measured.outside_ms, 2)}
    plan = planned(sent, engine, outside_s=measured.outside_ms / 1000)
    return cell | compared(figures(ends), plan, measured.costs)


def main() -> int:
    """0 where the median TPOT is within the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shares", default="0.35,0.8", help="of the rate that the costs allow")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument(
        "--most-seconds", type=float, default=100.0, help="of a rate; cuts requests"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "vllm-plan.log")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told = {"shares": options.shares, "requests": options.requests, "model": options.model}
    manifest = run_manifest(seed=0, options=told | {"max_tokens": options.max_tokens})
    more = ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(STEP_TOKENS)]
    more += ["--max-model-len", str(CONTEXT), "--no-enable-prefix-caching"]
    before = os.getloadavg()
    model = find_source(options.model).folder
    with server(vllm_python(), model, options.log, speculate=False, more=more) as url:
        cells = asyncio.run(check(url, options))
    return verdict(cells, manifest, before, options.json)


if __name__ == "__main__":
    sys.exit(main())
