"""Growing a draft tree level by level: shared by every drafter that runs a model.

`Growth` is the tree of one sequence under construction. A drafter asks which rows its next pass
must carry (`pass_tree`), hands back their logits (`grow`), and takes the result (`tree`). Nodes are
expanded best first, and the tree that is handed out holds the best of all nodes that were made.

Source: EAGLE-2, arXiv 2406.16858 (expand the k likeliest nodes of a level, then rerank all).

Shapes: N rows of the pass's tree, W the drafter's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.core.noise import Noise, Purpose
from outrider.core.sampling import Subset, candidates, draw, is_bare
from outrider.core.tree import NO_PARENT, DraftTree
from outrider.drafters.base import NodeBudget, SequenceView
from outrider.errors import InvalidParameter

HOPELESS = 0.004  # a path this unlikely is never worth a row of the target


@dataclass(frozen=True)
class TreeShape:
    """Attributes:
    branching: children per expanded node; 1 drafts a chain.
    beam: nodes expanded per level.
    """

    branching: int = 4
    beam: int = 4

    def __post_init__(self) -> None:
        for name in ("branching", "beam"):
            if getattr(self, name) < 1:
                raise InvalidParameter(f"tree: {name} is {getattr(self, name)}; use 1 or more")


class Growth:
    """A tree under construction for one view.

    Attributes:
        inner: nodes that have been expanded or are next, the root first; a pass carries these.
        frontier: those of them that are next.
    """

    def __init__(self, view: SequenceView, budget: NodeBudget, shape: TreeShape) -> None:
        self.view = view
        self.budget = budget
        self.shape = shape
        self.tokens = [view.root]
        self.parents = [NO_PARENT]
        self.depths = [0]
        self.chances = [1.0]  # of the whole path, by the drafter's own probabilities
        self.confidence = [1.0]
        self.q: dict[int, Tensor] = {}
        self.inner = [0]
        self.frontier = [0] if min(budget.nodes, budget.depth) > 0 else []

    @property
    def wants_more(self) -> bool:
        return bool(self.frontier)

    @property
    def is_bare(self) -> bool:
        """May a twin that knows nothing of penalties, truncation and `q` grow this tree?"""
        view = self.view
        noise = isinstance(view.stream.source, Noise) and view.stream.purpose is Purpose.TOKEN
        return noise and is_bare(view.params, view.history())

    def noise_keys(self) -> tuple[int, ...]:
        """The keys of the noise of each depth; none at temperature 0."""
        stream = self.view.stream
        if self.view.params.temperature == 0 or not isinstance(stream.source, Noise):
            return ()
        first = len(self.view.tokens)
        depths = range(self.budget.depth)
        return tuple(stream.source.key(first + depth, stream.purpose) for depth in depths)

    def pass_tree(self) -> DraftTree:
        """The nodes that the next pass must carry."""
        row = {node: index for index, node in enumerate(self.inner)}
        parents = [row[self.parents[node]] if node else NO_PARENT for node in self.inner]
        return DraftTree(tuple(self.tokens[node] for node in self.inner), tuple(parents))

    def parent_rows(self) -> list[int]:
        """For each row of `pass_tree` but the root, its parent's row."""
        row = {node: index for index, node in enumerate(self.inner)}
        return [row[self.parents[node]] for node in self.inner[1:]]

    def grow(self, logits_NW: Tensor, subset: Subset | None = None) -> None:
        """Give the frontier's nodes children, from the logits of the pass's rows."""
        row = {node: index for index, node in enumerate(self.inner)}
        children: list[int] = []
        for node in self.frontier:
            children += self._children(node, logits_NW[row[node]], subset)
        self.frontier = self._promising(children)
        self.inner += self.frontier

    def fill(
        self, tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float]
    ) -> None:
        """Take nodes that were grown elsewhere by the same rule; nothing is left to grow."""
        nodes = zip(tokens[1:], parents[1:], confidence[1:], strict=True)
        for token, parent, chance in nodes:
            self._add(parent, token, chance)
        self.frontier = []

    def tree(self) -> DraftTree:
        """The best nodes within the budget; parents come first, since no child beats its own."""
        order = sorted(range(1, len(self.tokens)), key=lambda n: (-self.chances[n], n))
        kept = [0, *order[: self.budget.nodes]]
        place = {node: index for index, node in enumerate(kept)}
        return DraftTree(
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] if node else NO_PARENT for node in kept),
            q={place[node]: q for node, q in self.q.items() if node in place},
            confidence=tuple(self.confidence[node] for node in kept),
        )

    def _add(self, parent: int, token: int, confidence: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.confidence.append(confidence)
        self.chances.append(self.chances[parent] * confidence)
        return len(self.tokens) - 1

    def _path(self, node: int) -> tuple[int, ...]:
        path: list[int] = []
        while node > 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(path))

    def _children(self, node: int, logits_W: Tensor, subset: Subset | None) -> list[int]:
        view = self.view
        history = view.history(self._path(node))
        position = len(view.tokens) + self.depths[node]
        if self.shape.branching == 1 and view.stream.purpose is Purpose.DRAFT:
            # `reject` and `block` weigh a drawn guess by the distribution that it came from
            row = logits_W if subset is None else subset.widen(logits_W)
            drawn = draw(row, view.params, history, stream=view.stream, position=position)
            self.q[node] = drawn.q
            [token] = drawn.tokens
            return [self._add(node, token, float(drawn.q[token]))]
        found = candidates(
            logits_W,
            view.params,
            history,
            stream=view.stream,
            position=position,
            count=self.shape.branching,
            subset=subset,
        )
        pairs = zip(found.tokens, found.probabilities, strict=True)
        return [self._add(node, token, chance) for token, chance in pairs]

    def _promising(self, children: Sequence[int]) -> list[int]:
        """Which children to expand: the best, where their own children could still be kept."""
        if not children or self.depths[children[0]] >= self.budget.depth:
            return []
        edge = max(HOPELESS, self.budget.least) if self.shape.branching > 1 else 0.0
        if len(self.chances) > self.budget.nodes:
            ordered = np.sort(self.chances[1:])[::-1]
            edge = max(edge, float(ordered[self.budget.nodes - 1]))
        able = [
            node
            for node in children
            if self.chances[node] >= edge and self.tokens[node] not in self.view.ends
        ]
        return sorted(able, key=lambda n: (-self.chances[n], n))[: self.shape.beam]
