"""The statistics under a verdict: each against a slow or independent way to the same number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from outrider.rollout.comparisons import RankTest, fisher, rate_difference, times, wilson
from outrider.rollout.spending import NORMAL, UNREACHABLE, bound, spent

LOOKS = tuple(round(k / 30, 6) for k in range(1, 31))
PLAN = (300, 1000)


def alone(values, stratum=""):
    return [(stratum, "", float(value)) for value in values]


def test_the_error_is_spent_whole_and_no_more():
    assert spent(1.0, 0.02, PLAN) == pytest.approx(0.02)
    assert spent(3.0, 0.02, PLAN) == pytest.approx(0.02)
    assert 0.4 * 0.02 < spent(0.3, 0.02, PLAN) < 0.41 * 0.02
    steps = [spent(t, 0.02, PLAN) for t in LOOKS]
    assert steps == sorted(steps)


def test_one_look_is_a_plain_test():
    assert bound((1.0,), 0.02, (1000,)) == pytest.approx(NORMAL.inv_cdf(0.98), abs=1e-4)


def test_bounds_hold_the_error_over_all_looks():
    bounds = np.array([bound(LOOKS[: k + 1], 0.02, PLAN) for k in range(30)])
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.standard_normal((100_000, 30)), axis=1) / np.sqrt(np.arange(1, 31))
    assert (walk >= bounds).any(axis=1).mean() == pytest.approx(0.02, abs=0.002)
    naive = (walk >= NORMAL.inv_cdf(0.98)).any(axis=1).mean()
    assert naive > 0.1  # what peeking costs


def test_a_look_with_nothing_to_spend_cannot_stop():
    assert bound((0.001,), 0.02, PLAN) == UNREACHABLE


def test_ranks_agree_with_scipy():
    rng = np.random.default_rng(1)
    x, y = rng.lognormal(0.1, 0.5, 80), rng.lognormal(0.0, 0.5, 120)
    test = RankTest(times(alone(x)), times(alone(y)))
    p = stats.mannwhitneyu(
        x, y, alternative="greater", method="asymptotic", use_continuity=False
    ).pvalue
    assert 1 - NORMAL.cdf(test.z()) == pytest.approx(p, rel=1e-6)
    differences = np.subtract.outer(np.log(x), np.log(y))
    assert test.shift() == pytest.approx(np.median(differences), abs=2e-4)
    assert test.shift(2.0) < test.shift() < test.shift(-2.0)
    assert test.z(test.shift(2.0)) == pytest.approx(2.0, abs=0.05)


def test_strata_take_out_what_differs_between_them():
    """Canary and control are equal within each stratum, but mixed differently."""
    rng = np.random.default_rng(2)
    short = [rng.lognormal(0, 0.2, n) for n in (150, 50)]
    long = [rng.lognormal(1, 0.2, n) for n in (50, 150)]
    canary = alone(short[0], "a") + alone(long[0], "b")
    control = alone(short[1], "a") + alone(long[1], "b")
    assert abs(RankTest(times(canary), times(control)).z()) < 2.5
    mixed = RankTest(times(alone([v for *_, v in canary])), times(alone([v for *_, v in control])))
    assert abs(mixed.z()) > 5


def test_requests_of_one_unit_count_once():
    canary = times([("", "user", 10.0)] * 500 + alone([5.0, 6.0]))
    assert canary.n == 3
    assert times([("a", "u", 1.0), ("b", "u", 1.0)]).n == 2


def test_an_interval_may_be_open():
    test = RankTest(times(alone([1.0, 2.0])), times(alone([1.5, 2.5])))
    assert test.shift(5.0) == -math.inf and test.shift(-5.0) == math.inf


def test_no_common_stratum():
    assert not RankTest(times(alone([1.0], "a")), times(alone([1.0], "b"))).comparable


@pytest.mark.parametrize(
    "table", [(5, 100, 1, 120), (0, 30, 3, 30), (30, 30, 30, 30), (7, 50, 0, 9)]
)
def test_fisher_agrees_with_scipy(table):
    a, m, b, n = table
    p = stats.fisher_exact([[a, m - a], [b, n - b]], alternative="greater").pvalue
    assert fisher(a, m, b, n) == pytest.approx(p, rel=1e-9)


def test_rates():
    low, high = wilson(3, 50, z=1.96)
    same = stats.binomtest(3, 50).proportion_ci(0.95, method="wilson")
    assert (low, high) == pytest.approx((same.low, same.high), abs=1e-4)
    difference, low, high = rate_difference(56, 70, 48, 80, z=1.96)
    # Newcombe 1998, table II, contrast 56/70 - 48/80, method 10
    assert (difference, low, high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
