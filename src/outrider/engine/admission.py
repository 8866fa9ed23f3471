"""Who gets the next free slot: first come, first served within a tenant, and fair between tenants.

The tenant with the fewest running requests goes first; among equals, whose oldest request has
waited longest. So a tenant that sends a thousand requests waits for itself, not the others for it.
The queue is bounded in length and in time; it knows no tokens, slots or drafters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from outrider.engine.sequence import Sequence
from outrider.errors import Overloaded


class WaitingLine:
    """Sequences that wait for a slot."""

    def __init__(self, *, limit: int | None, patience_s: float | None) -> None:
        """Args:
        limit: more than this many do not wait; `None` for no bound.
        patience_s: who has waited longer is sent away by `expired`; `None` for never.
        """
        self._limit = limit
        self._patience = patience_s
        self._lines: OrderedDict[str, OrderedDict[int, Sequence]] = OrderedDict()
        self._tenants: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def push(self, sequence: Sequence, *, free: int = 0) -> None:
        """Get in line.

        Args:
            free: slots that the next step gives away; who gets one does not count as waiting.

        Raises:
            Overloaded: the line is full.
        """
        if self._limit is not None and len(self) >= self._limit + free:
            raise Overloaded(f"{len(self) - free} requests wait already; try again later")
        self._lines.setdefault(sequence.tenant, OrderedDict())[sequence.id] = sequence
        self._tenants[sequence.id] = sequence.tenant

    def pop(self, running: Mapping[str, int]) -> Sequence:
        """Take the next sequence out.

        Args:
            running: tenant to its number of running requests.

        Raises:
            IndexError: nobody waits.
        """
        if not self._lines:
            raise IndexError("nobody waits")

        def rank(tenant: str) -> tuple[int, int]:
            return running.get(tenant, 0), next(iter(self._lines[tenant]))  # ids count up

        line = self._lines[min(self._lines, key=rank)]
        found = self.remove(next(iter(line)))
        assert found is not None
        return found

    def remove(self, request: int) -> Sequence | None:
        """Take one sequence out; `None` where it does not wait here."""
        tenant = self._tenants.pop(request, None)
        if tenant is None:
            return None
        line = self._lines[tenant]
        sequence = line.pop(request)
        if not line:
            del self._lines[tenant]
        return sequence

    def expired(self, now: float) -> list[Sequence]:
        """Take out everybody whose patience has ended by ``now`` (a `time.perf_counter`)."""
        if self._patience is None:
            return []
        late = [
            sequence
            for line in self._lines.values()
            for sequence in line.values()
            if now - sequence.clock.added > self._patience
        ]
        for sequence in late:
            self.remove(sequence.id)
        return late
