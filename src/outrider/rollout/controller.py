"""One object that a gateway talks to: observations and events in, weights out.

It holds the windows, the looks, the wires and the state of every profile, and writes what changes.
Clocks are handed in. It has no thread and no network: whoever owns it calls `tick` often (a stat of
the kill file where nothing is due). What is written comes after what is in force, never before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from outrider.errors import InvalidParameter
from outrider.records.files import RecordFileError
from outrider.rollout.audit import Ledger
from outrider.rollout.config import RolloutConfig
from outrider.rollout.ramp import (
    OURSELVES,
    WATCHED,
    Change,
    Event,
    GateResult,
    Manual,
    ProfileState,
    advance,
    reconcile,
    switch,
)
from outrider.rollout.tripwires import Event as WireEvent
from outrider.rollout.tripwires import Trip, Wires
from outrider.rollout.verdict import Looks, Observation, Report, judge, summaries

Arm = Literal["canary", "control"]

GATES_EVERY_S: Final = 5.0
WRITE_AGAIN_S: Final = 2.0
MOST: Final = 50_000  # observations of a window
REPORTS: Final = 200  # kept per profile


@dataclass
class _Window:
    """Observations since the last change of a profile's share."""

    number: int
    began: float
    canary: list[Observation] = field(default_factory=list)
    control: list[Observation] = field(default_factory=list)
    looks: Looks = field(default_factory=Looks)
    looked: float = 0.0
    passed: Report | None = None


