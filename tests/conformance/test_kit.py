"""Shipped drafters keep the laws; drafters broken on purpose are caught, each by its law."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from outrider.core.sampling import draw
from outrider.core.tree import DraftTree
from outrider.drafters import conformance as kit
from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.ngram import NgramConfig, NgramDrafter
from outrider.drafters.none import NoneDrafter
from outrider.drafters.replay import Recording, ReplayDrafter
from outrider.drafters.suffix import SuffixConfig, SuffixDrafter
from outrider.errors import InvalidParameter
from outrider.testing.fakes import TableTarget

VOCAB = 24
TARGET = TableTarget(vocab_size=VOCAB)
TEXTS = kit.repeating_texts(vocab_size=VOCAB)


def replay() -> ReplayDrafter:
    return ReplayDrafter(Recording.of(text.prompt, text.output) for text in TEXTS)


def draft_model(branching: int) -> DraftModelDrafter:
    config = DraftModelConfig(branching=branching, sequences=16, length=400)
    return DraftModelDrafter(TableTarget(vocab_size=VOCAB, ripple=0.0), config)


def features(tokens: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor:
    rows = [TARGET.exact_features(tokens[: i + 1], layers) for i in range(len(tokens))]
    return torch.stack(rows) if rows else torch.empty(0, len(layers), TARGET.width)


class TableDrafter:
    """Draws from the table target itself, with honest `q`; the base of the mutants below."""

    name = "table"

    def __init__(self) -> None:
        self.needs = Needs()
        self.tokens: dict[int, list[int]] = {}
        self.features: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self.tokens.setdefault(commit.sequence, []).extend(commit.tokens)
            if commit.features is not None:
                rows = self.features.setdefault(commit.sequence, [])
                assert len(rows) == commit.features_from
                rows.extend(commit.features)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self.tokens.pop(sequence, None)
            self.features.pop(sequence, None)

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [self.guess(v, b) for v, b in zip(views, budgets, strict=True)]

    def logits(self, view: SequenceView, path: tuple[int, ...]) -> torch.Tensor:
        return TARGET.exact([*self.tokens.get(view.id, []), *path])

    def guess(self, view: SequenceView, budget: NodeBudget) -> DraftTree:
        """A chain of draws with q, and as last depth two draws without replacement."""
        tokens, rows = [view.root], {}
        depth = min(budget.nodes - 1, budget.depth, 3)
        if depth < 1 or view.id not in self.tokens:
            return DraftTree.root_only(view.root)
        for level in range(depth):
            path = tuple(tokens[1:])
            drawn = draw(
                self.logits(view, path),
                view.params,
                view.history(path),
                stream=view.stream,
                position=len(view.tokens) + level,
                count=2 if level == depth - 1 else 1,
            )
            rows[level] = drawn.q
            tokens += drawn.tokens
        last = [depth - 1] * (len(tokens) - depth)
        parents = (-1, *range(depth - 1), *last)
        return DraftTree(tuple(tokens), parents, q=rows, without_replacement=True)


class FeatureDrafter(TableDrafter):
    """Guesses from the newest feature."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs(layers=(1, 3))

    def guess(self, view: SequenceView, budget: NodeBudget) -> DraftTree:
        rows = self.features.get(view.id, [])
        if min(budget.nodes, budget.depth) < 1 or len(rows) != len(view.tokens) - 1:
            return DraftTree.root_only(view.root)
        token = int(rows[-1].abs().sum() * 1000 + len(rows)) % VOCAB
        return DraftTree.chain([view.root, token])


MAKERS: dict[str, Callable[[], Drafter]] = {
    "none": NoneDrafter,
    "ngram": NgramDrafter,
    "ngram-1": lambda: NgramDrafter(NgramConfig(min_match=1)),
    "suffix": SuffixDrafter,
    "suffix-tree": lambda: SuffixDrafter(SuffixConfig(shape="tree", factor=4.0, offset=2.0)),
    "replay": replay,
    "draft-chain": lambda: draft_model(1),
    "draft-tree": lambda: draft_model(3),
    "hybrid": lambda: HybridDrafter([Member(SuffixDrafter()), Member(draft_model(1), cost=0.1)]),
    "hybrid-tree": lambda: HybridDrafter(
        [Member(SuffixDrafter()), Member(draft_model(2), cost=0.1)]
    ),
    "table": TableDrafter,
    "features": FeatureDrafter,
}


