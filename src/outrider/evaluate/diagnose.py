"""Is decoding what takes the time, and what is the most that speculation could gain here?

From whatever source, a `Picture` says where requests spend their time, how long outputs are and how
full batches are; `diagnose` turns it into a verdict with its numbers and with what to do instead.
Pure functions; sources are read in `diagnose_sources.py` and `diagnose_probe.py`.

The bound is Amdahl's: with decoding a share f of the time and decoding faster by s, requests get
faster by 1 / (1 - f + f / s). s is at most tau, tokens per target step, where checking guesses
costs nothing; with measured costs it is tau / (v(n) + d), see docs/reference/bench.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from outrider.errors import InvalidParameter

Stage = Literal["queue", "retrieval", "tools", "prefill", "decode", "other"]
STAGES: tuple[Stage, ...] = ("queue", "retrieval", "tools", "prefill", "decode", "other")

Verdict = Literal[
    "speculate",
    "fix queueing first",
    "prefill-bound",
    "outputs too short",
    "saturated",
    "pipeline-bound",
    "unknown",
]

TAU = 2.5
ROOFLINE = 150.0  # rows of a pass that a datacentre GPU gets nearly for free in bf16
KNEE = 1.5  # a pass this many times dearer than one of a single row ends the free region
SHORT = 16  # median output tokens below which there is little to speed up
QUEUE = 0.3
FULL_CACHE = 0.95
WORTH_IT = 1.1

INSTEAD: Mapping[Verdict, str] = {
    "speculate": "run `outrider check`, then `outrider replay` or `outrider bench` with your "
    "prompts to choose a drafter and its depth",
    "fix queueing first": "add replicas or slots, or shed load; a request that waits is not made "
    "faster by guesses. Measure again when the queue is short",
    "prefill-bound": "use prefix caching, chunked prefill, shorter prompts or a separate prefill "
    "pool; guesses only speed up what comes after the first token",
    "outputs too short": "there are few tokens to guess: look at prefill, at batching and at the "
    "pipeline around the model; constrained outputs may do with fewer tokens still",
    "saturated": "batches already use the machine's arithmetic: speculate only below this load "
    "(by a table of batch sizes, or the budget of `outrider serve`), or add hardware",
    "pipeline-bound": "retrieval and tools take the time: cache or parallelise them, or overlap "
    "them with decoding; a faster model changes little",
    "unknown": "supply what is missing, as named above, and run again",
}


@dataclass(frozen=True)
class Lengths:
    """Output lengths in tokens.

    Attributes:
        count: outputs.
        mean, p10, p50, p90: over them; quantiles of bucketed lengths are interpolated.
        short: share of outputs of fewer than `SHORT` tokens.
    """

    count: int
    mean: float
    p10: float
    p50: float
    p90: float
    short: float

    def to_dict(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass(frozen=True)
class Picture:
    """What a source tells. `None` is unknown, never zero.

    Attributes:
        source: where from, for people.
        requests: finished requests behind it.
        seconds: time by stage, added up over requests.
        lengths: of outputs.
        batch: sequences that decode at once, on average.
        waiting: requests in the queue, on average.
        cache_use: share of the key-value cache in use. `preemptions`: in the span.
        pass_cost: rows of a pass to its time, relative to one row; measured.
        tpot_ms: per output token. `notes`: what a reader must know.
        missing: what the source did not tell, by the names it should have.
    """

    source: str
    requests: int
    seconds: Mapping[Stage, float]
    lengths: Lengths | None = None
    batch: float | None = None
    waiting: float | None = None
    cache_use: float | None = None
    preemptions: int | None = None
    pass_cost: Mapping[int, float] = field(default_factory=dict)
    tpot_ms: float | None = None
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def shares(self) -> dict[Stage, float]:
        """Each stage's share of the time."""
        total = sum(self.seconds.values())
        if total <= 0:
            return {}
        return {stage: self.seconds.get(stage, 0.0) / total for stage in STAGES}


