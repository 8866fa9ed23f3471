"""The ramp, its latch, the audit log, the gates and the controller, over clocks made by hand."""

from __future__ import annotations

import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidParameter
from outrider.evaluate.certify import certificate
from outrider.records.files import RecordFileError
from outrider.rollout.audit import LOG, STATE, Ledger
from outrider.rollout.config import Gates, make_rollout
from outrider.rollout.controller import Controller
from outrider.rollout.gates import check_gates
from outrider.rollout.ramp import (
    GateResult,
    Manual,
    ProfileState,
    RolloutState,
    advance,
    reconcile,
    switch,
)
from outrider.rollout.tripwires import Trip
from outrider.rollout.verdict import Observation, Report

OPEN = GateResult(True, "open")
SHUT = GateResult(False, "certificate x.json says fail")
TRIP = Trip("out_of_memory", True, "out_of_memory")


def rollout(*, ramp=None, **keys):
    eagle = {"speculative": True, "method": "eagle3", "rollout": "5%", "shadow": "10%"}
    given = {"target": "tiny", "profiles": {"eagle": eagle}, "ramp": {"steps": ["25%", "100%"]}}
    given["ramp"] |= ramp or {}
    return make_rollout({**given, **keys})


CONFIG = rollout()


def report(state="pass", *, done=False, profile="eagle"):
    return Report(profile, 0.0, 3, state, done, 0.5, (), why=f"{state} by hand")


def person(action, **values):
    return Manual(action, "ada", **values)


def run(*events, config=CONFIG, state=None, gate=OPEN, step=1000.0):
    """The state after these events, ``step`` seconds apart."""
    state = state or ProfileState("eagle")
    for count, event in enumerate(events, start=1):
        state, _ = advance(state, event, config=config, now=count * step, gate=gate)
    return state


def test_from_nothing_to_all_traffic():
    standing = [run(*[OPEN, report(), report()][:n]) for n in range(4)]
    assert [(s.phase, s.weight) for s in standing] == [
        ("off", 0),
        ("canary", 500),
        ("canary", 2500),
        ("promoted", 10_000),
    ]
    assert [s.window for s in standing] == [0, 1, 2, 3]


def test_shadow_first():
    config = rollout(ramp={"start": "shadow"})
    assert run(OPEN, config=config).phase == "shadow"
    state = run(OPEN, report(), config=config)
    assert (state.phase, state.weight) == ("canary", 500)
    assert run(OPEN, report("fail"), config=config).phase == "rolled_back"


def test_nothing_starts_behind_a_shut_gate():
    assert run(SHUT, gate=SHUT).phase == "off"
    held = run(SHUT, report(), state=run(OPEN), gate=SHUT)
    assert (held.phase, held.weight) == ("hold", 500) and "gate" in held.why


@pytest.mark.parametrize("reached", range(1, 4))
@pytest.mark.parametrize("event", [report("fail"), TRIP, person("rollback")])
def test_every_serving_phase_can_be_taken_back(reached, event):
    state = run(*[OPEN, report(), report()][:reached], event)
    assert (state.phase, state.weight) == ("rolled_back", 0)


def test_time_is_needed_but_never_enough():
    state = run(OPEN)
    soon, change = advance(state, report(), config=CONFIG, now=1001.0, gate=OPEN)
    assert soon == state and change is None
    back, _ = advance(state, report(), config=CONFIG, now=-1e9, gate=OPEN)
    assert back == state
    for _ in range(3):
        state, change = advance(state, report("inconclusive"), config=CONFIG, now=1e12, gate=OPEN)
    assert state.weight == 500 and change is None


def test_a_window_without_a_verdict_holds_for_a_person():
    state = run(OPEN, report("inconclusive", done=True))
    assert (state.phase, state.weight) == ("hold", 500)
    watched = run(report("inconclusive", done=True), report(), state=state)
    assert (watched.phase, watched.weight, watched.window) == ("hold", 500, state.window + 1)
    assert run(person("promote"), state=state).weight == 2500


def test_without_automatic_a_pass_waits():
    state = run(OPEN, report(), config=rollout(ramp={"automatic": False}))
    assert state.phase == "hold" and "promote it by hand" in state.why


