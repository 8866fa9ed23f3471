"""The draft tree: what a drafter guesses and a verifier walks.

One representation for everything: plain decoding is a tree of one node, a chain is a tree whose
nodes have one child each, Medusa and EAGLE give wider ones. The tree knows tokens and ancestry and
nothing of caches, masks of a particular kernel, or sampling.

Shapes: N nodes (the root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.errors import InvalidTree

NO_PARENT = -1


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Guesses that hang from the last committed token.

    Attributes:
        tokens: N token ids. Node 0 is the *root*: the last committed token, whose logits the
            target has not computed yet. Nodes 1.. are guesses.
        parents: N parent indices, ``parents[0] == -1`` and ``parents[i] < i``.
        q: optional rows [V], keyed by the *parent* node whose children were drawn from them, in
            sibling order. A missing row says that the children were chosen without randomness
            of their own: as a function of the context (and of noise the verifier does not use).
        without_replacement: siblings were drawn one after the other without replacement;
            otherwise siblings that share a row are independent draws.
        confidence: optional N estimates of "accepted, given that the parent is". They size trees
            and are never used as ``q``; the root's entry is 1.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: Mapping[int, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    without_replacement: bool = False
    confidence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise InvalidTree(
                f"a tree needs one parent per token and at least a root, "
                f"got {len(self.tokens)} tokens and {len(self.parents)} parents"
            )
        if self.parents[0] != NO_PARENT:
            raise InvalidTree(f"the root's parent is {self.parents[0]}, it must be {NO_PARENT}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise InvalidTree(f"node {node} has parent {parent}; parents come before children")
        if strange := [node for node in self.q if not 0 <= node < len(self.tokens)]:
            raise InvalidTree(f"q rows hang from nodes {strange}; the tree has {len(self.tokens)}")
        if self.confidence is not None and len(self.confidence) != len(self.tokens):
            raise InvalidTree(
                f"{len(self.confidence)} confidences for {len(self.tokens)} nodes; give one each"
            )

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """The tree of plain decoding: the root and no guess."""
        return cls((token,), (NO_PARENT,))

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        *,
        q: Mapping[int, Tensor] | None = None,
        confidence: Sequence[float] | None = None,
    ) -> DraftTree:
        """A chain: ``tokens[0]`` is the root, each further token the child of the one before."""
        return cls(
            tuple(tokens),
            tuple(range(NO_PARENT, len(tokens) - 1)),
            q=MappingProxyType(dict(q or {})),
            confidence=None if confidence is None else tuple(confidence),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """N depths; the root's is 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(c) for c in children)

    def children(self, node: int) -> tuple[int, ...]:
        """The children of ``node`` in sibling order."""
        return self._children[node]

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to ``node``; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The guessed tokens on the way from the root (exclusive) to ``node``."""
        return tuple(self.tokens[n] for n in self.path(node))

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool [N, N]: entry (i, j) says that j lies on the path from the root to i, i included."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def keep(self, nodes: Iterable[int]) -> DraftTree:
        """The sub-tree of ``nodes`` (the root is always kept).

        Refused where it would remove a drawn node because of its value (law 2): a tree with
        ``q`` may only lose whole depths.

        Raises:
            InvalidTree: a node is kept without its parent or does not exist, or a tree with ``q``
                loses single nodes.
        """
        kept = sorted({0, *nodes})
        if kept[0] < 0 or kept[-1] >= len(self):
            raise InvalidTree(f"cannot keep nodes {kept} of a tree of {len(self)}")
        new_index = {node: i for i, node in enumerate(kept)}
        if self.q:
            depth = max(self.depths[n] for n in kept)
            if len(kept) != sum(d <= depth for d in self.depths):
                raise InvalidTree("drawn nodes (with q) may be cut by depth only, never one by one")
        try:
            parents = tuple(NO_PARENT if n == 0 else new_index[self.parents[n]] for n in kept)
        except KeyError as missing:
            raise InvalidTree(f"node {missing} is dropped while a child of it is kept") from None
        rows = {new_index[n]: row for n, row in self.q.items() if n in new_index}
        return DraftTree(
            tuple(self.tokens[n] for n in kept),
            parents,
            q=MappingProxyType(rows),
            without_replacement=self.without_replacement,
            confidence=None if self.confidence is None else tuple(self.confidence[n] for n in kept),
        )

    def cut(self, *, nodes: int, depth: int) -> DraftTree:
        """The tree within ``nodes`` guesses and ``depth``, dropping the deepest first."""
        if len(self) - 1 <= nodes and max(self.depths) <= depth:
            return self
        while depth > 0 and sum(0 < d <= depth for d in self.depths) > nodes and self.q:
            depth -= 1
        within = [n for n in range(len(self)) if self.depths[n] <= depth]
        if not self.q:
            within = sorted(within, key=lambda n: (self.depths[n], n))[: nodes + 1]
        return self.keep(within)
