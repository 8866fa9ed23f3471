"""Pictures by asking: a short live probe of a server, or of the engine in this process.

A server gets a few requests one by one and a few at once, within a time limit; what its pages tell
meanwhile is used where they tell it. The embedded engine is timed pass by pass. Few requests: the
picture is of the machine, not of your traffic, and says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.backends.base import Answer, Ask, Backend
from outrider.evaluate.diagnose import Picture, Stage, lengths_of
from outrider.evaluate.diagnose_sources import NoPicture, from_metrics

if TYPE_CHECKING:
    from outrider.models.target import Target

SECONDS = 25.0
TOKENS = 48
CROWD = (1, 4, 8)
PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright.",
    "List ten animals that live in rivers.",
    "Write a short letter that thanks a neighbour for help.",
    "Describe how bread is made.",
)


async def probe_server(backend: Backend, *, seconds: float = SECONDS) -> Picture:
    """A picture of a running server by at most ``seconds`` of requests of our own.

    Raises:
        NoPicture: no request came through.
    """
    end = time.perf_counter() + seconds
    before = await backend.scrape()
    loads: dict[int, list[Answer]] = {}
    for crowd in CROWD:
        left = end - time.perf_counter()
        if left <= 0.5:
            break
        asks = [
            Ask(
                ({"role": "user", "content": PROMPTS[i % len(PROMPTS)]},),
                max_tokens=TOKENS,
                temperature=0.0,
                cancel_after_s=left,
            )
            for i in range(crowd)
        ]
        loads[crowd] = list(await asyncio.gather(*(backend.answer(ask) for ask in asks)))
    after = await backend.scrape()
    answers = [answer for group in loads.values() for answer in group]
    picture = from_answers(answers, loads)
    if before is not None and after is not None:
        try:
            told = from_metrics(before, after)
        except NoPicture:
            return picture
        others = told.requests - len(answers)
        if others > len(answers):  # the server's own traffic says more than ours
            notes = (
                *picture.notes,
                f"{others} requests of others finished meanwhile: theirs count",
            )
            return Picture(**{**vars(told), "pass_cost": picture.pass_cost, "notes": notes})
    return picture


def from_answers(answers: Sequence[Answer], loads: Mapping[int, Sequence[Answer]]) -> Picture:
    """The picture of timed answers.

    Args:
        loads: the same answers by how many were asked at once; the time per token by crowd stands
            for the cost of a pass by rows.

    Raises:
        NoPicture: none has times.
    """
    timed = [a for a in answers if a.error is None and a.ttft_s is not None]
    if not timed:
        reason = next((a.error for a in answers if a.error), "no answer had content in time")
        raise NoPicture(f"no request of the probe came through: {reason}")
    seconds: dict[Stage, float] = {"queue": 0.0, "prefill": 0.0, "decode": 0.0}
    for answer in timed:
        first, queue = answer.ttft_s or 0.0, answer.queue_s or 0.0
        seconds["queue"] += min(queue, first)
        seconds["prefill"] += max(0.0, first - queue)
        seconds["decode"] += max(0.0, answer.end_s - first)
    failed = len(answers) - len(timed)
    notes = [f"{len(timed)} requests of our own, not your traffic: lengths and queue are not yours"]
    if failed:
        notes.append(f"{failed} of {len(answers)} requests failed or came too late")
    rates = {n: rate for n, group in loads.items() if (rate := _tpot(group)) is not None}
    alone = rates.get(min(rates)) if rates else None
    guessing = [a for a in timed if a.acceptance is not None and a.acceptance.accepted]
    if guessing:
        notes.append("the server guesses already: turn that off to learn what a plain pass costs")
        rates = {n: rate for n, rate in rates.items() if n == min(rates)}
    return Picture(
        source="a live probe",
        requests=len(timed),
        seconds=seconds,
        batch=None,
        pass_cost={n: rate / alone for n, rate in sorted(rates.items())} if alone else {},
        tpot_ms=None if alone is None else 1000 * alone,
        notes=tuple(notes),
        missing=() if alone else ("usage.completion_tokens (no time per token)",),
    )


def _tpot(group: Sequence[Answer]) -> float | None:
    found = [answer.tpot_s for answer in group if answer.tpot_s is not None]
    return sum(found) / len(found) if found else None


def probe_embedded(target: Target, prompts: Sequence[Sequence[int]]) -> Picture:
    """A picture of the engine here: costs of passes by rows, and a few plain answers."""
    from outrider.core.sampling import SamplingParams
    from outrider.engine import Engine, EngineConfig
    from outrider.engine.costs import ROWS, measure

    context = min(target.context_length, max(map(len, prompts)) + TOKENS + 1)
    most = max(1, min(max(ROWS), context - 2))
    rows = [n for n in ROWS if n <= most]
    cache = target.new_cache(slots=1, length=context + max(rows))
    costs = measure(target, cache, slot=0, rows=rows, repeats=3)
    engine = Engine(target, config=EngineConfig(slots=1, context=context, max_nodes=0, max_depth=0))
    params = SamplingParams(
        temperature=0.0, max_tokens=min(TOKENS, context - max(map(len, prompts)))
    )
    answers = engine.generate(prompts, params)
    seconds: dict[Stage, float] = {
        "prefill": sum((a.ttft_s or 0.0) - a.queue_s for a in answers),
        "decode": sum(a.e2e_s - (a.ttft_s or a.e2e_s) for a in answers),
    }
    tokens = [len(answer.tokens) for answer in answers]
    return Picture(
        source=f"the embedded engine, {target.name} {target.precision}",
        requests=len(answers),
        seconds=seconds,
        lengths=lengths_of(tokens),
        batch=1.0,
        pass_cost={n: ms / costs[rows[0]] for n, ms in costs.items()},
        tpot_ms=1000 * seconds["decode"] / max(1, sum(tokens) - len(tokens)),
        notes=("prompts of our own, one at a time: lengths and queue are not yours",),
    )
