"""Exactness on any device, at the price of speed: every row is a pass of its own.

Where a model's rows change their last bits with the number of rows computed together (a GPU, or
PyTorch on a CPU), `OneRowAtATime` computes each node of a tree exactly as plain decoding would: one
row, behind the committed tokens and the node's ancestors. Output is then equal to plain decoding's,
bit for bit, as far as the device repeats itself; speculation gains nothing here. It is a reference,
and the honest answer where the native kernels cannot run.

Prompts are read row by row as well, so nothing depends on how they are cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.models.cache import KVCache
from outrider.models.target import Forward, Segment, Target


class OneRowAtATime:
    """Wraps a `Target`; see there for the attributes."""

    row_invariant = True

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.name = inner.name
        self.fingerprint = f"{inner.fingerprint}-one-row"
        self.vocab_size = inner.vocab_size
        self.context_length = inner.context_length
        self.end_tokens = inner.end_tokens
        self.cache_shape = inner.cache_shape
        self.precision = inner.precision
        self.device = inner.device
        self.weight_bytes = inner.weight_bytes
        self.width = inner.width
        self.layers = inner.layers

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        """The wrapped model's cache."""
        return self.inner.new_cache(slots=slots, length=length)

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        """One pass per row. Stages every segment's rows in the cache, as any target does."""
        logits: list[Tensor] = []
        states: list[Tensor] = []
        for segment in segments:
            rows, seen = self._segment(segment, cache, features)
            nodes = rows[len(segment.prefix) :]
            empty = torch.empty(0, self.vocab_size, device=self.device)
            logits.append(torch.cat(nodes) if nodes else empty)
            states += [torch.cat(seen)] if features else []
        return Forward(logits, states if features else None)

    def _segment(
        self, segment: Segment, cache: KVCache, features: tuple[int, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [1, V] and features [1, F, D] of every row; leaves all rows staged."""
        slot, start = segment.slot, cache.lengths[segment.slot]
        cache.stage(slot, segment.rows)  # refuse what does not fit before anything is computed
        cache.keep(slot, ())
        logits: list[Tensor] = []
        states: list[Tensor] = []
        written: list[tuple[Tensor, Tensor]] = []
        for ancestors, token in zip(_ancestors(segment), segment.tokens, strict=True):
            self._place([written[row] for row in ancestors], cache, slot, start)
            root = DraftTree.root_only(token)
            result = self.inner.forward([Segment(slot, (), root)], cache, features=features)
            at = start + len(ancestors)
            written.append(
                (cache.keys[:, slot, :, at].clone(), cache.values[:, slot, :, at].clone())
            )
            cache.keep(slot, ())
            logits.append(result.logits[0])
            states += [result.features[0]] if result.features is not None else []
        self._place(written, cache, slot, start)
        cache.truncate(slot, start)
        cache.stage(slot, segment.rows)
        return logits, states

    @staticmethod
    def _place(
        rows: Sequence[tuple[Tensor, Tensor]], cache: KVCache, slot: int, start: int
    ) -> None:
        """Make ``rows`` the committed rows of the slot from ``start`` on. Changes the cache."""
        cache.truncate(slot, start)
        if rows:
            cache.stage(slot, len(rows))
            for offset, (key, value) in enumerate(rows):
                cache.keys[:, slot, :, start + offset] = key
                cache.values[:, slot, :, start + offset] = value
            cache.keep(slot, range(len(rows)))


def _ancestors(segment: Segment) -> list[tuple[int, ...]]:
    """For every row of a segment the earlier rows it sees, in order of position."""
    first = len(segment.prefix)
    seen: list[tuple[int, ...]] = [tuple(range(row)) for row in range(first)]
    if segment.tree is not None:
        for node in range(len(segment.tree)):
            path = [0, *segment.tree.path(node)][:-1] if node else []
            seen.append((*range(first), *(first + n for n in path)))
    return seen
