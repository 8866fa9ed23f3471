"""The way of a profile from nothing to all traffic and back: a state machine without effects.

`advance` takes a profile's state, an event and the time, and gives the next state and what changed.
A rollback is latched: nothing but a person, or a fresh passing gate where the configuration allows
it, leads out. It knows no statistics (a verdict is handed in) and no files (`audit` keeps them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.rollout.assign import Weights
from outrider.rollout.config import RolloutConfig
from outrider.rollout.tripwires import Trip
from outrider.rollout.verdict import Report

Phase = Literal["off", "shadow", "canary", "hold", "promoted", "rolled_back"]


@dataclass(frozen=True)
class ProfileState:
    """Where a profile stands.

    Attributes:
        profile: whose.
        phase: off (nothing served), shadow (mirrored), canary (a share, watched), hold (a share
            that does not grow by itself), promoted (all eligible traffic), rolled_back (latched).
        weight: share in basis points; 0 outside of canary, hold and promoted.
        since: wall-clock seconds of the last change of phase or weight.
        window: counts observation windows; a new one starts with every change of weight.
        why: of the last change.
        evidence: id of what it rests on: a report, a trip, a gate.
    """

    profile: str
    phase: Phase = "off"
    weight: int = 0
    since: float = 0.0
    window: int = 0
    why: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class RolloutState:
    """Everything that must survive a restart."""

    profiles: Mapping[str, ProfileState] = field(default_factory=dict)
    killed: bool = False
    killed_why: str = ""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RolloutState:
        """Raises:
        InvalidParameter: it is not the form that `to_dict` writes."""
        raise NotImplementedError

    def weights(self, config: RolloutConfig, *, kill_file: bool = False) -> Weights:
        """What is in force for assignment; ``kill_file`` says whether that file is there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Change:
    """What an event changed, for the audit log and the webhook.

    Attributes:
        at: wall-clock seconds.
        profile: whose; empty for the kill switch.
        who: a person's name, or "outrider".
        action: start, raise, hold, promote, rollback, arm, set, kill, unkill, window.
        before, after: phase and weight, as "canary 5%".
        why: in a line.
        evidence: id of what it rests on.
        details: the evidence itself, JSON-ready.
        hard: running streams of the profile must be cut.
    """

    at: float
    profile: str
    who: str
    action: str
    before: str
    after: str
    why: str
    evidence: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    hard: bool = False

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class GateResult:
    """Evidence before traffic.

    Attributes:
        passed: all gates that are asked for are there, pass and are fresh.
        why: in a line.
        created: wall-clock seconds of the oldest piece; 0 where no gate is asked for.
        evidence: names the files.
    """

    passed: bool
    why: str
    created: float = 0.0
    evidence: str = ""


@dataclass(frozen=True)
class Manual:
    """A person's word.

    Attributes:
        action: set (a share), hold, promote, rollback, arm, shadow.
        who, why: for the audit.
        weight: basis points, for set.
        force: also past a gate that does not pass; never past the latch, which wants arm.
    """

    action: Literal["set", "hold", "promote", "rollback", "arm", "shadow"]
    who: str
    why: str = ""
    weight: int | None = None
    force: bool = False


Event = Report | Trip | GateResult | Manual
"""A verdict, a trip-wire, the state of the gates, a person."""


def advance(
    state: ProfileState, event: Event, *, config: RolloutConfig, now: float, gate: GateResult
) -> tuple[ProfileState, Change | None]:
    """The next state, and what changed; `None` for nothing.

    Args:
        state: of one profile.
        event: what happened. A `GateResult` is handed in at the start, at a reload and now and
            then; it starts a profile that is off and arms one whose latch allows it.
        config: the rollout.
        now: wall-clock seconds. Clocks may jump: no share ever rises by time alone.
        gate: the gates as they are now; raising anything asks them.

    Raises:
        InvalidParameter: a person asks for what is not possible, such as raising a latched profile.
    """
    raise NotImplementedError


def switch(
    state: RolloutState, *, on: bool, who: str, why: str, now: float
) -> tuple[RolloutState, Change | None]:
    """The kill switch; `None` where it stands so already."""
    raise NotImplementedError


def reconcile(state: RolloutState, config: RolloutConfig) -> RolloutState:
    """The persisted state under a new configuration: profiles that are gone are dropped, new ones
    are off, latches and weights stay."""
    raise NotImplementedError
