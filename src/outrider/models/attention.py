"""Attention of packed rows over the cache: what each row may see, and one fused call per block.

A segment falls into at most two blocks: its prefix (a causal chain, attended as usual) and its
tree. Both write their keys and values into the cache first. On CPUs a tree block is padded, to
whole key blocks and a few query rows, because the fused kernel's order of summation depends on
those numbers alone: with the padding, a row's result has the same bits whether it is computed alone
or among guesses (measured; `tests/unit/test_models_invariance.py`).

Shapes: R rows, K key/value heads, G query heads per key/value head, H head size, C key positions,
L layers, Q query rows after folding G into them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.cache import KVCache
from outrider.models.target import Segment

# The CPU kernel sums over keys in blocks of 512 and has a different product for fewer than 4 rows.
KEY_BLOCK = 512
ROW_BLOCK = 4


@dataclass(frozen=True)
class View:
    """The keys that a block sees in the layers of one window.

    Attributes:
        keys, values: one [K, C, H] per layer of the model.
        mask: additive [Q or R, C]; `None` where `causal` says it all.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class Block:
    """Rows of one segment that attend together; one view per window of the model."""

    rows: slice
    tree: bool
    views: dict[int | None, View]


@dataclass(frozen=True)
class SegmentPlan:
    """Where the rows of a segment go in the cache, and how they attend.

    Attributes:
        keys, values: one [K, R, H] per layer: the staged rows of the cache.
    """

    rows: slice
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    blocks: tuple[Block, ...]


