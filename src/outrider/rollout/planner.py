"""What a fleet would do under given traffic, with and without speculation: a simulation.

Continuous batching: a step carries every decoding sequence and a chunk of prompts, first come first
served; its cost comes from a measured table by rows. The chunk is the embedded engine's, or what
decoding leaves of a bound on all tokens of a step, as in vLLM. Between two events (an arrival, an
end, a prompt that is read) all steps are alike, so the clock jumps over them: a million requests
are a few million events. It knows no model and no engine, only numbers.

What is not in it: the growing cost of long contexts, prefix reuse, cancelled requests, and a cache
that fills before the slots do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, pairwise, zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidParameter

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT_UP_TO: Final = 1024
"""Answers up to this length get their number of steps from its exact law, longer ones from the
normal law with the same mean and variance."""
KINDS: Final = 8
"""Groups into which measured requests are put by their acceptance."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step, as measured on one machine.

    Attributes:
        verify_ms: rows of a pass to its milliseconds.
        host_ms: the rest of a step.
        draft_base_ms, draft_depth_ms: of a proposal: once, and per depth.
        draft_share: how much of it each further sequence of the step adds: 0 for a drafter that
            guesses for all at once at the price of one, 1 for one after the other.
        sequence_ms: of each sequence that decodes, beyond its rows: its context, its text, its
            stream.
    """

    verify_ms: Mapping[int, float]
    host_ms: float = 0.0
    draft_base_ms: float = 0.0
    draft_depth_ms: float = 0.0
    draft_share: float = 0.0
    sequence_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.verify_ms or min(self.verify_ms) < 1 or min(self.verify_ms.values()) <= 0:
            raise InvalidParameter(
                "a cost table needs milliseconds above 0 by rows of at least 1, such as "
                '{"verify_ms": {"1": 4.5, "8": 5.3}}'
            )

    def verify(self, rows: int) -> float:
        """Of a pass: linear between measurements and beyond, never falling."""
        known = sorted(self.verify_ms)
        rising = list(accumulate((self.verify_ms[n] for n in known), max))
        if rows <= known[0] or len(known) == 1:
            return rising[0]
        index = min(bisect_left(known, rows), len(known) - 1)
        slope = (rising[index] - rising[index - 1]) / (known[index] - known[index - 1])
        return rising[index - 1] + slope * (rows - known[index - 1])

    def draft(self, sequences: int, depth: int) -> float:
        """Of guessing ``depth`` tokens for each of ``sequences``."""
        if not depth or not sequences:
            return 0.0
        one = self.draft_base_ms + self.draft_depth_ms * depth
        return one * (1 + self.draft_share * (sequences - 1))


@dataclass(frozen=True)
class Engine:
    """How a replica decodes.

    Attributes:
        costs: of its steps.
        reached: entry j - 1 is the share of steps whose accepted path reached depth j; empty for
            plain decoding. A chain of that many guesses is checked per step.
        mix: the same for kinds of requests, of which each is as frequent: text to be copied is
            guessed well and other text is not, and the median request is not the mean one. Empty
            where all are alike; see `kinds`.
        guessed: guesses of a step over its depth: below 1 for a drafter that has none in many
            steps, above it for trees.
        adaptive: per batch size, guess only as deep as pays by the costs.
        slots: sequences at once.
        chunk, busy_chunk: prompt tokens per step, alone and while others decode.
        step_tokens: most tokens of a step, of decoding and prompts together; in place of the
            chunks. vLLM's `--max-num-batched-tokens`.
    """

    costs: Costs
    reached: tuple[float, ...] = ()
    mix: tuple[tuple[float, ...], ...] = ()
    guessed: float = 1.0
    adaptive: bool = True
    slots: int = 16
    chunk: int = 256
    busy_chunk: int = 64
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        for reached in (self.reached, *self.mix):
            falling = all(a >= b for a, b in pairwise(reached))
            if not falling or not all(0 <= share <= 1 for share in reached):
                raise InvalidParameter(
                    f"acceptance {reached} must lie in [0, 1] and not rise with the depth"
                )
        if not self.guessed >= 0:
            raise InvalidParameter(f"guessed is {self.guessed}; it is at least 0")
        if min(self.slots, self.chunk, self.busy_chunk) < 1:
            raise InvalidParameter("slots and chunks are at least 1")
        most = self.rows(self.slots, len(self.reached))
        if self.step_tokens is not None and self.step_tokens <= most:
            raise InvalidParameter(
                f"a step of {self.step_tokens} tokens leaves prompts no room beside {self.slots} "
                f"sequences that decode; use more than {most}, or fewer slots"
            )

    @property
    def plain(self) -> Engine:
        """The same without guesses."""
        return replace(self, reached=(), mix=())

    def rows(self, sequences: int, depth: int) -> int:
        """Rows of a step with so many sequences that guess so deep."""
        return math.ceil(sequences * (1 + depth * self.guessed))

    def depth(self, sequences: int) -> int:
        """Guesses per sequence in a step with that many."""
        if not self.adaptive or not self.reached:
            return len(self.reached)
        return max(range(len(self.reached) + 1), key=lambda depth: self.rate(sequences, depth))

    def room(self, sequences: int, *, depth: int) -> int:
        """Prompt tokens of a step beside so many sequences that decode."""
        if self.step_tokens is not None:
            return self.step_tokens - self.rows(sequences, depth)
        return self.busy_chunk if sequences else self.chunk

    def rate(self, sequences: int, depth: int) -> float:
        """Expected tokens per millisecond."""
        return sequences * self.gain(depth) / self.step_ms(sequences, depth=depth)

    def gain(self, depth: int) -> float:
        """Expected tokens of a step for one sequence; the next token is one of them."""
        return 1.0 + sum(self.reached[:depth])

    def step_ms(self, sequences: int, *, depth: int, prompt_rows: int = 0) -> float:
        """Of a step."""
        rows = self.rows(sequences, depth) + prompt_rows
        beside = self.costs.host_ms + self.costs.sequence_ms * sequences
        return self.costs.verify(rows) + beside + self.costs.draft(sequences, depth)


@dataclass(frozen=True)
class Lengths:
    """Token counts, log-normal and rounded; ``spread`` is the standard deviation of the logarithm,
    0 for one fixed length."""

    mean: float
    spread: float = 0.0
    least: int = 1
    most: int = 8192

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        middle = math.log(self.mean) - self.spread**2 / 2
        lengths = np.exp(middle + self.spread * rng.standard_normal(n))
        return np.clip(np.rint(lengths), self.least, self.most).astype(np.int64)


@dataclass(frozen=True)
class Traffic:
    """What arrives.

    Attributes:
        rate: requests per second, of the whole fleet.
        prompt, output: their lengths.
        requests: how many.
        burstiness: 1 for Poisson; gaps have this as their squared coefficient of variation.
    """

    rate: float
    prompt: Lengths
    output: Lengths
    requests: int = 20_000
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.burstiness > 0 and self.requests > 0):
            raise InvalidParameter("rate, burstiness and requests must be above 0")


@dataclass(frozen=True)
class Load:
    """Requests of one replica, in order of arrival: times in ms, tokens, and work in steps."""

    arrivals: Sequence[float]
    prompts: Sequence[int]
    work: Sequence[float]


@dataclass(frozen=True)
class Served:
    """When each request of a load got its first and its last token, in ms; and what steps took."""

    first: list[float]
    last: list[float]
    busy_ms: float
    steps: int
    decoded: int


@dataclass(frozen=True)
class Outcome:
    """What the fleet did. Times in ms; the first tenth of the requests warms up and is not counted.

    Attributes:
        ttft, tpot: "p50", "p95", "p99"; the time to the first token includes the wait.
        tokens_per_s: of the whole fleet, over the time from first arrival to last token.
        batch: sequences per decoding step, mean.
        busy: share of the time in which a replica computes.
        stable: the wait does not grow: the last fifth waits no longer than twice the fifth before
            the middle, or than a hundred steps.
    """

    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    tokens_per_s: float
    batch: float
    busy: float
    stable: bool

    def meets(self, *, ttft_ms: float, tpot_ms: float) -> bool:
        """P95 of both, and a wait that does not grow."""
        return self.stable and self.ttft["p95"] <= ttft_ms and self.tpot["p95"] <= tpot_ms

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Tables:
    """What a step costs and brings, by batch size."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._depths = [engine.depth(b) if b else 0 for b in range(engine.slots + 1)]
        whole = engine.gain(len(engine.reached))
        self.pace = [engine.gain(depth) / whole for depth in self._depths]
        self.room = [engine.room(b, depth=depth) for b, depth in enumerate(self._depths)]
        self._ms: dict[tuple[int, int], float] = {}

    def ms(self, batch: int, rows: int) -> float:
        """Of a step with ``batch`` decoding sequences and ``rows`` prompt tokens."""
        known = self._ms.get((batch, rows))
        if known is None:
            depth = self._depths[batch]
            known = self._engine.step_ms(batch, depth=depth, prompt_rows=rows)
            self._ms[batch, rows] = known
        return known


