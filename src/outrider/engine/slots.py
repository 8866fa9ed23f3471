"""Which slot of the cache a request gets, and what it can reuse there.

A freed slot keeps its rows until it is needed, so a request that continues an earlier conversation
finds its prefix cached. Rows are shared within a tenant only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.cache import KVCache


@dataclass(frozen=True)
class _Freed:
    slot: int
    tokens: tuple[int, ...]
    tenant: str


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class SlotPool:
    """Free slots of a cache, oldest first, with the tokens whose rows they still hold."""

    def __init__(self, cache: KVCache, *, reuse: bool) -> None:
        self._cache = cache
        self._reuse = reuse
        self._free = [_Freed(slot, (), "") for slot in range(cache.slots)]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, prompt: Sequence[int], *, tenant: str, reuse: bool) -> int:
        """A free slot whose cached rows are a prefix of ``prompt`` without its last token.

        Changes the cache: rows behind the common prefix are forgotten. Picks the longest match,
        and the slot that was freed longest ago where nothing matches.
        """
        best, length = self._free[0], 0
        if reuse and self._reuse:
            for freed in self._free:
                match = common_prefix(freed.tokens, prompt[:-1]) if freed.tenant == tenant else 0
                if match > length:
                    best, length = freed, match
        self._free.remove(best)
        self._cache.truncate(best.slot, length)
        return best.slot

    def forget_rows(self) -> None:
        """Forget the rows of all free slots. Changes the cache; nothing is reused afterwards."""
        self._free = [_Freed(freed.slot, (), "") for freed in self._free]
        for freed in self._free:
            self._cache.truncate(freed.slot, 0)

    def give_back(self, slot: int, tokens: Sequence[int], *, tenant: str) -> None:
        """Free a slot; its committed rows stay for reuse."""
        kept = tuple(tokens[: self._cache.lengths[slot]])
        self._free.append(_Freed(slot, kept, tenant))