class Planner:
    """Plans passes over caches for one model.

    Attributes:
        group: query heads per key/value head.
        windows: the distinct windows of the model's layers.
        pad: whether this device's kernel needs padding for row-invariant results.
    """

    def __init__(self, *, group: int, windows: frozenset[int | None], device: torch.device) -> None:
        self.group = group
        self.windows = windows
        self.pad = device.type == "cpu"
        # per slot: rows from here on are zero (a masked row still meets 0 · NaN if it is not)
        self._written: WeakKeyDictionary[KVCache, list[int]] = WeakKeyDictionary()

    def plan(self, segment: Segment, cache: KVCache, first: int, start: int) -> SegmentPlan:
        """Plan a segment whose rows are ``first``.. in the pass and ``start``.. in the cache."""
        prefix, end = len(segment.prefix), start + segment.rows
        self._clear_behind(cache, segment.slot, end)
        blocks = []
        if prefix:
            rows = slice(first, first + prefix)
            views = {w: self._prefix_view(cache, segment, start, w) for w in self.windows}
            blocks.append(Block(rows, False, views))
        if segment.tree is not None:
            rows = slice(first + prefix, first + segment.rows)
            seen = self._tree_offsets(segment)
            root = start + prefix
            views = {w: self._tree_view(cache, segment, root, w, seen) for w in self.windows}
            blocks.append(Block(rows, True, views))
        return SegmentPlan(
            slice(first, first + segment.rows),
            cache.keys[:, segment.slot, :, start:end].unbind(0),
            cache.values[:, segment.slot, :, start:end].unbind(0),
            tuple(blocks),
        )

    def _clear_behind(self, cache: KVCache, slot: int, end: int) -> None:
        """Zero what earlier passes left behind the rows of this one. Changes the cache."""
        written = self._written.get(cache)
        if written is None:
            written = self._written[cache] = [cache.keys.shape[3]] * cache.slots
        if written[slot] > end:
            cache.keys[:, slot, :, end : written[slot]].zero_()
            cache.values[:, slot, :, end : written[slot]].zero_()
        written[slot] = end

    def _prefix_view(
        self, cache: KVCache, segment: Segment, start: int, window: int | None
    ) -> View:
        rows = len(segment.prefix)
        end = start + rows
        low = 0 if window is None else max(0, start + 1 - window)
        causal = start == 0 and (window is None or window >= rows)
        mask = None
        if not causal:
            distance = torch.arange(start, end)[:, None] - torch.arange(low, end)[None, :]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            mask = _additive(hidden, cache.keys)
        return self._view(cache, segment.slot, low, end, mask, causal)

    @staticmethod
    def _tree_offsets(segment: Segment) -> tuple[Tensor, Tensor] | None:
        """Depths [N] and the hidden pairs [N, N] of the tree; `None` for a lone root."""
        assert segment.tree is not None
        if len(segment.tree) == 1:
            return None
        return torch.tensor(segment.tree.depths), ~segment.tree.ancestors

    def _tree_view(
        self,
        cache: KVCache,
        segment: Segment,
        start: int,
        window: int | None,
        seen: tuple[Tensor, Tensor] | None,
    ) -> View:
        """``start`` is the root's row in the cache, which is also its position."""
        assert segment.tree is not None
        nodes = len(segment.tree)
        end = start + nodes
        low = 0 if window is None else max(0, start + 1 - window)
        high = end
        if self.pad:
            low = low // KEY_BLOCK * KEY_BLOCK
            high = min(-(-end // KEY_BLOCK) * KEY_BLOCK, cache.keys.shape[3])
        hidden = torch.zeros(nodes, high - low, dtype=torch.bool)
        hidden[:, end - low :] = True
        if window is not None:
            depths = torch.zeros(1, dtype=torch.long) if seen is None else seen[0]
            oldest = (start - window) + depths[:, None]
            hidden[:, : start - low] = torch.arange(low, start) <= oldest
        if seen is not None:
            depths, unrelated = seen
            if window is not None:
                unrelated = unrelated | (depths[:, None] - depths[None, :] >= window)
            hidden[:, start - low : end - low] = unrelated
        mask = _additive(hidden, cache.keys).repeat_interleave(self.group, 0)
        if self.pad and len(mask) % ROW_BLOCK:
            mask = torch.cat((mask, mask[-1:].expand(-len(mask) % ROW_BLOCK, -1)))
        return self._view(cache, segment.slot, low, high, mask, False)

    @staticmethod
    def _view(
        cache: KVCache, slot: int, low: int, high: int, mask: Tensor | None, causal: bool
    ) -> View:
        return View(
            cache.keys[:, slot, :, low:high].unbind(0),
            cache.values[:, slot, :, low:high].unbind(0),
            mask,
            causal,
        )


def _additive(hidden: Tensor, like: Tensor) -> Tensor:
    """0 where a row sees a key, -inf where it does not, in the cache's dtype and device."""
    mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -math.inf)
    return mask.to(like.device)


def attend_prefix(q_RKGH: Tensor, view: View, layer: int, scale: float) -> Tensor:
    """[R, K·G·H]: a chain of rows, heads apart."""
    rows = len(q_RKGH)
    out_AQH = F.scaled_dot_product_attention(
        q_RKGH.flatten(1, 2).transpose(0, 1)[None],
        view.keys[layer][None],
        view.values[layer][None],
        attn_mask=view.mask,
        is_causal=view.causal,
        scale=scale,
        enable_gqa=q_RKGH.shape[2] > 1,
    )[0]
    return out_AQH.transpose(0, 1).reshape(rows, -1)


def attend_tree(q_RKGH: Tensor, view: View, layer: int, scale: float) -> Tensor:
    """[R, K·G·H]: the rows of a tree, with the group's heads folded into the query rows."""
    rows, kv_heads, group, size = q_RKGH.shape
    assert view.mask is not None
    q_KQH = q_RKGH.transpose(0, 1).reshape(kv_heads, rows * group, size)
    padding = len(view.mask) - rows * group
    if padding:
        q_KQH = F.pad(q_KQH, (0, 0, 0, padding))
    out_KQH = F.scaled_dot_product_attention(
        q_KQH[None], view.keys[layer][None], view.values[layer][None], view.mask, scale=scale
    )[0]
    out_KRGH = out_KQH[:, : rows * group].reshape(kv_heads, rows, group, size)
    return out_KRGH.transpose(0, 1).reshape(rows, -1)
