"""The way of a request through the gateway: bytes, faults, retries, limits, leaving clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway_fakes import CHAT, World, body, rollout, with_gateway
from outrider.testing.asgi import AsgiClient, parse_events


def test_a_stream_passes_byte_for_byte_and_is_read_on_the_way(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        asked = body(stream=True, stream_options={"include_usage": True})
        direct = await AsgiClient(world.engines["spec"]).request("POST", CHAT, asked)
        through = await world.client.request("POST", CHAT, asked)
        assert through.body == direct.body
        assert through.headers["x-outrider-profile"] == "spec"
        assert through.headers["x-outrider-reason"].startswith("split: place ")
        assert through.headers["x-engine"] == "spec"
        assert world.sample("outrider_gateway_output_tokens_total", profile="spec") == 6
        assert world.sample("outrider_gateway_accepted_tokens_total", profile="spec") == 3

    with_gateway(rollout(tmp_path), test)


def test_usage_is_asked_for_and_left_out_where_the_client_did_not(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer = await world.ask(stream=True)
        assert world.engines["spec"].requests[-1]["stream_options"] == {"include_usage": True}
        assert all(event == "[DONE]" or event["choices"] for event in answer.events)
        assert answer.events[-1] == "[DONE]"
        assert world.sample("outrider_gateway_output_tokens_total", profile="spec") == 6

    with_gateway(rollout(tmp_path), test)


def test_a_whole_answer_passes_as_it_is(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        direct = await AsgiClient(world.engines["spec"]).request("POST", CHAT, body())
        through = await world.client.request("POST", CHAT, body())
        assert through.body == direct.body and through.status == 200

    with_gateway(rollout(tmp_path), test)


FAULTS: list[dict[str, Any]] = [
    {"status": 500},
    {"status": 503},
    {"status": 429},
    {"status": 422},
    {"crash_after": 0},
    {"garble_after": 0},
    {"hang_before": True},
    {"hang_after": 0},
]


CASES = [
    pytest.param(fault, stream, id=f"{fault}-{'stream' if stream else 'whole'}")
    for fault in FAULTS
    for stream in (True, False)
    if stream or not {"garble_after", "hang_after"} & fault.keys()
]


@pytest.mark.parametrize(("fault", "stream"), CASES)
def test_what_fails_before_the_first_byte_is_answered_by_the_baseline(
    tmp_path: Path, fault: dict[str, Any], stream: bool
) -> None:
    async def test(world: World) -> None:
        for name, value in fault.items():
            setattr(world.engines["spec"], name, value)
        answer = await world.ask(stream=stream)
        assert answer.status == 200
        assert answer.headers["x-outrider-profile"] == "baseline"
        assert answer.headers["x-outrider-reason"].startswith("spill: spec: ")
        if stream:
            assert answer.events[-1] == "[DONE]"
        await asyncio.sleep(0)
        assert world.engines["spec"].running == 0

    times = {"first_byte_s": 0.05, "total_s": 0.2 if not stream else 30}
    with_gateway(rollout(tmp_path, spec={"timeouts": times}), test)


@pytest.mark.parametrize(
    "fault",
    [{"crash_after": 2}, {"garble_after": 2}, {"hang_after": 2}],
    ids=lambda f: next(iter(f)),
)
def test_behind_the_first_byte_nothing_is_tried_again_and_nothing_claims_an_end(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    async def test(world: World) -> None:
        for name, value in fault.items():
            setattr(world.engines["spec"], name, value)
        answer = await world.ask(stream=True)
        events = parse_events(answer.body)
        assert events[-1]["error"]["code"] in ("engine_failed", "timeout")
        assert "[DONE]" not in events
        assert not world.engines["baseline"].requests
        other = await world.ask("another", stream=True, headers={"x-stainless-retry-count": "1"})
        assert other.events[-1] == "[DONE]"
        assert other.headers["x-outrider-reason"].startswith("spill: spec: the client tries again")

    with_gateway(rollout(tmp_path, spec={"timeouts": {"between_s": 0.05}}), test)


def test_a_missing_usage_leaves_the_answer_whole(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].usage = False
        answer = await world.ask(stream=True)
        assert answer.events[-1] == "[DONE]"

    with_gateway(rollout(tmp_path), test)


def declined(world: World) -> float:
    name = "outrider_gateway_upstream_faults_total"
    return world.sample(name, profile="spec", kind="declined")


def test_what_every_engine_refuses_passes_as_it_is_and_counts_for_none(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for engine in world.engines.values():
            engine.status = 422
        answer = await world.ask()
        assert answer.status == 422 and answer.json()["error"]["message"] == "made to fail"
        assert len(world.engines["baseline"].requests) == 1
        assert not declined(world)
        world.engines["baseline"].status = None
        assert (await world.ask()).status == 200
        assert declined(world) == 1

    with_gateway(rollout(tmp_path), test)


def test_no_room_spills_and_a_full_baseline_says_so(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for engine in world.engines.values():
            engine.token_s = 0.02
        first = asyncio.create_task(world.ask("one", stream=True))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(world.ask("two", stream=True))
        await asyncio.sleep(0.01)
        third = await world.ask("three")
        assert (await first).headers["x-outrider-profile"] == "spec"
        spilled = await second
        assert spilled.headers["x-outrider-profile"] == "baseline"
        assert spilled.headers["x-outrider-reason"] == "spill: spec: in flight"
        assert third.status == 429

    limits = {"limits": {"in_flight": 1}}
    values = rollout(tmp_path, spec=limits, profiles={"baseline": {"speculative": False, **limits}})
    with_gateway(values, test)


def test_a_429_storm_opens_the_circuit_and_loses_no_answer(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].status = 429
        answers = [await world.ask(f"{i}") for i in range(20)]
        assert {answer.status for answer in answers} == {200}
        assert len(world.engines["spec"].requests) == 5
        assert answers[-1].headers["x-outrider-reason"] == "spill: spec: circuit open"

    with_gateway(rollout(tmp_path), test)


@pytest.mark.parametrize("phase", ["before the first byte", "in a stream", "whole"])
def test_a_client_that_leaves_ends_the_engines_work(tmp_path: Path, phase: str) -> None:
    async def test(world: World) -> None:
        engine = world.engines["spec"]
        engine.hang_before = phase == "before the first byte"
        engine.hang_after = 2 if phase == "in a stream" else None
        engine.token_s = 10 if phase == "whole" else 0
        call = world.client.start("POST", CHAT, body(stream=phase != "whole"))
        while engine.running == 0:
            await asyncio.sleep(0.001)
        if phase == "in a stream":
            assert await call.message() and await call.message()
        call.leave()
        await call.task
        assert engine.running == 0 and engine.aborted == 1
        assert world.gateway.stage.lanes["spec"].gate.running == 0

    with_gateway(rollout(tmp_path), test)


def test_what_is_no_request_is_refused_before_any_engine_sees_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for wrong in (b"{", b"[]", b'{"model": 1}', b'{"model":"fake","x":NaN}'):
            answer = await world.client.request("POST", CHAT, wrong)
            assert answer.status == 415 or answer.status == 400
        assert (await world.ask(model="other")).status == 404
        assert (await world.ask(model="fake@spec")).status == 403
        assert (await world.client.request("GET", "/rollout")).status == 404
        assert not world.engines["spec"].requests + world.engines["baseline"].requests

    with_gateway(rollout(tmp_path), test)


def test_an_approximate_profile_says_so_and_a_route_may_forbid_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer = await world.ask()
        assert answer.headers["x-outrider-approximate"] == "true"
        text = {"model": "fake", "prompt": "x", "max_tokens": 3}
        other = await world.client.request("POST", "/v1/completions", text)
        assert "x-outrider-approximate" not in other.headers
        assert other.headers["x-outrider-reason"].startswith("ineligible")

    values = rollout(tmp_path, spec={"approximate": True, "rule": "typical"})
    with_gateway({**values, "routes": {"/v1/completions": {"approximate": False}}}, test)


def test_a_feature_that_the_engine_lacks_goes_to_the_baseline(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.gateway.stage.lanes["spec"].lacking = frozenset({"logit_bias"})
        answer = await world.ask(logit_bias={"1": 2})
        assert answer.headers["x-outrider-profile"] == "baseline"
        assert "logit_bias" in answer.headers["x-outrider-reason"]

    with_gateway(rollout(tmp_path), test)


def test_keys_are_asked_for_on_both_ports(tmp_path: Path) -> None:
    from outrider.serve.keys import hash_key

    async def test(world: World) -> None:
        assert (await world.ask()).status == 401
        assert (await world.order("rollback")).status == 401
        given = {"authorization": "Bearer secret-key"}
        assert (await world.ask(headers=given)).status == 200
        answer = await world.client.request("GET", "/v1/models", headers=given)
        assert [m["id"] for m in json.loads(answer.body)["data"]] == ["fake"]

    keys = [{"name": "me", "sha256": hash_key("secret-key")}]
    with_gateway(rollout(tmp_path), test, settings={"keys": keys})
