"""Assignment: sticky, monotone, equal cohorts, and a stated reason for each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.rollout.assign import (
    Key,
    RequestFacts,
    Weights,
    assign,
    bucket,
    features_of,
    ineligible,
    key_of,
    prompt_type_of,
    spill,
)
from outrider.rollout.config import BASELINE, make_rollout

EAGLE = {"speculative": True, "method": "eagle3", "rollout": "5%", "shadow": "5%"}


def rollout(**keys):
    return make_rollout({"target": "tiny", "profiles": {"eagle": EAGLE}, **keys})


CONFIG = rollout()


def facts(key: str = "a", **values) -> RequestFacts:
    return RequestFacts(Key(key, "user"), **values)


def shares(weights: Weights, config=CONFIG, keys: int = 4000) -> tuple[float, float]:
    """The canary's and its control's part of ``keys``."""
    made = [assign(facts(str(i)), config, weights) for i in range(keys)]
    canary = sum(a.profile == "eagle" for a in made)
    return canary / keys, sum("eagle" in a.control_for for a in made) / keys


def test_the_hash_is_fixed():
    """Another version must not move anybody to another cohort."""
    assert [bucket("1:eagle", key) for key in ("a", "b", "c")] == FIXED


FIXED = [6777, 241, 4631]


def test_cohorts_are_of_equal_size():
    canary, control = shares(Weights({"eagle": 1000}))
    assert canary == pytest.approx(0.1, abs=0.015) and control == pytest.approx(0.1, abs=0.015)
    _, control = shares(Weights({"eagle": 1000}), rollout(control=2.0))
    assert control == pytest.approx(0.2, abs=0.02)


def test_the_control_is_what_a_large_canary_leaves():
    canary, control = shares(Weights({"eagle": 7500}))
    assert canary + control == 1.0
    assert shares(Weights({"eagle": 10_000})) == (1.0, 0.0)


@settings(max_examples=40, deadline=None)
@given(key=st.text(max_size=20), low=st.integers(0, 10_000), high=st.integers(0, 10_000))
def test_a_key_stays_in_the_canary_while_the_share_rises(key, low, high):
    low, high = sorted((low, high))
    if assign(facts(key), CONFIG, Weights({"eagle": low})).profile == "eagle":
        assert assign(facts(key), CONFIG, Weights({"eagle": high})).profile == "eagle"


def test_another_salt_gives_another_cohort():
    first, second = Weights({"eagle": 2000}), rollout(salt="2")
    same = [
        assign(facts(str(i)), CONFIG, first).profile == assign(facts(str(i)), second, first).profile
        for i in range(2000)
    ]
    assert 0.6 < sum(same) / 2000 < 0.76  # 0.2² + 0.8²


def test_cohorts_of_two_profiles_are_independent():
    config = rollout(profiles={"a": EAGLE, "b": EAGLE})
    made = [
        assign(facts(str(i)), config, Weights({"a": 3000, "b": 3000})).profile for i in range(4000)
    ]
    assert made.count("a") / 4000 == pytest.approx(0.3, abs=0.03)
    assert made.count("b") / 4000 == pytest.approx(0.21, abs=0.03)  # of what a leaves


def test_the_order_of_decisions():
    everything = Weights({"eagle": 10_000})
    assert assign(facts(), CONFIG, everything).reason == "split"
    assert assign(facts(forced=BASELINE), CONFIG, everything).reason == "forced"
    killed = Weights({"eagle": 10_000}, killed=True)
    assert assign(facts(forced="eagle"), CONFIG, killed).reason == "kill_switch"
    assert assign(facts(forced="eagle"), CONFIG, Weights()).profile == "eagle"
    taken = Weights(rolled_back=frozenset({"eagle"}))
    assert assign(facts(), CONFIG, taken).reason == "rolled_back"


def test_what_a_profile_cannot_honour_goes_to_the_baseline_and_into_no_cohort():
    lacking = {"eagle": frozenset({"min_p"})}
    for weight in (10_000, 5000):
        for i in range(50):
            made = assign(
                facts(str(i), features=frozenset({"min_p"})),
                CONFIG,
                Weights({"eagle": weight}, {"eagle": 10_000}),
                lacking=lacking,
            )
            assert made.profile == BASELINE and made.reason == "ineligible"
            assert made.control_for == () and made.shadow == ()
            assert "min_p" in made.detail
    forced = facts(forced="eagle", features=frozenset({"min_p"}))
    assert assign(forced, CONFIG, Weights(), lacking=lacking).profile == BASELINE


def test_routes_forbid():
    profile = {"e": {**EAGLE, "approximate": True}}
    routes = {"/strict": {"approximate": False}, "/plain": {"speculative": False}}
    config = rollout(profiles=profile, routes=routes)
    everything = Weights({"e": 10_000})
    assert assign(facts(route="/other"), config, everything).approximate
    for route in routes:
        made = assign(facts(route=route, forced="e"), config, everything)
        assert made.profile == BASELINE and not made.approximate and route in made.detail


def test_sizes_are_part_of_eligibility():
    config = rollout(profiles={"e": {**EAGLE, "limits": {"prompt_tokens": 100, "max_tokens": 50}}})
    profile = config.profiles["e"]
    fits = facts(prompt_tokens=100, max_tokens=50)
    assert ineligible(fits, profile, config=config) is None
    for values in ({"prompt_tokens": 101, "max_tokens": 5}, {"max_tokens": 51}, {}):
        assert ineligible(facts(**values), profile, config=config) is not None


def test_shadow_copies_come_from_baseline_requests():
    weights = Weights(shadow={"eagle": 500})
    made = [assign(facts(str(i)), CONFIG, weights) for i in range(4000)]
    assert {a.profile for a in made} == {BASELINE}
    assert sum(a.shadow == ("eagle",) for a in made) / 4000 == pytest.approx(0.05, abs=0.015)


def test_a_spilled_request_is_in_no_cohort():
    made = spill(assign(facts(), CONFIG, Weights({"eagle": 10_000})), "no room")
    assert (made.profile, made.reason, made.control_for) == (BASELINE, "spill", ())
    assert made.detail == "eagle: no room"


def test_the_order_of_keys():
    headers = {"x-outrider-key": "h", "x-session-id": "s"}
    body = {"user": "u"}
    assert key_of(headers, body, api_key_id="k", request_id="r").source == "header"
    del headers["x-outrider-key"]
    assert key_of(headers, body, api_key_id="k", request_id="r") == Key("u", "user")
    assert key_of(headers, {}, api_key_id="k", request_id="r").source == "session"
    assert key_of({}, {"user": 5}, api_key_id="k", request_id="r").source == "api_key"
    assert key_of({}, {}, request_id="r") == Key("r", "request")
    assert "u" != Key("u", "user").hashed != Key("v", "user").hashed


FEATURES = [
    ({"min_p": 0.1}, {"min_p"}),
    ({"n": 2, "best_of": 1}, {"n"}),
    ({"logprobs": 0}, {"logprobs"}),
    ({"logprobs": False}, set()),
    ({"response_format": {"type": "json_schema"}}, {"json_schema"}),
    ({"response_format": {"type": "text"}}, set()),
    ({"response_format": {"type": "structural_tag"}}, {"grammar"}),
    ({"guided_regex": "a+"}, {"regex"}),
    ({"tools": [{}], "stream": True}, {"tools", "streamed_tools"}),
    ({"messages": [{"content": [{"type": "image_url"}]}]}, {"images"}),
    ({"frequency_penalty": 0.5, "seed": 0}, {"penalties", "seed"}),
    ({"messages": "nonsense", "n": "2"}, set()),
]


@pytest.mark.parametrize(("body", "expected"), FEATURES)
def test_features(body, expected):
    assert features_of({"temperature": 0, **body}) == expected


def test_sampling_is_the_default():
    assert features_of({}) == {"sampled"}


def test_prompt_types():
    assert prompt_type_of({"messages": []}, "agent-7") == "agent-7"
    assert prompt_type_of({"messages": []}, "a b; drop") == "chat"
    assert prompt_type_of({"messages": [{"content": "```py"}]}) == "code"
    assert prompt_type_of({"tools": [{}], "messages": []}) == "tools"
    assert prompt_type_of({"prompt": "x"}) == "completion"