@dataclass(frozen=True)
class Diagnosis:
    """The verdict and the numbers behind it.

    Attributes:
        why: one sentence. `instead`: what to do.
        ceiling: the most that whole requests can gain: Amdahl with decoding faster by tau.
        expected: the same with measured costs of checking guesses; `None` without any.
        decode_ceiling: the most that decoding alone can gain.
        room: guesses per sequence that a pass still takes nearly for free.
    """

    verdict: Verdict
    why: str
    instead: str
    picture: Picture
    tau: float
    ceiling: float | None
    expected: float | None
    room: float | None
    roofline: float

    def to_dict(self) -> dict[str, Any]:
        p = self.picture
        return {
            "diagnosis": 1,
            "verdict": self.verdict,
            "why": self.why,
            "instead": self.instead,
            "source": p.source,
            "requests": p.requests,
            "shares": p.shares(),
            "output_lengths": None if p.lengths is None else p.lengths.to_dict(),
            "batch": p.batch,
            "waiting": p.waiting,
            "cache_use": p.cache_use,
            "preemptions": p.preemptions,
            "pass_cost": {str(n): v for n, v in p.pass_cost.items()},
            "tpot_ms": p.tpot_ms,
            "tau": self.tau,
            "ceiling": self.ceiling,
            "expected": self.expected,
            "roofline_rows": self.roofline,
            "free_guesses_per_sequence": self.room,
            "notes": list(p.notes),
            "missing": list(p.missing),
        }

    def to_text(self) -> str:
        """For people: the verdict first."""
        p = self.picture
        lines = [f"{self.verdict}: {self.why}", f"  do: {self.instead}", f"  from: {p.source}"]
        shares = p.shares()
        if shares:
            told = ", ".join(f"{s} {share:.0%}" for s, share in shares.items() if share >= 0.005)
            lines.append(f"  time: {told} ({p.requests:,} requests)")
        if p.lengths is not None:
            n = p.lengths
            lines.append(
                f"  outputs: median {n.p50:.0f} tokens (10% below {n.p10:.0f}, 10% above "
                f"{n.p90:.0f}); {n.short:.0%} are shorter than {SHORT}"
            )
        if p.batch is not None:
            room = "" if self.room is None else f"; room for {self.room:.1f} guesses per sequence"
            lines.append(
                f"  batch: {p.batch:.1f} sequences against {self.roofline:.0f} free rows{room}"
            )
        if p.tpot_ms is not None:
            lines.append(f"  per token: {p.tpot_ms:.1f} ms")
        if self.ceiling is not None:
            told = f"  at {self.tau:g} tokens per step: at most {self.ceiling:.2f}x"
            if self.expected is not None:
                told += f", {self.expected:.2f}x with the measured cost of checking guesses"
            lines.append(told)
        lines += [f"  note: {note}" for note in p.notes]
        lines += [f"  missing: {name}" for name in p.missing]
        return "\n".join(lines)


def amdahl(share: float, speedup: float) -> float:
    """How much faster the whole gets where a share of it gets faster by ``speedup``."""
    if not 0 <= share <= 1 or speedup <= 0:
        raise InvalidParameter(
            f"a share of {share:g} and a speed-up of {speedup:g}; use a share from 0 to 1 and a "
            "speed-up above 0"
        )
    return 1 / (1 - share + share / speedup)


def cost_at(pass_cost: Mapping[int, float], rows: float) -> float | None:
    """Cost of a pass of ``rows`` rows, interpolated; beyond the last it grows in proportion."""
    known = sorted(pass_cost.items())
    if not known or rows <= 0:
        return None
    if rows <= known[0][0]:
        return known[0][1]
    for (low, a), (high, b) in pairwise(known):
        if rows <= high:
            return a + (b - a) * (rows - low) / (high - low)
    last, cost = known[-1]
    return cost * rows / last


def knee(pass_cost: Mapping[int, float], *, at: float = KNEE) -> float | None:
    """Rows at which a pass costs ``at`` times that of one row; `None` if none that was measured."""
    known = sorted(pass_cost.items())
    if len(known) < 2:
        return None
    first = known[0][1]
    for (low, a), (high, b) in pairwise(known):
        if b >= at * first:
            return float(high) if b <= a else low + (high - low) * (at * first - a) / (b - a)
    return None


def diagnose(picture: Picture, *, tau: float = TAU, roofline: float | None = None) -> Diagnosis:
    """The verdict on a picture.

    Args:
        tau: tokens per target step that a drafter is expected to reach, the next token included.
        roofline: rows that a pass takes nearly for free; `None` takes the measured knee, else
            `ROOFLINE`.
    """
    if roofline is not None and not roofline >= 1:
        raise InvalidParameter(f"roofline is {roofline:g}; use a number of rows, 1 or more")
    if not (math.isfinite(tau) and tau >= 1):
        raise InvalidParameter(f"tau is {tau}; use the tokens per target step, 1 or more")
    free = roofline or knee(picture.pass_cost) or ROOFLINE
    shares = picture.shares()
    decode = shares.get("decode")
    room = free / picture.batch - 1 if picture.batch else None
    ceiling = None if decode is None else amdahl(decode, tau)
    expected = None
    if decode is not None and len(picture.pass_cost) > 1:
        batch = picture.batch or 1.0
        plain, checked = (
            cost_at(picture.pass_cost, batch),
            cost_at(picture.pass_cost, batch * math.ceil(tau + 1)),
        )
        if plain and checked:
            expected = amdahl(decode, tau * plain / checked)
    verdict, why = _verdict(picture, shares, ceiling, expected, room, free)
    return Diagnosis(verdict, why, INSTEAD[verdict], picture, tau, ceiling, expected, room, free)


