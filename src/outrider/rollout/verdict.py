"""Is the canary as good as its control? Pure functions of observations.

Every check carries its sizes, effect and interval, and is `pass`, `fail` or `inconclusive`. Looks
repeat while samples come in, so bounds come from a spending plan (`spending`), times are compared
by a stratified rank test (`ranks`), rates by Fisher's exact test (`rates`). It knows no clock, no
engine and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.rollout.config import VerdictSettings

State = Literal["pass", "fail", "inconclusive"]
Outcome = Literal["ok", "error", "timeout", "out_of_memory", "cancelled"]


@dataclass(frozen=True)
class Observation:
    """One request of a cohort, as the gateway saw it.

    Attributes:
        at: wall-clock seconds of its end.
        prompt_type: stratum of the comparison.
        unit: what the assignment sticks to, hashed; requests of one unit are not independent.
            Empty for a request on its own.
        outcome: how it ended. Times of any but `ok` are not compared.
        ttft_ms, tpot_ms, e2e_ms: as in `RequestRecord`; `None` where unknown.
        prompt_tokens, completion_tokens: from usage; `None` where missing.
        finish_reason: as told.
        accepted, drafted, steps: of its guesses; `None` where not told.
        repetitive: the answer loops; `None` where not looked at.
        valid: its JSON or tool arguments hold; `None` where there are none.
        memory_bytes, kv_share: readings while it ran.
        id: of the request, for feedback.
    """

    at: float
    prompt_type: str = ""
    unit: str = ""
    outcome: Outcome = "ok"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    accepted: int | None = None
    drafted: int | None = None
    steps: int | None = None
    repetitive: bool | None = None
    valid: bool | None = None
    memory_bytes: int | None = None
    kv_share: float | None = None
    id: str = ""


@dataclass(frozen=True)
class Finding:
    """One check at one look.

    Attributes:
        metric, prompt_type: what is compared; an empty type is all traffic.
        state: the verdict.
        critical: its failure takes the profile back.
        canary, control: samples of each arm.
        effect: ratio of times (canary over control) or difference of rates; above 1 or 0 is worse.
        low, high: the interval that holds at every look together; `None` without enough data.
        p: one-sided, of no harm; bound: at or below which it fails at this look.
        why: in a line.
    """

    metric: str
    prompt_type: str
    state: State
    critical: bool
    canary: int
    control: int
    effect: float | None
    low: float | None
    high: float | None
    p: float | None
    bound: float | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class CohortSummary:
    """A cohort in numbers; `None` where the data cannot say.

    Attributes:
        n: requests.
        times: "ttft_ms", "tpot_ms", "e2e_ms" to "p50", "p95", "p99".
        rates: error, timeout, out_of_memory, cancelled, length, repetition, invalid.
        acceptance_length: pooled, the next token counted.
        target_forward_reduction: 1 - steps / output tokens.
        tokens_per_s: of a stream, median.
        memory_bytes, kv_share: largest readings.
    """

    n: int
    times: Mapping[str, Mapping[str, float | None]]
    rates: Mapping[str, float | None]
    acceptance_length: float | None
    target_forward_reduction: float | None
    tokens_per_s: float | None
    memory_bytes: int | None
    kv_share: float | None


@dataclass(frozen=True)
class Report:
    """A verdict.

    Attributes:
        profile, at, look: whose, when (wall clock), the how-manieth of its window (from 1).
        state: fail if a critical check fails; pass if every check that must have data has it and
            every check passes; else inconclusive.
        done: the window's plan is used up; a fresh window is needed to go on.
        spent: part of the plan that was used at this look, 0 to 1.
        findings: every check.
        canary, control: summaries per prompt type, "" for all.
        why: in a line.
    """

    profile: str
    at: float
    look: int
    state: State
    done: bool
    spent: float
    findings: tuple[Finding, ...]
    canary: Mapping[str, CohortSummary] = field(default_factory=dict)
    control: Mapping[str, CohortSummary] = field(default_factory=dict)
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Looks:
    """The looks of a window so far: how much information each had, 1 at the last planned size."""

    information: tuple[float, ...] = ()


def judge(
    profile: str,
    canary: Sequence[Observation],
    control: Sequence[Observation],
    settings: VerdictSettings,
    *,
    looks: Looks,
    at: float,
) -> tuple[Report, Looks]:
    """Look once more at a window's observations, all of them since it began.

    Args:
        profile: whose canary.
        canary, control: cumulative within the window.
        settings: checks, budget, plan.
        looks: what the look before gave back; `Looks()` for the first.
        at: now.

    Returns:
        The report, and the looks to hand in next time.
    """
    raise NotImplementedError


def summarize_cohort(observations: Sequence[Observation]) -> CohortSummary:
    """A cohort in numbers."""
    raise NotImplementedError
