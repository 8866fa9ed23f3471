"""How much to guess: the tree with the highest expected tokens per second, down to none.

Expected speed of a step is (sequences + sum of path probabilities) / (draft + verify(rows) + host).
Costs are measured on this machine; probabilities come from what was accepted before. Two decisions,
both pure functions of those numbers:

* before drafting, `depth_limit`: how deep a drafter that costs time should go;
* after drafting, `choose`: which of the guessed nodes, over all sequences of the step, are worth a
  row of the target's pass (the single-request form is DSpark's rule, arXiv 2607.05147; see also
  TurboSpec 2406.14066 and OPT-Tree 2406.17276).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.tree import DraftTree
from outrider.drafters.acceptance import AcceptanceTable, outcomes
from outrider.drafters.base import NodeBudget

PROBE_FIRST = 16  # steps between two probes of a drafter that does not pay, doubled each time
PROBE_LAST = 256
FREE_SHARE = 0.02  # of a one-row pass: drafting below this is not worth limiting


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a target pass by number of rows, and of the rest of a step.

    Attributes:
        verify_ms: rows to milliseconds; at least one entry.
        host_ms: sampling, verdicts and bookkeeping per step.
    """

    verify_ms: Mapping[int, float]
    host_ms: float = 0.0

    def verify(self, rows: int) -> float:
        """Milliseconds of a pass with ``rows`` rows: linear between measurements and beyond."""
        known = sorted(self.verify_ms)
        if rows <= known[0] or len(known) == 1:
            return self.verify_ms[known[0]]
        upper = next((n for n in known if n >= rows), known[-1])
        lower = known[known.index(upper) - 1]
        slope = (self.verify_ms[upper] - self.verify_ms[lower]) / (upper - lower)
        return self.verify_ms[lower] + max(slope, 0.0) * (rows - lower)

    def relative(self, rows: int) -> float:
        """v(n): the cost of ``rows`` rows in units of a one-row pass."""
        return self.verify(rows) / self.verify(1)


@dataclass(frozen=True)
class Offer:
    """A sequence's tree with an estimate per node of being on the accepted path."""

    tree: DraftTree
    chances: Sequence[float]


def choose(
    offers: Sequence[Offer], costs: CostTable, *, other_rows: int, draft_ms: float
) -> list[DraftTree]:
    """Cut every tree to the nodes that raise the expected tokens per second of the step.

    Trees with `q` are taken whole or cut by depth by their drafter's budget before; here they
    count, but lose no node.

    Args:
        offers: one per decoding sequence.
        costs: the machine's cost table.
        other_rows: rows of the pass that are there anyway (prefill).
        draft_ms: time already spent on drafting in this step.
    """
    fixed = {i for i, offer in enumerate(offers) if offer.tree.q}
    gain = float(len(offers))
    rows = other_rows + len(offers)
    for i in fixed:
        gain += sum(offers[i].chances[1:])
        rows += len(offers[i].tree) - 1
    pool = sorted(
        (-offer.chances[node], offer.tree.depths[node], i, node)
        for i, offer in enumerate(offers)
        if i not in fixed
        for node in range(1, len(offer.tree))
    )
    spent = costs.host_ms + draft_ms
    best_rate, best_count = gain / (costs.verify(rows) + spent), 0
    for count, (negative_chance, *_) in enumerate(pool, start=1):
        gain -= negative_chance
        rate = gain / (costs.verify(rows + count) + spent)
        if rate > best_rate:
            best_rate, best_count = rate, count
    kept: list[list[int]] = [[] for _ in offers]
    for _, _, i, node in pool[:best_count]:
        kept[i].append(node)
    return [
        offer.tree
        if i in fixed or len(kept[i]) == len(offer.tree) - 1
        else offer.tree.keep(kept[i])
        for i, offer in enumerate(offers)
    ]


def depth_limit(
    table: AcceptanceTable, costs: CostTable, *, depth_ms: float, rows: int, limit: int
) -> int:
    """The depth of chain that maximises expected tokens per second, 0 where none pays.

    Args:
        table: acceptance by depth.
        costs: the machine's cost table.
        depth_ms: drafting time per depth.
        rows: rows of the pass without this chain.
        limit: never more than this.
    """
    best_rate, best = 1.0 / (costs.verify(rows) + costs.host_ms), 0
    gain, chance = 1.0, 1.0
    for depth in range(1, limit + 1):
        chance *= table.at_depth(depth)
        gain += chance
        rate = gain / (costs.verify(rows + depth) + costs.host_ms + depth * depth_ms)
        if rate > best_rate:
            best_rate, best = rate, depth
    return best


@dataclass
class _Probe:
    """When a drafter that does not pay is tried again."""

    wait: int = PROBE_FIRST
    idle: int = 0


