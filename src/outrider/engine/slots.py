"""Which slot of the cache a request gets, and what it can reuse there.

A freed slot keeps its rows until it is needed, so a request that continues an earlier conversation
finds its prefix cached. Rows are shared within a tenant only. A drafter that reads the target's
states must be given those of the reused rows as well; they are kept beside the rows.

Shapes: R rows, F features, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.models.cache import KVCache


@dataclass
class RowFeatures:
    """Hidden states of a slot's rows, from the first on.

    Attributes:
        layers: which layers they enter; none for drafters that need none.
        rows: how many there are.
    """

    layers: tuple[int, ...] = ()
    rows: int = 0
    _pieces: list[Tensor] = field(default_factory=list)

    def add(self, features_RFD: Tensor) -> None:
        """Those of the next rows."""
        self._pieces.append(features_RFD)
        self.rows += len(features_RFD)

    def whole(self) -> Tensor | None:
        """[R, F, D] in one piece; `None` where there are none."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]
        return self._pieces[0] if self._pieces else None

    def first(self, rows: int) -> RowFeatures:
        """Those of the first rows alone; the others are let go."""
        kept, whole = RowFeatures(self.layers), self.whole()
        if whole is not None and rows:
            kept.add(whole if rows == self.rows else whole[:rows].clone())
        return kept


@dataclass(frozen=True)
class Place:
    """A slot of the cache, with the features of the rows that it holds."""

    slot: int
    features: RowFeatures


@dataclass(frozen=True)
class _Freed:
    place: Place
    tokens: tuple[int, ...]
    tenant: str

    def match(self, prompt: Sequence[int], tenant: str, layers: tuple[int, ...]) -> int:
        """Rows that a request can take over; its last token is read anew, for its logits."""
        features = self.place.features
        if tenant != self.tenant or (layers and layers != features.layers):
            return 0
        length = common_prefix(self.tokens, prompt[:-1])
        return min(length, features.rows) if layers else length


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class SlotPool:
    """Free slots of a cache, oldest first, with the tokens whose rows they still hold."""

    def __init__(self, cache: KVCache, *, reuse: bool) -> None:
        self._cache = cache
        self._reuse = reuse
        self._free = [_emptied(slot) for slot in range(cache.slots)]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, prompt: Sequence[int], *, tenant: str, layers: tuple[int, ...]) -> Place:
        """A free slot whose cached rows are a prefix of ``prompt`` without its last token.

        Changes the cache: rows behind the common prefix are forgotten. Picks the longest match,
        and the slot that was freed longest ago where nothing matches.

        Args:
            layers: whose features the request's drafter needs, for the reused rows too.
        """
        best, length = self._free[0], 0
        if self._reuse:
            for freed in self._free:
                match = freed.match(prompt, tenant, layers)
                if match > length:
                    best, length = freed, match
        self._free.remove(best)
        self._cache.truncate(best.place.slot, length)
        if not length or not layers:
            return Place(best.place.slot, RowFeatures(layers))
        return Place(best.place.slot, best.place.features.first(length))

    def forget_rows(self) -> None:
        """Forget the rows of all free slots. Changes the cache; nothing is reused afterwards."""
        self._free = [_emptied(freed.place.slot) for freed in self._free]
        for freed in self._free:
            self._cache.truncate(freed.place.slot, 0)

    def note(self, place: Place, features_RFD: Tensor) -> None:
        """Note the features of rows that were added to a slot in use."""
        if self._reuse:
            place.features.add(features_RFD)

    def give_back(self, place: Place, tokens: Sequence[int], *, tenant: str) -> None:
        """Free a slot; its committed rows stay for reuse."""
        kept = tuple(tokens[: self._cache.lengths[place.slot]])
        self._free.append(_Freed(place, kept, tenant))


def _emptied(slot: int) -> _Freed:
    return _Freed(Place(slot, RowFeatures()), (), "")
