"""Several drafters at once: their guesses in one tree.

Paths that two members share become one, the others are siblings, and the best nodes stay. Rows of
the target's pass cost little beside a pass, so covering two opinions pays where neither is sure.
Free members are asked always; one that costs time is left out while the free ones are sure of
themselves. Taking only the best member's guess (the rule of SuffixDecoding, arXiv 2411.04975) was
tried and accepts less (docs/log.md).

Confidences are made comparable by what was really accepted of each member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.tree import NO_PARENT, DraftTree
from outrider.drafters.acceptance import AcceptanceTable, outcomes
from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
from outrider.errors import InvalidParameter

LEAST = 0.35  # share of first guesses that come true, below which a costly member is left out
PROBE_EVERY = 24
SURE = 3.0  # expected accepted guesses of the free members that make a costly one superfluous


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


class _State:
    """What is known of one sequence: a table per member, and what each offered last.

    Nothing is learned across sequences, so that with the same budget a guess does not depend on who
    else is served.
    """

    def __init__(self, members: int) -> None:
        self.tables = [AcceptanceTable(memory=40.0) for _ in range(members)]
        self.last: dict[int, DraftTree] = {}
        self._idle = [0] * members

    def worth_asking(self, index: int, least: float) -> bool:
        """Is a member right often enough to be paid for? One that is not is tried now and then,
        but not while rows are dear.

        Args:
            least: the chance that a guess must have to be worth its row.
        """
        enough = self.tables[index].at_level(1) >= max(LEAST, least)
        if enough or (least <= LEAST and self._idle[index] >= PROBE_EVERY):
            self._idle[index] = 0
            return True
        self._idle[index] += 1
        return False


class HybridDrafter:
    """Asks its members in order of cost and merges their trees."""

    def __init__(self, members: Sequence[Member], *, name: str = "hybrid") -> None:
        if not members:
            raise InvalidParameter("a hybrid drafter has no members; name at least one drafter")
        self.name = name
        self._members = sorted(members, key=lambda m: m.cost)
        layers = sorted({n for m in members for n in m.drafter.needs.layers})
        self.needs = Needs(
            tuple(layers),
            memory_bytes=sum(m.drafter.needs.memory_bytes for m in members),
            trees=len(members) > 1 or members[0].drafter.needs.trees,
        )
        self._states: dict[int, _State] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            state = self._state(commit.sequence)
            if commit.tokens:
                for index, tree in state.last.items():
                    state.tables[index].update(outcomes(tree, commit.tokens))
                state.last = {}
        for member in self._members:
            member.drafter.observe([narrowed(c, self.needs, member.drafter) for c in commits])

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        merges = [Merge(view.root) for view in views]
        for index, member in enumerate(self._members):
            asked = [
                i
                for i, merge in enumerate(merges)
                if not member.cost
                or (
                    merge.expected < SURE
                    and self._state(views[i].id).worth_asking(index, budgets[i].least)
                )
            ]
            if not asked:
                continue
            trees = member.drafter.propose([views[i] for i in asked], [budgets[i] for i in asked])
            for i, tree in zip(asked, trees, strict=True):
                state = self._state(views[i].id)
                if len(tree) > 1:
                    state.last[index] = tree
                    merges[i].add(tree, state.tables[index].path_probabilities(tree))
        return [merge.tree(budget.nodes) for merge, budget in zip(merges, budgets, strict=True)]

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)
        for member in self._members:
            member.drafter.forget(sequences)

    def _state(self, sequence: int) -> _State:
        return self._states.setdefault(sequence, _State(len(self._members)))


class Merge:
    """The union of trees with the same root; a pure value apart from `add`."""

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [NO_PARENT]
        self._own = [1.0]  # the chance of a node, given its parent
        self._children: dict[tuple[int, int], int] = {}

    def add(self, tree: DraftTree, chances: Sequence[float]) -> None:
        """Take in a tree, with the chance that each node is on the accepted path."""
        place = [0]
        for node in range(1, len(tree)):
            parent = place[tree.parents[node]]
            above = chances[tree.parents[node]]
            own = chances[node] / above if above > 0 else 0.0
            key = (parent, tree.tokens[node])
            found = self._children.get(key)
            if found is None:
                found = self._children[key] = len(self._tokens)
                self._tokens.append(tree.tokens[node])
                self._parents.append(parent)
                self._own.append(own)
            else:  # two opinions: at least as likely as the surer one says
                self._own[found] = max(self._own[found], own)
            place.append(found)

    def _chances(self) -> list[float]:
        chances = [1.0]
        for node in range(1, len(self._tokens)):
            chances.append(chances[self._parents[node]] * self._own[node])
        return chances

    @property
    def expected(self) -> float:
        """Accepted guesses that the tree promises."""
        return sum(self._chances()[1:])

    def tree(self, nodes: int) -> DraftTree:
        """The best nodes; a parent comes before its children, which never beat it."""
        chances = self._chances()
        order = sorted(range(1, len(chances)), key=lambda n: (-chances[n], n))
        kept = [0, *order[:nodes]]
        place = {node: index for index, node in enumerate(kept)}
        return DraftTree(
            tuple(self._tokens[node] for node in kept),
            tuple(place[self._parents[node]] if node else NO_PARENT for node in kept),
            confidence=tuple(min(self._own[node], 1.0) for node in kept),
        )
