"""One object that a gateway talks to: observations and events in, weights out.

It holds the windows, the looks, the wires and the state of every profile, and writes what changes.
Clocks are handed in. It has no thread and no network: whoever owns it calls `tick`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from outrider.rollout.assign import Weights
from outrider.rollout.audit import Ledger
from outrider.rollout.config import RolloutConfig
from outrider.rollout.ramp import Change, GateResult, Manual, RolloutState
from outrider.rollout.tripwires import Event as WireEvent
from outrider.rollout.tripwires import Trip
from outrider.rollout.verdict import Observation, Report

Arm = Literal["canary", "control"]


class Controller:
    """A rollout in force.

    Attributes:
        weights: what `assign` reads; replaced whole at each change.
        state: of every profile.
        reports: the last verdict of each profile.
        unsaved: why the last write failed; empty when all is on disk.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        ledger: Ledger,
        gates: Callable[[str], GateResult],
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        changed: Callable[[Change], None] = lambda change: None,
    ) -> None:
        """Args:
        config: the rollout.
        ledger: where state and audit log live; the persisted state is taken up.
        gates: the gates of a profile as they are now (`outrider.rollout.gates.check_gates`).
        wall, monotonic: clocks, in seconds.
        changed: told of every change, before it is written.

        Raises:
            RecordFileError: the persisted state is damaged.
        """
        self.config = config
        self.weights = Weights()
        self.state = RolloutState()
        self.reports: Mapping[str, Report] = {}
        self.unsaved = ""

    def observe(self, profile: str, arm: Arm, observation: Observation) -> None:
        """Take in a finished request of a cohort of ``profile``."""
        raise NotImplementedError

    def wire(self, profile: str, event: WireEvent, *, detail: str = "") -> Trip | None:
        """Take in a hard event; weights are already at 0 when a trip is returned."""
        raise NotImplementedError

    def healthy(self, profile: str) -> None:
        """A health probe of ``profile`` succeeded."""
        raise NotImplementedError

    def manual(self, profile: str, order: Manual) -> Change | None:
        """A person's word.

        Raises:
            InvalidParameter: the profile is unknown, or what is asked for is not possible.
        """
        raise NotImplementedError

    def switch(self, *, on: bool, who: str, why: str) -> Change | None:
        """The kill switch."""
        raise NotImplementedError

    def tick(self) -> tuple[Change, ...]:
        """What is due: the kill file, gates, looks, writes that failed before."""
        raise NotImplementedError

    def reload(self, config: RolloutConfig) -> None:
        """Another configuration; weights and latches stay."""
        raise NotImplementedError