@pytest.mark.parametrize("law", kit.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("maker", MAKERS)
def test_law(maker: str, law: kit.Law) -> None:
    law(kit.Bench(MAKERS[maker], VOCAB, features, texts=TEXTS))


@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "none"])
def test_the_laws_are_not_kept_by_silence(maker: str) -> None:
    drive = kit.Bench(MAKERS[maker], VOCAB, features, texts=TEXTS).run()
    guessed = 0
    for i, text in enumerate(TEXTS):
        for length in range(len(text.prompt), len(text.tokens)):
            drive.advance(i, text, length)
            guessed += len(drive.propose(i, setting=1)) - 1
    assert guessed > 40


def test_all_laws_at_once_and_missing_features() -> None:
    kit.check_drafter(NgramDrafter, vocab_size=VOCAB)
    with pytest.raises(InvalidParameter, match="needs layers"):
        kit.check_drafter(FeatureDrafter, vocab_size=VOCAB)


# Each mutant breaks one thing. The law it is registered for must catch it.


class WrongRoot(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree((0, *t.tokens[1:]), t.parents) for t in super().propose(views, budgets)]


class OutsideVocabulary(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree.chain([v.root, VOCAB]) for v in views]


class Overconfident(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree.chain([v.root, 1], confidence=[1.0, 1.5]) for v in views]


class EqualSiblings(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree((v.root, 1, 1), (-1, 0, 0)) for v in views]


class AlwaysOne(NgramDrafter):
    """Guesses a token even for a budget of none."""

    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return super().propose(
            views, [NodeBudget(max(1, b.nodes), max(1, b.depth)) for b in budgets]
        )


class TooDeep(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return super().propose(views, [NodeBudget(b.nodes, b.nodes) for b in budgets])


class Drawn(TableDrafter):
    """A mutant of the drawing drafter changes its finished tree."""

    def change(self, tree: DraftTree) -> DraftTree:
        raise NotImplementedError

    def guess(self, view: SequenceView, budget: NodeBudget) -> DraftTree:
        tree = super().guess(view, budget)
        return self.change(tree) if tree.q else tree


class SharpenedQ(Drawn):
    """Records another row than it drew from."""

    def change(self, tree: DraftTree) -> DraftTree:
        rows = {n: row.square() / row.square().sum() for n, row in tree.q.items()}
        return DraftTree(tree.tokens, tree.parents, q=rows, without_replacement=True)


class SwappedToken(Drawn):
    """Replaces a drawn token and keeps its row."""

    def change(self, tree: DraftTree) -> DraftTree:
        tokens = (*tree.tokens[:-1], (tree.tokens[-1] + 1) % VOCAB)
        return DraftTree(tokens, tree.parents, q=tree.q, without_replacement=True)


class DropsUnlikely(Drawn):
    """Removes a drawn node because of its value (law 2)."""

    def change(self, tree: DraftTree) -> DraftTree:
        last = len(tree) - 1
        if float(tree.q[tree.parents[last]][tree.tokens[last]]) > 0.2:
            return tree
        return DraftTree(tree.tokens[:-1], tree.parents[:-1], q=tree.q, without_replacement=True)


class DropsRow(Drawn):
    """Leaves a row out, though its child was drawn."""

    def change(self, tree: DraftTree) -> DraftTree:
        rows = {n: row for n, row in tree.q.items() if n}
        return DraftTree(tree.tokens, tree.parents, q=rows, without_replacement=True)


class SilentAboutReplacement(Drawn):
    def change(self, tree: DraftTree) -> DraftTree:
        return DraftTree(tree.tokens, tree.parents, q=tree.q)


class Unnormalised(Drawn):
    def change(self, tree: DraftTree) -> DraftTree:
        rows = {n: row * 2 for n, row in tree.q.items()}
        return DraftTree(tree.tokens, tree.parents, q=rows, without_replacement=True)


class OwnDice(NgramDrafter):
    """Guesses with randomness that nobody gave it."""

    dice = random.Random(0)

    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree.chain([v.root, self.dice.randrange(VOCAB)]) for v in views]


class Learns(NgramDrafter):
    """Being asked changes it."""

    asked = 0

    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        self.asked += 1
        return [DraftTree.chain([v.root, self.asked % VOCAB]) for v in views]