@dataclass
class DrafterStats:
    """What has been seen of one drafter: acceptance and its own cost.

    Attributes:
        table: acceptance over all sequences.
        depth_ms: drafting time per depth, a moving average; 0 until measured.
    """

    table: AcceptanceTable = field(default_factory=AcceptanceTable)
    depth_ms: float = 0.0

    def spent(self, milliseconds: float, depth: int) -> None:
        """Take in what a proposal of ``depth`` cost."""
        per_depth = milliseconds / max(depth, 1)
        self.depth_ms = per_depth if self.depth_ms == 0 else 0.8 * self.depth_ms + 0.2 * per_depth


class _SequenceMemory:
    """What the cost budget remembers of one sequence."""

    def __init__(self, stats: DrafterStats) -> None:
        self.stats = stats
        self.table = AcceptanceTable(stats.table, memory=40.0)
        self.probe = _Probe()


@dataclass(frozen=True)
class Subject:
    """A sequence as the budget sees it: who it is, who guesses for it, how far it may still go."""

    id: int
    drafter: str
    room: int


class Budget(Protocol):
    """Decides how much is guessed."""

    def limits(self, subjects: Sequence[Subject], *, other_rows: int) -> list[NodeBudget]:
        """What each sequence's drafter may offer."""
        ...

    def cut(
        self,
        subjects: Sequence[Subject],
        trees: Sequence[DraftTree],
        *,
        other_rows: int,
        draft_ms: float,
    ) -> list[DraftTree]:
        """The part of each offered tree that the target shall check."""
        ...

    def spent(self, drafter: str, milliseconds: float, depth: int) -> None:
        """Learn what a proposal of ``depth`` cost."""
        ...

    def learn(self, subject: Subject, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Learn what became of an offered tree."""
        ...

    def forget(self, sequences: Sequence[int]) -> None:
        """These sequences are gone."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same: up to ``nodes`` guesses and ``depth``, whatever they cost or bring."""

    nodes: int
    depth: int

    def limits(self, subjects: Sequence[Subject], *, other_rows: int) -> list[NodeBudget]:
        return [NodeBudget(self.nodes, min(self.depth, s.room)) for s in subjects]

    def cut(
        self,
        subjects: Sequence[Subject],
        trees: Sequence[DraftTree],
        *,
        other_rows: int,
        draft_ms: float,
    ) -> list[DraftTree]:
        return list(trees)

    def spent(self, drafter: str, milliseconds: float, depth: int) -> None:
        return

    def learn(self, subject: Subject, tree: DraftTree, emitted: Sequence[int]) -> None:
        return

    def forget(self, sequences: Sequence[int]) -> None:
        return


class CostBudget:
    """Guesses as much as pays on this machine, by measured cost and observed acceptance."""

    def __init__(self, costs: CostTable, *, nodes: int, depth: int) -> None:
        self.costs = costs
        self._nodes = nodes
        self._depth = depth
        self._drafters: dict[str, DrafterStats] = {}
        self._sequences: dict[int, _SequenceMemory] = {}

    def limits(self, subjects: Sequence[Subject], *, other_rows: int) -> list[NodeBudget]:
        rows = other_rows + len(subjects)
        budgets = []
        for subject in subjects:
            depth = self._depth_for(self._memory(subject), rows, min(self._depth, subject.room))
            budgets.append(NodeBudget(self._nodes if depth else 0, depth))
        return budgets

    def cut(
        self,
        subjects: Sequence[Subject],
        trees: Sequence[DraftTree],
        *,
        other_rows: int,
        draft_ms: float,
    ) -> list[DraftTree]:
        offers = [
            Offer(tree, self._memory(subject).table.path_probabilities(tree))
            for subject, tree in zip(subjects, trees, strict=True)
        ]
        return choose(offers, self.costs, other_rows=other_rows, draft_ms=draft_ms)

    def spent(self, drafter: str, milliseconds: float, depth: int) -> None:
        self._drafters.setdefault(drafter, DrafterStats()).spent(milliseconds, depth)

    def learn(self, subject: Subject, tree: DraftTree, emitted: Sequence[int]) -> None:
        self._memory(subject).table.update(outcomes(tree, emitted))

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def _memory(self, subject: Subject) -> _SequenceMemory:
        if subject.id not in self._sequences:
            stats = self._drafters.setdefault(subject.drafter, DrafterStats())
            self._sequences[subject.id] = _SequenceMemory(stats)
        return self._sequences[subject.id]

    def _depth_for(self, memory: _SequenceMemory, rows: int, limit: int) -> int:
        """How deep to draft now; looks again at a drafter that did not pay, ever more rarely.

        A drafter that costs next to nothing may always offer: `choose` cuts what does not pay.
        """
        depth_ms = memory.stats.depth_ms
        if depth_ms * limit < FREE_SHARE * self.costs.verify(1):
            return limit
        best = depth_limit(memory.table, self.costs, depth_ms=depth_ms, rows=rows, limit=limit)
        probe = memory.probe
        if best > 0:
            memory.probe = _Probe()
            return best
        probe.idle += 1
        if probe.idle < probe.wait:
            return 0
        memory.probe = _Probe(wait=min(2 * probe.wait, PROBE_LAST))
        return min(2, limit)
