"""Verdicts: pass, fail and inconclusive for the right reason, over many looks, in small."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from outrider.rollout.config import TripWires, VerdictSettings
from outrider.rollout.tripwires import Wires
from outrider.rollout.verdict import Looks, Observation, judge, summaries, summarize_cohort

SETTINGS = VerdictSettings()


def traffic(n, *, seed, slower=1.0, late=1.0, **values):
    rng = np.random.default_rng(seed)
    tpot, ttft = rng.lognormal(3, 0.5, n) * slower, rng.lognormal(5, 0.5, n) * late
    values = {"prompt_type": "chat", **values}
    return [
        Observation(at=0.0, tpot_ms=t, ttft_ms=f, completion_tokens=20, **values)
        for t, f in zip(tpot, ttft, strict=True)
    ]


def look(canary, control, settings=SETTINGS, looks=None):
    return judge("eagle", canary, control, settings, looks=looks or Looks(), at=7.0)[0]


def found(report, metric, kind=""):
    return next(f for f in report.findings if (f.metric, f.prompt_type) == (metric, kind))


def test_a_faster_canary_passes():
    report = look(traffic(400, seed=1, slower=0.7), traffic(400, seed=2))
    assert report.state == "pass" and not report.done and report.look == 1
    finding = found(report, "tpot")
    assert finding.low < 0.7 < finding.high < 1
    assert finding.canary == finding.control == 400


def test_a_slower_canary_fails_and_says_by_how_much():
    report = look(traffic(300, seed=1, slower=1.3), traffic(300, seed=2))
    assert report.state == "fail" and "tpot is 1." in report.why
    assert found(report, "ttft").state != "fail"
    assert found(report, "tpot").p <= found(report, "tpot").bound


def test_direction_matters():
    report = look(traffic(300, seed=1, slower=0.5, late=0.5), traffic(300, seed=2))
    assert report.state == "pass"


def test_a_late_first_token_fails():
    report = look(traffic(600, seed=1, slower=0.7, late=1.35), traffic(600, seed=2))
    assert report.state == "fail" and "ttft" in report.why and "tpot" not in report.why


def test_equal_arms_are_inconclusive_early():
    report = look(traffic(60, seed=1), traffic(60, seed=2))
    assert report.state == "inconclusive" and report.findings and "not yet sure" in report.why


def test_too_few_spend_nothing():
    report, looks = judge(
        "e", traffic(9, seed=1), traffic(9, seed=2), SETTINGS, looks=Looks(), at=0
    )
    assert (report.state, report.findings, looks) == ("inconclusive", (), Looks())


def test_a_look_without_news_spends_nothing():
    canary, control = traffic(300, seed=1), traffic(300, seed=2)
    _, looks = judge("e", canary, control, SETTINGS, looks=Looks(), at=0)
    report, again = judge("e", canary, control, SETTINGS, looks=looks, at=0)
    assert again == looks and report.findings == ()


def test_a_window_ends_with_its_plan():
    canary, control = traffic(1001, seed=1), traffic(1001, seed=2)
    report, looks = judge("e", canary, control, SETTINGS, looks=Looks((0.5,)), at=0)
    assert report.done and report.look == 2
    after, _ = judge("e", canary * 2, control * 2, SETTINGS, looks=looks, at=0)
    assert after.done and after.state == "inconclusive" and "start a new one" in after.why


def test_errors_fail():
    canary = traffic(280, seed=1, slower=0.7) + traffic(20, seed=3, outcome="error")
    report = look(canary, traffic(300, seed=2))
    assert report.state == "fail" and "error 20 of 300 against 0 of 300" in report.why


def test_times_of_failed_requests_are_not_compared():
    canary = traffic(300, seed=1, slower=0.7) + traffic(3, seed=3, slower=50, outcome="error")
    assert found(look(canary, traffic(300, seed=2)), "tpot").canary == 300


def test_what_must_have_data_and_has_none_never_passes():
    canary = [
        Observation(at=0, ttft_ms=o.ttft_ms, prompt_type="chat") for o in traffic(400, seed=1)
    ]
    report = look(canary, traffic(400, seed=2))
    assert report.state == "inconclusive" and "tpot: 0 and 400 samples" in report.why


def test_what_need_not_have_data_does_not_stop_a_pass():
    report = look(traffic(400, seed=1, slower=0.7), traffic(400, seed=2))
    assert found(report, "invalid").effect is None and report.state == "pass"


def test_what_is_not_critical_only_holds():
    canary = traffic(300, seed=1, slower=0.7, finish_reason="length")
    report = look(canary, traffic(300, seed=2, finish_reason="stop"))
    assert report.state == "inconclusive" and "not critical" in report.why


def test_a_slow_prompt_type_holds_a_good_average():
    good = traffic(500, seed=1, slower=0.5), traffic(500, seed=2)
    bad = (
        traffic(200, seed=3, slower=1.6, prompt_type="poem"),
        traffic(200, seed=4, prompt_type="poem"),
    )
    report = look(good[0] + bad[0], good[1] + bad[1])
    assert found(report, "tpot").state != "fail"
    assert found(report, "tpot", "poem").state == "fail"
    assert report.state == "inconclusive" and "[poem]" in report.why


def test_a_small_effect_never_fails_however_sure():
    rows = traffic(5000, seed=1), traffic(5000, seed=1, slower=1 / 1.025)

    def state(least):
        check = SETTINGS.checks["tpot"].model_copy(update={"least": least})
        settings = SETTINGS.model_copy(update={"plan": (5000,), "checks": {"tpot": check}})
        return found(look(*rows, settings), "tpot").state

    assert state(0.03) == "pass" and state(0.01) == "fail"


def test_a_chatty_user_is_one_unit():
    canary = traffic(300, seed=1, slower=2.0, unit="one-user")
    report = look(canary, traffic(300, seed=2))
    assert report.state == "inconclusive" and report.findings == ()


def test_reports_are_json():
    report = look(traffic(31, seed=1, slower=9), traffic(31, seed=2))
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert json.loads(text)["findings"][0]["metric"] == "tpot"


def test_summaries():
    rows = traffic(150, seed=1, accepted=12, steps=8) + traffic(4, seed=2, prompt_type="tools")
    cohort = summaries(rows)
    assert set(cohort) == {"", "chat", "tools"}
    chat = cohort["chat"]
    assert chat.acceptance_length == 2.5 and chat.target_forward_reduction == pytest.approx(0.6)
    assert chat.times["tpot_ms"]["p99"] is not None
    assert cohort["tools"].times["tpot_ms"]["p95"] is None  # four values have no such tail
    assert summarize_cohort([]).n == 0


def detections(*, slower, n, looks, runs, seed):
    """The share of small rollouts that are taken back."""
    settings = VerdictSettings(by_type=())
    hits = 0
    for run in range(runs):
        canary = traffic(n, seed=seed + 2 * run, slower=slower)
        control = traffic(n, seed=seed + 2 * run + 1)
        state = Looks()
        for k in range(1, looks + 1):
            size = math.ceil(n * k / looks)
            report, state = judge("e", canary[:size], control[:size], settings, looks=state, at=0)
            if report.state == "fail":
                hits += 1
                break
    return hits / runs


def test_simulation_in_small():
    """The figures of record come from benchmarks/rollout_verdicts.py; this is its smoke test."""
    assert detections(slower=1.0, n=300, looks=6, runs=15, seed=100) <= 1 / 15
    assert detections(slower=1.2, n=300, looks=6, runs=15, seed=200) >= 12 / 15


def test_wires_count_in_a_window():
    wires = Wires(TripWires())
    for second in range(4):
        assert wires.saw("server_errors", now=second) is None
    assert wires.saw("server_errors", now=11.5) is None  # the first has aged out
    assert wires.saw("server_errors", now=11.5) is None
    trip = wires.saw("server_errors", now=11.5, detail="502")
    assert trip is not None and not trip.hard and "server_errors 5 times" in trip.why


def test_wires_of_one_event_and_readings():
    wires = Wires(TripWires(kv_share=0.9))
    trip = wires.saw("out_of_memory", now=0)
    assert trip is not None and trip.hard
    assert wires.reading("kv_share", 0.9) is None and wires.reading("memory_share", 1.0) is None
    assert wires.reading("kv_share", 0.95) is not None


def test_health_and_reset_forget():
    wires = Wires(TripWires())
    wires.saw("unhealthy", now=0), wires.saw("unhealthy", now=1)
    wires.healthy()
    assert wires.saw("unhealthy", now=2) is None
    wires.saw("unhealthy", now=3)
    wires.reset()
    assert wires.saw("unhealthy", now=4) is None


def test_a_clock_that_goes_back_still_counts():
    wires = Wires(TripWires())
    trips = [wires.saw("stalled", now=now) for now in (1000.0, 10.0, 11.0)]
    assert trips[-1] is not None
