"""Is the canary as good as its control? Pure functions of observations.

Every check carries its sizes, effect and interval, and is `pass`, `fail` or `inconclusive`. Looks
repeat while samples come in, so bounds come from a spending plan (`spending`); times are compared
by a stratified rank test and rates by Fisher's exact test (`comparisons`). It knows no clock, no
engine and no weights. Why so: docs/explanation/rollout-statistics.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np

from outrider.rollout.comparisons import RankTest, Times, fisher, rate_difference, times
from outrider.rollout.config import Check, VerdictSettings
from outrider.rollout.spending import LEAST_STEP, NORMAL, bound

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
        """JSON-ready: an end of an interval that is infinite becomes null."""
        data = asdict(self)
        for key in ("effect", "low", "high"):
            if data[key] is not None and not math.isfinite(data[key]):
                data[key] = None
        return data


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
        """JSON-ready."""
        return {**asdict(self), "findings": [finding.to_dict() for finding in self.findings]}


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
        The report, without cohort summaries (`summaries` makes them), and the looks to hand in
        next time. Where hardly anything came in since the look before, nothing is judged and
        nothing is spent.
    """
    seen = looks.information
    now = _information(canary, control, settings)
    number = len(seen) + 1
    if seen and seen[-1] >= 1:
        why = "the window's samples are used up without a verdict; start a new one"
        return _empty(profile, at, number - 1, done=True, spent=1.0, why=why), looks
    enough = min(len(canary), len(control)) >= settings.least_samples
    if not enough or now - (seen[-1] if seen else 0.0) < LEAST_STEP:
        why = f"{len(canary)} canary and {len(control)} control requests so far; too few to judge"
        spent = seen[-1] if seen else 0.0
        return _empty(profile, at, number - 1, done=False, spent=spent, why=why), looks
    information = (*seen, now)
    findings = tuple(_findings(canary, control, settings, information))
    state, why = _overall(findings, settings)
    report = Report(
        profile=profile,
        at=at,
        look=number,
        state=state,
        done=now >= 1,
        spent=min(1.0, now),
        findings=findings,
        why=why,
    )
    return report, Looks(information)


def _empty(profile: str, at: float, look: int, *, done: bool, spent: float, why: str) -> Report:
    return Report(profile, at, look, "inconclusive", done, spent, (), why=why)


def _information(
    canary: Sequence[Observation], control: Sequence[Observation], settings: VerdictSettings
) -> float:
    """How much the arms tell, 1 for the last planned size in each; units count, not requests."""
    m, n = _units(canary), _units(control)
    if not m or not n:
        return 0.0
    return round(2 / (1 / m + 1 / n) / settings.plan[-1], 6)


def _units(observations: Sequence[Observation]) -> int:
    alone = sum(not o.unit for o in observations)
    return alone + len({(o.prompt_type, o.unit) for o in observations if o.unit})


TIMES: Final = ("tpot", "ttft")

_Arm = Sequence[Observation]
_Error = Callable[[str], float]


@dataclass(frozen=True)
class _Setting:
    """What a check of one figure runs with."""

    check: Check
    error: float
    critical: bool
    prompt_type: str = ""


@dataclass(frozen=True)
class _Bounds:
    """Standard deviations that fail and that pass, at this look."""

    fail: float
    passing: float

    @property
    def p(self) -> float:
        return 1 - NORMAL.cdf(self.fail)


