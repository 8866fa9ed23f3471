"""Statistics: against brute force, against simulated truth, and at the edges."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidParameter
from outrider.evaluate import statistics
from outrider.evaluate.statistics import (
    MIN_PROMPTS,
    Pair,
    acceptance_summary,
    percentile,
    speedup,
    summarize,
    timing_summary,
)
from outrider.records.request import RequestRecord, RequestTimings, request_record
from outrider.records.step import StepRecord


def pair(prompt: str, plain_s: float, speculative_s: float, tokens: int = 10) -> Pair:
    return Pair(prompt, plain_s, speculative_s, tokens, tokens)


def request(
    id: str, accepted: list[int], *, drafted: int = 4, ttft_ms: float = 50.0
) -> RequestRecord:
    steps = [
        StepRecord(
            request=0,
            step=i,
            drafter="ngram",
            rule="walk",
            precision="int8",
            lossless=True,
            proposed=drafted,
            proposed_depth=drafted,
            offered=drafted,
            accepted=a,
            emitted=a + 1,
            rows=drafted + 1,
            sequences=1,
            draft_ms=1.0,
            verify_ms=8.0,
            host_ms=1.0,
        )
        for i, a in enumerate(accepted)
    ]
    return request_record(
        steps,
        RequestTimings(queue_s=0.0, ttft_ms=ttft_ms, e2e_ms=ttft_ms + 100.0),
        id=id,
        sampling={},
        prompt_tokens=3,
        finish_reason="stop",
        peak_memory_bytes=len(accepted) * 100,
    )


class TestPercentiles:
    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
    @settings(max_examples=200, deadline=None)
    def test_against_the_definition(self, values: list[float], q: float) -> None:
        found = percentile(values, q)
        if found is None:
            assert len(values) * min(q, 1 - q) < 1
            return
        ordered = sorted(values)
        position = (len(values) - 1) * q
        low = math.floor(position)
        high = min(low + 1, len(values) - 1)
        expected = ordered[low] + (position - low) * (ordered[high] - ordered[low])
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)

    @pytest.mark.parametrize(("q", "least"), [(0.5, 2), (0.9, 10), (0.99, 100), (0.01, 100)])
    def test_too_few_values_say_nothing(self, q: float, least: int) -> None:
        assert percentile([1.0] * (least - 1), q) is None
        assert percentile([1.0] * least, q) == 1.0

    def test_the_ends_and_nothing(self) -> None:
        assert percentile([3.0, 1.0], 0) == 1.0
        assert percentile([3.0, 1.0], 1) == 3.0
        assert percentile([], 0.5) is None

    @pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
    def test_bad_quantile(self, q: float) -> None:
        with pytest.raises(InvalidParameter, match="quantile"):
            percentile([1.0], q)

    def test_not_finite_is_refused(self) -> None:
        with pytest.raises(InvalidParameter, match="NaN"):
            summarize([1.0, math.nan])

    def test_summary(self) -> None:
        summary = summarize([1.0, None, 3.0, 2.0], percents=(50, 99))
        assert (summary.n, summary.mean, summary.std) == (3, 2.0, 1.0)
        assert summary.percentiles == {"p50": 2.0, "p99": None}
        empty = summarize([None])
        assert (empty.n, empty.mean, empty.std, empty.minimum) == (0, None, None, None)
        assert summarize([4.0]).std is None


class TestSpeedup:
    def test_three_numbers_by_hand(self) -> None:
        result = speedup([pair("a", 4.0, 1.0), pair("b", 6.0, 4.0)])
        assert result.total.value == pytest.approx(10 / 5)
        assert result.geometric.value == pytest.approx(math.sqrt(4 * 1.5))
        rates = (10 / 1 + 10 / 4) / (10 / 4 + 10 / 6)
        assert result.mean_rates.value == pytest.approx(rates)
        assert (result.pairs, result.prompts, result.unequal_tokens) == (2, 2, 0)
        assert json.loads(json.dumps(result.to_dict()))["total"]["interval"] is None

    def test_unequal_tokens_use_rates_and_are_counted(self) -> None:
        result = speedup([Pair("a", 2.0, 1.0, 10, 5)])
        assert result.total.value == pytest.approx(1.0)
        assert result.unequal_tokens == 1

    def test_a_prompt_that_is_repeated_counts_once_in_the_geometric_mean(self) -> None:
        result = speedup([pair("a", 2.0, 1.0)] * 9 + [pair("b", 1.0, 1.0)])
        assert result.geometric.value == pytest.approx(math.sqrt(2))
        assert result.prompts == 2

    def test_interval_against_every_resample(self) -> None:
        """All 5**5 resamples, equally likely, give the distribution that the bootstrap draws."""
        pairs = [pair(str(i), 3.0 + i, 2.0 + 0.1 * i * i) for i in range(5)]
        exact = np.array(
            [
                sum(pairs[i].plain_s for i in draw) / sum(pairs[i].speculative_s for i in draw)
                for draw in itertools.product(range(5), repeat=5)
            ]
        )
        interval = speedup(pairs, level=0.5, samples=200_000, seed=1).total.interval
        assert interval is not None
        tail = statistics.stats.norm.cdf(math.sqrt(5 / 4) * statistics.stats.t.ppf(0.25, 4))
        assert 0.15 < tail < 0.25  # wider than the plain percentile interval
        assert interval.low == pytest.approx(np.quantile(exact, tail), rel=5e-3)
        assert interval.high == pytest.approx(np.quantile(exact, 1 - tail), rel=5e-3)

    def test_same_seed_same_interval(self) -> None:
        pairs = [pair(str(i), 2.0 + i % 3, 1.0 + i % 2) for i in range(12)]
        assert speedup(pairs, seed=5) == speedup(pairs, seed=5)
        assert speedup(pairs, seed=5) != speedup(pairs, seed=6)

    def test_chunks_change_nothing_but_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pairs = [pair(str(i), 2.0 + i % 3, 1.0 + i % 2) for i in range(12)]
        whole = speedup(pairs)
        monkeypatch.setattr(statistics, "_CHUNK", 100)
        assert speedup(pairs) == whole

    @pytest.mark.parametrize("prompts", [1, 2, MIN_PROMPTS - 1])
    def test_too_few_prompts_have_no_interval_however_often_repeated(self, prompts: int) -> None:
        result = speedup([pair(str(i % prompts), 2.0, 1.0) for i in range(100)])
        assert result.total.value == pytest.approx(2.0)
        assert result.total.interval is None
        assert result.geometric.interval is None

    def test_repeats_do_not_narrow_the_interval(self) -> None:
        once = [pair(str(i), 2.0 + i % 3, 1.0 + 0.3 * (i % 4)) for i in range(10)]
        single, repeated = speedup(once).total.interval, speedup(once * 50).total.interval
        assert single is not None
        assert repeated is not None
        assert repeated.high - repeated.low == pytest.approx(single.high - single.low)

    @pytest.mark.parametrize(("prompts", "repeats"), [(8, 1), (14, 3), (40, 1)])
    def test_coverage_on_simulated_runs(self, prompts: int, repeats: int) -> None:
        """The interval holds the truth about as often as it says, clusters included.

        400 runs: the standard error of a coverage of 0.95 is 0.011. Without the widening, 8
        prompts reach about 0.88; without clustering, repeats fall below 0.8.
        """
        rng = np.random.default_rng(prompts)
        truth, hits, runs = 0.5, 0, 400
        for _ in range(runs):
            effect = truth + 0.3 * rng.standard_normal(prompts)
            log_ratio = np.repeat(effect, repeats) + 0.05 * rng.standard_normal(prompts * repeats)
            pairs = [
                pair(str(i // repeats), math.exp(ratio), 1.0) for i, ratio in enumerate(log_ratio)
            ]
            interval = speedup(pairs, samples=1000).geometric.interval
            assert interval is not None
            hits += interval.low <= math.exp(truth) <= interval.high
        assert 0.92 <= hits / runs <= 0.985

    @pytest.mark.parametrize(
        "bad",
        [
            pair("a", 0.0, 1.0),
            pair("a", 1.0, -1.0),
            pair("a", math.nan, 1.0),
            pair("a", math.inf, 1.0),
            pair("a", 1.0, 1.0, tokens=0),
        ],
    )
    def test_what_is_no_measurement_is_refused(self, bad: Pair) -> None:
        with pytest.raises(InvalidParameter, match="'a'"):
            speedup([bad])

    def test_nothing_is_refused(self) -> None:
        with pytest.raises(InvalidParameter, match="at least one"):
            speedup([])
        with pytest.raises(InvalidParameter, match="level"):
            speedup([pair("a", 1, 1)], level=1.0)
        with pytest.raises(InvalidParameter, match="samples"):
            speedup([pair("a", 1, 1)], samples=0)


class TestAcceptance:
    def test_pooled_and_per_request_differ_as_they_should(self) -> None:
        records = [request("a", [4] * 9 + [1]), request("b", [0, 0])]
        summary = acceptance_summary(records)
        assert summary.acceptance_length is not None
        assert summary.acceptance_length.value == pytest.approx(1 + 37 / 12)
        assert summary.acceptance_length.interval is None
        assert summary.acceptance_length_per_request == pytest.approx((4.7 + 1.0) / 2)
        assert summary.draft_acceptance_rate == pytest.approx(37 / 48)
        assert summary.accepted_per_verified == pytest.approx((37 + 12) / (48 + 12))
        assert summary.completion_tokens == 49
        assert summary.target_forward_reduction == pytest.approx(1 - 12 / 49)
        assert summary.histogram == {0: 2, 1: 1, 4: 9}
        aiperf = summary.aiperf()
        assert aiperf["spec_decode_overall_draft_acceptance_rate"] == pytest.approx(100 * 37 / 48)
        assert json.loads(json.dumps(summary.to_dict()))["histogram"] == {"0": 2, "1": 1, "4": 9}

    def test_positions(self) -> None:
        summary = acceptance_summary([request("a", [0, 1, 2, 4]), request("b", [0], drafted=1)])
        first, second, third, fourth = summary.positions
        assert (first.accepted, first.rejected) == (3, 2)
        assert first.unconditional == pytest.approx(3 / 5)
        assert first.conditional == pytest.approx(3 / 5)
        assert (second.accepted, second.rejected) == (2, 1)
        assert second.conditional == pytest.approx(2 / 3)
        assert (third.accepted, third.rejected, fourth.accepted) == (1, 1, 1)
        assert fourth.conditional == 1.0
        assert sum(p.accepted for p in summary.positions) == summary.accepted

    def test_interval_holds_the_pooled_value(self) -> None:
        rng = np.random.default_rng(0)
        records = [request(str(i), rng.integers(0, 5, 20).tolist()) for i in range(12)]
        estimate = acceptance_summary(records).acceptance_length
        assert estimate is not None
        assert estimate.interval is not None
        assert estimate.interval.low < estimate.value < estimate.interval.high
        assert estimate.interval.prompts == 12

    def test_failed_and_silent_requests_are_counted_apart(self) -> None:
        good = request("a", [2, 2])
        records = [good, replace(good, error="boom"), replace(good, acceptance=None)]
        summary = acceptance_summary([*records, request("b", [])])
        assert (summary.requests, summary.failed, summary.silent) == (1, 1, 2)
        assert summary.steps == 2

    def test_nothing(self) -> None:
        summary = acceptance_summary([])
        assert summary.requests == 0
        assert summary.acceptance_length is None
        assert summary.acceptance_length_per_request is None
        assert summary.draft_acceptance_rate is None
        assert summary.positions == ()

    def test_plain_decoding(self) -> None:
        summary = acceptance_summary([request("a", [0] * 5, drafted=0)])
        assert summary.acceptance_length is not None
        assert summary.acceptance_length.value == 1.0
        assert summary.draft_acceptance_rate is None
        assert summary.accepted_per_verified == 1.0
        assert summary.target_forward_reduction == 0.0


class TestTimings:
    def test_by_hand(self) -> None:
        records = [
            request("a", [1, 1], ttft_ms=10.0),
            request("b", [0], ttft_ms=30.0),
            replace(request("c", [4], ttft_ms=9999.0), error="boom"),
        ]
        summary = timing_summary(records)
        assert summary.ttft_ms.mean == 20.0
        assert summary.tpot_ms.n == 1  # one output token has no time between tokens
        assert summary.tpot_ms.mean == pytest.approx(100 / 3)
        assert summary.stream_tokens_per_s.mean == pytest.approx(30.0)
        assert summary.draft_ms_per_step == 1.0
        assert summary.verify_ms_per_step == 8.0
        assert summary.peak_memory_bytes == 200

    def test_nothing(self) -> None:
        summary = timing_summary([])
        assert summary.ttft_ms.n == 0
        assert summary.verify_ms_per_step is None
        assert summary.peak_memory_bytes is None
