"""L1: the laws have teeth. Every known mistake is found, with a bias above a stated floor.

The floors are about half of what each mutant shows on the pair below; the pairs behind the
published figures are not published, so those are matched in kind and order of size only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mutants
import numpy as np
import pytest
import torch
from enumerate_law import (
    EXACT,
    Enumerator,
    Table,
    completed,
    drawn,
    emit,
    law,
    table,
    target_law,
    total_variation,
)
from torch import Tensor

from outrider.core.noise import Purpose, Source
from outrider.core.tree import DraftTree
from outrider.core.verify import Rule, block, reject, walk

P = torch.tensor([0.10, 0.15, 0.30, 0.45], dtype=torch.float64)
Q = torch.tensor([0.45, 0.25, 0.20, 0.10], dtype=torch.float64)
Drafting = Callable[[Table, Source], DraftTree]


def p(context: tuple[int, ...]) -> Tensor:
    """Turns with the context, so that a wrong row shows."""
    return P.roll(sum(context) + len(context))


def q(context: tuple[int, ...]) -> Tensor:
    return Q.roll(sum(context))


def chain_of(guesses: int) -> Drafting:
    shape = tuple(range(-1, guesses))
    return partial(_drawn, shape=shape, without_replacement=False)


def pair(*, without_replacement: bool) -> Drafting:
    return partial(_drawn, shape=(-1, 0, 0), without_replacement=without_replacement)


def _drawn(
    q: Table, source: Source, *, shape: tuple[int, ...], without_replacement: bool
) -> DraftTree:
    return drawn(shape, q, source, without_replacement=without_replacement)


def bias(
    drafting: Drafting, rule: Rule, *, target: Table = p, draft: Table = q, length: int = 3
) -> float:
    emitted = law(lambda source: emit(drafting(draft, source), target, source, rule))
    return total_variation(completed(emitted, target, length), target_law(target, length))


WRONG_RULES = [
    (mutants.strikes_only_the_token, 0.08),
    (mutants.swaps_p_and_q, 0.10),
    (mutants.swaps_the_residual, 0.10),
    (mutants.keeps_p_after_rejection, 0.08),
    (mutants.stale_row_at_the_end, 0.08),
    (mutants.repeats_the_last_token, 0.08),
    (mutants.rejects_if_not_the_likeliest, 0.30),
]


@pytest.mark.parametrize(("rule", "floor"), WRONG_RULES)
def test_wrong_chain_rules_fail(rule: Rule, floor: float) -> None:
    assert bias(chain_of(2), rule) > floor
    assert bias(chain_of(2), reject) <= EXACT


@pytest.mark.parametrize(
    ("rule", "floor"),
    [(mutants.block_breaks_early, 0.04), (mutants.block_with_token_residual, 0.007)],
)
def test_wrong_block_rules_fail(rule: Rule, floor: float) -> None:
    """Three guesses, four tokens, as in the published case."""
    target, draft = table(61, 3), table(161, 3)
    assert bias(chain_of(3), rule, target=target, draft=draft, length=4) > floor
    assert bias(chain_of(3), block, target=target, draft=draft, length=4) <= EXACT


WRONG_DRAFTERS = [
    (mutants.claims_softmax_for_argmax, 0.15),
    (mutants.claims_softmax_for_top_k, 0.15),
    (mutants.keeps_the_likelier_of_two, 0.08),
    (mutants.hides_its_truncation, 0.08),
    (mutants.drops_unlikely_draws, 0.05),
    (mutants.drops_repeated_siblings, 0.005),
    (mutants.draws_in_half_precision, 1e-4),
]


@pytest.mark.parametrize(("drafting", "floor"), WRONG_DRAFTERS)
def test_dishonest_drafters_fail_under_reject_and_pass_under_walk(
    drafting: Drafting, floor: float
) -> None:
    assert bias(drafting, reject) > floor
    assert bias(drafting, walk) <= EXACT


@pytest.mark.parametrize(
    "drafting", [mutants.records_its_truncation, mutants.stops_after_unlikely_draws]
)
def test_their_honest_twins_pass(drafting: Drafting) -> None:
    assert bias(drafting, reject) <= EXACT


@pytest.mark.parametrize("drawn_without", [False, True])
def test_siblings_verified_as_the_other_kind_fail(drawn_without: bool) -> None:
    """Drawn with replacement and verified as without, and the other way round."""

    def mislabelled(q: Table, source: Source) -> DraftTree:
        tree = pair(without_replacement=drawn_without)(q, source)
        return DraftTree(tree.tokens, tree.parents, q=tree.q, without_replacement=not drawn_without)

    assert bias(mislabelled, reject) > 0.005
    assert bias(pair(without_replacement=drawn_without), reject) <= EXACT


@pytest.mark.parametrize(("strike", "residual"), [(False, True), (True, False), (False, False)])
def test_half_of_the_sibling_rule_fails(strike: bool, residual: bool) -> None:
    rule = partial(mutants.siblings, strike=strike, residual=residual)
    assert bias(pair(without_replacement=True), rule) > 0.005
    whole = partial(mutants.siblings, strike=True, residual=True)
    assert bias(pair(without_replacement=True), whole) <= EXACT


def test_a_missing_next_token_is_seen_in_the_length() -> None:
    """Leaving it out keeps the law, so the length is what must be watched: 1 + accepted."""

    def emitted(source: Enumerator, *, forgets: bool) -> tuple[int, int]:
        tree = chain_of(2)(q, source)
        tokens = emit(tree, p, source, reject)
        accepted = len(tokens) - 1
        return accepted, len(tokens) - (1 if forgets and accepted == 2 else 0)

    right = law(lambda source: emitted(source, forgets=False))
    wrong = law(lambda source: emitted(source, forgets=True))
    assert all(length == accepted + 1 for accepted, length in right)
    assert not all(length == accepted + 1 for accepted, length in wrong)


class OneUniform:
    """A source that takes the decision and the draw after it from the same uniform number."""

    def __init__(self, draft: float, verify: float, redraw: float) -> None:
        self._numbers = {Purpose.DRAFT: draft, Purpose.TOKEN: redraw}
        self._verify = verify

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: object = None,
    ) -> list[int]:
        cumulative = torch.cumsum(weights_V, 0)
        number = torch.tensor(self._numbers[purpose] * float(cumulative[-1]))
        return [int(torch.searchsorted(cumulative, number.double()))]

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        return self._verify * q < p


def test_a_uniform_used_twice_fails() -> None:
    """By a grid of midpoints; every cell's edge is one of the grid's, so the law is exact.

    Q is in twentieths, the acceptances are 2/9 and 3/5, the residual is (0, 0, 2/9, 7/9).
    """
    grid, ninths = (np.arange(45) + 0.5) / 45, (np.arange(9) + 0.5) / 9
    laws: dict[bool, Tensor] = {}
    for shared in (False, True):
        tokens = torch.zeros(4, dtype=torch.float64)
        for draft in (np.arange(20) + 0.5) / 20:
            for verify in grid:
                for redraw in [verify] if shared else ninths:
                    source = OneUniform(draft, verify, redraw)
                    tree = DraftTree.chain(
                        (0, *source.sample(Q, position=1, purpose=Purpose.DRAFT)), q={0: Q}
                    )
                    verdict = reject(tree, lambda node: P, source, start=1)
                    first = tree.tokens[1] if verdict.path else verdict.next_token
                    tokens[first] += 1
        laws[shared] = tokens / tokens.sum()
    assert 0.5 * float((laws[False] - P).abs().sum()) <= EXACT
    assert 0.5 * float((laws[True] - P).abs().sum()) > 0.08
