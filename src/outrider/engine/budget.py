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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from outrider.core.tree import DraftTree
from outrider.drafters.acceptance import AcceptanceTable, outcomes
from outrider.drafters.base import NodeBudget

PROBE_FIRST = 16  # steps between two probes of a drafter that does not pay, doubled each time
PROBE_LAST = 256
PROBE_DEPTH = 4
FREE_SHARE = 0.02  # of a one-row pass: depths that cost less than this in all are free
COST_MEMORY = 0.98  # per proposal
COST_STEP = 1.01
COST_RETURN = 0.005  # per pass elsewhere in the table
HOST_STEP = 0.05
GAIN_STEP = 0.06
WIDTH_STEP = 0.03
UNLIKELY = 0.01  # levels that are reached less often do not decide how deep to guess
WORTH_A_PASS = 0.1  # chance of a path from which on a drafter's pass for it pays (docs/log.md)
COSTLY_NODES = 16  # a drafter whose nodes cost time need not offer more than a pass can pay for
STEADY = 3.0  # proposals after which the cost of a drafter is known well enough to see outliers
YOUNG = 12.0  # proposals up to which one that is far cheaper shows that those before it were slow
OUTLIER = 3.0
FAR = 3.0  # times the levels of the largest proposals seen lately


@dataclass
class CostTable:
    """Milliseconds of a target pass by number of rows, and of the rest of a step.

    It starts from a measurement and follows what passes really cost, since that changes with the
    context's length and with other work on the machine.

    Attributes:
        verify_ms: rows to milliseconds; at least one entry.
        host_ms: sampling, verdicts and bookkeeping per step.
    """

    verify_ms: dict[int, float]
    host_ms: float = 0.0
    _rising: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def _known(self) -> list[int]:
        return sorted(self.verify_ms)

    @cached_property
    def _start(self) -> CostTable:
        """As it was when the first pass was taken in."""
        return CostTable(dict(self.verify_ms))

    def verify(self, rows: int) -> float:
        """Milliseconds of a pass with ``rows`` rows: linear between measurements and beyond.

        More rows never count as cheaper, whatever single entries say.
        """
        known = self._known
        if not self._rising:
            self._rising = list(accumulate((self.verify_ms[n] for n in known), max))
        if rows <= known[0] or len(known) == 1:
            return self._rising[0]
        index = min(bisect_left(known, rows), len(known) - 1)
        low, high = self._rising[index - 1], self._rising[index]
        slope = (high - low) / (known[index] - known[index - 1])
        return low + slope * (rows - known[index - 1])

    def decoding(self, sequences: int, *, guesses: int, other_rows: int) -> float:
        """Milliseconds that a pass of one row per sequence and so many guesses takes for decoding.

        Rows of prompts that travel along are charged to their prompts, at what they add to the
        pass without guesses: they must be read in some pass anyway, so a guess gains nothing by
        sharing one with them, and costs what a row costs in so large a pass.
        """
        if not other_rows:
            return self.verify(sequences + guesses)
        plain = other_rows + sequences
        prompts = self.verify(plain) - self.verify(sequences)
        return self.verify(plain + guesses) - prompts

    def learn(self, rows: int, *, verify_ms: float, host_ms: float) -> None:
        """Take in one pass: the entries around ``rows`` move a small step towards it.

        A step of fixed size makes each entry follow the median, so one slow pass does no harm. The
        other entries go slowly back to where they stood beside these at the start: a machine that
        became slower did so for all of them, and an entry that a slow minute raised would never be
        seen again, since nothing is then guessed so widely.
        """
        start = self._start  # kept from the first call on
        step = COST_STEP if verify_ms > self.verify(rows) else 1 / COST_STEP
        index = bisect_left(self._known, rows)
        beside = self._known[max(index - 1, 0) : index + 1]
        for known in beside:
            share = max(0.0, 1 - abs(known - rows) / rows)
            self.verify_ms[known] *= step**share
        self._rising = []
        scale = self.verify(rows) / start.verify(rows)
        for known in self._known:
            if known not in beside:
                due = scale * start.verify(known)
                self.verify_ms[known] += COST_RETURN * (due - self.verify_ms[known])
        self._rising = []
        self.host_ms += HOST_STEP * (min(host_ms, 4 * self.host_ms + 1) - self.host_ms)

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
    gain, guesses = float(len(offers)), 0
    for i in fixed:
        gain += sum(offers[i].chances[1:])
        guesses += len(offers[i].tree) - 1
    pool = sorted(
        (-offer.chances[node], offer.tree.depths[node], i, node)
        for i, offer in enumerate(offers)
        if i not in fixed
        for node in range(1, len(offer.tree))
    )

    def milliseconds(count: int) -> float:
        passed = costs.decoding(len(offers), guesses=guesses + count, other_rows=other_rows)
        return passed + costs.host_ms + draft_ms

    best_rate, best_count = gain / milliseconds(0), 0
    for count, (negative_chance, *_) in enumerate(pool, start=1):
        gain -= negative_chance
        rate = gain / milliseconds(count)
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


