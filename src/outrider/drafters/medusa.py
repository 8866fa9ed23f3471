"""Medusa heads as a drafter: a sparse tree over the heads' likeliest tokens, in one go.

All guesses come from the last true state, so a draft costs one product per head. The tree is the
set of (head, rank) paths with the highest chance. Ranks have chances from two sources: how often
the rank was right on calibration data, where the head's files hold that (the published static
tree), else the heads' own probabilities. As for every drafter, the target decides: typical
acceptance, which changes the output law, is not here.

Source: Medusa, arXiv 2401.10774, section 2.1.2.

Shapes: F features, D width, K heads, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from outrider.core.sampling import Candidates, Subset, candidates
from outrider.core.tree import NO_PARENT, DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.drafters.growth import HOPELESS
from outrider.models.heads.medusa import MedusaModel
from outrider.models.target import Target

RANKS = 8  # tokens of a head that are considered


class MedusaDrafter:
    """Drafts with Medusa heads."""

    def __init__(
        self,
        model: MedusaModel,
        *,
        subset: Subset | None,
        accuracy: Sequence[Sequence[float]] | None = None,
        name: str = "medusa",
    ) -> None:
        """Put it together.

        Args:
            subset: the heads' draft vocabulary; `None` for all of the target's.
            accuracy: per head, how often its first, second, ... choice was right, given that the
                path so far was; the tree is then static.
        """
        self.name = name
        self._model = model
        self._subset = subset
        self._accuracy = accuracy
        self.needs = Needs(layers=model.features)
        self._states: dict[int, tuple[int, Tensor]] = {}  # committed tokens, newest state
        self._lengths: dict[int, int] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            length = self._lengths.get(commit.sequence, 0) + len(commit.tokens)
            self._lengths[commit.sequence] = length
            if commit.features is not None and len(commit.features):
                position = commit.features_from + len(commit.features)
                state = self._model.fuse(commit.features[-1:])
                self._states[commit.sequence] = (position, state)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)
            self._lengths.pop(sequence, None)

    def relative_cost(self, target: Target) -> float:
        """A whole draft in units of the target's pass: the ratio of weights read."""
        return self._model.weight_bytes / max(target.weight_bytes, 1)

    @torch.inference_mode()
    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        trees = [DraftTree.root_only(view.root) for view in views]
        able = [
            i
            for i, (view, budget) in enumerate(zip(views, budgets, strict=True))
            if self._ready(view) and min(budget.nodes, budget.depth) > 0
        ]
        if not able:
            return trees
        heads = min(self._model.config.medusa_heads, max(budgets[i].depth for i in able))
        states = torch.cat([self._states[views[i].id][1] for i in able])
        for i, logits_KW in zip(able, self._model.logits(states, heads), strict=True):
            trees[i] = self._tree(views[i], budgets[i], logits_KW)
        return trees

    def _ready(self, view: SequenceView) -> bool:
        """Is the newest state that of the token before the root?"""
        found = self._states.get(view.id)
        return found is not None and found[0] == len(view.tokens) - 1

    def _tree(self, view: SequenceView, budget: NodeBudget, logits_KW: Tensor) -> DraftTree:
        """The likeliest paths, best first; a path's chance is the product of its ranks'."""
        levels = [
            self._ranks(view, head, row) for head, row in enumerate(logits_KW[: budget.depth])
        ]
        tokens, parents, confidence = [view.root], [NO_PARENT], [1.0]
        heap: list[tuple[float, int, int, int]] = []  # -chance, parent, depth, rank

        def offer(parent: int, depth: int, rank: int, chance: float) -> None:
            if depth < len(levels) and rank < len(levels[depth].tokens):
                chance *= levels[depth].probabilities[rank]
                if chance >= HOPELESS:
                    heappush(heap, (-chance, parent, depth, rank))

        offer(0, 0, 0, 1.0)
        while heap and len(tokens) <= budget.nodes:
            minus, parent, depth, rank = heappop(heap)
            level = levels[depth]
            node, own = len(tokens), level.probabilities[rank]
            tokens.append(level.tokens[rank])
            parents.append(parent)
            confidence.append(own)
            offer(parent, depth, rank + 1, -minus / own)
            if tokens[node] not in view.ends:
                offer(node, depth + 1, 0, -minus)
        return DraftTree(tuple(tokens), tuple(parents), confidence=tuple(confidence))

    def _ranks(self, view: SequenceView, head: int, logits_W: Tensor) -> Candidates:
        """A head's likeliest tokens with their chances, best first."""
        found = candidates(
            logits_W,
            view.params,
            view.history(),
            stream=view.stream,
            position=len(view.tokens) + head,
            count=RANKS,
            subset=self._subset,
        )
        if self._accuracy is not None:
            chances = tuple(self._accuracy[head][: len(found.tokens)])
            return Candidates(found.tokens[: len(chances)], chances)
        order = sorted(range(len(found.tokens)), key=lambda i: -found.probabilities[i])
        return Candidates(
            tuple(found.tokens[i] for i in order), tuple(found.probabilities[i] for i in order)
        )
