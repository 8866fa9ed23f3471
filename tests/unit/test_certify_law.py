"""The certificate's statistics: right sizes, the power they claim, and that they can fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from outrider.core.law import GROUPS, EProcess, Law
from outrider.errors import InvalidParameter
from outrider.evaluate.certify_law import (
    ContextTally,
    Tally,
    coupling_bound,
    detectable,
    noncentrality,
    simulated_power,
    tokens_for,
)


def laws(count: int = 40, size: int = 30, seed: int = 1) -> list[Law]:
    """Random complete laws of different contexts."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.dirichlet(np.full(size, 0.3), size=count))[:, ::-1]
    return [Law(tuple(range(size)), tuple((row / row.sum()).tolist())) for row in rows]


def draw(law: Law, rng: np.random.Generator, *, lean: float = 0.0) -> int:
    """A token of a law; with chance ``lean`` the likeliest one whatever the law says."""
    if rng.random() < lean:
        return 0
    p = np.array(law.probabilities)
    return int(rng.choice(len(p), p=p / p.sum()))


def tally_of(tokens: int, *, lean: float = 0.0, seed: int = 0) -> Tally:
    rng, tally, rows = np.random.default_rng(seed), Tally("test"), laws()
    for _ in range(tokens):
        law = rows[int(rng.integers(len(rows)))]
        tally.add(law, draw(law, rng, lean=lean))
    return tally


def test_p_values_are_uniform_under_the_null():
    found = [tally_of(150, seed=seed).test().p_value for seed in range(60)]
    assert stats.kstest(found, "uniform").pvalue > 1e-3


def test_a_leaning_of_ten_percent_is_found_and_none_is_not():
    assert tally_of(4000).test().passed
    wrong = tally_of(4000, lean=0.1).test()
    assert not wrong.passed and wrong.z > 20


def test_the_power_table_of_the_handbook():
    # algorithms.md section 13.3: df, alpha, lambda, N for a total variation of 0.02
    assert noncentrality(7) == pytest.approx(68.5, abs=0.05)
    assert noncentrality(63) == pytest.approx(121.8, abs=0.05)
    assert noncentrality(63, alpha=1e-3) == pytest.approx(87.0, abs=0.05)
    assert tokens_for(0.02, 7) == pytest.approx(43_000, rel=0.01)
    assert detectable(tokens_for(0.02, 7), 7) == pytest.approx(0.02, rel=1e-3)


def test_the_promised_power_shows_in_simulation_and_falls_with_fewer_tokens():
    shares = tally_of(2000).shares().tolist()
    assert simulated_power(shares, tokens=tokens_for(0.02, 7), effect=0.02) >= 0.98
    assert simulated_power(shares, tokens=4000, effect=0.02) < 0.1
    assert simulated_power(shares, tokens=40_000, effect=0.0) == 0.0


def test_a_token_that_cannot_come_fails_at_once():
    law = Law((3, 5), (0.75, 0.25), closed=True)
    tally = Tally("narrow")
    for token in [3] * 70 + [5] * 29 + [4]:
        tally.add(law, token)
    found = tally.test()
    assert found.impossible == 1 and found.p_value == 0 and not found.passed


def test_a_token_beyond_an_open_law_proves_nothing_by_itself():
    law, tally, process = Law((3, 5), (0.75, 0.25)), Tally("open"), EProcess()
    for token in [3] * 75 + [5] * 24 + [4]:
        tally.add(law, token)
    assert tally.test().passed and tally.test().impossible == 0
    process.update(law, 4)
    assert math.isfinite(process.log_e)


def test_a_law_with_a_rest_allows_what_it_does_not_list():
    law = Law(("a", "b"), (0.5, 0.3))
    assert law.allows("c") and law.group("c") == GROUPS - 1
    assert law.grouped.sum() == pytest.approx(1) and law.grouped[-1] == pytest.approx(0.2)
    with pytest.raises(InvalidParameter, match="give one for each"):
        Law(("a",), (0.5, 0.6))


def test_ranks_alone_miss_an_error_that_contexts_show():
    """Two tokens of equal likelihood swap: the groups by rank see something only by chance."""
    rng, by_context, by_rank = np.random.default_rng(3), ContextTally("c"), Tally("r")
    one, two = Law(("a", "b", "c"), (0.4, 0.4, 0.2)), Law(("b", "a", "c"), (0.4, 0.4, 0.2))
    for number in range(3000):
        context, law = ("x", one) if number % 2 else ("y", two)
        token = "abc"[int(rng.choice(3, p=[0.5, 0.3, 0.2]))]  # leans to "a" in both
        by_context.add(context, law, token)
        by_rank.add(law, token)
    assert by_rank.test().passed
    assert not by_context.test().passed


def test_contexts_seen_once_prove_nothing_and_say_so():
    tally = ContextTally("rare")
    for number, law in enumerate(laws(20)):
        tally.add(number, law, 0)
    found = tally.test()
    assert found.empty and found.passed and found.tokens == 0


def test_equal_outputs_bound_the_total_variation():
    assert coupling_bound(0, 691) == pytest.approx(0.0198, abs=1e-4)
    # with an error of exactly the bound, no difference is seen with chance alpha
    assert (1 - coupling_bound(0, 300)) ** 300 == pytest.approx(1e-6, rel=1e-6)
    assert coupling_bound(30, 300) > 0.1 and coupling_bound(0, 0) == 1.0
    with pytest.raises(InvalidParameter):
        coupling_bound(5, 4)


def run_process(tokens: int, *, lean: float, seed: int) -> EProcess:
    rng, process, rows = np.random.default_rng(seed), EProcess(), laws()
    for _ in range(tokens):
        law = rows[int(rng.integers(len(rows)))]
        process.update(law, draw(law, rng, lean=lean))
        if process.rejected:
            break
    return process


def test_the_e_process_stops_for_an_error_and_not_without_one():
    wrong = run_process(6000, lean=0.15, seed=1)
    assert wrong.rejected and wrong.tokens < 6000
    assert not run_process(3000, lean=0.0, seed=1).rejected


def test_the_e_value_has_mean_one_at_most_under_the_null():
    finals = [math.exp(run_process(60, lean=0.0, seed=s).log_e) for s in range(80)]
    assert np.mean(finals) < 1 + 4 * np.std(finals) / math.sqrt(len(finals))


def test_an_impossible_token_ends_the_e_process():
    process = EProcess()
    process.update(Law((1,), (1.0,), closed=True), 2)
    assert process.rejected and process.to_dict()["log_e"] is None