def _findings(
    canary: Sequence[Observation],
    control: Sequence[Observation],
    settings: VerdictSettings,
    information: tuple[float, ...],
) -> list[Finding]:
    """Every check at this look: the whole traffic first, then by prompt type."""
    made: list[Finding] = []

    def add(names: Iterable[str], arms: tuple[_Arm, _Arm], kind: str, error: _Error) -> None:
        tallies = [_tally(arm) for arm in arms]
        for name in names:
            check = settings.checks[name]
            setting = _Setting(check, error(name), check.critical and not kind, kind)
            bounds = _Bounds(
                bound(information, setting.error, settings.plan),
                bound(information, settings.false_pass, settings.plan),
            )
            least = settings.least_samples
            if name in TIMES:
                made.append(_compare_times(name, setting, *arms, bounds, least))
            else:
                here, there = (tally[name] for tally in tallies)
                made.append(_compare_rates(name, setting, here, there, bounds, least))

    errors = _errors(settings)
    add(settings.checks, (canary, control), "", errors.__getitem__)
    types = sorted({o.prompt_type for o in canary} & {o.prompt_type for o in control} - {""})
    if len(types) > 1:
        each = settings.false_rollback / (len(types) * max(1, len(settings.by_type)))
        for kind in types:
            m = [o for o in canary if o.prompt_type == kind]
            n = [o for o in control if o.prompt_type == kind]
            add(settings.by_type, (m, n), kind, lambda name: each)
    return made


def _errors(settings: VerdictSettings) -> dict[str, float]:
    """Each check's part of the error: the critical ones share it by their budgets, the others,
    which take nothing back, have the whole each."""
    total = sum(check.budget for check in settings.checks.values() if check.critical)
    return {
        name: settings.false_rollback * (check.budget / total if check.critical else 1.0)
        for name, check in settings.checks.items()
    }


def _log_times(observations: Sequence[Observation], name: str) -> Times:
    rows: list[tuple[str, str, float]] = []
    for o in observations:
        value = o.tpot_ms if name == "tpot" else o.ttft_ms
        if o.outcome == "ok" and value is not None and math.isfinite(value):
            rows.append((o.prompt_type, o.unit, value))
    return times(rows)


def _compare_times(
    name: str,
    setting: _Setting,
    canary: Sequence[Observation],
    control: Sequence[Observation],
    bounds: _Bounds,
    least_samples: int,
) -> Finding:
    """Is the canary slower?"""
    m, n = _log_times(canary, name), _log_times(control, name)
    test = RankTest(m, n)
    if min(m.n, n.n) < least_samples or not test.comparable:
        return _too_few(name, setting, m.n, n.n)
    check = setting.check
    z = test.z()
    ratio = math.exp(test.shift())
    low, high = math.exp(test.shift(bounds.fail)), math.exp(test.shift(-bounds.fail))
    state: State = "inconclusive"
    if z >= bounds.fail and ratio >= 1 + check.least:
        state = "fail"
    elif test.z(math.log1p(check.tolerance)) <= -bounds.passing:
        state = "pass"
    why = f"{name} is {ratio:.3f} times the control's ({low:.3f} to {high:.3f})"
    return Finding(
        name,
        setting.prompt_type,
        state,
        setting.critical,
        m.n,
        n.n,
        ratio,
        low,
        high,
        1 - NORMAL.cdf(z),
        bounds.p,
        why,
    )


def _tally(observations: Sequence[Observation]) -> dict[str, tuple[int, int]]:
    """Per rate, how often it happened, and to how many requests the question arises."""
    outcomes, n = Counter(o.outcome for o in observations), len(observations)
    reasons = [o.finish_reason for o in observations if o.outcome == "ok"]
    loops = [o.repetitive for o in observations if o.repetitive is not None]
    forms = [o.valid for o in observations if o.valid is not None]
    return {
        "error": (outcomes["error"], n),
        "timeout": (outcomes["timeout"], n),
        "out_of_memory": (outcomes["out_of_memory"], n),
        "cancelled": (outcomes["cancelled"], n),
        "length": (reasons.count("length"), len(reasons)),
        "repetition": (sum(loops), len(loops)),
        "invalid": (len(forms) - sum(forms), len(forms)),
    }