class Controller:
    """A rollout in force.

    Attributes:
        config: in force.
        weights: what `assign` reads; replaced whole at each change.
        state: of every profile.
        reports: the last verdict of each profile.
        history: the verdicts of each profile, oldest first, `REPORTS` at most.
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
        judged: Callable[[Report], None] = lambda report: None,
    ) -> None:
        """Args:
        config: the rollout.
        ledger: where state and audit log live; the persisted state is taken up.
        gates: the gates of a profile as they are now (`outrider.rollout.gates.check_gates`).
        wall, monotonic: clocks, in seconds.
        changed: told of every change, before it is written.
        judged: told of every verdict.

        Raises:
            RecordFileError: the persisted state is damaged.
        """
        self.config = config
        self.state = reconcile(ledger.load(), config)
        self.reports: dict[str, Report] = {}
        self.history: dict[str, deque[Report]] = {}
        self.unsaved = ""
        self._ledger, self._gates = ledger, gates
        self._wall, self._monotonic = wall, monotonic
        self._changed, self._judged = changed, judged
        self._kill_file = self._kill_file_there()
        self._wires = {name: Wires(config.trip_wires) for name in config.canaries}
        self._windows: dict[str, _Window] = {}
        self._gates_due = self._write_due = monotonic()
        self.weights = self.state.weights(config, kill_file=self._kill_file)

    def observe(self, profile: str, arm: Arm, observation: Observation) -> None:
        """Take in a finished request of a cohort of ``profile``; one that is not watched now, or
        is no longer there, is passed over."""
        if profile in self._wires and self._standing(profile).phase in WATCHED:
            window = self._window(profile)
            if len(window.canary) + len(window.control) >= MOST:
                del self._windows[profile]  # nothing came of so many; begin again
                window = self._window(profile)
            (window.canary if arm == "canary" else window.control).append(observation)

    def wire(self, profile: str, event: WireEvent, *, detail: str = "") -> Trip | None:
        """Take in a hard event; weights are already at 0 when a trip is returned."""
        if profile not in self._wires or self._standing(profile).phase not in WATCHED:
            return None
        trip = self._wires[profile].saw(event, now=self._monotonic(), detail=detail)
        if trip is not None:
            self._apply(profile, trip)
        return trip

    def reading(
        self, profile: str, event: Literal["memory_share", "kv_share"], share: float
    ) -> Trip | None:
        """Take in a reading; as `wire`."""
        if profile not in self._wires or self._standing(profile).phase not in WATCHED:
            return None
        trip = self._wires[profile].reading(event, share)
        if trip is not None:
            self._apply(profile, trip)
        return trip

    def healthy(self, profile: str) -> None:
        """A health probe of ``profile`` succeeded."""
        if profile in self._wires:
            self._wires[profile].healthy()

    def manual(self, profile: str, order: Manual) -> Change | None:
        """A person's word.

        Raises:
            InvalidParameter: the profile is unknown, or what is asked for is not possible.
        """
        if profile not in self.config.canaries:
            known = ", ".join(self.config.canaries)
            raise InvalidParameter(f"profile {profile!r} is not rolled out here; use {known}")
        return self._apply(profile, order)

    def switch(self, *, on: bool, who: str, why: str) -> Change | None:
        """The kill switch."""
        self.state, change = switch(self.state, on=on, who=who, why=why, now=self._wall())
        self._settle(change)
        return change

    def tick(self) -> tuple[Change, ...]:
        """What is due: the kill file, gates, looks, writes that failed before."""
        now = self._monotonic()
        changes = [self._look_for_kill_file()]
        if now >= self._gates_due:
            self._gates_due = now + GATES_EVERY_S
            for name in self.config.canaries:
                if self._standing(name).phase in ("off", "rolled_back"):
                    changes.append(self._apply(name, self._gates(name)))
        for name in self.config.canaries:
            if self._standing(name).phase in WATCHED:
                changes.append(self._look(name, now))
        if self.unsaved and now >= self._write_due:
            self._settle(None)
        return tuple(change for change in changes if change is not None)

    def reload(self, config: RolloutConfig) -> None:
        """Another configuration; weights and latches stay."""
        self.config = config
        self._wires = {
            name: self._wires.get(name) or Wires(config.trip_wires) for name in config.canaries
        }
        self._windows = {n: w for n, w in self._windows.items() if n in config.canaries}
        self.state = reconcile(self.state, config)
        self._gates_due = self._monotonic()
        self._settle(None)

    def _standing(self, profile: str) -> ProfileState:
        return self.state.profiles[profile]

    def _window(self, profile: str) -> _Window:
        number = self._standing(profile).window
        window = self._windows.get(profile)
        if window is None or window.number != number:
            window = self._windows[profile] = _Window(number, self._monotonic())
            window.looked = window.began
        return window

    def _look(self, profile: str, now: float) -> Change | None:
        """Judge where it is due. A pass that came before its time stands, unless a later look
        fails, and is put forward when its time has come."""
        window = self._window(profile)
        if now - window.looked >= self.config.verdict.every_s:
            window.looked = now
            report = self._judge(profile, window)
            if report.state == "pass":
                window.passed = report
            elif window.passed is None or report.state == "fail":
                return self._apply(profile, report)
        rising = self._standing(profile).phase in ("shadow", "canary")
        if window.passed is None or not rising or now - window.began < self.config.ramp.least_s:
            return None
        return self._apply(profile, window.passed)

    def _judge(self, profile: str, window: _Window) -> Report:
        report, window.looks = judge(
            profile,
            window.canary,
            window.control,
            self.config.verdict,
            looks=window.looks,
            at=self._wall(),
        )
        report = replace(report, canary=summaries(window.canary), control=summaries(window.control))
        self.reports[profile] = report
        self.history.setdefault(profile, deque(maxlen=REPORTS)).append(report)
        self._judged(report)
        return report

    def _apply(self, profile: str, event: Event) -> Change | None:
        before = self._standing(profile)
        # Gates are files: only what might raise a share asks them, and a trip-wire never waits.
        if isinstance(event, GateResult):
            gate = event
        elif isinstance(event, Trip) or (isinstance(event, Report) and event.state != "pass"):
            gate = GateResult(False, "not asked")
        else:
            gate = self._gates(profile)
        after, change = advance(before, event, config=self.config, now=self._wall(), gate=gate)
        if after != before:
            self.state = replace(self.state, profiles={**self.state.profiles, profile: after})
            if before.phase in ("off", "rolled_back"):
                self._wires[profile].reset()
            self._settle(change)
        return change

    def _settle(self, change: Change | None) -> None:
        """Put the state in force, tell of it, write it; in this order."""
        self.weights = self.state.weights(self.config, kill_file=self._kill_file)
        if change is not None:
            self._changed(change)
        try:
            self._ledger.save(self.state, () if change is None else (change,))
            self.unsaved = ""
        except RecordFileError as fault:
            self.unsaved = str(fault)
            self._write_due = self._monotonic() + WRITE_AGAIN_S

    def _kill_file_there(self) -> bool:
        return self.config.kill_file is not None and self.config.kill_file.exists()

    def _look_for_kill_file(self) -> Change | None:
        there = self._kill_file_there()
        if there == self._kill_file:
            return None
        self._kill_file = there
        path = self.config.kill_file
        words = ("killed", "running")
        change = Change(
            at=self._wall(),
            profile="",
            who=OURSELVES,
            action="kill" if there else "unkill",
            before=words[there],
            after=words[not there],
            why=f"kill file {path} is {'there' if there else 'gone'}",
        )
        self._settle(change)
        return change
