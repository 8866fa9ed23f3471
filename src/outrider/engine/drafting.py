"""The engine's dealings with drafters: ask, check, cut, tell, and survive their faults.

A drafter that raises or breaks the protocol never harms a request: the sequences it was guessing
for go on without speculation, and every step record says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from outrider.core.grammar import Grammar
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, NodeBudget
from outrider.engine.budget import Budget, Subject
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidTree

log = logging.getLogger(__name__)

NO_DRAFTER = "no drafter"
NO_GUESS = "the drafter had no guess"
NOT_WORTH_IT = "guessing would not pay"
AT_THE_END = "the output ends with the next token"
UNGRAMMATICAL = "the grammar forbids every guess"


@dataclass(frozen=True)
class Guess:
    """What was offered for a sequence, what goes to the target, and why if that is nothing."""

    tree: DraftTree
    offered: DraftTree
    reason: str = ""


def check_tree(tree: DraftTree, *, root: int, budget: NodeBudget, vocab_size: int) -> None:
    """Hold a drafter to its word.

    Raises:
        InvalidTree: the root is not the last committed token, the budget is exceeded, or a token is
            not in the vocabulary.
    """
    if tree.tokens[0] != root:
        raise InvalidTree(f"the root is token {tree.tokens[0]}, the last committed token is {root}")
    if len(tree) - 1 > budget.nodes or max(tree.depths) > budget.depth:
        raise InvalidTree(
            f"{len(tree) - 1} nodes of depth {max(tree.depths)} exceed the budget of "
            f"{budget.nodes} nodes of depth {budget.depth}"
        )
    if not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
        raise InvalidTree(f"a guess lies outside the vocabulary of {vocab_size}")


def grammatical(tree: DraftTree, grammar: Grammar) -> DraftTree:
    """The tree without the guesses that the grammar forbids; they could never be accepted.

    A tree with `q` stays whole: a drawn node is never removed because of its value.
    """
    if tree.q or len(tree) == 1:
        return tree
    fitting: set[int] = set()
    for leaf in (node for node in range(1, len(tree)) if not tree.children(node)):
        fitting.update(tree.path(leaf)[: grammar.fits(tree.path_tokens(leaf))])
    return tree if len(fitting) == len(tree) - 1 else tree.keep(sorted(fitting))


class Drafting:
    """Runs the drafters of an engine."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        budget: Budget,
        vocab_size: int,
    ) -> None:
        self._drafters = drafters
        self._budget = budget
        self._vocab_size = vocab_size
        self._faults: dict[int, str] = {}
        self._asked: set[int] = set()  # ever
        self._lately: set[int] = set()  # in the step before
        self._now: set[int] = set()

    def guess(self, sequences: SequenceOf[Sequence], *, other_rows: int) -> list[Guess]:
        """One guess per sequence, cut to what pays."""
        self._lately, self._now = self._now, set()
        subjects = [_subject(s) for s in sequences]
        budgets = self._budget.limits(subjects, other_rows=other_rows)
        limits = [_within(b, s.most) for b, s in zip(budgets, sequences, strict=True)]
        begin = time.perf_counter()
        offered: dict[int, DraftTree] = {s.id: DraftTree.root_only(s.tokens[-1]) for s in sequences}
        allowed = [
            (sequence, limit)
            for sequence, limit in zip(sequences, limits, strict=True)
            if limit.nodes > 0 and limit.depth > 0 and sequence.id not in self._faults
        ]
        for name in dict.fromkeys(s.drafter for s, _ in allowed):
            offered.update(self._ask(name, [pair for pair in allowed if pair[0].drafter == name]))
        forbidden = self._obey_grammars([s for s, _ in allowed], offered)
        trees = [offered[s.id] for s in sequences]
        spent = (time.perf_counter() - begin) * 1000
        cut = self._budget.cut(subjects, trees, other_rows=other_rows, draft_ms=spent)
        return [
            Guess(tree, offer, self._reason(sequence, limit, offer, tree, forbidden))
            for sequence, limit, offer, tree in zip(sequences, limits, trees, cut, strict=True)
        ]

    def observe(self, drafter: str, commit: Commit) -> None:
        """Tell a drafter what is certain now."""
        if commit.sequence in self._faults:
            return
        try:
            self._drafters[drafter].observe([commit])
        except Exception as fault:
            self._disable(drafter, [commit.sequence], fault)

    def learn(self, sequence: Sequence, guess: Guess, emitted: SequenceOf[int]) -> None:
        """Let the budget know what became of a guess."""
        if len(guess.offered) > 1:
            self._budget.learn(_subject(sequence), guess.offered, emitted)

    def forget(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        self._budget.forget([sequence.id])
        self._faults.pop(sequence.id, None)
        self._asked.discard(sequence.id)
        try:
            self._drafters[sequence.drafter].forget([sequence.id])
        except Exception as fault:
            log.warning("drafter %s failed to forget: %s", sequence.drafter, fault)

    def _ask(
        self, name: str, pairs: SequenceOf[tuple[Sequence, NodeBudget]]
    ) -> dict[int, DraftTree]:
        """Trees by sequence id from one drafter; none where it fails."""
        views = [sequence.view() for sequence, _ in pairs]
        budgets = [limit for _, limit in pairs]
        begin = time.perf_counter()
        try:
            trees = self._drafters[name].propose(views, budgets)
            if len(trees) != len(views):
                raise InvalidTree(f"{len(trees)} trees for {len(views)} sequences")
            for tree, view, budget in zip(trees, views, budgets, strict=True):
                check_tree(tree, root=view.root, budget=budget, vocab_size=self._vocab_size)
                if not (tree.is_chain or self._drafters[name].needs.trees):
                    raise InvalidTree(f"drafter {name} says that it only makes chains")
        except Exception as fault:
            self._disable(name, [view.id for view in views], fault)
            return {}
        levels, spent = (
            sum(max(tree.depths) for tree in trees),
            (time.perf_counter() - begin) * 1000,
        )
        asked = {view.id for view in views}
        if asked <= self._asked:  # the first guess for a sequence reads its whole prompt
            self._budget.spent(name, spent, levels, at_most=not asked <= self._lately)
        self._asked |= asked
        self._now |= asked
        return {view.id: tree for view, tree in zip(views, trees, strict=True)}

    def _obey_grammars(
        self, sequences: SequenceOf[Sequence], offered: dict[int, DraftTree]
    ) -> set[int]:
        """Cut what grammars forbid; returns the sequences that lost every guess.

        A grammar that fails here fails again at the verdict, where it ends its own request.
        """
        lost = set()
        for sequence in sequences:
            tree = offered[sequence.id]
            if sequence.grammar is None or len(tree) == 1:
                continue
            try:
                offered[sequence.id] = grammatical(tree, sequence.grammar)
            except Exception as fault:
                log.warning("request %d: its grammar failed: %s", sequence.id, fault)
                continue
            if len(offered[sequence.id]) == 1:
                lost.add(sequence.id)
        return lost

    def _disable(self, name: str, sequences: SequenceOf[int], fault: Exception) -> None:
        log.warning(
            "drafter %s failed, %d sequences go on without it: %s", name, len(sequences), fault
        )
        for sequence in sequences:
            self._faults[sequence] = f"drafter fault: {fault}"

    def _reason(
        self,
        sequence: Sequence,
        limit: NodeBudget,
        offer: DraftTree,
        tree: DraftTree,
        forbidden: set[int],
    ) -> str:
        """Why ``tree`` holds no guess; empty where it holds one."""
        if len(tree) > 1:
            return ""
        if sequence.id in forbidden:
            return UNGRAMMATICAL
        if sequence.id in self._faults:
            return self._faults[sequence.id]
        if sequence.drafter == "none":
            return NO_DRAFTER
        if sequence.remaining <= 1:
            return AT_THE_END
        if limit.depth == 0 or len(offer) > 1:
            return NOT_WORTH_IT
        return NO_GUESS


def _within(budget: NodeBudget, most: NodeBudget | None) -> NodeBudget:
    """The budget, held to what the request's profile allows."""
    if most is None:
        return budget
    return replace(budget, nodes=min(budget.nodes, most.nodes), depth=min(budget.depth, most.depth))


def _subject(sequence: Sequence) -> Subject:
    return Subject(sequence.id, sequence.drafter, max(sequence.remaining - 1, 0))