def test_the_latch():
    taken = run(OPEN, TRIP)
    for event in (report(), report("fail"), OPEN, TRIP, person("rollback")):
        assert run(event, state=taken) == taken
    for action in ("set", "promote", "shadow", "hold"):
        with pytest.raises(InvalidParameter, match="arm it"):
            run(person(action, weight=100, force=True), state=taken)
    armed = run(person("arm"), state=taken)
    assert armed.phase == "off" and run(OPEN, state=armed).weight == 500
    with pytest.raises(InvalidParameter, match="not taken back"):
        run(person("arm"), state=armed)


def test_a_fresh_gate_arms_where_it_may():
    config = rollout(ramp={"rearm_s": 60})
    taken = run(OPEN, TRIP)  # at 2000
    stale, fresh = GateResult(True, "old", 1999.0), GateResult(True, "new", 2001.0)

    def after(gate, now, config=config):
        return advance(taken, gate, config=config, now=now, gate=gate)[0].phase

    assert after(stale, 9000.0) == "rolled_back"
    assert after(fresh, 2030.0) == "rolled_back"
    assert after(fresh, 2060.0) == "canary"
    assert after(fresh, 9000.0, CONFIG) == "rolled_back"  # a person alone


def test_a_person_sets_and_holds():
    state = run(OPEN, person("set", weight=700))
    assert (state.phase, state.weight) == ("hold", 700)
    assert run(report(), state=state) == state
    assert run(person("set", weight=0), state=state).weight == 0
    assert run(person("set", weight=10_000), state=state).phase == "promoted"
    with pytest.raises(InvalidParameter, match="gate does not pass"):
        run(person("set", weight=800), state=state, gate=SHUT)
    assert run(person("set", weight=800, force=True), state=state, gate=SHUT).weight == 800
    assert run(person("set", weight=600), state=state, gate=SHUT).weight == 600
    with pytest.raises(InvalidParameter, match="out of range"):
        run(person("set", weight=10_001), state=state)


def test_a_change_says_who_when_why_and_on_what():
    _, change = advance(run(OPEN), TRIP, config=CONFIG, now=5.0, gate=OPEN)
    assert (change.at, change.who, change.action, change.hard) == (
        5.0,
        "outrider",
        "rollback",
        True,
    )
    assert (change.before, change.after) == ("canary 5%", "rolled_back")
    assert change.why == "trip-wire: out_of_memory" and change.evidence
    assert change.details["wire"] == "out_of_memory"


EVENTS = st.sampled_from(
    [
        *(report(s, done=d) for s in ("pass", "fail", "inconclusive") for d in (False, True)),
        *(OPEN, SHUT, TRIP, Trip("stalled", False, "x")),
        *(person(a, weight=w) for a in ("set", "promote", "hold") for w in (0, 300, 10_000)),
        *(person("rollback"), person("arm"), person("shadow")),
    ]
)


@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=12))
def test_what_always_holds(events):
    state = ProfileState("eagle")
    for count, event in enumerate(events, start=1):
        before = state
        try:
            state, change = advance(before, event, config=CONFIG, now=count * 1e3, gate=OPEN)
        except InvalidParameter:
            continue
        assert (state.weight == 0) or state.phase in ("canary", "hold", "promoted")
        assert (state.phase == "promoted") <= (state.weight == 10_000)
        if before.phase == "rolled_back" and state.phase != "rolled_back":
            assert isinstance(event, Manual) and event.action == "arm"
        if state.weight > before.weight and before.phase == "hold":
            assert isinstance(event, Manual)
        changed = (state.phase, state.weight) != (before.phase, before.weight)
        assert not changed or change is not None


def test_the_kill_switch_and_the_weights():
    state = RolloutState({"eagle": run(OPEN)})
    assert state.weights(CONFIG).serving == {"eagle": 500}
    killed, change = switch(state, on=True, who="ada", why="odd", now=1.0)
    assert killed.weights(CONFIG).killed and change is not None
    assert switch(killed, on=True, who="ada", why="odd", now=1.0)[1] is None
    assert state.weights(CONFIG, kill_file=True).killed
    shadow = RolloutState({"eagle": ProfileState("eagle", "shadow")}).weights(CONFIG)
    assert shadow.serving == {} and shadow.shadow == {"eagle": 1000}


