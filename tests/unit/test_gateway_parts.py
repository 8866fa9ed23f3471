"""Parts of the gateway on their own: breaker, limits, reading, command lines, putting together."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.base import EngineUnfit
from outrider.backends.launch import Launch, command_of
from outrider.backends.vllm import VLLM
from outrider.errors import InvalidParameter
from outrider.rollout.config import make_rollout
from outrider.serve.gateway.app import admin_keys
from outrider.serve.gateway.engines import embedded_config, same_engine
from outrider.serve.gateway.guards import Breaker, Full, Gate
from outrider.serve.gateway.lanes import Lane, probe_features
from outrider.serve.gateway.observe import valid
from outrider.serve.gateway.reading import Malformed, Reader, Reading
from outrider.serve.gateway.upstream import AsgiUpstream
from outrider.testing.engine import FakeEngine


def test_the_breaker_opens_tries_once_and_closes() -> None:
    breaker = Breaker(failures=3, rest_s=10)
    for now in (0.0, 1.0):
        breaker.failed(now)
    breaker.succeeded()
    for now in (2.0, 3.0, 4.0):
        assert breaker.admits(now)
        breaker.failed(now)
    assert not breaker.admits(5.0) and breaker.state(5.0) == "open"
    assert breaker.admits(14.0) and not breaker.admits(14.0)  # one tries
    breaker.abandoned()
    assert breaker.admits(14.0)
    breaker.failed(14.0)
    assert not breaker.admits(20.0)
    assert breaker.admits(24.0)
    breaker.succeeded()
    assert breaker.admits(24.0) and breaker.admits(24.0)


def test_a_minute_bounds_requests_and_tokens() -> None:
    async def test() -> None:
        gate = Gate(per_minute=2)
        await gate.enter(0.0)
        await gate.enter(1.0)
        with pytest.raises(Full, match="requests per minute"):
            await gate.enter(59.0)
        await gate.enter(60.0)
        tokens = Gate(tokens_per_minute=100)
        await tokens.enter(0.0)
        tokens.leave(5.0, tokens=150)
        with pytest.raises(Full, match="tokens per minute"):
            await tokens.enter(64.0)
        await tokens.enter(65.0)

    asyncio.run(test())


def test_the_queue_hands_places_over_and_forgets_who_left() -> None:
    async def test() -> None:
        gate = Gate(in_flight=1, queue=2, queue_s=5)
        await gate.enter(0.0)
        waiting = [asyncio.create_task(gate.enter(0.0)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Full):
            await gate.enter(0.0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        gate.leave(1.0)
        await waiting[1]
        assert gate.running == 1 and gate.waiting == 0
        gate.leave(1.0)
        assert gate.running == 0
        late = Gate(in_flight=1, queue=1, queue_s=0.01)
        await late.enter(0.0)
        with pytest.raises(Full):
            await late.enter(0.0)
        assert late.running == 1 and late.waiting == 0

    asyncio.run(test())


def stream(*events: object, end: str = "\n\n") -> bytes:
    lines = [e if isinstance(e, str) else "data: " + json.dumps(e) for e in events]
    return "".join(line + end for line in lines).encode()


def chunk(text: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
WHOLE = (": hello", chunk(""), chunk("a\u00e9"), chunk("b"), chunk(None, "stop"), USAGE)


@given(cuts=st.lists(st.integers(0, 700), max_size=8), end=st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_bytes_pass_unchanged_however_they_are_cut(cuts: list[int], end: str) -> None:
    data = stream(*WHOLE, "data: [DONE]", end=end)
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    reader = Reader(VLLM.read, chat=True)
    passed = b"".join(reader.feed(data[a:b], float(a)) for a, b in itertools.pairwise(places))
    reader.end()
    assert passed == data
    assert reader.seen.text() == "a\u00e9b" and reader.seen.completion_tokens == 2
    assert reader.seen.chunks == 2 and reader.seen.done and reader.seen.finish == "stop"


def test_only_the_usage_event_is_left_out() -> None:
    reader = Reader(VLLM.read, chat=True, strip_usage=True)
    passed = reader.feed(stream(*WHOLE, "data: [DONE]"), 0.0)
    assert passed == stream(*WHOLE[:-1], "data: [DONE]")
    assert reader.seen.prompt_tokens == 3


@pytest.mark.parametrize(
    "data",
    [b"data: {\n\n", b"data: []\n\n", b"<html>\n\n", b'data: {"x": 1}\n\n', b"data: nonsense\n\n"],
)
def test_what_is_no_stream_is_seen_as_such(data: bytes) -> None:
    with pytest.raises(Malformed):
        Reader(VLLM.read, chat=True).feed(data, 0.0)


@pytest.mark.parametrize("data", [stream(chunk("a")), stream(chunk("a", "stop")) + b'data: {"'])
def test_an_end_that_is_none_is_seen(data: bytes) -> None:
    reader = Reader(VLLM.read, chat=True)
    reader.feed(data, 0.0)
    with pytest.raises(Malformed):
        reader.end()


def test_json_and_tool_arguments_are_looked_at() -> None:
    form = {"response_format": {"type": "json_object"}}
    assert valid(Reading(finish="stop", texts={0: ["{}"]}), form) is True
    assert valid(Reading(finish="stop", texts={0: ["{"]}), form) is False
    assert valid(Reading(finish="length", texts={0: ["{"]}), form) is None
    assert valid(Reading(finish="tool_calls", calls={(0, 0): ["f", '{"a": 1']}), {}) is False
    assert valid(Reading(finish="stop", texts={0: ["x"]}), {}) is None


def launch(engine: str, **more: Any) -> Launch:
    return Launch(engine=engine, model="big", name="served", port=9001, **more)


def test_command_lines_say_how_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VLLM_PYTHON", "python-of-vllm")
    eagle = launch("vllm", method="eagle3", drafter="head", guesses=3, args=("-tp", "2"))
    command = command_of(eagle)
    assert command[:3] == ["python-of-vllm", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["-tp", "2"]
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert "--speculative-config" not in command_of(launch("vllm"))
    ngram = command_of(launch("vllm", method="ngram", guesses=4))
    assert json.loads(ngram[-1])["prompt_lookup_max"] == 5
    llama = command_of(launch("llamacpp", method="draft_model", drafter="small.gguf", guesses=4))
    assert llama[-6:] == [
        *("--spec-type", "draft-simple", "--spec-draft-model", "small.gguf"),
        *("--spec-draft-n-max", "4"),
    ]
    assert command_of(launch("llamacpp", method="ngram"))[-2:] == ["--spec-type", "ngram-simple"]


@pytest.mark.parametrize(
    "wrong",
    [
        launch("vllm", method="eagle3"),
        launch("llamacpp", method="draft_model"),
        launch("sglang"),
    ],
    ids=lambda wrong: wrong.engine,
)
def test_what_an_engine_cannot_be_told_is_refused_before_it_starts(wrong: Launch) -> None:
    with pytest.raises(EngineUnfit):
        command_of(wrong)


SPEC = {"speculative": True, "method": "eagle3", "drafter": "folder", "rollout": "5%"}


def test_the_embedded_engine_serves_all_profiles_that_want_it() -> None:
    attached = {**SPEC, "backend": {"engine": "vllm", "url": "http://127.0.0.1:1"}}
    rollout = make_rollout({"target": "a/b", "profiles": {"one": SPEC, "two": attached}})
    server = embedded_config(rollout, {"weights": "int8", "engine": {"slots": 3}})
    assert server is not None and server.weights == "int8" and server.engine.slots == 3
    assert server.profile_names == ("one", "baseline") and server.served_name == "b"
    assert server.profiles["one"].drafter == "eagle3:folder"
    assert not same_engine(rollout.profiles["one"], rollout.profiles["two"])
    elsewhere = {"engine": "openai", "url": "http://127.0.0.1:2"}
    profiles = {"x": attached, "baseline": {"speculative": False, "backend": elsewhere}}
    none = make_rollout({"target": "a", "profiles": profiles})
    assert embedded_config(none, {}) is None
    two_rules = {"one": SPEC, "two": {**SPEC, "rule": "reject"}}
    both = embedded_config(make_rollout({"target": "a", "profiles": two_rules}), {})
    assert both is not None
    assert [both.profile(name).rule for name in ("one", "two")] == ["walk", "reject"]


def test_what_an_engine_refuses_is_found_out_by_asking() -> None:
    class Picky(FakeEngine):
        async def _post(self, path: str, asked: dict[str, Any], send: Any) -> None:
            self.status = 400 if {"logit_bias", "min_p"} & asked.keys() else None
            await super()._post(path, asked, send)

    async def test() -> None:
        profile = make_rollout({"target": "a", "profiles": {"one": SPEC}}).profiles["one"]
        lane = Lane("one", profile, AsgiUpstream(Picky()))
        assert await probe_features(lane, model="a") == {"logit_bias", "min_p"}

    asyncio.run(test())


def test_operators_keys_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADMIN_KEYS", "ann=secret-secret, bob=other-secret")
    assert [key.name for key in admin_keys()] == ["ann", "bob"]
    monkeypatch.setenv("OUTRIDER_ADMIN_KEYS", "secret-secret")
    with pytest.raises(InvalidParameter, match="NAME=KEY"):
        admin_keys()
