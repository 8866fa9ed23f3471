"""What a run's numbers say, and how sure one may be. numpy only; pure functions; seeded.

The unit of chance is the *prompt*: requests that repeat a prompt are not independent, so every
interval resamples prompts with all their requests (a cluster bootstrap). A number that the data
cannot support is `None`, never a guess.

Words: a *pair* is one prompt run plainly and speculatively; times are seconds unless a name ends
in ms. Shapes: C prompts (clusters), B bootstrap samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from outrider.errors import InvalidParameter
from outrider.records.request import RequestRecord

Array = NDArray[np.float64]

PERCENTILE_METHOD: Final = "linear"
"""Hyndman and Fan's type 7: linear between order statistics, position 1 + (n - 1) q."""

MIN_PROMPTS = 5
"""The fewest prompts for an interval: below, the widened 2.5 % tail is thinner than the chance of
one single resample (4 prompts: 1/256 against 1/8000), so the interval would only be the range."""

_CHUNK = 1 << 21


@dataclass(frozen=True)
class Interval:
    """A confidence interval and how it was made."""

    low: float
    high: float
    level: float
    method: str
    prompts: int
    samples: int


@dataclass(frozen=True)
class Summary:
    """A distribution in numbers.

    Attributes:
        n: finite values; everything else is `None` or empty when it is 0.
        std: with n - 1; `None` for n < 2.
        percentiles: "p50" and so on to its value (`PERCENTILE_METHOD`), or to `None` where n is
            too small to say: fewer than 1 / (1 - q) values, or 1 / q for the lower half.
    """

    n: int
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    percentiles: Mapping[str, float | None]
    method: str = PERCENTILE_METHOD


@dataclass(frozen=True)
class Pair:
    """One prompt, run plainly and speculatively, close together in time.

    Attributes:
        prompt: the cluster; repeats of a prompt share it.
        plain_s, speculative_s: the two times, above 0.
        plain_tokens, speculative_tokens: output tokens of each; equal where outputs are equal.
    """

    prompt: Hashable
    plain_s: float
    speculative_s: float
    plain_tokens: int
    speculative_tokens: int


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; `interval` is `None` with fewer than `MIN_PROMPTS` prompts."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Speedup:
    """How much faster the speculative runs were; above 1 is faster.

    Attributes:
        total: the headline: total tokens over total time, speculative over plain. With equal
            outputs it is the ratio of the total times: what a user who runs them all waits.
        geometric: exp of the mean over prompts of each prompt's log ratio of rates: every prompt
            counts the same.
        mean_rates: the mean over runs of tokens per second, speculative over plain, as Spec-Bench
            reports it; prompts with high rates count more. Secondary.
        pairs, prompts: how many.
        unequal_tokens: pairs whose token counts differ; above 0 the runs did not do the same work.
    """

    total: Estimate
    geometric: Estimate
    mean_rates: Estimate
    pairs: int
    prompts: int
    unequal_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PositionRates:
    """Acceptance at one depth of the draft (1-based).

    Attributes:
        accepted, rejected: verify steps.
        unconditional: accepted over all verify steps, as vLLM reports it.
        conditional: accepted over accepted + rejected: given that the path came this far and the
            draft went on; `None` without such a step.
    """

    position: int
    accepted: int
    rejected: int
    unconditional: float
    conditional: float | None


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance over many requests. Lengths count the next token; the root is never drafted.

    Attributes:
        requests: those that count; failed: those left out because they carry an error; silent:
            those left out because they carry no acceptance record or no step.
        acceptance_length: pooled over steps, 1 + sum of accepted / sum of steps: each step counts
            the same. `interval` is by prompt.
        acceptance_length_per_request: mean over requests of each one's length.
        draft_acceptance_rate: sum of accepted / sum of drafted.
        accepted_per_verified: (accepted + steps) / (drafted + steps).
        target_forward_reduction: 1 - steps / output tokens.
        positions: by depth.
        histogram: j to the verify steps that accepted exactly j.
    """

    requests: int
    failed: int
    silent: int
    steps: int
    drafted: int
    accepted: int
    completion_tokens: int
    acceptance_length: Estimate | None
    acceptance_length_per_request: float | None
    draft_acceptance_rate: float | None
    accepted_per_verified: float | None
    target_forward_reduction: float | None
    positions: tuple[PositionRates, ...]
    histogram: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["histogram"] = {str(j): times for j, times in self.histogram.items()}
        return data

    def aiperf(self) -> dict[str, Any]:
        """The run-level numbers under AIPerf's names; its overall rate is in percent."""
        length, rate = self.acceptance_length, self.draft_acceptance_rate
        return {
            "spec_decode_token_weighted_acceptance_length": None
            if length is None
            else length.value,
            "spec_decode_overall_draft_acceptance_rate": None if rate is None else 100 * rate,
            "total_num_accepted_draft_tokens": self.accepted,
            "total_num_draft_tokens": self.drafted,
            "total_num_spec_steps": self.steps,
            "pooled_spec_decode_acceptance_histogram": self.to_dict()["histogram"],
        }


