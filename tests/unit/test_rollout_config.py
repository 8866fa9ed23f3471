"""The rollout's file: what it takes, and that the first fault is one line that names the key."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidParameter
from outrider.rollout.config import is_rollout, load_rollout, make_rollout, percent, share

EAGLE = {"speculative": True, "method": "eagle3", "num_speculative_tokens": 3, "rollout": "5%"}


def rollout(**keys):
    return make_rollout({"target": "tiny", "profiles": {"eagle": EAGLE}, **keys})


def test_the_file_of_the_issue(tmp_path):
    path = tmp_path / "rollout.yaml"
    path.write_text(
        "target: smollm2-135m\nprofiles:\n  baseline: {speculative: false}\n"
        "  spec_decode_eagle: {speculative: true, method: eagle3, num_speculative_tokens: 3, "
        "rollout: 5%}\n"
    )
    config = load_rollout(path)
    assert config.canaries == ("spec_decode_eagle",)
    assert config.profiles["spec_decode_eagle"].rollout == 500
    assert config.steps("spec_decode_eagle") == (500, 1000, 2500, 5000, 10_000)


@pytest.mark.parametrize(
    ("text", "points"), [("5%", 500), ("0.25%", 25), ("100 %", 10_000), (0, 0)]
)
def test_shares(text, points):
    assert share(text) == points
    assert share(percent(points)) == points


WRONG = [
    ({"profiles": {"e": {**EAGLE, "rollout": 5}}}, "profiles.e.rollout: 5 is not a share"),
    ({"profiles": {"e": {**EAGLE, "rollout": "101%"}}}, "out of range"),
    (
        {"profiles": {"e": {**EAGLE, "methd": "x"}}},
        "profiles.e.methd is unknown; did you mean method",
    ),
    ({"profiles": {"e": {"rollout": "1%"}}}, "profiles.e.speculative is missing"),
    ({"profiles": {"e": {"speculative": True}}}, "needs method or drafter"),
    ({"profiles": {"e": {"speculative": False, "method": "x"}}}, "method needs speculative"),
    ({"profiles": {}}, "nothing to roll out"),
    ({"profiles": {"baseline": {**EAGLE}}}, "plain decoding"),
    ({"profiles": {"a b": EAGLE}}, "profile name 'a b'"),
    ({"profiles": {"e": {**EAGLE, "rule": "typical"}}}, "say approximate: true"),
    (
        {"profiles": {"e": {**EAGLE, "backend": {"args": ["--x=typical_acceptance_sampler"]}}}},
        "typical_acceptance changes the law",
    ),
    ({"ramp": {"steps": ["25%", "10%"]}}, "ramp.steps: shares must rise"),
    ({"verdict": {"checks": {"tpto": {}}}}, "'tpto' is none of tpot"),
    ({"verdict": {"checks": {"tpot": {"toleranze": 1}}}}, "did you mean tolerance"),
    ({"verdict": {"plan": [300, 200]}}, "verdict.plan: sample sizes must rise"),
    ({"verdict": {"false_rollback": 0}}, "verdict.false_rollback"),
]


@pytest.mark.parametrize(("keys", "words"), WRONG, ids=[words[:24] for _, words in WRONG])
def test_the_first_fault_is_one_line(keys, words):
    with pytest.raises(InvalidParameter) as caught:
        rollout(**keys)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_approximate_profile_says_so():
    config = rollout(profiles={"e": {**EAGLE, "rule": "typical", "approximate": True}})
    assert config.profiles["e"].approximate


def test_checks_change_single_keys_of_the_defaults():
    tpot = rollout(verdict={"checks": {"tpot": {"tolerance": 0.2}}}).verdict.checks["tpot"]
    assert (tpot.tolerance, tpot.critical, tpot.budget) == (0.2, True, 12)


def test_a_rollout_is_told_from_a_server():
    assert is_rollout({"profiles": {"e": EAGLE}})
    assert not is_rollout({"profiles": {"fast": {"drafter": "ngram"}}})
    assert not is_rollout({"target": "x"}) and not is_rollout(None)


def test_a_file_that_is_not_there_or_not_yaml(tmp_path):
    with pytest.raises(InvalidParameter, match="cannot be read"):
        load_rollout(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(InvalidParameter, match="is not YAML"):
        load_rollout(tmp_path / "bad.yaml")
