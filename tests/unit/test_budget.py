"""The budget's decisions: they follow measured cost and observed acceptance, down to nothing."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.core.tree import NO_PARENT, DraftTree
from outrider.drafters.acceptance import AcceptanceTable, Outcome, outcomes
from outrider.engine.budget import (
    PROBE_FIRST,
    WORTH_A_PASS,
    CostBudget,
    CostTable,
    DraftCost,
    Offer,
    Subject,
    choose,
    depth_limit,
    least_chance,
)

FLAT = CostTable({1: 10.0, 8: 11.0, 16: 15.0}, host_ms=0.5)  # nothing here teaches it
STEEP = CostTable({1: 10.0, 2: 20.0, 4: 40.0})


def test_costs_are_linear_between_and_beyond_measurements() -> None:
    table = CostTable({1: 10.0, 2: 12.0, 4: 20.0})
    assert [table.verify(n) for n in (1, 2, 3, 4, 6)] == [10, 12, 16, 20, 28]
    assert table.relative(4) == 2.0
    assert CostTable({1: 10.0, 2: 8.0}).verify(5) == 10.0  # more rows never count as cheaper


def test_costs_follow_what_passes_cost_and_ignore_outliers() -> None:
    rng = random.Random(0)
    table = CostTable({1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0})
    for _ in range(600):
        rows = rng.choice([1, 3, 8])
        spike = 50.0 if rng.random() < 0.1 else 1.0
        table.learn(rows, verify_ms=(5.0 + rows) * rng.uniform(0.9, 1.1) * spike, host_ms=0.3)
    for rows in (1, 3, 8):
        assert table.verify(rows) == pytest.approx(5.0 + rows, rel=0.15)
    assert table.host_ms == pytest.approx(0.3, rel=0.1)


def test_outcomes_follow_the_emitted_tokens_through_the_tree() -> None:
    #      5 -> 7 -> 9
    # 1 <
    #      6 -> 8
    tree = DraftTree(
        (1, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3), confidence=(1, 0.9, 0.4, 0.8, 0.3, 0.7)
    )
    assert outcomes(tree, [5, 7, 2]) == [
        Outcome(1, 0.9, True),
        Outcome(1, 0.4, False),
        Outcome(2, 0.8, True),
        Outcome(3, 0.7, False),
    ]
    assert outcomes(tree, [4]) == [Outcome(1, 0.9, False), Outcome(1, 0.4, False)]


def test_acceptance_estimates_move_from_prior_to_record() -> None:
    table = AcceptanceTable()
    assert table.at_confidence(0.35) == pytest.approx(0.35)
    for _ in range(300):
        table.update([Outcome(1, 0.35, True), Outcome(2, 0.85, False)])
    assert table.at_confidence(0.31) > 0.9 and table.at_confidence(0.85) < 0.1
    assert table.at_depth(1) > 0.9 and table.at_depth(2) < 0.1
    child = AcceptanceTable(table)
    assert child.at_depth(1) == pytest.approx(table.at_depth(1))


def expected_rate(nodes: list[list[int]], offers: list[Offer], costs: CostTable) -> float:
    """Expected tokens per millisecond of a choice, by definition."""
    gain = sum(1 + sum(o.chances[n] for n in kept) for o, kept in zip(offers, nodes, strict=True))
    rows = sum(1 + len(kept) for kept in nodes)
    return gain / (costs.verify(rows) + costs.host_ms)


@pytest.mark.parametrize("seed", range(30))
def test_choose_finds_the_best_subset(seed: int) -> None:
    """Against brute force over all connected subsets of two small trees."""
    rng = random.Random(seed)
    costs = CostTable({1: 10.0, 2: 10 + 4 * rng.random(), 4: 14 + 9 * rng.random(), 9: 40.0})
    offers = []
    for _ in range(2):
        parents = [-1, *(rng.randrange(node) for node in range(1, 5))]
        chances = [1.0]
        for node in range(1, 5):
            chances.append(chances[parents[node]] * rng.random())
        offers.append(Offer(DraftTree(tuple(range(5)), tuple(parents)), chances))

    def connected(tree: DraftTree) -> list[list[int]]:
        subsets = itertools.chain.from_iterable(
            itertools.combinations(range(1, 5), n) for n in range(5)
        )
        return [list(s) for s in subsets if all(tree.parents[n] in (0, *s) for n in s)]

    best = max(
        expected_rate([a, b], offers, costs)
        for a in connected(offers[0].tree)
        for b in connected(offers[1].tree)
    )
    cut = choose(offers, costs, other_rows=0, draft_ms=0.0)
    kept = [list(tree.tokens[1:]) for tree in cut]  # tokens are node numbers
    assert expected_rate(kept, offers, costs) == pytest.approx(best)


def test_choose_drops_everything_where_rows_are_dear_and_keeps_trees_with_q() -> None:
    tree = DraftTree.chain([0, 1, 2, 3])
    [cut] = choose([Offer(tree, [1, 0.9, 0.8, 0.7])], STEEP, other_rows=0, draft_ms=0.0)
    assert len(cut) == 1
    import torch

    drawn = DraftTree.chain([0, 1, 2], q={0: torch.ones(4) / 4, 1: torch.ones(4) / 4})
    [kept] = choose([Offer(drawn, [1, 0.1, 0.01])], STEEP, other_rows=0, draft_ms=0.0)
    assert kept is drawn


def test_depth_limit_weighs_acceptance_against_drafting() -> None:
    good, bad = AcceptanceTable(), AcceptanceTable()
    for _ in range(200):
        good.update([Outcome(d, 0.5, True) for d in range(1, 8)])
        bad.update([Outcome(d, 0.5, False) for d in range(1, 8)])
    cheap, dear = DraftCost(level_ms=0.5), DraftCost(level_ms=20.0)
    assert depth_limit(good, FLAT, draft=cheap, limit=7) == 7
    assert depth_limit(bad, FLAT, draft=cheap, limit=7) == 0
    assert depth_limit(good, FLAT, draft=dear, limit=7) == 0


def test_rows_of_prompts_do_not_make_guesses_look_cheap() -> None:
    """A pass that is dear because of prompts must not pay for guesses that cost what they cost."""
    costs = CostTable({1: 4.0, 8: 4.0, 16: 8.0, 32: 16.0, 64: 32.0, 128: 64.0})
    offers = [Offer(DraftTree((0, 1), (NO_PARENT, 0)), [1.0, 0.4]) for _ in range(4)]
    alone = choose(offers, costs, other_rows=0, draft_ms=0.0)
    beside = choose(offers, costs, other_rows=60, draft_ms=0.0)
    assert [len(tree) for tree in alone] == [2, 2, 2, 2]  # eight rows cost what four do
    assert [len(tree) for tree in beside] == [1, 1, 1, 1]  # half a millisecond for 0.4 tokens
    assert costs.decoding(4, guesses=0, other_rows=60) == costs.verify(4)
    assert costs.decoding(4, guesses=8, other_rows=60) == pytest.approx(4.0 + 8 * 0.5)
    table = AcceptanceTable()
    for step in range(200):
        table.update([Outcome(1, 0.5, step % 4 == 0)])
    assert depth_limit(table, costs, draft=DraftCost(), limit=4, sequences=4) > 0
    assert depth_limit(table, costs, draft=DraftCost(), limit=4, sequences=4, other_rows=60) == 0


def test_an_entry_that_a_slow_minute_raised_comes_back_without_being_seen() -> None:
    table = CostTable({1: 5.0, 8: 6.0, 16: 9.0, 32: 16.0})
    for _ in range(60):  # the machine is slow while wide passes are made
        table.learn(16, verify_ms=18.0, host_ms=0.0)
    raised = table.verify(16)
    assert raised > 15.0
    for _ in range(1000):  # it is fast again, but now nothing is guessed
        table.learn(1, verify_ms=5.0, host_ms=0.0)
    assert table.verify(16) == pytest.approx(9.0, rel=0.05)
    for _ in range(1000):  # a slower machine is slower for all
        table.learn(1, verify_ms=10.0, host_ms=0.0)
    assert table.verify(16) == pytest.approx(18.0, rel=0.05)


def test_a_table_that_falls_somewhere_makes_no_guess_cheaper_than_none() -> None:
    costs = CostTable({1: 4.0, 2: 4.2, 4: 4.4, 8: 5.0, 16: 14.0, 32: 12.0})
    for other_rows, sequences in itertools.product((0, 9, 13, 20, 40), (1, 4, 16)):
        plain = costs.decoding(sequences, guesses=0, other_rows=other_rows)
        assert plain == costs.verify(sequences)
        passed = [costs.decoding(sequences, guesses=n, other_rows=other_rows) for n in range(1, 40)]
        assert passed == sorted(passed) and passed[0] >= plain


def test_a_drafter_that_drafts_for_all_at_once_is_tried_where_sequences_become_many() -> None:
    """Its cost for one sequence times sixteen is not its cost for sixteen."""
    rows = CostTable({1: 5.0, 16: 5.5, 64: 8.0, 128: 12.0}, host_ms=1.0)
    budget = CostBudget(rows, nodes=8, depth=4)
    for step in range(400):
        subjects = [Subject(i, "d", room=999) for i in range(1 if step < 200 else 16)]
        limits = budget.limits(subjects, other_rows=0)
        trees = [DraftTree.chain([0] * (1 + limit.depth)) for limit in limits]
        budget.cut(subjects, trees, other_rows=0, draft_ms=0.0)
        asked = sum(x.depth > 0 for x in limits)
        if asked:  # some trees end before their time
            levels = sum(x.depth if step % 2 else 1 for x in limits if x.depth)
            budget.spent("d", (0.4 + 0.02 * asked) * levels / asked, levels)
        for subject, tree in zip(subjects, trees, strict=True):
            if len(tree) > 1:
                budget.learn(subject, tree, [0] * len(tree) if step % 4 else [9])
        if step in (199, 220):
            assert asked == len(subjects)


def test_a_proposal_that_reads_what_was_left_unread_tells_no_more_than_a_bound() -> None:
    budget = CostBudget(FLAT, nodes=8, depth=4)
    for _ in range(20):
        budget.spent("d", 3.0, 4)
    for _ in range(20):
        budget.spent("d", 18.0, 4, at_most=True)
    assert budget._drafters["d"].cost.at(4) == pytest.approx(3.0)
    for _ in range(400):
        budget.spent("d", 1.0, 4, at_most=True)
    assert budget._drafters["d"].cost.at(4) == pytest.approx(1.0, abs=0.01)


def test_the_chance_that_a_guess_must_have_follows_the_price_of_rows() -> None:
    costs = CostTable({1: 4.0, 8: 4.0, 16: 8.0, 32: 16.0, 64: 32.0})
    assert least_chance(costs, 0, other_rows=9) == 0.0
    assert least_chance(costs, 1, other_rows=0) == 0.0  # the second row is free
    assert least_chance(costs, 16, other_rows=0) == 1.0  # twice the rows, twice the time
    assert least_chance(costs, 4, other_rows=40) == pytest.approx(4 * 0.5 / 4.0)
    budget = CostBudget(costs, nodes=8, depth=4)
    few = budget.limits([Subject(0, "d", 9)], other_rows=0)
    many = budget.limits([Subject(i, "d", 9) for i in range(16)], other_rows=0)
    assert few[0].least == WORTH_A_PASS < many[0].least == 1.0


def test_many_sequences_do_not_try_a_dear_drafter_more_often_than_one_does() -> None:
    """A drafter that does not pay costs all of them whenever one tries it."""

    def tries(sequences: int, level_ms: float) -> int:
        budget = CostBudget(STEEP, nodes=8, depth=4)
        for _ in range(8):
            budget.spent("d", 1.0 + 4 * level_ms, 4)
            budget.spent("d", 1.0 + level_ms, 1)
        subjects = [Subject(i, "d", 99) for i in range(sequences)]
        found = 0
        for _ in range(16 * 16):
            limits = budget.limits(subjects, other_rows=0)
            levels = sum(limit.depth for limit in limits)
            if levels:
                found += 1
                budget.spent("d", 1.0 + level_ms * levels, levels)
            trees = [DraftTree.chain([0] * (1 + limit.depth)) for limit in limits]
            budget.cut(subjects, trees, other_rows=0, draft_ms=1.0)
            for subject, tree in zip(subjects, trees, strict=True):
                if len(tree) > 1:
                    budget.learn(subject, tree, [1])
        return found

    one, many = tries(1, level_ms=3.0), tries(8, level_ms=3.0)
    assert 0 < many < one
    assert tries(8, level_ms=0.0) > many  # what costs nothing is tried as often as by one


def test_the_first_slow_proposals_of_a_process_do_not_silence_a_drafter() -> None:
    budget = CostBudget(FLAT, nodes=8, depth=4)
    asked = []
    for step in range(8):
        [limit] = budget.limits([Subject(0, "d", 100)], other_rows=0)
        asked.append(limit.depth)
        if limit.depth:
            budget.spent("d", 40.0 if step == 0 else 1.0, limit.depth)
    assert all(asked[:2]) and all(asked[3:])
    assert budget._drafters["d"].cost.at(4) == pytest.approx(1.0)


def test_a_drafter_that_is_slow_every_time_falls_silent() -> None:
    budget = CostBudget(FLAT, nodes=8, depth=4)
    asked = 0
    for _ in range(12):
        [limit] = budget.limits([Subject(0, "d", 100)], other_rows=0)
        if limit.depth:
            asked += 1
            budget.spent("d", 40.0, limit.depth)
    assert asked == 4


def test_draft_cost_tells_base_from_slope() -> None:
    cost = DraftCost()
    for depth in (1, 5, 3, 8, 2, 6, 4, 7):
        cost.learn(depth, 2.0 + 0.5 * depth)
    assert cost.base_ms == pytest.approx(2.0) and cost.level_ms == pytest.approx(0.5)
    constant = DraftCost()
    for _ in range(5):
        constant.learn(4, 3.0)
    assert constant.at(4) == pytest.approx(3.0)


def run(budget: CostBudget, *, steps: int, accept: bool, ms: float) -> list[int]:
    """Depths that a chain drafter of a given cost per proposal was allowed, step by step."""
    subject = Subject(0, "d", room=100)
    allowed = []
    for _ in range(steps):
        [limit] = budget.limits([subject], other_rows=0)
        allowed.append(limit.depth)
        if limit.depth:
            tree = DraftTree.chain(range(limit.depth + 1))
            budget.spent("d", ms * limit.depth, limit.depth)
            emitted = list(range(1, limit.depth + 1)) if accept else [99]
            budget.learn(subject, tree, emitted)
    return allowed


def test_a_drafter_that_never_hits_is_asked_ever_more_rarely() -> None:
    budget = CostBudget(FLAT, nodes=8, depth=8)
    allowed = run(budget, steps=800, accept=False, ms=1.0)
    asked = [i for i, depth in enumerate(allowed) if depth]
    assert len(asked) < 60
    gaps = [b - a for a, b in itertools.pairwise(asked)][-3:]
    assert gaps == sorted(gaps) and gaps[-1] >= 4 * PROBE_FIRST


def test_a_drafter_that_becomes_good_is_found_again() -> None:
    budget = CostBudget(FLAT, nodes=8, depth=8)
    run(budget, steps=300, accept=False, ms=1.0)
    allowed = run(budget, steps=900, accept=True, ms=1.0)
    assert allowed[-1] > 4


def test_room_bounds_the_depth() -> None:
    budget = CostBudget(FLAT, nodes=8, depth=8)
    limits = budget.limits([Subject(0, "d", room=2), Subject(1, "d", room=0)], other_rows=0)
    assert [(n.nodes, n.depth) for n in limits] == [(8, 2), (0, 0)]


@pytest.mark.parametrize(("sequences", "asked"), [(1, True), (6, False)])
def test_many_sequences_pay_for_all_their_guesses(sequences: int, asked: bool) -> None:
    """A draft that pays for one sequence may not for six: a token is cheaper there, rows are not,
    and the drafter guesses for one after the other."""
    rows = CostTable({1: 5.0, 8: 5.5, 16: 8.0, 64: 30.0}, host_ms=1.0)
    budget = CostBudget(rows, nodes=8, depth=8)
    subjects = [Subject(i, "d", room=100) for i in range(sequences)]
    tree = DraftTree.chain((0, 1, 2, 3))
    depths: list[int] = []
    for step in range(200):
        limits = budget.limits(subjects, other_rows=0)
        depths.append(limits[0].depth)
        trees = [tree if limit.depth else DraftTree.root_only(0) for limit in limits]
        drafting = [subject for subject, limit in zip(subjects, limits, strict=True) if limit.depth]
        budget.cut(subjects, trees, other_rows=0, draft_ms=0.0)
        if drafting:
            budget.spent("d", 1.2 * len(drafting), 3 * len(drafting))
            for subject in drafting:
                budget.learn(subject, tree, [1, 9] if step % 2 else [9])
    assert (sum(map(bool, depths[-100:])) > 90) is asked
