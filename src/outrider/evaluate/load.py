"""Puts a load on an engine and takes down what came of each request. Knows no statistics.

*Closed* loops keep a number of requests in flight: the next starts when one ends. *Open* loops send
at times of their own, whatever comes back: that is how users come, and the only way to see a queue.
Warm-up requests are sent first and are in no figure.

The generator may be the slow part. It therefore says how late it sent each request, and
`generator_limit` measures how many it can send at all.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

from outrider.backends.base import Answer, Ask, Backend, Counters, EngineInfo, UnsupportedOption
from outrider.backends.openai import GENERIC, OpenAIBackend
from outrider.backends.wire import Wire
from outrider.errors import InvalidParameter

Shape = Literal["closed", "constant", "poisson", "burst"]
SHAPES: tuple[Shape, ...] = ("closed", "constant", "poisson", "burst")
SAMPLE_S = 0.25
LATE_S = 0.1
NOT_SENT = "not sent"


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        shape: "closed" with `concurrency` in flight; "constant" or "poisson" at `rate` per second;
            "burst": `concurrency` at once, as often as gives `rate` on average.
        warm_up: requests before the measured ones.
        cancel_share: this part of the requests, drawn by seed, hangs up after `cancel_after_s`.
        stop_when_saturated: end an open loop whose queue only grows.
        most_s: end after so long; what is under way is waited for.
    """

    shape: Shape = "closed"
    concurrency: int = 1
    rate: float | None = None
    warm_up: int = 1
    cancel_share: float = 0.0
    cancel_after_s: float = 0.5
    stop_when_saturated: bool = True
    most_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InvalidParameter(f"load {self.shape!r} is none of {', '.join(SHAPES)}")
        if self.concurrency < 1:
            raise InvalidParameter(f"concurrency is {self.concurrency}; use 1 or more")
        if self.shape != "closed" and not (self.rate and self.rate > 0):
            raise InvalidParameter(f"a {self.shape} load needs a rate above 0, got {self.rate}")
        if not 0 <= self.cancel_share <= 1:
            raise InvalidParameter(f"cancel_share is {self.cancel_share}; use a share from 0 to 1")

    @property
    def name(self) -> str:
        """In a word, for tables."""
        if self.shape == "closed":
            return f"c{self.concurrency}"
        burst = f"x{self.concurrency}" if self.shape == "burst" else ""
        return f"{self.shape}{burst}@{self.rate:g}/s"

    def times(self, requests: int) -> list[float]:
        """When an open loop sends each request, in seconds from its start."""
        assert self.rate is not None
        if self.shape == "burst":
            every = self.concurrency / self.rate
            return [every * (i // self.concurrency) for i in range(requests)]
        if self.shape == "constant":
            return [i / self.rate for i in range(requests)]
        rng, at, found = random.Random(self.seed), 0.0, []
        for _ in range(requests):
            at += rng.expovariate(self.rate)
            found.append(at)
        return found


@dataclass(frozen=True)
class Job:
    """A request to send: which prompt, which repeat, and what to ask."""

    key: str
    repeat: int
    ask: Ask


@dataclass(frozen=True)
class Shot:
    """A request that was sent.

    Attributes:
        due_s, sent_s: seconds from the load's start: when it should have been sent, and was.
        in_flight: others under way when it was sent.
    """

    job: Job
    due_s: float
    sent_s: float
    in_flight: int
    answer: Answer


@dataclass
class Outcome:
    """What came of a load.

    Attributes:
        shots: in the order in which they ended.
        wall_s: from the first request to the last answer.
        stopped: why it ended early; empty if it did not.
        before, after: the engine's counters around it, `None` where it has none.
        peak: the counters' largest load seen in between.
        notes: what a reader of the numbers must know.
    """

    shots: list[Shot] = field(default_factory=list)
    wall_s: float = 0.0
    stopped: str = ""
    before: Counters | None = None
    after: Counters | None = None
    peak_cache_use: float | None = None
    peak_waiting: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def late_s(self) -> list[float]:
        """How late the generator sent each request."""
        return [max(0.0, shot.sent_s - shot.due_s) for shot in self.shots]


Stop = Callable[[], str]


async def run_load(
    backend: Backend,
    jobs: Sequence[Job],
    load: Load,
    *,
    done: Callable[[Shot], None] = lambda shot: None,
    stop: Stop = lambda: "",
    watch: bool = True,
) -> Outcome:
    """Send the jobs.

    Args:
        done: told of each answer as it comes.
        stop: asked before each request; a reason ends the load.
        watch: read the engine's counters a few times a second in between.

    Raises:
        UnsupportedOption: the engine cannot honour an option of a request.
    """
    if not jobs:
        raise InvalidParameter("there is no request to send; the set is empty")
    generator = _Generator(backend, load, done, stop)
    await generator.warm_up(jobs)
    generator.outcome.before = await backend.counters()
    watcher = asyncio.ensure_future(generator.watch()) if watch else None
    clock, wall = time.perf_counter(), time.time()
    try:
        if load.shape == "closed":
            await generator.closed(jobs)
        else:
            await generator.open(jobs)
    finally:
        if watcher is not None:
            watcher.cancel()
    outcome = generator.outcome
    outcome.wall_s = time.perf_counter() - clock
    jump = abs((time.time() - wall) - outcome.wall_s)
    if jump > 1:
        outcome.notes.append(f"the machine's clock was set by {jump:.1f} s; times are monotonic")
    outcome.after = await backend.counters()
    late = sum(value > LATE_S for value in outcome.late_s)
    if late:
        outcome.notes.append(
            f"the generator sent {late} of {len(outcome.shots)} requests over {LATE_S:g} s late"
        )
    return outcome


class _Generator:
    """One load under way."""

    def __init__(
        self, backend: Backend, load: Load, done: Callable[[Shot], None], stop: Stop
    ) -> None:
        self._backend = backend
        self._load = load
        self._done = done
        self._stop = stop
        self._in_flight = 0
        self._begin = 0.0
        self._rng = random.Random(load.seed)
        self._saturation = Saturation()
        self.outcome = Outcome()

    async def warm_up(self, jobs: Sequence[Job]) -> None:
        for number in range(self._load.warm_up):
            ask = replace(jobs[number % len(jobs)].ask, cancel_after_s=None)
            try:
                answer = await self._backend.answer(ask)
            except UnsupportedOption:
                continue  # the measured request will say so
            if answer.error is not None:
                self.outcome.notes.append(f"a warm-up request failed: {answer.error}")

    async def closed(self, jobs: Sequence[Job]) -> None:
        """As many workers as may be in flight."""
        self._begin = time.perf_counter()
        waiting = iter(jobs)

        async def worker() -> None:
            for job in waiting:
                if self._ends():
                    return
                await self._send(job, time.perf_counter() - self._begin)

        await _all([worker() for _ in range(min(self._load.concurrency, len(jobs)))])

    async def open(self, jobs: Sequence[Job]) -> None:
        """Every job at its time."""
        self._begin = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        try:
            for job, due in zip(jobs, self._load.times(len(jobs)), strict=True):
                while (left := due - (time.perf_counter() - self._begin)) > 0:
                    await asyncio.sleep(left)
                if self._ends():
                    break
                task = asyncio.ensure_future(self._send(job, due))
                tasks.add(task)
                task.add_done_callback(_settle(tasks))
            await _all(list(tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def watch(self) -> None:
        """Read the engine's load now and then; an engine that cannot tell is asked once."""
        while True:
            counters = await self._backend.counters()
            if counters is None:
                return
            outcome = self.outcome
            if counters.cache_use is not None:
                outcome.peak_cache_use = max(outcome.peak_cache_use or 0.0, counters.cache_use)
            if counters.waiting is not None:
                outcome.peak_waiting = max(outcome.peak_waiting or 0, counters.waiting)
            await asyncio.sleep(SAMPLE_S)

    def _ends(self) -> bool:
        """Is it time to stop?"""
        if self.outcome.stopped:
            return True
        reason = self._stop()
        most = self._load.most_s
        if most is not None and time.perf_counter() - self._begin > most:
            reason = reason or f"the time of {most:g} s is over"
        if self._load.shape != "closed" and self._load.stop_when_saturated:
            reason = reason or self._saturation.verdict()
        self.outcome.stopped = reason
        return bool(reason)

    async def _ask(self, ask: Ask) -> Answer:
        """Where one request runs at a time, counters may speak for it."""
        alone = self._load.shape == "closed" and self._load.concurrency == 1
        return await (self._backend.answer_alone(ask) if alone else self._backend.answer(ask))

    async def _send(self, job: Job, due: float) -> None:
        ask = job.ask
        if self._load.cancel_share and self._rng.random() < self._load.cancel_share:
            ask = replace(ask, cancel_after_s=self._load.cancel_after_s)
        sent, before = time.perf_counter() - self._begin, self._in_flight
        self._in_flight += 1
        try:
            answer = await self._ask(ask)
        except UnsupportedOption as fault:
            answer = Answer(
                begin=time.perf_counter(),
                end_s=0.0,
                finish_reason=NOT_SENT,
                error=f"{NOT_SENT}: {fault}",
            )
        finally:
            self._in_flight -= 1
        self._saturation.add(sent, before, answer.ttft_s)
        shot = Shot(job, due, sent, before, answer)
        self.outcome.shots.append(shot)
        self._done(shot)


def _settle(tasks: set[asyncio.Task[None]]) -> Callable[[asyncio.Task[None]], None]:
    """Forget a task that went well; one that failed is kept for whoever waits for all."""

    def settle(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            tasks.discard(task)

    return settle


async def _all(awaitables: Sequence[Any]) -> None:
    """Wait for all; the first fault ends the others."""
    async with asyncio.TaskGroup() as group:
        for awaitable in awaitables:
            group.create_task(_wait(awaitable))


async def _wait(awaitable: Any) -> None:
    await awaitable


@dataclass
class Saturation:
    """Does the queue only grow? Slopes over the last `window_s` of requests in flight *and* of the
    time to the first token, each above 0 with this confidence.

    A burst makes one of them rise for a while; an engine that cannot keep up makes both rise.
    """

    window_s: float = 120.0
    at_least_s: float = 10.0
    at_least: int = 30
    confidence: float = 0.95
    rows: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, at_s: float, in_flight: int, ttft_s: float | None) -> None:
        if ttft_s is not None:
            self.rows.append((at_s, float(in_flight), ttft_s))

    def verdict(self) -> str:
        """Why to stop, in numbers; empty to go on."""
        if len(self.rows) < self.at_least or len(self.rows) % 10:
            return ""
        last = max(row[0] for row in self.rows)
        rows = np.array([row for row in self.rows if row[0] >= last - self.window_s])
        at, flying, ttft = rows.T
        if len(rows) < self.at_least or at.max() - at.min() < self.at_least_s:
            return ""
        flying_low = slope_low(at, flying, confidence=self.confidence)
        ttft_low = slope_low(at, ttft, confidence=self.confidence)
        if flying_low <= 0 or ttft_low <= 0:
            return ""
        return (
            f"over-saturated: requests in flight grow by more than {flying_low:.2f}/s and the time "
            f"to the first token by more than {ttft_low * 1000:.1f} ms/s ({len(rows)} requests)"
        )


def slope_low(x: Any, y: Any, *, confidence: float) -> float:
    """The lower bound of a line's slope, by Student's t."""
    if np.ptp(y) == 0 or np.ptp(x) == 0:
        return 0.0
    fit = stats.linregress(x, y)
    margin = stats.t.ppf(confidence, len(x) - 2) * fit.stderr
    low = float(fit.slope - margin)
    return low if math.isfinite(low) else 0.0


@dataclass(frozen=True)
class Limit:
    """What the generator itself can do on this machine."""

    requests_per_s: float
    requests: int
    failed: int

    def to_dict(self) -> dict[str, float | int]:
        return {
            "requests_per_s": self.requests_per_s,
            "requests": self.requests,
            "failed": self.failed,
        }


async def generator_limit(
    *, seconds: float = 1.0, concurrency: int = 64, url: str | None = None
) -> Limit:
    """Send as much as possible to a server of canned answers in another process.

    Args:
        url: a server that answers at once; `None` starts our own.
    """
    if url is not None:
        return await _measure(url, seconds, concurrency)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.evaluate.echo"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        return await _measure(line.decode().strip(), seconds, concurrency)
    finally:
        process.kill()
        await process.wait()


async def _measure(url: str, seconds: float, concurrency: int) -> Limit:
    info = EngineInfo(kind="openai", version=None, models=("echo",), model="echo")
    backend = OpenAIBackend(Wire(url), GENERIC, info)
    end = time.perf_counter() + seconds
    counts = {"all": 0, "failed": 0}

    async def worker() -> None:
        while time.perf_counter() < end:
            answer = await backend.answer(Ask("x", max_tokens=8))
            counts["all"] += 1
            counts["failed"] += answer.error is not None

    begin = time.perf_counter()
    try:
        await asyncio.gather(*(worker() for _ in range(concurrency)))
    finally:
        await backend.close()
    spent = time.perf_counter() - begin
    return Limit(counts["all"] / spent, counts["all"], counts["failed"])