def test_taking_a_profile_out_of_the_file_does_not_arm_it():
    taken = RolloutState({"eagle": run(OPEN, TRIP)})
    other = make_rollout({"target": "t", "profiles": {"x": {"speculative": True, "drafter": "n"}}})
    assert reconcile(reconcile(taken, other), CONFIG).profiles["eagle"].phase == "rolled_back"
    assert reconcile(RolloutState(), CONFIG).profiles["eagle"].phase == "off"


# -- files --------------------------------------------------------------------------------------


def changes(n=2):
    made, state = [], ProfileState("eagle")
    for count in range(n):
        event = OPEN if count == 0 else person("set", weight=count)
        state, change = advance(state, event, config=CONFIG, now=float(count), gate=OPEN)
        made.append(change)
    return RolloutState({"eagle": state}), tuple(made)


def test_state_and_log_survive(tmp_path):
    ledger = Ledger(tmp_path / "r")
    state, made = changes(3)
    ledger.save(state, made[:2])
    ledger.save(state, made[2:])
    assert Ledger(tmp_path / "r").load() == state
    log = ledger.history()
    assert log.fault is None and [e["action"] for e in log.entries] == ["start", "set", "set"]


@pytest.mark.parametrize("how", ["change", "remove"])
def test_a_log_that_was_touched_shows(tmp_path, how):
    ledger = Ledger(tmp_path)
    ledger.save(*changes(3))
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    if how == "change":
        lines[0] = lines[0].replace(b"outrider", b"somebody")
    else:
        del lines[1]
    (tmp_path / LOG).write_bytes(b"".join(lines))
    assert "line 2" in (ledger.history().fault or "")


def test_a_torn_last_line_is_cut_off(tmp_path):
    ledger = Ledger(tmp_path)
    state, made = changes(2)
    ledger.save(state, made)
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"half')
    assert len(ledger.history().entries) == 2
    ledger.save(state, made[:1])
    log = ledger.history()
    assert log.fault is None and len(log.entries) == 3