class CountsCommits(NgramDrafter):
    """Its state depends on how the tokens were cut into commits."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: dict[int, int] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self.commits[commit.sequence] = self.commits.get(commit.sequence, 0) + 1

    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree.chain([v.root, self.commits.get(v.id, 0) % VOCAB]) for v in views]


class LosesFirst(NgramDrafter):
    """Forgets a token at every commit border."""

    def observe(self, commits: Sequence[Commit]) -> None:
        for c in commits:
            index = self._indexes.get(c.sequence)
            super().observe([c])
            if index and c.tokens:
                index._newest.pop(tuple(index.tokens[-3:-1]), None)


class NeverForgets(NgramDrafter):
    def forget(self, sequences: Sequence[int]) -> None:
        pass


class ForgetsAll(NgramDrafter):
    def forget(self, sequences: Sequence[int]) -> None:
        self._indexes.clear()


class KeepsOldIndex(TableDrafter):
    """Drops the state that it counts, and finds the old one when the id returns."""

    def __init__(self) -> None:
        super().__init__()
        self.old: dict[int, list[int]] = {}

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            if sequence in self.tokens:
                self.old[sequence] = self.tokens.pop(sequence)

    def logits(self, view: SequenceView, path: tuple[int, ...]) -> torch.Tensor:
        past = [*self.old.get(view.id, []), *self.tokens[view.id]]
        return TARGET.exact([*past, *path])


class LooksAtNeighbours(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return [DraftTree.chain([v.root, len(views) % VOCAB]) for v in views]


class MindsTheOrder(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        trees = super().propose(views, budgets)
        return sorted(trees, key=lambda t: t.tokens)


class RefusesStrangers(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        for view in views:
            if view.id not in self._indexes:
                raise KeyError(view.id)
        return super().propose(views, budgets)


class AnswersNobody(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        return super().propose(views, budgets) or [DraftTree.root_only(0)]


class OneStoreForAll(SuffixDrafter):
    """Mixes tenants."""

    def observe(self, commits: Sequence[Commit]) -> None:
        super().observe([Commit(c.sequence, c.tokens, "all") for c in commits])


class MovesTorch(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        torch.rand(1)
        return super().propose(views, budgets)


class ChangesTokens(NgramDrafter):
    def propose(self, views, budgets):  # type: ignore[no-untyped-def]
        trees = super().propose(views, budgets)
        for view in views:
            if isinstance(view.tokens, list):
                view.tokens.append(0)
        return trees


MUTANTS: list[tuple[type, kit.Law]] = [
    (WrongRoot, kit.trees_are_lawful),
    (OutsideVocabulary, kit.trees_are_lawful),
    (Overconfident, kit.trees_are_lawful),
    (EqualSiblings, kit.trees_are_lawful),
    (AlwaysOne, kit.budgets_are_kept),
    (TooDeep, kit.budgets_are_kept),
    (SharpenedQ, kit.q_is_honest),
    (SwappedToken, kit.q_is_honest),
    (DropsUnlikely, kit.q_is_honest),
    (DropsRow, kit.q_is_honest),
    (SilentAboutReplacement, kit.q_is_honest),
    (Unnormalised, kit.q_is_honest),
    (OwnDice, kit.proposals_repeat),
    (Learns, kit.proposals_repeat),
    (CountsCommits, kit.chunks_do_not_matter),
    (LosesFirst, kit.chunks_do_not_matter),
    (NeverForgets, kit.forgetting_frees),
    (KeepsOldIndex, kit.forgetting_frees),
    (LooksAtNeighbours, kit.neighbours_do_not_matter),
    (MindsTheOrder, kit.neighbours_do_not_matter),
    (RefusesStrangers, kit.strangers_are_served),
    (AnswersNobody, kit.strangers_are_served),
    (ForgetsAll, kit.sequences_may_end_any_time),
    (OneStoreForAll, kit.tenants_do_not_mix),
    (MovesTorch, kit.the_world_is_left_alone),
    (ChangesTokens, kit.the_world_is_left_alone),
]


@pytest.mark.parametrize(("mutant", "law"), MUTANTS, ids=lambda x: x.__name__)
def test_each_mutant_is_caught(mutant: type, law: kit.Law) -> None:
    with pytest.raises(kit.LawBroken, match="^" + law.__name__.replace("_", " ")):
        law(kit.Bench(mutant, VOCAB, features, texts=TEXTS))


def test_every_law_has_a_mutant() -> None:
    assert {law for _, law in MUTANTS} == set(kit.LAWS)
