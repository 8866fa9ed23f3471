"""The drafter that guesses nothing: plain decoding, on the same path as all the others."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView


class NoneDrafter:
    """Every tree is a root; there is no state."""

    name: str = "none"
    needs: Needs = Needs(trees=False)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [DraftTree.root_only(view.root) for view in views]

    def forget(self, sequences: Sequence[int]) -> None:
        """Nothing to drop."""
