"""The way of a profile from nothing to all traffic and back: a state machine without effects.

`advance` takes a profile's state, an event and the time, and gives the next state and what changed.
A rollback is latched: nothing but a person, or a fresh passing gate where the configuration allows
it, leads out. It knows no statistics (a verdict is handed in) and no files (`audit` keeps them).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, get_args

from outrider.errors import InvalidParameter
from outrider.rollout.assign import Weights
from outrider.rollout.config import WHOLE, RolloutConfig, percent
from outrider.rollout.tripwires import Trip
from outrider.rollout.verdict import Report

OURSELVES: Final = "outrider"
"""Who acts where no person does."""

SERVING: Final = ("canary", "hold", "promoted")
WATCHED: Final = ("shadow", *SERVING)
NOTHING: Final[Mapping[str, Any]] = {}

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
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RolloutState:
        """Raises:
        InvalidParameter: it is not the form that `to_dict` writes."""
        try:
            profiles = {name: ProfileState(**entry) for name, entry in data["profiles"].items()}
            killed, why = data["killed"], data["killed_why"]
        except (KeyError, TypeError, AttributeError) as fault:
            raise InvalidParameter(f"the rollout's state is malformed: {fault}") from None
        for name, state in profiles.items():
            whole = isinstance(state.weight, int) and 0 <= state.weight <= WHOLE
            if state.profile != name or state.phase not in get_args(Phase) or not whole:
                raise InvalidParameter(f"the rollout's state of {name} is malformed: {state}")
        if not isinstance(killed, bool):
            raise InvalidParameter(f"the rollout's state is malformed: killed is {killed!r}")
        return cls(profiles, killed, str(why))

    def weights(self, config: RolloutConfig, *, kill_file: bool = False) -> Weights:
        """What is in force for assignment; ``kill_file`` says whether that file is there."""
        here = {n: self.profiles[n] for n in config.canaries if n in self.profiles}
        return Weights(
            serving={n: s.weight for n, s in here.items() if s.phase in SERVING and s.weight},
            shadow={n: config.profiles[n].shadow for n, s in here.items() if s.phase == "shadow"},
            killed=self.killed or kill_file,
            rolled_back=frozenset(n for n, s in here.items() if s.phase == "rolled_back"),
        )


@dataclass(frozen=True)
class Change:
    """What an event changed, for the audit log and the webhook.

    Attributes:
        at: wall-clock seconds.
        profile: whose; empty for the kill switch.
        who: a person's name, or "outrider".
        action: start, shadow, raise, set, hold, promote, rollback, arm, kill or unkill.
        before, after: phase and share, as "canary 5%".
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
        return asdict(self)


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
        action: set (a share, which then does not grow by itself), hold, promote (to the next step,
            from where it grows by itself), rollback, arm, shadow.
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

Step = tuple[ProfileState, Change | None]


def advance(
    state: ProfileState, event: Event, *, config: RolloutConfig, now: float, gate: GateResult
) -> Step:
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
    turn = _Turn(state, config, now, gate)
    if isinstance(event, Trip):
        return turn.trip(event)
    if isinstance(event, Report):
        return turn.report(event)
    if isinstance(event, GateResult):
        return turn.gates()
    return turn.manual(event)


