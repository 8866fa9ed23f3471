"""Two runs that should have said the same: where they part, and whether that was a near-tie.

On hardware where a row's logits depend on how many rows are computed with it, two tokens whose
scores all but tie may swap. The judgement is made from numbers: the margin between the two tokens
at the first difference, against twice the change that the number of rows makes to any logit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.noise import Noise
from outrider.core.sampling import History, SamplingParams, margin
from outrider.core.tree import NO_PARENT, DraftTree
from outrider.models.cache import KVCache
from outrider.models.target import Segment, Target

CHUNK = 256
ROWS = 8


@dataclass(frozen=True)
class Difference:
    """The first difference of two outputs.

    Attributes:
        position: index in the output.
        plain, other: the two tokens; `None` where that output had ended.
        margin: by how much one score beat the other (logits, or log-probability plus noise);
            `None` where a truncation (top-k, top-p, min-p) shut one of them out.
        tolerance: twice the largest change of a logit between a pass of one row and of several.
    """

    position: int
    plain: int | None
    other: int | None
    margin: float | None
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """The numbers of the passes explain the difference."""
        return self.margin is not None and self.margin <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "near_tie": self.near_tie}


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first position where two outputs differ, `None` if they are equal."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


@torch.inference_mode()
def judge(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    *,
    params: SamplingParams,
    seed: int,
    ends: frozenset[int],
) -> Difference | None:
    """Find and weigh the first difference of two outputs of one prompt; `None` if there is none."""
    position = first_difference(plain, other)
    if position is None:
        return None
    a = plain[position] if position < len(plain) else None
    b = other[position] if position < len(other) else None
    tokens = [*prompt, *plain[:position]]
    single, several = _two_ways(target, tokens)
    scale = params.temperature or 1.0
    tolerance = 2 * float((single - several).abs().max()) / scale
    if a is None or b is None:
        return Difference(position, a, b, None, tolerance)
    gap = margin(
        single,
        params,
        History(prompt, plain[:position], ends),
        noise=Noise(seed),
        position=len(tokens),
        tokens=(a, b),
    )
    return Difference(position, a, b, gap, tolerance)


def _two_ways(target: Target, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits [V] after ``tokens``, float32: from a pass of one row, and of several."""
    cache = target.new_cache(slots=1, length=len(tokens) + 1)
    _fill(target, cache, tokens[:-1])
    single = _last_row(target, cache, tokens[-1:])
    rows = min(ROWS, len(tokens))
    cache.truncate(0, len(tokens) - rows)
    return single, _last_row(target, cache, tokens[-rows:])


def _fill(target: Target, cache: KVCache, tokens: Sequence[int]) -> None:
    for start in range(0, len(tokens), CHUNK):
        chunk = tuple(tokens[start : start + CHUNK])
        target.forward([Segment(0, chunk)], cache)
        cache.keep(0, range(len(chunk)))


def _last_row(target: Target, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    chain = DraftTree(tuple(tokens), tuple(range(NO_PARENT, len(tokens) - 1)))
    logits = target.forward([Segment(0, (), chain)], cache).logits[0][-1]
    cache.keep(0, ())
    return logits.float().cpu()