def _compare_rates(
    name: str,
    setting: _Setting,
    canary: tuple[int, int],
    control: tuple[int, int],
    bounds: _Bounds,
    least_samples: int,
) -> Finding:
    """Does it happen more often in the canary? Events, and requests, of each arm."""
    (a, m), (b, n) = canary, control
    if min(m, n) < least_samples:
        return _too_few(name, setting, m, n)
    check = setting.check
    p = fisher(a, m, b, n)
    difference, low, high = rate_difference(a, m, b, n, z=bounds.fail)
    _, _, surely_below = rate_difference(a, m, b, n, z=bounds.passing)
    state: State = "inconclusive"
    if p <= bounds.p and difference >= check.least:
        state = "fail"
    elif surely_below <= check.tolerance:
        state = "pass"
    why = f"{name} {a} of {m} against {b} of {n} ({low:+.2%} to {high:+.2%})"
    return Finding(
        name,
        setting.prompt_type,
        state,
        setting.critical,
        m,
        n,
        difference,
        low,
        high,
        p,
        bounds.p,
        why,
    )


def _too_few(name: str, setting: _Setting, m: int, n: int) -> Finding:
    why = f"{name}: {m} and {n} samples are too few"
    nothing = (None,) * 5
    return Finding(name, setting.prompt_type, "inconclusive", setting.critical, m, n, *nothing, why)


def _overall(findings: Sequence[Finding], settings: VerdictSettings) -> tuple[State, str]:
    """Fail if a critical check fails; pass if nothing speaks against it and all that must is known.

    A check that has no data and need not have any does not count. Prompt types never pass or take
    back, they can only hold.
    """
    failed = [f for f in findings if f.state == "fail"]
    if critical := [f for f in failed if f.critical]:
        return "fail", "; ".join(f.why for f in critical)
    if failed:
        kinds = (f"[{f.prompt_type}] {f.why}" if f.prompt_type else f.why for f in failed)
        return "inconclusive", "not critical, but failing: " + "; ".join(kinds)
    open_ = [
        f
        for f in findings
        if not f.prompt_type
        and f.state != "pass"
        and (settings.checks[f.metric].must_have_data or (f.critical and f.effect is not None))
    ]
    if open_:
        return "inconclusive", "not yet sure: " + "; ".join(f.why for f in open_)
    return "pass", "; ".join(f.why for f in findings if f.critical and f.effect is not None)


def summaries(observations: Sequence[Observation]) -> dict[str, CohortSummary]:
    """A cohort in numbers, per prompt type and, under "", for all."""
    kinds = sorted({o.prompt_type for o in observations} - {""})
    parts = {kind: [o for o in observations if o.prompt_type == kind] for kind in kinds}
    whole = {"": list(observations)}
    return {kind: summarize_cohort(part) for kind, part in (whole | parts).items()}


def summarize_cohort(observations: Sequence[Observation]) -> CohortSummary:
    """A cohort in numbers."""
    fine = [o for o in observations if o.outcome == "ok"]
    told = [o for o in fine if o.accepted is not None and o.steps and o.completion_tokens]
    steps = sum(o.steps or 0 for o in told)
    tokens = sum(o.completion_tokens or 0 for o in told)
    rates = {
        name: events / asked if asked else None
        for name, (events, asked) in _tally(observations).items()
    }
    tpot = _percentiles([o.tpot_ms for o in fine])
    return CohortSummary(
        n=len(observations),
        times={
            "ttft_ms": _percentiles([o.ttft_ms for o in fine]),
            "tpot_ms": tpot,
            "e2e_ms": _percentiles([o.e2e_ms for o in fine]),
        },
        rates=rates,
        acceptance_length=1 + sum(o.accepted or 0 for o in told) / steps if steps else None,
        target_forward_reduction=1 - steps / tokens if tokens else None,
        tokens_per_s=1000 / tpot["p50"] if tpot["p50"] else None,
        memory_bytes=max((o.memory_bytes for o in observations if o.memory_bytes), default=None),
        kv_share=max((o.kv_share for o in observations if o.kv_share is not None), default=None),
    )


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """P50, P95 and P99; `None` where there are too few values to have such a tail."""
    data = np.asarray([value for value in values if value is not None], dtype=np.float64)
    return {
        f"p{q}": float(np.quantile(data, q / 100)) if len(data) * (100 - q) >= 100 else None
        for q in (50, 95, 99)
    }
