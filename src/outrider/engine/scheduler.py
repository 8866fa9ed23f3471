"""Which sequences run this step, and how many committed tokens each may bring into the cache.

A pure decision over plain numbers: it knows no tensors, no tokens and no drafters. A sequence whose
uncached tokens fit into the step decodes (its last token is the root of a tree); one with more is
fed a chunk of them. Plain decoding is the case of exactly one uncached token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A running sequence as the scheduler sees it: its id and committed tokens not in the cache."""

    id: int
    uncached: int


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        decode: ids of sequences that get a tree behind their uncached tokens.
        prefill: id to the number of committed tokens to cache without a tree.
    """

    decode: tuple[int, ...]
    prefill: dict[int, int]


def schedule(running: Sequence[Waiting], *, chunk: int) -> Plan:
    """Plan one step.

    Args:
        running: admitted sequences, first come first.
        chunk: how many committed tokens (roots not counted) the whole step may bring into the
            cache, so that a long prompt never stalls the streams beside it.
    """
    room = chunk
    decode: list[int] = []
    prefill: dict[int, int] = {}
    for item in running:
        behind = item.uncached - 1
        if behind <= room:
            decode.append(item.id)
            room -= behind
        elif room > 0:
            prefill[item.id] = room
            room = 0
    return Plan(tuple(decode), prefill)
