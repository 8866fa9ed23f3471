"""The memory plan: made before anything is allocated, refused with numbers if it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.drafters.base import Needs
from outrider.errors import OutOfMemory
from outrider.models.target import Target

RESERVE = 0.05  # of the free memory, left to everything that is not planned


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MB"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine is about to allocate, and what is free.

    Attributes:
        cache: the target's keys and values.
        drafters: what drafters allocate beside their weights, and features kept for them.
        logits: the largest pass's logits.
        available: free memory on the device; 0 where it cannot be told.
    """

    cache: int
    drafters: int
    logits: int
    available: int

    @property
    def total(self) -> int:
        return self.cache + self.drafters + self.logits

    def check(self, *, slots: int, context: int) -> None:
        """Raises:
        OutOfMemory: with the numbers and what to lower."""
        if self.available and self.total > self.available * (1 - RESERVE):
            raise OutOfMemory(
                f"{slots} slots of {context} positions need {megabytes(self.total)} "
                f"(cache {megabytes(self.cache)}, drafters {megabytes(self.drafters)}, logits "
                f"{megabytes(self.logits)}), {megabytes(self.available)} are free; "
                "lower the slots or the context"
            )


def memory_plan(
    target: Target, needs: Sequence[Needs], *, slots: int, context: int, nodes: int
) -> MemoryPlan:
    """What an engine allocates.

    Args:
        needs: of its drafters.
        slots: sequences at once.
        context: positions of each.
        nodes: guesses per sequence and step at most.
    """
    layers = max((len(need.layers) for need in needs), default=0)
    features = slots * context * layers * target.width * torch.float32.itemsize
    return MemoryPlan(
        cache=target.cache_shape.nbytes(slots, context + nodes + 1),
        drafters=sum(need.memory_bytes for need in needs) + features,
        logits=slots * (1 + nodes) * target.vocab_size * torch.float32.itemsize,
        available=available_memory(target.device),
    )


@contextmanager
def allocating(what: str, *, slots: int, context: int) -> Iterator[None]:
    """Turn a refusal of the allocator into one line with the remedy.

    Raises:
        OutOfMemory: there is not as much; nothing of what was asked for is kept.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as fault:
        # The CPU's allocator has no error class of its own.
        wanting = isinstance(fault, MemoryError | torch.OutOfMemoryError)
        if not wanting and "not enough memory" not in str(fault) and "alloc" not in str(fault):
            raise
        raise OutOfMemory(
            f"{what} of {slots} slots of {context} positions cannot be allocated; lower the slots "
            "or the context"
        ) from None


def available_memory(device: torch.device) -> int:
    """Free bytes on the device; 0 where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
