"""Known wrong ways to draft and to verify. Each must fail the laws; see `test_mutants.py`.

The ones that come from a paper's or a project's mistake say so. A mutant of a rule has the rule's
signature; a mutant of a drafter gives a tree for a table ``q`` and a source.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from enumerate_law import Table, drawn
from torch import Tensor

from outrider.core.noise import Purpose, Source
from outrider.core.tree import DraftTree
from outrider.core.verify import Rows, Verdict

Chance = Callable[[float, float], tuple[float, float]]
Residual = Callable[[Tensor, Tensor, int], Tensor]


def _normalised(weights_V: Tensor) -> Tensor:
    weights_V = weights_V.clamp(min=0)
    return weights_V / weights_V.sum()


def _struck(row_V: Tensor, token: int) -> Tensor:
    rest = row_V.clone()
    rest[token] = 0
    return _normalised(rest)


# ---- Verifiers of a chain ----


def _chain(
    tree: DraftTree, p: Rows, source: Source, start: int, chance: Chance, residual: Residual
) -> Verdict:
    path: list[int] = []
    for node in range(1, len(tree)):
        position, token, r, q = start + node - 1, tree.tokens[node], p(node - 1), tree.q[node - 1]
        if not source.accept(
            *chance(float(r[token]), float(q[token])), position=position, index=node
        ):
            r = residual(r, q, token)
            break
        path.append(node)
    else:
        r = p(len(tree) - 1)
    [token] = source.sample(r, position=start + len(path), purpose=Purpose.TOKEN)
    return Verdict(tuple(path), token)


def strikes_only_the_token(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Accepts by p/q, but the residual only loses the rejected token (xLLM PR 2175)."""
    return _chain(tree, p, source, start, lambda p, q: (p, q), lambda r, q, t: _struck(r, t))


