"""What is kept for the next drafter, what is not, and when acceptance drifts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.evaluate.sets import load_set
from outrider.rollout.config import FeedbackSettings
from outrider.rollout.feedback import Case, DriftWatch, FeedbackFolder, Selector
from outrider.rollout.verdict import Observation


def seen(i=0, **values):
    values = {"tpot_ms": 10.0, "accepted": 10, "steps": 10, **values}
    return Observation(at=0.0, prompt_type="chat", id=f"r{i}", **values)


def says(text):
    return [{"role": "user", "content": text}]


def selector(**settings):
    return Selector("eagle", FeedbackSettings(**settings), redact=lambda t: t.replace("Ada", "X"))


def filled(**settings):
    made = selector(**settings)
    rng = np.random.default_rng(0)
    for i in range(400):
        case = made.consider(
            seen(i, tpot_ms=float(rng.uniform(8, 12)), accepted=int(rng.integers(5, 15))),
            says(f"warm {i}"),
        )
        assert i >= 200 or case is None
    return made


REASONS = [
    ({"outcome": "timeout"}, "failed"),
    ({"valid": False}, "invalid"),
    ({"repetitive": True}, "repetitive"),
    ({"accepted": 0}, "low_acceptance"),
    ({"accepted": 80}, "high_acceptance"),
    ({"tpot_ms": 99.0}, "slow"),
]


@pytest.mark.parametrize(("values", "reason"), REASONS, ids=[r for _, r in REASONS])
def test_why_a_request_is_kept(values, reason):
    case = filled().consider(seen(999, **values), says("x"))
    assert case is not None and case.reason == reason and case.messages is None


def test_an_ordinary_request_is_not_kept():
    made = filled()
    assert made.consider(seen(999), says("x")) is None
    assert made.consider(seen(999), says("x"), different=True).reason == "different"
    assert made.consider(seen(999), says("x"), drifting=True).reason == "drift"
    assert made.consider(seen(999, outcome="cancelled"), says("y")) is None


def test_the_same_prompt_is_kept_once_and_there_is_a_cap():
    made = selector(most=2)
    bad = [made.consider(seen(i, outcome="error"), says(text)) for i, text in enumerate("aabcd")]
    assert [case is not None for case in bad] == [True, False, True, False, False]


def test_text_is_kept_only_on_request_and_redacted():
    message = [{"role": "user", "content": [{"type": "text", "text": "I am Ada"}, {"type": "i"}]}]
    case = selector(text=True).consider(seen(outcome="error"), message)
    assert case.messages == [{"role": "user", "content": "I am X\n"}]
    assert "Ada" not in json.dumps(selector().consider(seen(outcome="error"), message).figures)


def test_the_folder_is_a_set_that_evaluation_reads(tmp_path):
    folder = FeedbackFolder(tmp_path / "f")
    made = selector(text=True)
    for i in range(3):
        folder.add(made.consider(seen(i, outcome="error"), says(f"Ada {i}")))
    assert folder.kept("eagle") == {("chat", "failed"): 3} and not folder.kept("other")
    found = load_set(str(tmp_path / "f" / "regression.jsonl"))
    assert [item.prompt.id for item in found.items] == ["r0", "r1", "r2"]
    assert "Ada" not in (tmp_path / "f" / "regression.jsonl").read_text()
    again = Selector("eagle", FeedbackSettings(most=3), redact=str, kept=folder.kept("eagle"))
    assert again.consider(seen(9, outcome="error"), says("new")) is None


def test_a_damaged_line_is_passed_over(tmp_path):
    folder = FeedbackFolder(tmp_path)
    folder.add(Case("a", "slow", "eagle", "chat", {}, "h"))
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write("{\n[]\n")
    assert folder.kept("eagle") == {("chat", "slow"): 1}


def lengths(n, mean, seed):
    for accepted in np.random.default_rng(seed).poisson(mean * 20, n):
        yield seen(accepted=int(accepted), steps=20)


def drifts(watch, observations):
    return [drift for o in observations if (drift := watch.saw(o)) is not None]


def test_drift_is_found_in_both_ways_and_not_without_one():
    for mean, word in ((0.8, "fell"), (1.2, "rose")):
        watch = DriftWatch("chat")
        assert drifts(watch, lengths(1000, 1.0, 1)) == []
        (found,) = drifts(watch, lengths(500, mean, 2))
        assert word in found.why and found.requests <= 1300
    watch = DriftWatch("chat")
    assert drifts(watch, lengths(3000, 1.0, 3)) == []
    assert watch.saw(seen(steps=None)) is None