def serve(load: Load, engine: Engine) -> Served:
    """One replica's day: jumps from event to event.

    Progress is counted in steps at full depth. Where the depth follows the batch, a step at a
    smaller depth does so much less of one.
    """
    n, tables = len(load.arrivals), _Tables(engine)
    pace = tables.pace
    first, last = [0.0] * n, [0.0] * n
    running: list[tuple[float, int]] = []  # done at, request
    reading: deque[list[int]] = deque()  # prompt tokens left, request
    now = done = busy = 0.0
    arrived = steps = decoded = finished = 0
    arrivals, prompts, work = load.arrivals, load.prompts, load.work
    while finished < n:
        free = engine.slots - len(running) - len(reading)
        while free and arrived < n and arrivals[arrived] <= now:
            reading.append([prompts[arrived], arrived])
            arrived, free = arrived + 1, free - 1
        batch, rows, whole = len(running), 0, 0
        if not batch and not reading:
            now = arrivals[arrived]
            continue
        ready: list[int] = []
        jump = n * 1_000_000
        if reading:
            chunk = tables.room[batch]
            whole = (reading[0][0] - 1) // chunk  # chunks before the one that ends the prompt
            rows, jump = (chunk, whole) if whole else (_read(reading, chunk, ready), 1)
        step = tables.ms(batch, rows)
        if batch:
            jump = min(jump, max(1, math.ceil((running[0][0] - done) / pace[batch] - 1e-6)))
        if free and arrived < n:
            jump = min(jump, max(1, math.ceil((arrivals[arrived] - now) / step)))
        if whole:
            reading[0][0] -= jump * rows
        now, busy = now + jump * step, busy + jump * step
        steps, decoded = steps + (jump if batch else 0), decoded + jump * batch
        done += jump * pace[batch]
        while running and running[0][0] <= done + 1e-6:
            last[heappop(running)[1]] = now
            finished += 1
        for request in ready:
            first[request] = last[request] = now
            if work[request] > 0:
                heappush(running, (done + work[request], request))
            else:
                finished += 1
    return Served(first, last, busy, steps, decoded)


