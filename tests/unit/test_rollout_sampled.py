"""Engines without exactness are taken back when they do not sample what they say, and only then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway_fakes import World, rollout, with_gateway
from outrider.backends.llamacpp import LLAMACPP
from outrider.backends.sglang import SGLANG
from outrider.core.law import Setting
from outrider.rollout.config import Profile
from outrider.rollout.sampled import TOP, SampledLaw
from outrider.serve.gateway.lanes import Lane, Request
from outrider.serve.gateway.probe import law_probe, setting_of
from outrider.serve.gateway.upstream import AsgiUpstream
from outrider.testing.engine import FakeEngine

LAW = (0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01)
WORDS = tuple("abcdefghij")
PLAIN = Setting("plain", 1.0)


def answer(rng: np.random.Generator, *, lean: float = 0.0, tokens: int = 16) -> Any:
    """An answer in `Told`'s form; with chance `lean` the likeliest token came whatever the law."""
    tops = [(word, math.log(p)) for word, p in zip(WORDS, LAW, strict=True)]
    drawn = np.where(rng.random(tokens) < lean, 0, rng.choice(len(LAW), tokens, p=LAW))
    return [(WORDS[i], tops) for i in drawn]


def accused(*, lean: float, answers: int, seed: int) -> bool:
    rng, seen = np.random.default_rng(seed), SampledLaw(1e-6)
    return any(seen.saw(answer(rng, lean=lean), PLAIN) for _ in range(answers))


def test_who_samples_rightly_is_not_accused_and_who_leans_is() -> None:
    assert not any(accused(lean=0.0, answers=400, seed=seed) for seed in range(10))
    assert all(accused(lean=0.15, answers=200, seed=seed) for seed in range(10))


def test_a_token_that_cannot_come_is_enough() -> None:
    seen = SampledLaw(1e-6)
    top = [("a", math.log(0.5)), ("b", math.log(0.3)), ("c", math.log(0.2))]
    why = seen.saw([("c", top)], Setting("k", 1.0, top_k=2))
    assert why is not None and "certain after 1 tokens" in why


def test_what_is_listed_only_because_it_was_drawn_changes_no_law() -> None:
    """Engines add a drawn token to the likeliest ones that were asked for; a law with it would hold
    what came to be likelier than it was."""
    top = [(f"t{i}", math.log(0.04)) for i in range(TOP)]
    told = [*top, ("drawn", math.log(1e-4))]
    one, two = SampledLaw(1e-6), SampledLaw(1e-6)
    one.saw([("drawn", told)] * 5, PLAIN)
    two.saw([("drawn", top)] * 5, PLAIN)
    assert one.evidence == two.evidence and one.tokens == 5


def test_an_answer_counts_up_to_where_nothing_is_told() -> None:
    seen = SampledLaw(1e-6)
    top = [("a", math.log(0.6)), ("b", math.log(0.4))]
    seen.saw([("a", top), ("b", ()), ("b", top)], PLAIN)
    seen.saw([("a", top)], Setting("hot", 1.5))
    assert (seen.tokens, seen.undecided) == (1, 1)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, (1.0, 0, 1.0)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, (0.7, 5, 0.9)),
        ({"temperature": 0}, None),
        ({"temperature": 1.5}, None),
        ({"temperature": 1.5, "top_k": 4}, (1.5, 4, 1.0)),
        ({"top_k": 64}, None),
        ({"top_k": -1}, (1.0, 0, 1.0)),
        ({"temperature": "warm"}, None),
        ({"temperature": True}, None),
    ],
)
def test_which_samplers_can_be_tested(body: dict[str, Any], found: Any) -> None:
    setting = setting_of(body)
    assert found == (setting and (setting.temperature, setting.top_k, setting.top_p))


def lane(kind: str, **more: Any) -> Lane:
    return Lane(
        "spec", Profile(speculative=True, method="eagle3"), AsgiUpstream(FakeEngine()), kind, **more
    )


def test_a_probe_is_the_prompt_and_the_sampler_alone() -> None:
    asked = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5,
        "top_k": 4, "logit_bias": {"1": 9}, "presence_penalty": 1.0, "seed": 3, "stream": True,
        "stop": ["x"], "response_format": {"type": "json_object"}, "max_tokens": 900,
    }  # fmt: skip
    request = Request("/v1/chat/completions", asked, b"", "r", seed=7)
    made = law_probe(request, lane("vllm"))
    assert made is not None
    probe, setting = made
    assert setting == Setting("as asked", 0.5, top_k=4) and probe.seed is None
    assert set(probe.body) == {
        "model", "messages", "max_tokens", "top_k", "min_p", "repetition_penalty", "temperature",
        "top_p", "ignore_eos", "logprobs", "top_logprobs", "return_tokens_as_token_ids",
    }  # fmt: skip
    assert probe.body["top_k"] == 4 and probe.body["max_tokens"] < 900 and probe.body["ignore_eos"]
    ours = law_probe(request, lane("embedded"))
    assert ours is not None and ours[0].body["return_tokens_as_token_ids"] is True
    for other in (lane("openai"), lane("llamacpp"), lane("vllm", lacking=frozenset({"logprobs"}))):
        assert law_probe(request, other) is None
    assert SGLANG.scaled_logprobs and law_probe(request, lane("sglang")) is None
    assert LLAMACPP.sampling_off is None
    plain = Request("/v1/completions", {"model": "m", "prompt": "x"}, b"", "r")
    told = law_probe(plain, lane("sglang"))
    assert told is not None and told[0].body["logprobs"] == TOP and told[0].body["prompt"] == "x"


SHADOW = {"ramp": {"start": "shadow", "automatic": False, "least_s": 0}}


async def ask(world: World, count: int) -> None:
    for number in range(count):
        await world.ask(f"{number}", temperature=1)
        await world.gateway.flow.mirrors.quiet()


def test_in_shadow_a_lossy_engine_is_taken_back_and_a_right_one_is_not(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        engine, controller = world.engines["spec"], world.gateway.controller
        engine.law = LAW
        await ask(world, 60)
        assert controller.state.profiles["spec"].phase == "shadow"
        tested = {"profile": "spec", "outcome": "tested"}
        assert world.sample("outrider_gateway_law_tokens_total", **tested) == 60 * 16
        assert len(engine.requests) == 120  # the copy that is compared and timed, and the probe
        seen = len(controller._windows["spec"].canary)
        assert seen == 60  # probes are in no cohort
        engine.lean = 0.5
        await ask(world, 60)
        standing = controller.state.profiles["spec"]
        assert standing.phase == "rolled_back" and "parity: sampled tokens" in standing.why

    with_gateway(rollout(tmp_path, spec={"shadow": "100%"}, **SHADOW), test, exact=False)


def test_while_it_serves_a_share_is_probed_too(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].law, world.engines["spec"].lean = LAW, 0.6
        await ask(world, 60)
        assert "sampled tokens" in world.gateway.controller.state.profiles["spec"].why

    with_gateway(rollout(tmp_path, spec={"shadow": "100%"}), test, exact=False)


@pytest.mark.parametrize("off", ["exact", "none", "approximate"])
def test_who_is_not_probed(tmp_path: Path, off: str) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].law = LAW
        await ask(world, 3)
        assert all("ignore_eos" not in asked for asked in world.engines["spec"].requests)

    approximate = {"approximate": True, "rule": "typical"} if off == "approximate" else {}
    more: dict[str, Any] = {"trip_wires": {"sampled": None}} if off == "none" else {}
    values = rollout(tmp_path, spec={"shadow": "100%", **approximate}, **SHADOW, **more)
    with_gateway(values, test, exact=off == "exact")
