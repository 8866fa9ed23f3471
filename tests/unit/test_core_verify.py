"""What the rules ask of their source and their rows; tests/laws/ shows that they are exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from outrider.core.noise import Purpose
from outrider.core.tree import DraftTree
from outrider.core.verify import RULES, Rule, Verdict, block, reject, walk
from outrider.errors import InvalidTree

V = 4
FLAT = torch.full((V,), 1 / V)
START = 20


@dataclass
class Scripted:
    """A source that accepts the first ``yes`` guesses and notes every question."""

    yes: int
    token: int = 3
    weights: list[Tensor] = field(default_factory=list)
    drawn: list[tuple[int, Purpose]] = field(default_factory=list)
    judged: list[tuple[int, int]] = field(default_factory=list)

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: object = None,
    ) -> list[int]:
        self.weights.append(weights_V)
        self.drawn.append((position, purpose))
        return [self.token]

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        self.judged.append((position, index))
        return len(self.judged) <= self.yes


def chain(guesses: int) -> DraftTree:
    return DraftTree.chain([0] * (guesses + 1), q=dict.fromkeys(range(guesses), FLAT))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_reject_keys_every_question_by_its_position(accepted: int) -> None:
    source = Scripted(accepted)
    verdict = reject(chain(3), lambda node: FLAT, source, start=START)
    assert verdict == Verdict(tuple(range(1, accepted + 1)), 3)
    asked = min(accepted + 1, 3)
    assert source.judged == [(START + i, i + 1) for i in range(asked)]
    assert source.drawn == [(START + accepted, Purpose.TOKEN)]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_block_judges_all_and_draws_at_the_position_it_stops_at(accepted: int) -> None:
    source = Scripted(accepted)
    verdict = block(chain(3), lambda node: FLAT, source, start=START)
    assert verdict == Verdict(tuple(range(1, accepted + 1)), 3)
    assert source.judged == [(START + i, i + 1) for i in range(3)]
    assert source.drawn == [(START + accepted, Purpose.TOKEN)]


def test_walk_draws_once_per_visited_node_and_judges_nothing() -> None:
    tree = DraftTree((0, 1, 3, 2, 3), (-1, 0, 0, 2, 2))
    visited: list[int] = []

    def rows(node: int) -> Tensor:
        visited.append(node)
        return FLAT

    source = Scripted(0)
    assert walk(tree, rows, source, start=START) == Verdict((2, 4), 3)
    assert visited == [0, 2, 4]
    assert source.drawn == [(START + i, Purpose.TOKEN) for i in range(3)]
    assert source.judged == []


def test_siblings_are_judged_under_keys_of_their_own() -> None:
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 0))
    source = Scripted(0)
    reject(tree, lambda node: FLAT, source, start=START)
    assert source.judged == [(START, 1), (START, 2), (START, 3)]


@pytest.mark.parametrize("rule", [reject, block], ids=["reject", "block"])
def test_an_empty_residual_falls_back_to_p(rule: Rule) -> None:
    """p equal to q cannot be rejected but by rounding; then 0/0 must not become NaN."""
    source = Scripted(0)
    rule(chain(1), lambda node: FLAT, source, start=START)
    assert torch.equal(source.weights[0], FLAT)


@pytest.mark.parametrize("rule", [reject, block], ids=["reject", "block"])
def test_a_guess_that_q_excludes_is_rejected(rule: Rule) -> None:
    """It cannot have been drawn from q, so there is no ratio that could be trusted."""

    class Honest(Scripted):
        def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
            return q > 0 and p / q >= 1

    q = torch.tensor([0.0, 0.5, 0.5, 0.0])
    tree = DraftTree.chain([0, 0], q={0: q})
    assert rule(tree, lambda node: FLAT, Honest(0), start=START).path == ()


def test_rows_are_read_only_to_the_rules() -> None:
    p, q = FLAT.clone(), torch.tensor([0.1, 0.2, 0.3, 0.4])
    siblings = DraftTree((0, 1, 2), (-1, 0, 0), q={0: q}, without_replacement=True)
    line = DraftTree.chain([0, 1], q={0: q})
    for rule, tree in ((walk, siblings), (reject, siblings), (block, line)):
        rule(tree, lambda node: p, Scripted(0), start=START)
    assert torch.equal(p, FLAT)
    assert q.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_block_refuses_trees_by_name() -> None:
    with pytest.raises(InvalidTree, match="use walk or reject for trees"):
        block(DraftTree((0, 1, 2), (-1, 0, 0)), lambda node: FLAT, Scripted(0), start=START)


def test_the_rules_are_listed_by_name() -> None:
    assert [*RULES.items()] == [("walk", walk), ("reject", reject), ("block", block)]