def least_chance(costs: CostTable, sequences: int, *, other_rows: int) -> float:
    """The chance from which on a guess is worth its row, where each sequence makes one.

    That is the price of the row in tokens: what plain decoding brings in the time that it takes.
    """
    if not sequences:
        return 0.0
    plain = costs.decoding(sequences, guesses=0, other_rows=other_rows)
    guessed = costs.decoding(sequences, guesses=sequences, other_rows=other_rows)
    return (guessed - plain) / (plain + costs.host_ms)


def depth_limit(
    table: AcceptanceTable,
    costs: CostTable,
    *,
    draft: DraftCost,
    limit: int,
    other_rows: int = 0,
    width: float = 1.0,
    sequences: int = 1,
) -> int:
    """The depth that maximises expected tokens per second, 0 where none pays.

    Args:
        table: acceptance by level.
        costs: the machine's cost table.
        draft: what drafting costs.
        limit: never more than this.
        other_rows: rows of the pass that are there anyway (prefill).
        width: guesses that are checked per level; 1 for a chain.
        sequences: sequences that are asked for, taken to be alike.
    """
    best_rate, best = 1.0 / (costs.verify(sequences) + costs.host_ms), 0
    gain, chance = 1.0, 1.0
    for depth in range(1, limit + 1):
        chance *= table.at_level(depth)
        if chance < UNLIKELY:
            break
        gain += chance
        guesses = round(sequences * width * depth)
        passed = costs.decoding(sequences, guesses=guesses, other_rows=other_rows)
        rate = gain / (passed + costs.host_ms + draft.at(depth * sequences))
        if rate > best_rate:
            best_rate, best = rate, depth
    return best


@dataclass
class DraftCost:
    """What a drafter's proposals cost: a part per proposal and a part per level of a tree.

    The levels of all sequences' trees count together. A straight line through the proposals seen,
    by least squares with exponential forgetting; both parts are at least 0. Model-free drafters
    are nearly all base, draft models nearly all slope.
    """

    base_ms: float = 0.0
    level_ms: float = 0.0
    _most: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def is_steady(self) -> bool:
        """Have enough proposals been seen to judge by?"""
        return self._sums[0] >= STEADY

    def covers(self, levels: int) -> bool:
        """Have proposals of about so many levels been seen lately? A line drawn from small ones
        says little about large ones, where a drafter guesses for all sequences at once."""
        return self.is_steady and levels <= FAR * self._most

    def learn(self, levels: int, milliseconds: float) -> None:
        """Take in one proposal.

        One that took far longer than usual counts as a slow one. The first of a process may be the
        slow ones (nothing is in the caches): they are forgotten once a far cheaper one comes.
        """
        if self.is_steady:
            milliseconds = min(milliseconds, OUTLIER * self.at(levels) + 0.2)
        if levels and self._sums[0] < YOUNG and OUTLIER * milliseconds + 0.2 < self.at(levels):
            self._sums = [0.0] * 5
        self._most = max(COST_MEMORY * self._most, levels)
        seen = (1.0, levels, milliseconds, levels * levels, levels * milliseconds)
        self._sums = [COST_MEMORY * s + x for s, x in zip(self._sums, seen, strict=True)]
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-6 * n * n else 0.0
        self.level_ms = max(0.0, slope)
        self.base_ms = max(0.0, (y - self.level_ms * x) / n)

    def is_free(self, costs: CostTable, depth: int) -> bool:
        """Does a tree of this depth cost next to nothing beside a pass?"""
        return self.level_ms * depth <= FREE_SHARE * costs.verify(1)

    def at(self, levels: int) -> float:
        """Milliseconds of a proposal of so many levels in all."""
        return self.base_ms + self.level_ms * levels


@dataclass
class DrafterStats:
    """What has been seen of one drafter over all sequences: acceptance, its own cost, and how many
    guesses per level were worth checking."""

    table: AcceptanceTable = field(default_factory=AcceptanceTable)
    cost: DraftCost = field(default_factory=DraftCost)
    width: float = 1.0

    def saw(self, tree: DraftTree) -> None:
        """Take in a tree as it goes to the target."""
        if len(tree) > 1:
            width = (len(tree) - 1) / max(tree.depths)
            self.width += WIDTH_STEP * (width - self.width)


