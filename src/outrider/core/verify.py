"""Verification: from a tree, the target's distributions and randomness to a verdict.

Three pure functions, all exact: the law of the emitted tokens is the target's. They know nothing of
temperature, ends of text, caches or metrics. `p(node)` gives the target's distribution [V] after a
node; it is called for visited nodes only, so rows that do not matter are never computed.
`start` is the position of the token that follows the root. Rows are judged on the host by NumPy:
a row is too small to share among threads.

* `walk`  draws the target's own token at each node and follows the child that holds it. With keyed
          noise the emitted tokens are those of plain decoding, whatever was guessed.
* `reject` accepts with p/q and draws from the residual (Leviathan et al., arXiv 2211.17192; Chen et
          al., 2302.01318; several siblings: SpecInfer 2305.09781, without replacement 2402.14160).
* `block` judges a chain as a whole (Sun et al., arXiv 2403.10444, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.noise import Purpose, Source
from outrider.core.tree import DraftTree
from outrider.errors import InvalidTree

Rows = Callable[[int], Tensor]
Row = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes in path order (root excluded) and the token that follows them."""

    path: tuple[int, ...]
    next_token: int


class Rule(Protocol):
    """A verification rule: see the module's head for the arguments."""

    def __call__(self, tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict: ...


def walk(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Agreement: at every node, the target's draw decides. `q` is never read."""
    node = 0
    path: list[int] = []
    while True:
        position = start + len(path)
        [token] = source.sample(p(node), position=position, purpose=Purpose.TOKEN)
        child = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def _host(row_V: Tensor) -> Row:
    row: Row = row_V.detach().cpu().numpy()
    return row


def _one_hot(token: int, like_V: Row) -> Row:
    row = np.zeros_like(like_V)
    row[token] = 1
    return row


def _guessed_from(tree: DraftTree, node: int, like_V: Row) -> Row:
    """The row that the only child of ``node`` was drawn from; a one-hot where it was chosen."""
    q = tree.q.get(node)
    return _one_hot(tree.tokens[node + 1], like_V) if q is None else _host(q)


def _positive_part(weights_V: Row, fallback_V: Row) -> Row:
    """max(weights, 0) normalised, or ``fallback`` where nothing is left (0/0)."""
    residual = np.maximum(weights_V, 0)
    mass = residual.sum()
    return residual / mass if mass > 0 else fallback_V


def _without(q_V: Row, token: int) -> Row:
    """q after ``token`` was drawn from it without replacement."""
    rest = q_V.copy()
    rest[token] = 0
    return _positive_part(rest, q_V)


def _token(weights_V: Row, source: Source, *, position: int) -> int:
    weights = torch.from_numpy(weights_V)
    [token] = source.sample(weights, position=position, purpose=Purpose.TOKEN)
    return token


def reject(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Acceptance by p/q with residuals, sibling after sibling.

    A node whose parent has no `q` row counts as drawn from a one-hot: it is accepted with
    probability p and struck from p otherwise.
    """
    node = 0
    path: list[int] = []
    while True:
        position, taken, r = start + len(path), None, _host(p(node))
        shared_q = _host(tree.q[node]) if node in tree.q else None
        for child in tree.children(node):
            token = tree.tokens[child]
            q = _one_hot(token, r) if shared_q is None else shared_q
            if source.accept(float(r[token]), float(q[token]), position=position, index=child):
                taken = child
                break
            r = _positive_part(r - q, r)
            if shared_q is not None and tree.without_replacement:
                shared_q = _without(shared_q, token)
        if taken is None:
            return Verdict(tuple(path), _token(r, source, position=position))
        path.append(taken)
        node = taken


def block(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Block verification of a chain: never accepts less than `reject` in expectation.

    Raises:
        InvalidTree: the tree is not a chain.
    """
    if not tree.is_chain:
        raise InvalidTree("block verification needs a chain; use walk or reject for trees")
    depth = len(tree) - 1
    rows = [_host(p(node)) for node in range(depth + 1)]
    kept, survival = 0, [1.0]
    for node in range(1, depth + 1):
        token, parent = tree.tokens[node], rows[node - 1]
        q = _guessed_from(tree, node - 1, parent)
        ratio = float(parent[token]) / float(q[token]) if q[token] > 0 else 0.0
        survival.append(min(1.0, survival[-1] * ratio))
        if _block_accepts(tree, rows, survival, source, node=node, start=start):
            kept = node
    r = rows[kept]
    if kept < depth:
        r = _positive_part(survival[kept] * r - _guessed_from(tree, kept, r), r)
    return Verdict(tuple(range(1, kept + 1)), _token(r, source, position=start + kept))


def _block_accepts(
    tree: DraftTree,
    rows: list[Row],
    survival: list[float],
    source: Source,
    *,
    node: int,
    start: int,
) -> bool:
    """The decision eta <= h for the sub-chain that ends at ``node``."""
    position = start + node - 1
    if node == len(tree) - 1:
        return source.accept(survival[node], 1.0, position=position, index=node)
    q = _guessed_from(tree, node, rows[node])
    left = float(np.maximum(survival[node] * rows[node] - q, 0).sum())
    return source.accept(left, left + (1 - survival[node]), position=position, index=node)


RULES: dict[str, Rule] = {"walk": walk, "reject": reject, "block": block}
FOR_CHAINS = frozenset({"block"})  # rules that cannot judge a tree that branches
