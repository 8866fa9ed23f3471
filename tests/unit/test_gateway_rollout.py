"""The gateway and its rollout: switches, latches over restarts, shadow, reload, page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway_fakes import CHAT, World, body, rollout, with_gateway
from outrider.cli.rollout import history_lines, status_lines
from outrider.serve.gateway.parity import compare, loops
from outrider.serve.gateway.reading import Reading


def profile(answer: object) -> str:
    return answer.headers["x-outrider-profile"]  # type: ignore[attr-defined]


def test_the_switch_acts_at_once_and_survives_a_restart(tmp_path: Path) -> None:
    async def first(world: World) -> None:
        assert profile(await world.ask()) == "spec"
        answer = await world.admin.request("POST", "/rollout/kill", {"on": True, "who": "me"})
        assert answer.json()["change"]["action"] == "kill"
        assert profile(await world.ask()) == "baseline"

    async def second(world: World) -> None:
        answer = await world.ask()
        assert answer.headers["x-outrider-reason"].startswith("kill_switch")
        await world.admin.request("POST", "/rollout/kill", {"on": False, "who": "me"})
        assert profile(await world.ask()) == "spec"

    with_gateway(rollout(tmp_path), first)
    with_gateway(rollout(tmp_path), second)


def test_the_kill_file_acts_while_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "stop"

    async def test(world: World) -> None:
        path.touch()
        while profile(await world.ask()) == "spec":
            await asyncio.sleep(0.02)
        path.unlink()
        while profile(await world.ask()) == "baseline":
            await asyncio.sleep(0.02)

    with_gateway(rollout(tmp_path, kill_file=str(path)), test, loops=True)


def test_a_rollback_is_latched_over_a_restart_until_somebody_arms(tmp_path: Path) -> None:
    async def first(world: World) -> None:
        world.engines["spec"].status = 500
        for number in range(5):
            assert (await world.ask(f"{number}")).status == 200
        assert world.gateway.controller.weights.serving == {}

    async def second(world: World) -> None:
        answer = await world.ask()
        assert answer.headers["x-outrider-reason"].startswith("rolled_back")
        assert (await world.order("set", share="50%")).status == 409
        assert (await world.order("arm")).status == 200
        assert (await world.order("set", share="100%")).status == 200
        assert profile(await world.ask()) == "spec"
        history = (await world.admin.request("GET", "/rollout/history")).json()
        actions = [entry["action"] for entry in history["entries"]]
        assert actions[:2] == ["start", "rollback"] and "arm" in actions and actions[-1] == "set"
        assert any("server_errors" in line for line in history_lines(history))

    with_gateway(rollout(tmp_path), first)
    with_gateway(rollout(tmp_path), second)


def test_sick_engines_are_taken_back(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].healthy = False
        for _ in range(3):
            await world.gateway.look()
        assert world.gateway.controller.weights.serving == {}
        assert "unhealthy" in world.gateway.controller.state.profiles["spec"].why

    with_gateway(rollout(tmp_path), test)


def test_out_of_memory_cuts_streams_and_saves_those_without_a_byte(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].hang_before = True
        waiting = asyncio.create_task(world.ask(stream=True))
        while not world.engines["spec"].running:
            await asyncio.sleep(0)
        world.gateway.happened("spec", "out_of_memory", "CUDA out of memory")
        answer = await waiting
        assert profile(answer) == "baseline" and answer.events[-1] == "[DONE]"
        assert world.gateway.controller.state.profiles["spec"].phase == "rolled_back"

    with_gateway(rollout(tmp_path), test)


SHADOW = {"ramp": {"start": "shadow", "automatic": False, "least_s": 0}}


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_in_shadow_answers_are_compared_and_dropped(tmp_path: Path, temperature: float) -> None:
    async def test(world: World) -> None:
        for number in range(4):
            answer = await world.ask(f"{number}", stream=True, temperature=temperature)
            assert profile(answer) == "baseline"
        await world.gateway.flow.mirrors.quiet()
        assert len(world.engines["spec"].requests) == 4
        labels = {"profile": "spec", "agreement": "same"}
        assert world.sample("outrider_gateway_compared_total", **labels) == 4
        pairs = zip(world.engines["spec"].requests, world.engines["baseline"].requests, strict=True)
        for one, other in pairs:
            assert (one.get("seed") == other.get("seed")) and ("seed" in one) == bool(temperature)
        world.engines["spec"].wrong = 1
        await world.ask("last", temperature=temperature)
        await world.gateway.flow.mirrors.quiet()
        assert "parity" in world.gateway.controller.state.profiles["spec"].why

    values = rollout(tmp_path, spec={"shadow": "100%"}, **SHADOW)
    with_gateway(values, test)


def test_engines_that_are_not_exact_are_compared_where_greedy(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].wrong = 1
        await world.ask("sampled", temperature=1)
        await world.ask("greedy", temperature=0)
        await world.gateway.flow.mirrors.quiet()
        assert world.engines["spec"].requests[-1]["top_logprobs"] == 2
        labels = {"profile": "spec", "agreement": "unknown"}  # the pretended engine tells none
        assert world.sample("outrider_gateway_compared_total", **labels) == 1
        assert world.gateway.controller.state.profiles["spec"].phase == "shadow"

    values = rollout(tmp_path, spec={"shadow": "100%"}, **SHADOW)
    with_gateway(values, test, exact=False)


def read(text: str, tops: list[tuple[str, list[tuple[str, float]]]] | None = None) -> Reading:
    seen = Reading(finish="stop", texts={0: [text]})
    seen.tops = {0: tops} if tops else {}
    return seen


def test_a_tie_is_none_of_the_engines_faults_and_a_clear_choice_is() -> None:
    near = [("a", [("a", -0.1)]), ("b", [("b", -0.70), ("c", -0.71)])]
    far = [("a", [("a", -0.1)]), ("b", [("b", -0.1), ("c", -4.0)])]
    other = [("a", [("a", -0.1)]), ("b", [("b", -0.70), ("d", -0.71)])]
    assert compare(read("ac"), read("ab", near), exact=False)[0] == "tie"
    assert compare(read("ac"), read("ab", far), exact=False)[0] == "different"
    assert compare(read("ac"), read("ab", other), exact=False)[0] == "different"
    assert compare(read("ac"), read("ab", near), exact=True)[0] == "different"


def test_loops_are_seen_and_lists_are_not() -> None:
    assert loops("so it goes " * 20) and loops("x" * 200)
    assert not loops(" ".join(str(number * 7919) for number in range(60)))
    assert not loops("short short short")


def test_a_reload_changes_limits_and_drops_no_stream(tmp_path: Path) -> None:
    path = tmp_path / "rollout.yaml"
    values = rollout(tmp_path)
    path.write_text(yaml.safe_dump(values))

    async def test(world: World) -> None:
        world.engines["spec"].token_s = 0.01
        streaming = asyncio.create_task(world.ask(stream=True, max_tokens=8))
        while not world.engines["spec"].running:
            await asyncio.sleep(0)
        values["profiles"]["spec"]["limits"] = {"in_flight": 3}
        values["profiles"]["second"] = {"speculative": True, "method": "ngram"}
        path.write_text(yaml.safe_dump(values))
        answer = await world.admin.request("POST", "/rollout/reload", {})
        assert answer.status == 200
        assert set(world.gateway.stage.lanes) == {"baseline", "spec", "second"}
        assert (await streaming).events[-1] == "[DONE]"
        assert world.gateway.controller.weights.serving["spec"] == 10_000
        path.write_text("profiles: nonsense")
        assert (await world.admin.request("POST", "/rollout/reload", {})).status == 409
        assert profile(await world.ask()) == "spec"

    with_gateway(values, test, source=path)


def test_the_page_loads_nothing_and_is_public_and_its_paths_are_not(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer = await world.admin.request("GET", "/ui/rollout")
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        text = answer.body.decode()
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text
        assert (await world.client.request("GET", "/ui/rollout")).status == 404
        metrics = await world.admin.request("GET", "/metrics")
        assert b'outrider_rollout_weight_ratio{profile="spec"} 1.0' in metrics.body

    with_gateway(rollout(tmp_path), test)


def test_the_status_reads_well(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.ask()
        found = (await world.admin.request("GET", "/rollout")).json()
        lines = "\n".join(status_lines(json.loads(json.dumps(found))))
        assert ("spec: vllm" in lines and "canary at 100%" in lines) or "promoted at 100%" in lines

    with_gateway(rollout(tmp_path), test)


def test_a_wrong_order_is_refused_in_words(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for path, told in (
            ("set", {"profile": "spec", "share": "200%"}),
            ("set", {"profile": "spec"}),
            ("promote", {"profile": 3}),
            ("promote", {"profile": "spec", "who": "<b>"}),
            ("kill", {"on": "yes"}),
        ):
            answer = await world.admin.request("POST", f"/rollout/{path}", told)
            assert answer.status == 400, path
        assert (await world.order("promote", profile="none")).status == 409
        form = {"content-type": "text/plain"}
        answer = await world.admin.request("POST", "/rollout/kill", b"{}", headers=form)
        assert answer.status == 415

    with_gateway(rollout(tmp_path), test)


def test_a_slow_reader_does_not_make_a_profile_slow(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async def slow(message: Any) -> None:
            await asyncio.sleep(0.01)

        async def receive() -> Any:
            if not asked:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": asked.pop(), "more_body": False}

        asked = [json.dumps(body(stream=True)).encode()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        await world.client.app(scope, receive, slow)
        assert world.sample("outrider_gateway_output_tokens_total", profile="spec") == 6
        labels = {"profile": "spec", "arm": "canary"}
        name = "outrider_gateway_time_per_output_token_seconds_count"
        assert world.sample(name, **labels) == 0

    with_gateway(rollout(tmp_path), test)


def test_requests_that_went_badly_are_kept_and_prompts_only_where_asked(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].status = 500
        await world.ask("call me on 0123 456789")
        world.engines["spec"].status = None
        await world.ask("fine")

    for text in (False, True):
        folder = tmp_path / f"kept-{text}"
        values = rollout(tmp_path / str(text), feedback={"folder": str(folder), "text": text})
        with_gateway(values, test)
        cases = [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]
        assert [case["reason"] for case in cases] == ["failed"]
        kept = (folder / "regression.jsonl").exists()
        assert kept == text
        everything = "".join(path.read_text() for path in folder.iterdir())
        assert "0123" not in everything  # the gateway was given no redaction: text is withheld


def test_a_reload_without_a_file_is_refused(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer = await world.admin.request("POST", "/rollout/reload", {})
        assert answer.status == 409 and "restart" in answer.json()["error"]["message"]

    with_gateway(rollout(tmp_path), test)
