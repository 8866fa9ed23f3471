"""Several drafters, one at a time: per sequence, the one that promises the most per unit of time.

A drafter that costs nothing is asked and judged by what it offers; one that costs time is judged by
its record before it is asked, so a good free guess saves its cost. The promise of a guess is
(1 + expected accepted tokens) / (1 + relative drafting cost), after the hybrid rule of
SuffixDecoding (arXiv 2411.04975), with confidences recalibrated by what was really accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.tree import DraftTree
from outrider.drafters.acceptance import AcceptanceTable, outcomes
from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
from outrider.errors import InvalidParameter

PROBE_EVERY = 32  # steps after which an unasked drafter is asked again


@dataclass(frozen=True)
class Member:
    """A drafter and what it costs per depth, in units of a one-row target pass."""

    drafter: Drafter
    cost: float = 0.0


def narrowed(commit: Commit, needs: Needs, drafter: Drafter) -> Commit:
    """A commit with only those of the features in ``needs`` that one drafter asked for."""
    wanted = drafter.needs.layers
    if commit.features is None or wanted == needs.layers:
        return commit
    picked = [needs.layers.index(layer) for layer in wanted]
    return Commit(
        commit.sequence,
        commit.tokens,
        commit.tenant,
        commit.features[:, picked] if wanted else None,
        commit.features_from,
    )


def promise(expected: float, *, cost: float, depth: int) -> float:
    """Expected tokens per unit of time if ``expected`` guesses of a draft are accepted."""
    return (1.0 + expected) / (1.0 + cost * depth)


class _State:
    """What is known of one sequence: a table per member, and the last tree offered."""

    def __init__(self, parents: Sequence[AcceptanceTable]) -> None:
        self.tables = [AcceptanceTable(parent, memory=40.0) for parent in parents]
        self.idle = [0] * len(parents)
        self.last: tuple[int, DraftTree] | None = None


class HybridDrafter:
    """Asks its members in order of cost and takes the best promise."""

    def __init__(self, members: Sequence[Member], *, name: str = "hybrid") -> None:
        if not members:
            raise InvalidParameter("a hybrid drafter has no members; name at least one drafter")
        self.name = name
        self._members = sorted(members, key=lambda m: m.cost)
        layers = sorted({n for m in members for n in m.drafter.needs.layers})
        self.needs = Needs(
            tuple(layers), memory_bytes=sum(m.drafter.needs.memory_bytes for m in members)
        )
        self._parents = [AcceptanceTable() for _ in members]
        self._states: dict[int, _State] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            state = self._state(commit.sequence)
            if state.last is not None and commit.tokens:
                index, tree = state.last
                state.tables[index].update(outcomes(tree, commit.tokens))
                state.last = None
        for member in self._members:
            member.drafter.observe([narrowed(c, self.needs, member.drafter) for c in commits])

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        best = [DraftTree.root_only(view.root) for view in views]
        promises = [promise(0.0, cost=0.0, depth=0)] * len(views)
        for index, member in enumerate(self._members):
            asked = [
                i
                for i, (view, budget) in enumerate(zip(views, budgets, strict=True))
                if self._worth_asking(index, view, budget, promises[i])
            ]
            if not asked:
                continue
            trees = member.drafter.propose([views[i] for i in asked], [budgets[i] for i in asked])
            for i, tree in zip(asked, trees, strict=True):
                offered = self._promise_of(index, views[i], tree)
                # What has been drafted is paid for: a tree that cost time only has to be better.
                if len(tree) > 1 and offered > promises[i]:
                    best[i], promises[i] = tree, offered
                    self._state(views[i].id).last = (index, tree)
        return best

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)
        for member in self._members:
            member.drafter.forget(sequences)

    def _state(self, sequence: int) -> _State:
        return self._states.setdefault(sequence, _State(self._parents))

    def _worth_asking(
        self, index: int, view: SequenceView, budget: NodeBudget, beaten: float
    ) -> bool:
        """Free members always; others when their record beats what is on the table, or to look."""
        member = self._members[index]
        if member.cost == 0.0:
            return True
        state = self._state(view.id)
        table = state.tables[index]
        chance, expected, best = 1.0, 0.0, 0.0
        for depth in range(1, min(budget.depth, budget.nodes) + 1):
            chance *= table.at_level(depth)
            expected += chance
            best = max(best, promise(expected, cost=member.cost, depth=depth))
        state.idle[index] += 1
        if best <= beaten and state.idle[index] < PROBE_EVERY:
            return False
        state.idle[index] = 0
        return True

    def _promise_of(self, index: int, view: SequenceView, tree: DraftTree) -> float:
        chances = self._state(view.id).tables[index].path_probabilities(tree)
        cost = self._members[index].cost
        return promise(sum(chances[1:]), cost=cost, depth=max(tree.depths))
