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


def schedule(running: Sequence[Waiting], *, chunk: int, busy_chunk: int | None = None) -> Plan:
    """Plan one step.

    The oldest sequence that is behind gets at least half of the room, the others follow with the
    shortest first: a short prompt does not wait for a long one to be read, and a long one is never
    starved by short ones.

    Args:
        running: admitted sequences, first come first.
        chunk: how many committed tokens (roots not counted) the whole step may bring into the
            cache, so that a long prompt never stalls the streams beside it.
        busy_chunk: the same while some sequence is decoding and would have to wait for the chunk;
            `None` for no difference.
    """
    behind = {item.id: item.uncached - 1 for item in running}
    late = [id for id, rows in behind.items() if rows > 0]
    room = chunk if busy_chunk is None or len(late) == len(behind) else min(chunk, busy_chunk)
    given = dict.fromkeys(late, 0)
    if late:
        oldest, share = late[0], room if len(late) == 1 else (room + 1) // 2
        given[oldest] = min(behind[oldest], share)
        room -= given[oldest]
    for id in sorted(late[1:], key=lambda id: behind[id]):
        given[id] = min(behind[id], room)
        room -= given[id]
    if late:  # what the others left
        more = min(behind[late[0]] - given[late[0]], room)
        given[late[0]] += more
    decode = tuple(id for id, rows in behind.items() if given.get(id, 0) == rows)
    prefill = {id: rows for id, rows in given.items() if 0 < rows < behind[id]}
    return Plan(decode, prefill)