@dataclass(frozen=True)
class _Turn:
    """One event's worth of deciding."""

    state: ProfileState
    config: RolloutConfig
    now: float
    gate: GateResult

    def trip(self, trip: Trip) -> Step:
        if self.state.phase not in WATCHED:
            return self.state, None
        return self._to(
            "rolled_back",
            0,
            "rollback",
            f"trip-wire: {trip.why}",
            details=asdict(trip),
            hard=trip.hard,
        )

    def report(self, report: Report) -> Step:
        """A failing verdict takes back in every phase; a passing one raises a canary's share."""
        state = self.state
        if state.phase not in WATCHED or report.profile != state.profile:
            return state, None
        details = report.to_dict()
        if report.state == "fail":
            return self._to("rolled_back", 0, "rollback", report.why, details=details)
        if state.phase not in ("shadow", "canary"):
            # A person's share, or all traffic: watched on, window after window.
            return (replace(state, window=state.window + 1) if report.done else state), None
        if report.state == "inconclusive":
            if not report.done:
                return state, None
            why = f"the window ended without a verdict: {report.why}"
            return self._to("hold", state.weight, "hold", why, details=details)
        if self.now - state.since < self.config.ramp.least_s:
            return state, None
        refusal = None if self.config.ramp.automatic else "ramp.automatic is off"
        if not self.gate.passed:
            refusal = f"gate: {self.gate.why}"
        if refusal is not None:
            why = f"passed, but {refusal}; promote it by hand"
            return self._to("hold", state.weight, "hold", why, details=details)
        return self._up("raise", report.why or "passed", details=details)

    def gates(self) -> Step:
        """Start what is off; arm what may be armed by evidence that is newer than its rollback."""
        state, ramp = self.state, self.config.ramp
        if not self.gate.passed:
            return state, None
        if state.phase == "off":
            return self._start("start", self.gate.why)
        fresh = self.gate.created > state.since
        if state.phase != "rolled_back" or ramp.rearm_s is None or not fresh:
            return state, None
        if self.now - state.since < ramp.rearm_s:
            return state, None
        return self._start("arm", f"a fresh gate passes: {self.gate.why}")

    def manual(self, order: Manual) -> Step:
        state = self.state
        if order.action == "rollback":
            if state.phase == "rolled_back":
                return state, None
            return self._to("rolled_back", 0, "rollback", order.why or "by hand", who=order.who)
        if order.action == "arm":
            if state.phase != "rolled_back":
                raise InvalidParameter(
                    f"{state.profile} is not taken back, it is {described(state)}"
                )
            return self._to("off", 0, "arm", order.why or "by hand", who=order.who)
        if state.phase == "rolled_back":
            raise InvalidParameter(
                f"{state.profile} was taken back ({state.why}); arm it before anything else"
            )
        if order.action == "hold":
            if state.phase == "hold":
                return state, None
            return self._to("hold", state.weight, "hold", order.why or "by hand", who=order.who)
        return self._raised(order)

    def _raised(self, order: Manual) -> Step:
        """What a person may only do past the gate: set, promote, shadow."""
        state, why = self.state, order.why or "by hand"
        if order.action == "set":
            weight = order.weight
            if weight is None or not 0 <= weight <= WHOLE:
                raise InvalidParameter(f"share {weight} is out of range; use 0% to 100%")
            if weight > state.weight:
                self._ask_gate(order)
            phase: Phase = "promoted" if weight == WHOLE else "hold"
            return self._to(phase, weight, "set", why, who=order.who)
        self._ask_gate(order)
        if order.action == "promote":
            if state.phase == "promoted":
                return state, None
            return self._up("promote", why, who=order.who)
        if not self.config.profiles[state.profile].shadow:
            raise InvalidParameter(
                f"{state.profile} has no shadow share; give it one, as shadow: 5%"
            )
        return self._to("shadow", 0, "shadow", why, who=order.who)

    def _ask_gate(self, order: Manual) -> None:
        if not self.gate.passed and not order.force:
            raise InvalidParameter(
                f"{self.state.profile}: the gate does not pass ({self.gate.why}); mend it, or force"
            )

    def _start(self, action: str, why: str) -> Step:
        """The first phase, where the profile has a share to start with."""
        profile = self.config.profiles[self.state.profile]
        if self.config.ramp.start == "shadow" and profile.shadow:
            return self._to("shadow", 0, action, why)
        if not profile.rollout:
            return self.state, None
        return self._to(_serving_phase(profile.rollout), profile.rollout, action, why)

    def _up(
        self, action: str, why: str, *, who: str = OURSELVES, details: Mapping[str, Any] = NOTHING
    ) -> Step:
        """The next step of the ramp."""
        steps = self.config.steps(self.state.profile)
        later = [step for step in steps if step > self.state.weight]
        weight = later[0] if later else WHOLE
        return self._to(_serving_phase(weight), weight, action, why, who=who, details=details)

    def _to(
        self,
        phase: Phase,
        weight: int,
        action: str,
        why: str,
        *,
        who: str = OURSELVES,
        details: Mapping[str, Any] = NOTHING,
        hard: bool = False,
    ) -> Step:
        evidence = evidence_id(details) if details else self.gate.evidence
        after = ProfileState(
            self.state.profile, phase, weight, self.now, self.state.window + 1, why, evidence
        )
        change = Change(
            at=self.now,
            profile=after.profile,
            who=who,
            action=action,
            before=described(self.state),
            after=described(after),
            why=why,
            evidence=evidence,
            details=details,
            hard=hard,
        )
        return after, change


def _serving_phase(weight: int) -> Phase:
    return "promoted" if weight == WHOLE else "canary"


def described(state: ProfileState) -> str:
    """A state in two words: ``canary 5%``, ``rolled_back``."""
    return f"{state.phase} {percent(state.weight)}" if state.phase in SERVING else state.phase


def evidence_id(details: object) -> str:
    """A short name for a piece of evidence: a hash of its JSON."""
    text = json.dumps(details, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def switch(
    state: RolloutState, *, on: bool, who: str, why: str, now: float
) -> tuple[RolloutState, Change | None]:
    """The kill switch; `None` where it stands so already."""
    if state.killed == on:
        return state, None
    words = ("killed", "running")
    change = Change(
        at=now,
        profile="",
        who=who,
        action="kill" if on else "unkill",
        before=words[not state.killed],
        after=words[not on],
        why=why,
    )
    return replace(state, killed=on, killed_why=why if on else ""), change


def reconcile(state: RolloutState, config: RolloutConfig) -> RolloutState:
    """The persisted state under a new configuration: new profiles are off, weights stay, and
    latches stay even of profiles that are gone, so that taking one out of the file and putting it
    back does not arm it."""
    kept = {n: s for n, s in state.profiles.items() if n in config.canaries}
    latched = {n: s for n, s in state.profiles.items() if s.phase == "rolled_back"}
    new = {n: ProfileState(n) for n in config.canaries if n not in state.profiles}
    return replace(state, profiles={**kept, **latched, **new})