@dataclass(frozen=True)
class TimingSummary:
    """Times over many requests.

    Attributes:
        ttft_ms, tpot_ms, e2e_ms: over the requests without error that have the number.
        stream_tokens_per_s: 1000 / TPOT of each request: excludes the time to the first token.
        draft_ms_per_step, verify_ms_per_step, host_ms_per_step: means of the whole step's time over
            the steps that requests sat in: a step shared by three requests counts three times.
        peak_memory_bytes: the largest seen.
    """

    ttft_ms: Summary
    tpot_ms: Summary
    e2e_ms: Summary
    stream_tokens_per_s: Summary
    draft_ms_per_step: float | None
    verify_ms_per_step: float | None
    host_ms_per_step: float | None
    peak_memory_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile, 0 <= q <= 1, by `PERCENTILE_METHOD`; `None` where n is too small to say.

    Raises:
        InvalidParameter: q is out of range or a value is not finite.
    """
    if not 0 <= q <= 1:
        raise InvalidParameter(f"quantile {q} is out of range; use a number in [0, 1]")
    data = _finite("values", values)
    tail = min(q, 1 - q)
    # The tolerance keeps 1 - 0.99, a hair above 0.01, from asking for a 101st value.
    if not len(data) or (tail > 0 and len(data) * tail < 1 - 1e-9):
        return None
    return float(np.quantile(data, q, method=PERCENTILE_METHOD))


def summarize(
    values: Sequence[float | None], *, percents: Sequence[float] = (50, 90, 99)
) -> Summary:
    """The distribution of those values that are not `None`."""
    present = [value for value in values if value is not None]
    data = _finite("values", present)
    n = len(data)
    return Summary(
        n=n,
        mean=float(data.mean()) if n else None,
        std=float(data.std(ddof=1)) if n > 1 else None,
        minimum=float(data.min()) if n else None,
        maximum=float(data.max()) if n else None,
        percentiles={f"p{percent:g}": percentile(present, percent / 100) for percent in percents},
    )


def speedup(
    pairs: Sequence[Pair], *, seed: int = 0, samples: int = 10_000, level: float = 0.95
) -> Speedup:
    """How much faster speculative was than plain, with intervals clustered by prompt.

    Raises:
        InvalidParameter: no pair, or a pair with a time or token count that is not above 0.
    """
    if not pairs:
        raise InvalidParameter("a speed-up needs at least one pair of runs, got none")
    for pair in pairs:
        times = (pair.plain_s, pair.speculative_s)
        if not all(math.isfinite(t) and t > 0 for t in times):
            raise InvalidParameter(f"prompt {pair.prompt!r}: times {times} must be above 0")
        if min(pair.plain_tokens, pair.speculative_tokens) < 1:
            raise InvalidParameter(f"prompt {pair.prompt!r}: a run without output has no rate")
    # Columns per prompt: tokens and seconds of both sides, log ratio, rates of both sides, runs.
    sums_C8 = cluster_sums([p.prompt for p in pairs], [_columns(p) for p in pairs])
    log_mean_C = sums_C8[:, 4] / sums_C8[:, 7]

    def total(weights_BC: Array) -> Array:
        tokens_p, seconds_p, tokens_s, seconds_s = (weights_BC @ sums_C8[:, :4]).T
        ratio_B: Array = (tokens_s / seconds_s) / (tokens_p / seconds_p)
        return ratio_B

    def geometric(weights_BC: Array) -> Array:
        ratio_B: Array = np.exp(weights_BC @ log_mean_C / weights_BC.sum(axis=1))
        return ratio_B

    def mean_rates(weights_BC: Array) -> Array:
        rates_p, rates_s = (weights_BC @ sums_C8[:, 5:7]).T
        ratio_B: Array = rates_s / rates_p
        return ratio_B

    prompts = len(sums_C8)

    def estimate(statistic: Callable[[Array], Array]) -> Estimate:
        return bootstrap(statistic, prompts, seed=seed, samples=samples, level=level)

    return Speedup(
        total=estimate(total),
        geometric=estimate(geometric),
        mean_rates=estimate(mean_rates),
        pairs=len(pairs),
        prompts=prompts,
        unequal_tokens=sum(p.plain_tokens != p.speculative_tokens for p in pairs),
    )


def acceptance_summary(
    records: Sequence[RequestRecord], *, seed: int = 0, samples: int = 10_000, level: float = 0.95
) -> AcceptanceSummary:
    """Acceptance over ``records``, pooled and per request; clusters are the records' ids."""
    whole = [r for r in records if r.error is None]
    used = [r for r in whole if r.acceptance is not None and r.acceptance.num_spec_steps]
    kept = [(r, r.acceptance) for r in used if r.acceptance is not None]
    steps = sum(a.num_spec_steps for _, a in kept)
    drafted = sum(a.num_draft_tokens for _, a in kept)
    accepted = sum(a.num_accepted_draft_tokens for _, a in kept)
    tokens = sum(r.completion_tokens for r in used)
    lengths = [1 + a.num_accepted_draft_tokens / a.num_spec_steps for _, a in kept]
    histogram: Counter[int] = Counter()
    for _, a in kept:
        histogram.update(a.acceptance_histogram)
    pooled: Estimate | None = None
    if kept:
        rows = [(float(a.num_accepted_draft_tokens), float(a.num_spec_steps)) for _, a in kept]
        sums_C2 = cluster_sums([r.id for r in used], rows)

        def length(weights_BC: Array) -> Array:
            accepted_B, steps_B = (weights_BC @ sums_C2).T
            length_B: Array = 1 + accepted_B / steps_B
            return length_B

        pooled = bootstrap(length, len(sums_C2), seed=seed, samples=samples, level=level)
    return AcceptanceSummary(
        requests=len(used),
        failed=len(records) - len(whole),
        silent=len(whole) - len(used),
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        completion_tokens=tokens,
        acceptance_length=pooled,
        acceptance_length_per_request=float(np.mean(lengths)) if lengths else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        accepted_per_verified=(accepted + steps) / (drafted + steps) if steps else None,
        target_forward_reduction=1 - steps / tokens if tokens else None,
        positions=_positions(used, steps),
        histogram=dict(sorted(histogram.items())),
    )