def _verdict(
    picture: Picture,
    shares: Mapping[Stage, float],
    ceiling: float | None,
    expected: float | None,
    room: float | None,
    free: float,
) -> tuple[Verdict, str]:
    if not shares or ceiling is None or picture.requests == 0:
        told = ", ".join(picture.missing) or "no finished request was seen"
        return "unknown", f"where the time goes cannot be told ({told})"
    if shares["queue"] >= QUEUE:
        return "fix queueing first", f"requests wait for {shares['queue']:.0%} of their time"
    if picture.preemptions or (picture.cache_use or 0) >= FULL_CACHE:
        return "saturated", _full_cache(picture)
    if room is not None and room < 1:
        return (
            "saturated",
            f"{picture.batch:.0f} sequences decode at once, and a pass takes about {free:.0f} rows "
            "before it costs more: no room for a guess each",
        )
    return _inside(picture, shares, ceiling, expected)


def _inside(
    picture: Picture, shares: Mapping[Stage, float], ceiling: float, expected: float | None
) -> tuple[Verdict, str]:
    """The verdict where load is no obstacle: what requests do with their time."""
    pipeline = shares["retrieval"] + shares["tools"] + shares["other"]
    if pipeline >= 0.5 and ceiling < 1 + 0.5 * (1 - pipeline):
        return (
            "pipeline-bound",
            f"{pipeline:.0%} of the time is spent outside the model; at most {ceiling:.2f}x",
        )
    if picture.lengths is not None and picture.lengths.p50 < SHORT:
        return (
            "outputs too short",
            f"half of the outputs have fewer than {picture.lengths.p50:.0f} tokens; at most "
            f"{ceiling:.2f}x",
        )
    if shares["prefill"] >= shares["decode"]:
        return (
            "prefill-bound",
            f"reading prompts takes {shares['prefill']:.0%} of the time, decoding "
            f"{shares['decode']:.0%}; at most {ceiling:.2f}x",
        )
    if expected is not None and expected < 1:
        return (
            "saturated",
            f"checking guesses costs more than they bring on this machine: {expected:.2f}x",
        )
    if ceiling < WORTH_IT:
        return (
            "pipeline-bound",
            f"decoding is {shares['decode']:.0%} of the time: at most {ceiling:.2f}x",
        )
    gain = f"{ceiling:.2f}x at most"
    if expected is not None:
        gain += f", {expected:.2f}x with measured costs"
    return "speculate", f"decoding is {shares['decode']:.0%} of the time: {gain}"


def _full_cache(picture: Picture) -> str:
    if picture.preemptions:
        return f"{picture.preemptions} requests were put back for lack of cache"
    return f"the key-value cache is {picture.cache_use or 0:.0%} full"


# -- lengths ----------------------------------------------------------------------------------


def lengths_of(values: Sequence[int]) -> Lengths | None:
    """From single outputs; `None` without any."""
    if not values:
        return None
    ordered = sorted(values)

    def at(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Lengths(
        len(ordered),
        sum(ordered) / len(ordered),
        at(0.1),
        at(0.5),
        at(0.9),
        sum(v < SHORT for v in ordered) / len(ordered),
    )


def lengths_from_buckets(buckets: Mapping[float, float], *, mean: float) -> Lengths | None:
    """From a histogram's cumulative counts by upper edge; `None` without a count."""
    edges = sorted(buckets.items())
    total = edges[-1][1] if edges else 0
    if total <= 0:
        return None

    def at(q: float) -> float:
        low, before = 0.0, 0.0
        for edge, count in edges:
            if count >= q * total:
                if not math.isfinite(edge):
                    return low
                inside = count - before
                return low + (edge - low) * ((q * total - before) / inside if inside else 1.0)
            low, before = edge, count
        return low

    return Lengths(int(total), mean, at(0.1), at(0.5), at(0.9), _below(edges, total))


def _below(edges: Sequence[tuple[float, float]], total: float) -> float:
    """The share of outputs shorter than `SHORT`, interpolated in its bucket."""
    low, before = 0.0, 0.0
    for edge, count in edges:
        if edge >= SHORT:
            if not math.isfinite(edge):
                return before / total
            return (before + (count - before) * (SHORT - low) / (edge - low)) / total
        low, before = edge, count
    return before / total