def _read(reading: deque[list[int]], chunk: int, ready: list[int]) -> int:
    """Fill a step's chunk, first come first served; returns its rows and adds to ``ready`` whose
    prompt is through."""
    rows = 0
    while reading and rows < chunk:
        left = reading[0]
        taken = min(left[0], chunk - rows)
        left[0] -= taken
        rows += taken
        if not left[0]:
            ready.append(left[1])
            reading.popleft()
    return rows


class Acceptance(NamedTuple):
    """How requests were guessed, in the order in which an engine takes it: ``Engine(costs,
    *acceptance)``. See `Engine` for the parts."""

    reached: tuple[float, ...] = ()
    mix: tuple[tuple[float, ...], ...] = ()
    guessed: float = 1.0


def acceptance(
    accepted: Sequence[Sequence[int]], steps: Sequence[int], *, rows_per_step: float
) -> Acceptance:
    """What measured requests tell.

    Args:
        accepted: by request: entry j - 1 counts steps whose accepted path reached depth j.
        steps: by request: those that gave a token.
        rows_per_step: root and guesses, mean over all of these steps.
    """
    reached = _pooled(accepted, steps)
    guessed = (rows_per_step - 1) / len(reached) if reached else 1.0
    return Acceptance(reached, kinds(accepted, steps), guessed)