def timing_summary(
    records: Sequence[RequestRecord], *, percents: Sequence[float] = (50, 90, 99)
) -> TimingSummary:
    """Times over the records that carry no error."""
    used = [r for r in records if r.error is None]
    steps = sum(r.target_steps for r in used)
    rates = [1000 / r.tpot_ms for r in used if r.tpot_ms]
    memory = [r.peak_memory_bytes for r in used if r.peak_memory_bytes is not None]

    def per_step(values: Sequence[float]) -> float | None:
        return sum(values) / steps if steps else None

    return TimingSummary(
        ttft_ms=summarize([r.ttft_ms for r in used], percents=percents),
        tpot_ms=summarize([r.tpot_ms for r in used], percents=percents),
        e2e_ms=summarize([r.e2e_ms for r in used], percents=percents),
        stream_tokens_per_s=summarize(rates, percents=percents),
        draft_ms_per_step=per_step([r.draft_ms for r in used]),
        verify_ms_per_step=per_step([r.verify_ms for r in used]),
        host_ms_per_step=per_step([r.host_ms for r in used]),
        peak_memory_bytes=max(memory, default=None),
    )


def _positions(records: Sequence[RequestRecord], steps: int) -> tuple[PositionRates, ...]:
    accepted: Counter[int] = Counter()
    rejected: Counter[int] = Counter()
    for record in records:
        accepted.update(dict(enumerate(record.accepted_by_position, start=1)))
        rejected.update(dict(enumerate(record.rejected_by_position, start=1)))
    rates: list[PositionRates] = []
    for position in sorted(accepted | rejected):
        a, r = accepted[position], rejected[position]
        rates.append(PositionRates(position, a, r, a / steps, a / (a + r) if a + r else None))
    return tuple(rates)