def swaps_p_and_q(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Accepts by q/p."""
    return _chain(tree, p, source, start, lambda p, q: (q, p), lambda r, q, t: _normalised(r - q))


def swaps_the_residual(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Draws the correction from q - p."""
    return _chain(tree, p, source, start, lambda p, q: (p, q), lambda r, q, t: _normalised(q - r))


def keeps_p_after_rejection(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Draws the correction from p itself."""
    return _chain(tree, p, source, start, lambda p, q: (p, q), lambda r, q, t: r)


def stale_row_at_the_end(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """All accepted, but the token that follows is drawn from the row before."""

    def rows(node: int) -> Tensor:
        return p(max(0, node - 1)) if node == len(tree) - 1 else p(node)

    return _chain(
        tree, rows, source, start, lambda p, q: (p, q), lambda r, q, t: _normalised(r - q)
    )


def repeats_the_last_token(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """All accepted, and instead of a token that follows the last guess is given once more."""
    verdict = _chain(
        tree, p, source, start, lambda p, q: (p, q), lambda r, q, t: _normalised(r - q)
    )
    if len(verdict.path) == len(tree) - 1 > 0:
        return Verdict(verdict.path, tree.tokens[-1])
    return verdict


def rejects_if_not_the_likeliest(
    tree: DraftTree, p: Rows, source: Source, *, start: int
) -> Verdict:
    """Verifies greedily whatever the temperature (SGLang PR 31214)."""
    greedy = [torch.eye(len(p(n))).double()[p(n).argmax()] for n in range(len(tree))]
    return _chain(
        tree,
        greedy.__getitem__,
        source,
        start,
        lambda p, q: (p, 1.0),
        lambda r, q, t: r,
    )


# ---- Verifiers of siblings ----


def siblings(
    tree: DraftTree, p: Rows, source: Source, *, start: int, strike: bool, residual: bool
) -> Verdict:
    """Recursive rejection of the root's children with one part left out."""
    r, q = p(0), tree.q[0]
    for child in tree.children(0):
        token = tree.tokens[child]
        if source.accept(float(r[token]), float(q[token]), position=start, index=child):
            [last] = source.sample(p(child), position=start + 1, purpose=Purpose.TOKEN)
            return Verdict((child,), last)
        if residual and (r - q).clamp(min=0).sum() > 0:
            r = _normalised(r - q)
        if strike and float(q.sum() - q[token]) > 0:
            q = _struck(q, token)
    [last] = source.sample(r, position=start, purpose=Purpose.TOKEN)
    return Verdict((), last)


# ---- Block verification gone wrong (vllm-ascend 7807, 7808) ----


def _block(
    tree: DraftTree, p: Rows, source: Source, start: int, *, early_break: bool, plain: bool
) -> Verdict:
    depth, kept, survival = len(tree) - 1, 0, [1.0]
    for node in range(1, depth + 1):
        token, row, q = tree.tokens[node], p(node - 1), tree.q[node - 1]
        survival.append(min(1.0, survival[-1] * float(row[token]) / float(q[token])))
        s = survival[-1]
        left = s if node == depth else float((s * p(node) - tree.q[node]).clamp(min=0).sum())
        most = 1.0 if node == depth else left + (1 - s)
        if source.accept(left, most, position=start + node - 1, index=node):
            kept = node
        elif early_break:
            break
    r = p(kept)
    if kept < depth:
        rest = ((1.0 if plain else survival[kept]) * r - tree.q[kept]).clamp(min=0)
        r = rest / rest.sum() if rest.sum() > 0 else r
    [token] = source.sample(r, position=start + kept, purpose=Purpose.TOKEN)
    return Verdict(tuple(range(1, kept + 1)), token)


def block_breaks_early(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Stops at the first sub-block that is not accepted."""
    return _block(tree, p, source, start, early_break=True, plain=False)


def block_with_token_residual(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Corrects with max(p - q, 0) instead of max(survival * p - q, 0)."""
    return _block(tree, p, source, start, early_break=False, plain=True)


# ---- Walks with the wrong noise ----


def walks_on_one_position(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Uses the root's noise at every depth."""
    return _walk(tree, p, source, lambda depth: start)


def walks_one_position_late(tree: DraftTree, p: Rows, source: Source, *, start: int) -> Verdict:
    """Uses the noise of the position after, below the root."""
    return _walk(tree, p, source, lambda depth: start + depth + (depth > 0))


def _walk(tree: DraftTree, p: Rows, source: Source, position: Callable[[int], int]) -> Verdict:
    node = 0
    path: list[int] = []
    while True:
        [token] = source.sample(p(node), position=position(len(path)), purpose=Purpose.TOKEN)
        child = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


# ---- Drafters ----


def claims_softmax_for_argmax(q: Table, source: Source) -> DraftTree:
    """A chain of the likeliest tokens with the soft q (transformers PR 33534)."""
    tokens: tuple[int, ...] = ()
    rows = {}
    for node in range(2):
        rows[node] = q(tokens)
        tokens = (*tokens, int(rows[node].argmax()))
    return DraftTree.chain((0, *tokens), q=rows)


def claims_softmax_for_top_k(q: Table, source: Source) -> DraftTree:
    """The two likeliest tokens as siblings, said to be drawn from q."""
    best = q(()).argsort(descending=True)[:2].tolist()
    return DraftTree((0, *best), (-1, 0, 0), q={0: q(())})


def keeps_the_likelier_of_two(q: Table, source: Source) -> DraftTree:
    """Draws two, keeps the one with more q: pruning by confidence after the draw."""
    tree = drawn((-1, 0, 0), q, source, without_replacement=False)
    best = max(tree.tokens[1:], key=lambda token: float(q(())[token]))
    return DraftTree.chain((0, best), q={0: q(())})


def hides_its_truncation(q: Table, source: Source) -> DraftTree:
    """Draws from the top 2 of q and records q as it was (transformers 47932)."""
    row = q(())
    best = row.argsort(descending=True)[:2]
    kept = torch.zeros_like(row)
    kept[best] = row[best]
    [token] = source.sample(kept, position=1, purpose=Purpose.DRAFT)
    return DraftTree.chain((0, token), q={0: row})


def records_its_truncation(q: Table, source: Source) -> DraftTree:
    """As `hides_its_truncation`, but honest: the control."""
    row = q(())
    best = row.argsort(descending=True)[:2]
    kept = torch.zeros_like(row)
    kept[best] = row[best]
    [token] = source.sample(kept, position=1, purpose=Purpose.DRAFT)
    return DraftTree.chain((0, token), q={0: kept / kept.sum()})


def drops_unlikely_draws(q: Table, source: Source) -> DraftTree:
    """Drops a drawn token because its q is low."""
    tree = drawn((-1, 0), q, source, without_replacement=False)
    return tree if float(q(())[tree.tokens[1]]) >= 0.3 else DraftTree.root_only(0)


def stops_after_unlikely_draws(q: Table, source: Source) -> DraftTree:
    """Keeps a drawn token whose q is low and stops after it: the control."""
    tree = drawn((-1, 0, 1), q, source, without_replacement=False)
    return tree if float(q(())[tree.tokens[1]]) >= 0.3 else tree.keep([1])


def drops_repeated_siblings(q: Table, source: Source) -> DraftTree:
    """Two draws from q, of which an equal pair is given once; harmless only without q."""
    tree = drawn((-1, 0, 0), q, source, without_replacement=False)
    if tree.tokens[1] != tree.tokens[2]:
        return tree
    return DraftTree.chain(tree.tokens[:2], q=tree.q)


def draws_in_half_precision(q: Table, source: Source) -> DraftTree:
    """Draws from q rounded to bfloat16, records it unrounded (DeepSpec 31, 48)."""
    rounded = q(()).to(torch.bfloat16).double()
    [token] = source.sample(rounded, position=1, purpose=Purpose.DRAFT)
    return DraftTree.chain((0, token), q={0: q(())})