def kinds(accepted: Sequence[Sequence[int]], steps: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Requests in groups of about equal size, from the least to the most accepted; what each group
    accepts, for `Engine.mix`. Arguments as of `acceptance`."""
    order = sorted(range(len(steps)), key=lambda i: sum(accepted[i]) / max(steps[i], 1))
    groups = np.array_split(order, min(KINDS, len(order)) or 1)
    return tuple(_pooled([accepted[i] for i in g], [steps[i] for i in g]) for g in groups)


def _pooled(accepted: Sequence[Sequence[int]], steps: Sequence[int]) -> tuple[float, ...]:
    """The share of all steps that reached each depth, down to the last that any reached."""
    counts = (sum(column) for column in zip_longest(*accepted, fillvalue=0))
    return tuple(count / sum(steps) for count in counts if count)


def work_of(tokens: Ints, engine: Engine, rng: np.random.Generator) -> Array:
    """Steps until so many tokens behind the first are out, for each request; its kind is drawn."""
    if not engine.mix:
        return steps_needed(tokens, engine.reached, rng)
    kind = rng.integers(len(engine.mix), size=len(tokens))
    work = np.zeros(len(tokens))
    for number, reached in enumerate(engine.mix):
        own = kind == number
        work[own] = steps_needed(tokens[own], reached, rng)
    return work


def steps_needed(tokens: Ints, reached: Sequence[float], rng: np.random.Generator) -> Array:
    """Steps until so many tokens behind the first are out, drawn for each request.

    A step gives one token and the accepted path; paths are independent between steps. The last
    step may reach beyond the end.
    """
    if not reached:
        return tokens.astype(np.float64)
    ends = [1.0, *reached, 0.0]
    gains = np.array([a - b for a, b in pairwise(ends)])  # of 1, 2, ... tokens
    steps = np.zeros(len(tokens))
    far = tokens > EXACT_UP_TO
    if far.any():
        values = np.arange(1, len(gains) + 1)
        mean = float(gains @ values)
        variance = float(gains @ values**2) - mean**2
        wanted = tokens[far]
        spread = np.sqrt(wanted * variance / mean**3)
        drawn = wanted / mean + 0.5 + spread * rng.standard_normal(len(wanted))
        steps[far] = np.clip(np.rint(drawn), np.ceil(wanted / len(gains)), wanted)
    near = ~far
    if near.any():
        law = _law(gains, int(tokens[near].max()))
        uniform = rng.random(len(tokens))
        for length in np.unique(tokens[near]):
            here = near & (tokens == length)
            steps[here] = np.searchsorted(law[:, length], uniform[here], "right")
    return steps


def _law(gains: Array, most: int) -> Array:
    """[s, m]: the chance that s steps give at least m tokens; rises with s."""
    sums = np.zeros(most + 1)
    sums[0] = 1.0
    law = np.zeros((most + 1, most + 1))
    for s in range(most + 1):
        law[s] = 1.0 - np.concatenate(([0.0], np.cumsum(sums)[:-1]))
        moved = np.zeros(most + 1)
        for tokens, chance in enumerate(gains, start=1):
            moved[tokens:] += chance * sums[:-tokens] if tokens <= most else 0.0
        sums = moved
    return np.clip(law, 0.0, 1.0)


def simulate(traffic: Traffic, engine: Engine, *, replicas: int = 1) -> Outcome:
    """What a fleet does: requests go round the replicas in turn.

    Raises:
        InvalidParameter: no replica.
    """
    if replicas < 1:
        raise InvalidParameter(f"{replicas} replicas cannot serve; use at least 1")
    rng = np.random.default_rng(traffic.seed)
    n = traffic.requests
    gaps = rng.gamma(1 / traffic.burstiness, traffic.burstiness, n) * 1000 / traffic.rate
    arrivals = np.cumsum(gaps)
    prompts, outputs = traffic.prompt.draw(n, rng), traffic.output.draw(n, rng)
    work = work_of(outputs - 1, engine, rng)
    first, last = np.zeros(n), np.zeros(n)
    busy, steps, decoded = 0.0, 0, 0
    for replica in range(min(replicas, n)):
        own = slice(replica, None, replicas)
        load = Load(arrivals[own].tolist(), prompts[own].tolist(), work[own].tolist())
        served = serve(load, engine)
        first[own], last[own] = served.first, served.last
        busy, steps, decoded = busy + served.busy_ms, steps + served.steps, decoded + served.decoded
    return _outcome(arrivals, outputs, first, last, (busy / replicas, steps, decoded))


def _outcome(
    arrivals: Array, outputs: Ints, first: Array, last: Array, work: tuple[float, int, int]
) -> Outcome:
    """The fleet's figures, without the warm-up."""
    busy, steps, decoded = work
    waits = first - arrivals
    kept = np.arange(len(arrivals)) >= len(arrivals) // 10
    several = kept & (outputs > 1)
    each = (last - first)[several] / (outputs[several] - 1)
    span = float(last.max() - arrivals[0])
    end, middle = np.array_split(waits, 5)[-1], np.array_split(waits, 5)[1]
    grows = end.mean() > 2 * middle.mean() + 100 * busy / max(1, steps)
    return Outcome(
        ttft=_percentiles(waits[kept]),
        tpot=_percentiles(each),
        tokens_per_s=float(outputs.sum()) / span * 1000,
        batch=decoded / steps if steps else 0.0,
        busy=busy / span,
        stable=not bool(grows),
    )


def _percentiles(values: Array) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("p50", "p95", "p99"), 0.0)
    return {f"p{q}": float(np.quantile(values, q / 100)) for q in (50, 95, 99)}