def _columns(pair: Pair) -> tuple[float, ...]:
    plain = pair.plain_tokens / pair.plain_s
    speculative = pair.speculative_tokens / pair.speculative_s
    return (
        pair.plain_tokens,
        pair.plain_s,
        pair.speculative_tokens,
        pair.speculative_s,
        math.log(speculative / plain),
        plain,
        speculative,
        1.0,
    )


def cluster_sums(clusters: Sequence[Hashable], rows: Sequence[Sequence[float]]) -> Array:
    """The rows of each cluster added up, clusters in order of first appearance."""
    index = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    sums = np.zeros((len(index), len(rows[0])))
    np.add.at(sums, [index[cluster] for cluster in clusters], np.asarray(rows, dtype=np.float64))
    return sums


def bootstrap(
    statistic: Callable[[Array], Array], prompts: int, *, seed: int, samples: int, level: float
) -> Estimate:
    """A statistic of prompt weights, with its expanded percentile interval.

    The plain percentile interval is too narrow for few prompts. The quantiles are moved outwards
    as far as Student's t with C - 1 degrees of freedom and the factor sqrt(C / (C - 1)) ask
    (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 2015).

    Args:
        statistic: from weights [B, C], how often each prompt was drawn, to values [B].
    """
    if not 0 < level < 1:
        raise InvalidParameter(f"level {level} is out of range; use a number in (0, 1)")
    if samples < 1:
        raise InvalidParameter(f"samples is {samples}; use at least 1")
    value = float(statistic(np.ones((1, prompts)))[0])
    if prompts < MIN_PROMPTS:
        return Estimate(value, None)
    rng = np.random.default_rng(seed)
    even = np.full(prompts, 1 / prompts)
    values: list[Array] = []
    left = samples
    while left:  # in chunks: B times C weights of a large run would not fit in memory
        size = min(left, max(1, _CHUNK // prompts))
        values.append(statistic(rng.multinomial(prompts, even, size=size).astype(np.float64)))
        left -= size
    widen = math.sqrt(prompts / (prompts - 1))
    tail = stats.norm.cdf(widen * stats.t.ppf((1 - level) / 2, prompts - 1))
    low, high = np.quantile(np.concatenate(values), [tail, 1 - tail])
    method = "expanded percentile bootstrap by prompt"
    return Estimate(value, Interval(float(low), float(high), level, method, prompts, samples))


def _finite(name: str, values: Sequence[float]) -> Array:
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise InvalidParameter(f"{name} holds NaN or infinity; drop failed measurements first")
    return data
