"""What takes a profile back at once: counts of hard events in a sliding window. No statistics.

A pure machine over a clock that is handed in (monotonic seconds).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from outrider.rollout.config import Burst, TripWires

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

HARD: Final = frozenset({"restart", "out_of_memory", "parity", "non_finite"})
"""After these the engine's running streams are not to be trusted either."""


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
        self._bursts: dict[Event, Burst] = {
            "unhealthy": settings.unhealthy,
            "restart": settings.restart,
            "out_of_memory": settings.out_of_memory,
            "parity": settings.parity,
            "non_finite": settings.non_finite,
            "server_errors": settings.server_errors,
            "stalled": settings.stalled,
        }
        self._times: dict[Event, deque[float]] = {
            event: deque(maxlen=burst.count) for event, burst in self._bursts.items()
        }

    def saw(self, event: Event, *, now: float, detail: str = "") -> Trip | None:
        """Take in one event; the wire, where it was one too many.

        Raises:
            KeyError: the event is a reading; use `reading`.
        """
        times, burst = self._times[event], self._bursts[event]
        times.append(now)
        # A clock that went back makes the difference negative: the events still count.
        if len(times) < burst.count or now - times[0] > burst.within_s:
            return None
        times.clear()
        told = f": {detail}" if detail else ""
        why = f"{event} {burst.count} times within {burst.within_s:g} s{told}"
        return Trip(event, event in HARD, why if burst.count > 1 else f"{event}{told}")

    def healthy(self) -> None:
        """A health probe succeeded: earlier failures no longer count."""
        self._times["unhealthy"].clear()

    def reading(self, event: Literal["memory_share", "kv_share"], share: float) -> Trip | None:
        """Take in a reading of the device's memory or of the cache."""
        settings = self._settings
        most = settings.memory_share if event == "memory_share" else settings.kv_share
        if most is None or share <= most:
            return None
        return Trip(event, False, f"{event} {share:.2f} is above {most:g}")

    def reset(self) -> None:
        """Forget everything: the profile was armed again."""
        for times in self._times.values():
            times.clear()