@dataclass(frozen=True)
class Plan:
    """The answer to a plan's question.

    Attributes:
        plain, speculative: the same traffic on the same fleet.
        crossover: requests per second of the fleet above which speculation gives no better median
            TPOT; `None` where it is better up to the load at which plain decoding gives way, 0
            where it never is.
        plain_replicas, speculative_replicas: the fewest that meet the aims; `None` without aims or
            where none up to the bound does.
    """

    plain: Outcome
    speculative: Outcome
    crossover: float | None
    plain_replicas: int | None = None
    speculative_replicas: int | None = None

    @property
    def saved(self) -> int | None:
        """Replicas that speculation saves."""
        if self.plain_replicas is None or self.speculative_replicas is None:
            return None
        return self.plain_replicas - self.speculative_replicas

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "saved": self.saved}


def plan(
    traffic: Traffic,
    engine: Engine,
    *,
    replicas: int = 1,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    most_replicas: int = 256,
) -> Plan:
    """Simulate both ways, find where they cross, and how many replicas meet the aims.

    Args:
        traffic: of the whole fleet.
        engine: with guesses; plain decoding is the same engine without.
        replicas: of the fleet.
        ttft_ms, tpot_ms: aims for P95; without either no replicas are counted.
        most_replicas: the search goes no further.
    """
    plain, speculative = (simulate(traffic, e, replicas=replicas) for e in (engine.plain, engine))
    counts: list[int | None] = [None, None]
    if ttft_ms is not None or tpot_ms is not None:
        aims = (ttft_ms or math.inf, tpot_ms or math.inf)
        counts = [
            fewest(traffic, e, ttft_ms=aims[0], tpot_ms=aims[1], most=most_replicas)
            for e in (engine.plain, engine)
        ]
    where = crossover(traffic, engine, replicas=replicas)
    return Plan(plain, speculative, where, counts[0], counts[1])


def fewest(
    traffic: Traffic, engine: Engine, *, ttft_ms: float, tpot_ms: float, most: int
) -> int | None:
    """The fewest replicas that meet the aims, by bisection; `None` where ``most`` do not."""

    def meets(replicas: int) -> bool:
        outcome = simulate(traffic, engine, replicas=replicas)
        return outcome.meets(ttft_ms=ttft_ms, tpot_ms=tpot_ms)

    high = 1
    while not meets(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def crossover(
    traffic: Traffic, engine: Engine, *, replicas: int = 1, requests: int = 3000
) -> float | None:
    """The load at which speculation stops to help the median TPOT; see `Plan`."""
    sample = replace(traffic, requests=min(traffic.requests, requests))

    def helps(rate: float) -> bool:
        here = replace(sample, rate=rate)
        ours = simulate(here, engine, replicas=replicas).tpot["p50"]
        return ours < 0.99 * simulate(here, engine.plain, replicas=replicas).tpot["p50"]

    high = _most_rate(sample, engine.plain) * replicas
    low = high / 100
    if not helps(low):
        return 0.0
    if helps(high):
        return None
    for _ in range(7):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if helps(middle) else (low, middle)
    return math.sqrt(low * high)


def _most_rate(traffic: Traffic, engine: Engine) -> float:
    """Requests per second that one replica can just bear with all slots decoding."""
    tokens, prompt = max(traffic.output.mean - 1, 1), traffic.prompt.mean
    room = engine.room(engine.slots, depth=0)
    share = prompt / (room * tokens / engine.slots + prompt)
    rows = round(room * share)
    step = engine.step_ms(engine.slots, depth=0, prompt_rows=rows)
    return engine.slots / (tokens * step) * 1000