def test_a_damaged_state_is_not_a_fresh_start(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.save(*changes())
    for text in ("{", '{"profiles": {"a": {"profile": "b"}}, "killed": false, "killed_why": ""}'):
        (tmp_path / STATE).write_text(text)
        with pytest.raises(RecordFileError, match=STATE):
            ledger.load()
    (tmp_path / STATE).unlink()
    with pytest.raises(RecordFileError, match="is gone"):
        ledger.load()


def test_gates(tmp_path):
    sealed = certificate({}, {}, [], at="2026-11-29T10:00:00+00:00") | {"verdict": "pass"}
    paths = {name: tmp_path / f"{name}.json" for name in ("certificate", "preflight")}
    gates = Gates(**paths)
    assert check_gates(Gates(), now=0).passed
    assert "certificate.json is missing" in check_gates(gates, now=0).why
    paths["certificate"].write_text(json.dumps(sealed))
    assert "changed after it was sealed" in check_gates(gates, now=0).why
    whole = certificate({}, {}, [], at="2026-11-29T10:00:00+00:00")
    paths["certificate"].write_text(json.dumps(whole))
    assert "says inconclusive" in check_gates(gates, now=0).why
    only = Gates(preflight=paths["preflight"], fresh_s=60)
    paths["preflight"].write_text('{"status": "pass"}')
    os.utime(paths["preflight"], (100.0, 100.0))
    assert check_gates(only, now=150).passed and check_gates(only, now=150).created == 100.0
    assert "older than 60 s" in check_gates(only, now=161).why


# -- the controller -----------------------------------------------------------------------------


class Desk:
    """A controller with clocks to turn."""

    def __init__(self, tmp_path, config=CONFIG, gate=OPEN):
        self.now, self.gate, self.told = 1000.0, gate, []
        self.ledger = Ledger(tmp_path / "state")
        self.controller = Controller(
            config,
            ledger=self.ledger,
            gates=lambda name: self.gate,
            wall=lambda: self.now,
            monotonic=lambda: self.now,
            changed=self.told.append,
        )

    def tick(self, seconds=0.0):
        self.now += seconds
        return self.controller.tick()

    def serve(self, n, *, slower=1.0):
        for i in range(n):
            fast = 10.0 + (i * 37 % 101) / 10
            for arm, tpot in (("canary", fast * slower), ("control", fast)):
                seen = Observation(at=self.now, tpot_ms=tpot, ttft_ms=fast, prompt_type="chat")
                self.controller.observe("eagle", arm, seen)

    @property
    def standing(self):
        state = self.controller.state.profiles["eagle"]
        return state.phase, state.weight


def test_the_controller_from_start_to_all(tmp_path):
    desk = Desk(tmp_path)
    desk.tick()
    assert desk.standing == ("canary", 500) and desk.controller.weights.serving == {"eagle": 500}
    for weight in (2500, 10_000):
        desk.serve(400, slower=0.7)
        desk.tick(31)
        assert desk.controller.reports["eagle"].state == "pass"
        assert desk.controller.weights.serving["eagle"] < weight  # too soon
        desk.tick(300)
        assert desk.controller.weights.serving["eagle"] == weight
    assert [c.action for c in desk.told] == ["start", "raise", "raise"]
    assert [e["action"] for e in desk.ledger.history().entries] == ["start", "raise", "raise"]


def test_the_controller_takes_back_for_slowness(tmp_path):
    desk = Desk(tmp_path)
    desk.tick()
    desk.serve(300, slower=1.3)
    (change,) = desk.tick(31)
    assert desk.standing == ("rolled_back", 0) and "tpot" in change.why
    assert desk.controller.weights.rolled_back == {"eagle"}


def test_a_pass_that_waits_is_withdrawn_by_a_failure(tmp_path):
    desk = Desk(tmp_path)
    desk.tick()
    desk.serve(300, slower=0.8)
    desk.tick(31)
    assert desk.controller.reports["eagle"].state == "pass"
    desk.serve(700, slower=1.5)
    desk.tick(31)
    assert desk.standing == ("rolled_back", 0)


def test_a_trip_wire_acts_at_once_and_stays_over_a_restart(tmp_path):
    desk = Desk(tmp_path)
    desk.tick()
    assert desk.controller.wire("eagle", "out_of_memory", detail="killed") is not None
    assert desk.controller.weights.serving == {} and desk.told[-1].hard
    again = Desk(tmp_path)
    again.tick()
    assert again.standing == ("rolled_back", 0)
    again.controller.manual("eagle", person("arm"))
    again.tick(10)
    assert again.standing == ("canary", 500)
    assert again.controller.wire("none", "restart") is None


def test_the_kill_file(tmp_path):
    desk = Desk(tmp_path, rollout(kill_file=str(tmp_path / "kill")))
    desk.tick()
    (tmp_path / "kill").touch()
    (change,) = desk.tick()
    assert change.action == "kill" and desk.controller.weights.killed
    assert Desk(tmp_path, desk.controller.config).controller.weights.killed
    (tmp_path / "kill").unlink()
    assert [c.action for c in desk.tick()] == ["unkill"] and not desk.controller.weights.killed


def test_a_full_disk_never_stops_a_rollback(tmp_path, monkeypatch):
    desk = Desk(tmp_path)
    desk.tick()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        desk.controller.manual("eagle", person("rollback"))
        assert desk.controller.weights.serving == {} and desk.controller.unsaved
        desk.tick(5)
        assert desk.controller.unsaved
    desk.tick(5)
    assert not desk.controller.unsaved
    log = desk.ledger.history()
    assert [e["action"] for e in log.entries] == ["start", "rollback"] and log.fault is None
    assert Desk(tmp_path).standing == ("rolled_back", 0)


def test_a_reload_keeps_what_is_in_force(tmp_path):
    desk = Desk(tmp_path)
    desk.tick()
    desk.controller.reload(rollout(salt="2"))
    assert desk.controller.weights.serving == {"eagle": 500}
    with pytest.raises(InvalidParameter, match="not rolled out here"):
        desk.controller.manual("other", person("hold"))
