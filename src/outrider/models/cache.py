"""The key/value cache: transactional rows.

A forward pass *stages* rows behind the committed ones of a slot; afterwards the caller *keeps* the
accepted path and everything else is dropped. The cache knows slots and rows, nothing of trees,
requests or attention.

Shapes: L layers, S slots, K key/value heads, C positions per slot, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import InvalidParameter


@dataclass(frozen=True)
class CacheShape:
    """What decides the size of a cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, slots: int, length: int) -> int:
        """Bytes of keys and values for ``slots`` sequences of ``length`` positions."""
        per_row = 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
        return per_row * slots * length


class KVCache:
    """Keys and values of ``slots`` sequences.

    Attributes:
        keys, values: [L, S, K, C, H]. Rows ``[0, lengths[s])`` of slot s are committed, the next
            ``staged[s]`` rows belong to the pass under way.
    """

    def __init__(
        self, shape: CacheShape, *, slots: int, length: int, device: torch.device | str = "cpu"
    ) -> None:
        size = (shape.layers, slots, shape.kv_heads, length, shape.head_dim)
        self.shape = shape
        self.capacity = length
        self.keys: Tensor = torch.empty(size, dtype=shape.dtype, device=device)
        self.values: Tensor = torch.empty(size, dtype=shape.dtype, device=device)
        self.lengths: list[int] = [0] * slots
        self.staged: list[int] = [0] * slots

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def stage(self, slot: int, rows: int) -> int:
        """Reserve ``rows`` rows behind the committed ones; returns the index of the first.

        Changes the cache.

        Raises:
            InvalidParameter: rows are staged already, or the slot is full.
        """
        start = self.lengths[slot]
        if self.staged[slot]:
            raise InvalidParameter(
                f"slot {slot} has {self.staged[slot]} staged rows; keep or drop them"
            )
        if rows < 0 or start + rows > self.capacity:
            raise InvalidParameter(
                f"slot {slot} cannot add {rows} rows to {start}; the cache holds {self.capacity}"
            )
        self.staged[slot] = rows
        return start

    def keep(self, slot: int, rows: Sequence[int]) -> None:
        """Commit the staged ``rows`` (indices from 0, increasing) and drop the others.

        Changes the cache: kept rows move up behind the committed ones.

        Raises:
            InvalidParameter: a row was not staged, or the rows are not increasing.
        """
        start = self.lengths[slot]
        increasing = list(rows) == sorted(set(rows))
        if not increasing or (rows and not 0 <= rows[0] <= rows[-1] < self.staged[slot]):
            raise InvalidParameter(f"cannot keep rows {list(rows)} of {self.staged[slot]} staged")
        moved = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if moved < len(rows):
            source = torch.tensor([start + row for row in rows[moved:]], device=self.keys.device)
            target = slice(start + moved, start + len(rows))
            for tensor in (self.keys, self.values):
                tensor[:, slot, :, target] = tensor[:, slot].index_select(2, source)
        self.lengths[slot] = start + len(rows)
        self.staged[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Forget all committed rows of a slot from ``length`` on. Changes the cache.

        Raises:
            InvalidParameter: fewer rows are committed, or rows are staged.
        """
        if not 0 <= length <= self.lengths[slot] or self.staged[slot]:
            raise InvalidParameter(
                f"cannot cut slot {slot} to {length}: {self.lengths[slot]} committed, "
                f"{self.staged[slot]} staged"
            )
        self.lengths[slot] = length

    def check_integrity(self) -> None:
        """Assert what must hold between two steps: nothing staged, nothing beyond the capacity."""
        for slot, (length, staged) in enumerate(zip(self.lengths, self.staged, strict=True)):
            if staged or not 0 <= length <= self.capacity:
                raise AssertionError(f"slot {slot}: length {length}, staged {staged}")
