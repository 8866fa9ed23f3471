"""How often guesses come true: counts that forget, by depth and by the drafter's own confidence.

Used by the engine's budget, once per drafter and once per sequence, and by the hybrid drafter. It
compares a tree with the tokens that were really emitted, so it learns from guesses that were
offered and never sent to the target as well: no exploration is needed to notice that a free drafter
has become good again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.tree import DraftTree

BUCKETS = 10


@dataclass(frozen=True)
class Outcome:
    """One guess whose parent came true: its depth, the drafter's confidence, and whether it did."""

    depth: int
    confidence: float
    accepted: bool


def outcomes(tree: DraftTree, emitted: Sequence[int]) -> list[Outcome]:
    """What the emitted tokens say about a tree's guesses.

    Args:
        tree: the tree as offered.
        emitted: the tokens that followed the root.
    """
    found: list[Outcome] = []
    node = 0
    for depth, token in enumerate(emitted, start=1):
        follow = None
        for child in tree.children(node):
            hit = follow is None and tree.tokens[child] == token
            follow = child if hit else follow
            confidence = tree.confidence[child] if tree.confidence else 0.5
            found.append(Outcome(depth, confidence, hit))
        if follow is None:
            break
        node = follow
    return found


class AcceptanceTable:
    """Exponentially forgetting estimates of P(guess accepted, given that its parent was).

    An estimate starts at a prior (the parent table's, or the drafter's confidence) that weighs as
    much as ``prior_weight`` observations.
    """

    def __init__(
        self,
        parent: AcceptanceTable | None = None,
        *,
        prior_weight: float = 6.0,
        memory: float = 200.0,
    ) -> None:
        self._parent = parent
        self._prior_weight = prior_weight
        self._keep = 1.0 - 1.0 / memory
        self._seen: dict[tuple[str, int], list[float]] = {}

    def update(self, results: Sequence[Outcome]) -> None:
        """Take in outcomes, here and in the parent table."""
        for result in results:
            for key in (("depth", result.depth), ("confidence", _bucket(result.confidence))):
                cell = self._seen.setdefault(key, [0.0, 0.0])
                cell[0] = cell[0] * self._keep + 1.0
                cell[1] = cell[1] * self._keep + result.accepted
        levels: dict[int, bool] = {}
        for result in results:
            levels[result.depth] = levels.get(result.depth, False) or result.accepted
        for depth, accepted in levels.items():
            cell = self._seen.setdefault(("level", depth), [0.0, 0.0])
            cell[0] = cell[0] * self._keep + 1.0
            cell[1] = cell[1] * self._keep + accepted
        if self._parent is not None:
            self._parent.update(results)

    def at_depth(self, depth: int) -> float:
        """The chance that a guess at ``depth`` is accepted once its parent is."""
        prior = self._parent.at_depth(depth) if self._parent else 0.6
        return self._estimate(("depth", depth), prior)

    def at_level(self, depth: int) -> float:
        """The chance that some guess at ``depth`` is accepted once one before it was.

        Of a chain this is `at_depth`; siblings share a level, so trees do better here.
        """
        prior = self._parent.at_level(depth) if self._parent else 0.6
        return self._estimate(("level", depth), prior)

    def at_confidence(self, confidence: float) -> float:
        """The chance that a guess made with ``confidence`` is accepted once its parent is."""
        prior = self._parent.at_confidence(confidence) if self._parent else confidence
        return self._estimate(("confidence", _bucket(confidence)), prior)

    def _estimate(self, key: tuple[str, int], prior: float) -> float:
        tried, accepted = self._seen.get(key, (0.0, 0.0))
        return (prior * self._prior_weight + accepted) / (self._prior_weight + tried)

    def path_probabilities(self, tree: DraftTree) -> list[float]:
        """N estimates that each node is on the accepted path; the root's is 1.

        A child never exceeds its parent.
        """
        chances = [1.0]
        for node in range(1, len(tree)):
            if tree.confidence is None:
                own = self.at_depth(tree.depths[node])
            else:
                own = self.at_confidence(tree.confidence[node])
            chances.append(chances[tree.parents[node]] * min(own, 1.0))
        return chances


def _bucket(confidence: float) -> int:
    return min(BUCKETS - 1, int(confidence * BUCKETS))
