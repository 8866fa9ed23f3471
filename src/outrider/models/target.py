"""What the engine and the drafters ask of a model: one forward pass over packed rows.

A pass holds one `Segment` per sequence: committed tokens that the cache lacks (a prefill chunk, or
nothing), then a draft tree whose root is the last committed token. Prefill, plain decoding and
verification are the same call.

Shapes: R rows of a segment, N tree nodes, V vocabulary, F features, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.errors import InvalidParameter
from outrider.models.cache import CacheShape, KVCache


@dataclass(frozen=True)
class Segment:
    """The rows of one sequence in a pass.

    Attributes:
        slot: the sequence's slot in the cache.
        prefix: committed tokens to be cached first, in order; each sees all before it.
        tree: the tree to verify; its nodes see the cache, the prefix and their ancestors. `None`
            for a prefill chunk that needs no logits.
    """

    slot: int
    prefix: tuple[int, ...] = ()
    tree: DraftTree | None = None

    @property
    def rows(self) -> int:
        return len(self.prefix) + (len(self.tree) if self.tree else 0)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prefix + (self.tree.tokens if self.tree else ())

    def offsets(self) -> tuple[int, ...]:
        """R positions relative to the first row: the prefix counts up, nodes add their depth."""
        first = len(self.prefix)
        depths = self.tree.depths if self.tree else ()
        return (*range(first), *(first + depth for depth in depths))

    def visible(self) -> Tensor:
        """Bool [R, R]: may row i attend to row j of this segment?"""
        first = len(self.prefix)
        mask = torch.ones(self.rows, self.rows, dtype=torch.bool).tril()
        if self.tree is not None and not self.tree.is_chain:
            mask[first:, first:] = self.tree.ancestors
        return mask


@dataclass(frozen=True)
class Forward:
    """What a pass gives, one entry per segment.

    Attributes:
        logits: [N, V] for the nodes of the segment's tree; [0, V] without a tree.
        features: [R, F, D] hidden states entering the named layers, for every row; `None` where
            none were asked for.
    """

    logits: Sequence[Tensor]
    features: Sequence[Tensor] | None = None


class Target(Protocol):
    """A model that the engine can decode from.

    Attributes:
        name: shown to people.
        fingerprint: a hash of configuration, weights and tokenizer; records and caches carry it.
        vocab_size, context_length: limits that requests are checked against.
        end_tokens: the model's own end-of-text tokens.
        cache_shape: what its cache needs per position.
        precision: what its weights are held in: "int8", "int4", "bf16", "fp16" or "fp32". It is
            part of what the model says, so every record names it.
        row_invariant: a row's logits have the same bits in every company: alone, among guesses,
            beside other sequences. Then speculative output is equal to plain output.
        device: where it computes.
        weight_bytes: bytes of weights that a one-row pass reads.
        width: of a hidden state.
        layers: number of layers; features may be asked of 0 .. layers (the last: the final state
            before the last norm).
    """

    name: str
    fingerprint: str
    vocab_size: int
    context_length: int
    end_tokens: frozenset[int]
    cache_shape: CacheShape
    precision: str
    row_invariant: bool
    device: torch.device
    weight_bytes: int
    width: int
    layers: int

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        """An empty cache for this model on its device."""
        ...

    def forward(
        self, segments: Sequence[Segment], cache: KVCache, *, features: tuple[int, ...] = ()
    ) -> Forward:
        """One pass. Stages every segment's rows in the cache; the caller keeps or drops them."""
        ...


def check_segments(target: Target, segments: Sequence[Segment], features: tuple[int, ...]) -> None:
    """What every target refuses before it computes anything.

    Raises:
        InvalidParameter: no segment, an empty one, or a token or feature that the model lacks.
    """
    if not segments:
        raise InvalidParameter("a pass needs at least one segment")
    for segment in segments:
        if not segment.rows:
            raise InvalidParameter(f"the segment of slot {segment.slot} has no rows")
        tokens = segment.tokens
        if min(tokens) < 0 or max(tokens) >= target.vocab_size:
            bad = next(t for t in tokens if not 0 <= t < target.vocab_size)
            raise InvalidParameter(
                f"token {bad} is not in {target.name}'s vocabulary of {target.vocab_size}"
            )
    for index in features:
        if not 0 <= index <= target.layers:
            raise InvalidParameter(
                f"{target.name} has features 0 to {target.layers}; {index} was asked for"
            )


def check_inputs(inputs_MD: Tensor, *, rows: int, width: int) -> None:
    """Refuse hidden states that do not fit the rows of a pass.

    Raises:
        InvalidParameter: says both shapes.
    """
    if inputs_MD.shape != (rows, width):
        raise InvalidParameter(
            f"inputs of shape {list(inputs_MD.shape)} do not fit {rows} rows of width {width}"
        )


def stage_all(segments: Sequence[Segment], cache: KVCache) -> list[int]:
    """Stage all segments or none; returns the first cache row of each. Changes the cache."""
    starts: list[int] = []
    try:
        for segment in segments:
            starts.append(cache.stage(segment.slot, segment.rows))
    except InvalidParameter:
        for segment, _ in zip(segments, starts, strict=False):
            cache.keep(segment.slot, ())
        raise
    return starts