class _SequenceMemory:
    """What the cost budget remembers of one sequence.

    Attributes:
        gain, nodes, levels: accepted tokens, checked guesses and levels offered per proposal,
            moving averages; the start is hopeful.
        sent: what was checked of the last proposal.
        wait, idle: proposals that are left out before the drafter is tried again, and how many
            have been left out since.
    """

    def __init__(self, stats: DrafterStats) -> None:
        self.stats = stats
        self.table = AcceptanceTable(stats.table, memory=40.0)
        self.gain = 1.0
        self.nodes = 0.0
        self.levels = 0.0
        self.sent: DraftTree | None = None
        self.wait = PROBE_FIRST
        self.idle = 0

    def depth(self, costs: CostTable, *, other_rows: int, limit: int, sequences: int) -> int:
        """How deep to draft now, 0 for not at all. The other sequences are taken to be like this.

        Where depth costs next to nothing the drafter may offer all it has, since `choose` cuts what
        does not pay; the question is only whether asking it pays. Where depth costs time, the best
        depth by the record decides. A drafter that does not pay is tried again, ever more rarely.
        """
        cost = self.stats.cost
        if cost.is_free(costs, limit):
            best = limit if self._pays(costs, other_rows=other_rows, sequences=sequences) else 0
        else:
            best = depth_limit(
                self.table,
                costs,
                draft=cost,
                limit=limit,
                other_rows=other_rows,
                width=self.stats.width,
                sequences=sequences,
            )
        if best > 0:
            self.wait, self.idle = PROBE_FIRST, 0
            return best
        probe = min(PROBE_DEPTH, limit)
        if not cost.covers(probe * sequences):
            return probe
        self.idle += 1
        if self.idle < self.wait * (1 if cost.is_free(costs, limit) else sequences):
            return 0
        self.wait, self.idle = min(2 * self.wait, PROBE_LAST), 0
        return probe

    def _pays(self, costs: CostTable, *, other_rows: int, sequences: int) -> bool:
        """Are more tokens per second to be had with proposals like the last ones than without?"""
        plain = costs.verify(sequences) + costs.host_ms
        guesses = round(sequences * self.nodes)
        passed = costs.decoding(sequences, guesses=guesses, other_rows=other_rows)
        cost = self.stats.cost
        guessed = passed + costs.host_ms + cost.base_ms + cost.level_ms * sequences * self.levels
        return (1 + self.gain) * plain >= guessed

    def learn(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Take in what became of an offered tree, here and over all sequences."""
        results = outcomes(tree, emitted)
        self.table.update(results)
        sent = tree if self.sent is None else self.sent
        if sent is not tree:  # some of it was cut
            results = outcomes(sent, emitted)
        accepted = sum(result.accepted for result in results)
        self.gain += GAIN_STEP * (accepted - self.gain)
        self.nodes += GAIN_STEP * (len(sent) - 1 - self.nodes)
        self.levels += GAIN_STEP * (max(tree.depths) - self.levels)


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

    def spent(
        self, drafter: str, milliseconds: float, levels: int, *, at_most: bool = False
    ) -> None:
        """Learn what a proposal cost, and how many levels its trees had together.

        Args:
            at_most: it also read what had been left unread for some steps, so that an ordinary
                one costs less.
        """
        ...

    def passed(self, rows: int, *, verify_ms: float, host_ms: float) -> None:
        """Learn what a step of ``rows`` rows cost beside drafting."""
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

    def spent(
        self, drafter: str, milliseconds: float, levels: int, *, at_most: bool = False
    ) -> None:
        return

    def passed(self, rows: int, *, verify_ms: float, host_ms: float) -> None:
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
        budgets = []
        least = max(WORTH_A_PASS, least_chance(self.costs, len(subjects), other_rows=other_rows))
        for subject in subjects:
            limit = min(self._depth, subject.room)
            memory = self._memory(subject)
            depth = memory.depth(
                self.costs, other_rows=other_rows, limit=limit, sequences=len(subjects)
            )
            free = memory.stats.cost.is_free(self.costs, limit)
            nodes = self._nodes if free else min(self._nodes, COSTLY_NODES)
            budgets.append(NodeBudget(nodes if depth else 0, depth, least=least))
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
        kept = choose(offers, self.costs, other_rows=other_rows, draft_ms=draft_ms)
        for subject, tree in zip(subjects, kept, strict=True):
            memory = self._memory(subject)
            memory.sent = tree
            memory.stats.saw(tree)
        return kept

    def spent(
        self, drafter: str, milliseconds: float, levels: int, *, at_most: bool = False
    ) -> None:
        cost = self._drafters.setdefault(drafter, DrafterStats()).cost
        if not at_most or not cost.covers(levels) or milliseconds < cost.at(levels):
            cost.learn(levels, milliseconds)

    def passed(self, rows: int, *, verify_ms: float, host_ms: float) -> None:
        if rows <= max(self.costs.verify_ms):
            self.costs.learn(rows, verify_ms=verify_ms, host_ms=host_ms)

    def learn(self, subject: Subject, tree: DraftTree, emitted: Sequence[int]) -> None:
        self._memory(subject).learn(tree, emitted)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def _memory(self, subject: Subject) -> _SequenceMemory:
        if subject.id not in self._sequences:
            stats = self._drafters.setdefault(subject.drafter, DrafterStats())
            self._sequences[subject.id] = _SequenceMemory(stats)
        return self._sequences[subject.id]
