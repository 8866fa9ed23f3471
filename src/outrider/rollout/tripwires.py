"""What takes a profile back at once: counts of hard events in a sliding window. No statistics.

A pure machine over a clock that is handed in (monotonic seconds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.rollout.config import TripWires

Event = Literal[
    "unhealthy",
    "restart",
    "out_of_memory",
    "parity",
    "non_finite",
    "server_errors",
    "stalled",
    "memory_share",
    "kv_share",
]


@dataclass(frozen=True)
class Trip:
    """A wire that was touched.

    Attributes:
        wire: which.
        hard: running streams are cut as well, since the engine is not to be trusted.
        why: in a line.
    """

    wire: Event
    hard: bool
    why: str


class Wires:
    """The wires of one profile."""

    def __init__(self, settings: TripWires) -> None:
        self._settings = settings

    def saw(self, event: Event, *, now: float, detail: str = "") -> Trip | None:
        """Take in one event; the wire, where it was one too many."""
        raise NotImplementedError

    def healthy(self) -> None:
        """A health probe succeeded: earlier failures no longer count."""
        raise NotImplementedError

    def reading(self, event: Event, share: float) -> Trip | None:
        """Take in a reading of `memory_share` or `kv_share`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything: the profile was armed again."""
        raise NotImplementedError
