"""The chaos list of production, one test per item, against a gateway in front of engines.

In each case: what a baseline could still answer is answered, nothing is tried again behind the
first byte, no end mark follows an error, other requests do not notice, the event is on record, and
the trip-wire fires where there is one for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_fakes import CHAT, World, body, rollout, with_gateway
from outrider.backends.connect import DIALECTS
from outrider.backends.supervise import Patience
from outrider.rollout import audit
from outrider.rollout.audit import Ledger
from outrider.rollout.config import make_rollout
from outrider.serve.gateway import engines
from outrider.serve.gateway.engines import Engines
from outrider.serve.gateway.reading import Malformed, Reader
from outrider.serve.gateway.upstream import HttpUpstream
from outrider.testing.asgi import Response, parse_events
from outrider.testing.engine import FakeEngine

WAIT_S = 20
QUICK = Patience(start_s=15, look_s=0.02, end_s=2, again_s=0.01)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def phase(world: World) -> str:
    return world.gateway.controller.state.profiles["spec"].phase


def why(world: World) -> str:
    return world.gateway.controller.state.profiles["spec"].why


def broken(answer: Response) -> str:
    """The code of the error that a stream ended with, and nothing behind it."""
    events = parse_events(answer.body)
    assert "[DONE]" not in events
    return str(events[-1]["error"]["code"])


def whole(answer: Response) -> bool:
    return answer.status == 200 and answer.events[-1] == "[DONE]"


def faults(world: World, kind: str) -> float:
    return world.sample("outrider_gateway_upstream_faults_total", profile="spec", kind=kind)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------------------ 1: kill -9

PROCESS = """
import http.server, json, sys, time
class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked["messages"][0]["content"] == "wait":
            time.sleep(60)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for word in ("one ", "two "):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")
            self.wfile.flush()
        time.sleep(60)
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.asynccontextmanager
async def process() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A real engine process, which two requests never finish on."""
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert engine.stdout is not None
        port = int(await asyncio.wait_for(engine.stdout.readline(), WAIT_S))
        yield f"http://127.0.0.1:{port}", engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            engine.kill()
        await engine.wait()


def test_kill_9_in_mid_stream(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with process() as (url, engine):
            lane = world.gateway.stage.lanes["spec"]
            lane.upstream = HttpUpstream(url)
            streaming = world.client.start("POST", CHAT, body("go", stream=True))
            waiting = [asyncio.create_task(world.ask("wait", stream=bool(i % 2))) for i in range(4)]
            said = b""
            while b"two" not in said:
                message = await streaming.message()
                assert message is not None
                said += message.get("body", b"")
            await until(lambda: lane.gate.running == 5)
            engine.send_signal(signal.SIGKILL)
            answers = await asyncio.gather(*waiting)
            while (message := await streaming.message()) is not None:
                said += message.get("body", b"")
            await streaming.task
            assert [a.status for a in answers] == [200] * 4  # the baseline saved them
            assert {a.headers["x-outrider-profile"] for a in answers} == {"baseline"}
            events = parse_events(said)
            assert events[-1]["error"]["code"] == "engine_failed" and "[DONE]" not in events
            assert whole(await world.ask("next", stream=True))
            await until(lambda: phase(world) == "rolled_back")
            assert "server_errors" in why(world) or "unhealthy" in why(world)
            assert Ledger(world.gateway.stage.config.state).history().entries[-1]["why"]

    wires = {"server_errors": {"count": 5, "within_s": 10}}
    with_gateway(rollout(tmp_path, trip_wires=wires), test, loops=True)


# ------------------------------------------------------------------- 2: hang after the first byte


def test_a_hang_after_the_first_byte(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].hang_after = 2
        hanging = [asyncio.create_task(world.ask(f"{i}", stream=True)) for i in range(3)]
        await until(lambda: world.engines["spec"].running == 3)
        world.engines["spec"].hang_after = None
        assert whole(await world.ask("other", stream=True))  # beside them, on the same engine
        assert {broken(answer) for answer in await asyncio.gather(*hanging)} == {"timeout"}
        assert world.engines["spec"].running == 0 and world.engines["spec"].aborted == 3
        assert not world.engines["baseline"].requests  # nothing was tried again
        assert faults(world, "between") == 3
        assert phase(world) == "rolled_back" and "stalled 3 times" in why(world)
        assert whole(await world.ask("next", stream=True))

    with_gateway(rollout(tmp_path, spec={"timeouts": {"between_s": 0.3}}), test)


# ---------------------------------------------------------------------------- 3: half-open sockets


@contextlib.asynccontextmanager
async def silent(first: bytes) -> AsyncIterator[str]:
    """A server that takes requests, says something, and is never heard of again: as a machine that
    lost its power, whose connection nobody closes."""
    held = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(first)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        for writer in held:
            writer.transport.abort()
        server.close()


WORD = b'data: {"choices":[{"index":0,"delta":{"content":"one "},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("first", "saved"),
    [(b"", True), (HEAD, True), (HEAD + WORD[:30], True), (HEAD + WORD, False)],
    ids=["no head", "a head", "half an event", "a word"],
)
def test_a_half_open_socket(tmp_path: Path, first: bytes, saved: bool) -> None:
    async def test(world: World) -> None:
        async with silent(first) as url:
            lane = world.gateway.stage.lanes["spec"]
            lane.upstream = HttpUpstream(url)
            answers = await asyncio.gather(*(world.ask(f"{i}", stream=True) for i in range(3)))
            if saved:
                assert all(whole(answer) for answer in answers)
            else:
                assert {broken(answer) for answer in answers} == {"timeout"}
                assert not world.engines["baseline"].requests
            assert phase(world) == "rolled_back" and "stalled" in why(world)
            assert lane.gate.running == 0
            await lane.upstream.close()

    times = {"first_byte_s": 0.2, "between_s": 0.2}
    with_gateway(rollout(tmp_path, spec={"timeouts": times}), test)


# -------------------------------------------------------------------------------- 4: slow reader


def test_a_slow_reader(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        engine, reads = world.engines["spec"], asyncio.Event()
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            if message.get("body"):
                sent += 1
                await reads.wait()

        asked = [json.dumps(body("slow", stream=True, max_tokens=400)).encode()]

        async def receive() -> Any:
            if not asked:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": asked.pop(), "more_body": False}

        head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": head}
        work = asyncio.create_task(world.client.app(scope, receive, send))
        await until(lambda: sent == 1)
        quick = await asyncio.gather(*(world.ask(f"{i}", stream=True) for i in range(20)))
        assert all(whole(answer) for answer in quick)
        assert sent == 1 and engine.running == 1  # the engine waits as well: nothing piles up
        reads.set()
        await work
        assert sent > 100
        assert phase(world) != "rolled_back" and faults(world, "between") == 0

    with_gateway(rollout(tmp_path, spec={"timeouts": {"between_s": 0.2}}), test)


# ------------------------------------------------------------------------------ 5: malformed SSE

GARBAGE = {
    "no JSON": b'data: {"id":"x","choi\n\n',
    "no object": b"data: [1, 2]\n\n",
    "no event": b"<html>502</html>\n\n",
    "no choices": b'data: {"id":"x"}\n\n',
    "no UTF-8": b"data: \xff\xfe\n\n",
    "deep": b"data: " + b"[" * 100_000 + b"\n\n",
    "half an event": b'data: {"choices":[]}',
    "no end": b"",
}


def saying(*parts: bytes) -> Any:
    """An engine whose streams are just these parts."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return engine


@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind a word"])
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_malformed_sse(tmp_path: Path, garbage: bytes, behind: bool) -> None:
    async def test(world: World) -> None:
        upstream: Any = world.gateway.stage.lanes["spec"].upstream
        upstream._app = saying(WORD, garbage) if behind else saying(garbage)
        answers = [await world.ask(f"{i}", stream=True) for i in range(5)]
        if behind:
            assert {broken(answer) for answer in answers} == {"engine_failed"}
            assert not world.engines["baseline"].requests
        else:
            assert all(whole(answer) for answer in answers)
        assert faults(world, "malformed") == 5
        assert phase(world) == "rolled_back" and "server_errors" in why(world)
        assert whole(await world.ask("next", stream=True))

    with_gateway(rollout(tmp_path), test)


NAMES = st.sampled_from(
    [
        *("choices", "index", "delta", "message", "text", "content", "tool_calls", "function"),
        *("name", "arguments", "logprobs", "top_logprobs", "tokens", "token", "logprob", "usage"),
        *("prompt_tokens", "completion_tokens", "finish_reason", "error", "metrics", "timings"),
        *("speculative_decoding", "num_spec_steps", "num_draft_tokens", "acceptance_histogram"),
        *("num_accepted_draft_tokens", "sglext", "spec_verify_ct", "draft_n", "reasoning"),
    ]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**20), st.floats(), st.text(max_size=3)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=20,
)
ENTRY = st.dictionaries(NAMES, JSON | st.lists(st.dictionaries(NAMES, LEAVES), max_size=2))
LOGPROBS = st.fixed_dictionaries(
    {},
    optional={
        "content": st.lists(ENTRY | JSON, max_size=2) | JSON,
        "tokens": st.lists(JSON, max_size=2) | JSON,
        "top_logprobs": st.lists(st.dictionaries(NAMES, LEAVES) | JSON, max_size=2) | JSON,
    },
)
PART = st.dictionaries(NAMES, JSON | st.lists(st.dictionaries(NAMES, JSON), max_size=2))
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": LEAVES,
        "delta": PART | JSON,
        "message": PART | JSON,
        "logprobs": LOGPROBS | JSON,
        "finish_reason": JSON,
    },
)
TOLD = st.dictionaries(NAMES, LEAVES | st.lists(LEAVES, max_size=3))
EVENTS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE | JSON, max_size=2) | JSON},
    optional={
        "usage": TOLD | JSON,
        "metrics": st.fixed_dictionaries({"speculative_decoding": TOLD}) | JSON,
        "timings": TOLD | JSON,
        "sglext": st.fixed_dictionaries({"spec_tokens_details": TOLD}) | TOLD | JSON,
        "error": JSON,
    },
)


@settings(max_examples=400, deadline=None)
@given(EVENTS, st.sampled_from(sorted(DIALECTS)), st.booleans())
def test_no_json_whatsoever_breaks_the_reader(event: Any, kind: str, chat: bool) -> None:
    data = json.dumps(event).encode()
    for whole_answer in (False, True):
        reader = Reader(DIALECTS[kind].read, chat=chat)
        with contextlib.suppress(Malformed):
            if whole_answer:
                reader.whole(data, 1.0)
            else:
                reader.feed(b"data: " + data + b"\n\n", 1.0)
                reader.end()
        reader.seen.content()
        reader.seen.text()


# ------------------------------------------------------------------------------ 6: usage missing


def test_usage_is_missing(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].usage = False
        for stream in (True, False):
            answers = [await world.ask(f"{i}", stream=stream) for i in range(3)]
            assert {answer.status for answer in answers} == {200}
        window = world.gateway.controller._windows["spec"].canary
        assert len(window) == 6
        # Chunks are not tokens: without usage there is no time per token and no count.
        assert {(o.tpot_ms, o.completion_tokens) for o in window} == {(None, None)}
        assert all(o.ttft_ms is not None for o in window[:3])
        assert world.sample("outrider_gateway_output_tokens_total", profile="spec") == 0
        assert phase(world) == "canary" or phase(world) == "promoted"

    with_gateway(rollout(tmp_path), test)


# ------------------------------------------------------------------------------- 7: a 429 storm


def test_a_429_storm(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.engines["spec"].status = 429
        asked = [world.ask(f"{i}", stream=bool(i % 2)) for i in range(40)]
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
        assert {answer.headers["x-outrider-profile"] for answer in answers} == {"baseline"}
        before = len(world.engines["spec"].requests)
        more = [await world.ask(f"more {i}") for i in range(20)]
        assert {answer.status for answer in more} == {200}
        assert len(world.engines["spec"].requests) == before  # the circuit is open: it is let be
        assert world.sample("outrider_gateway_saved_total", profile="spec", why="refused") == before
        assert phase(world) != "rolled_back"  # an engine without room is not a sick one

    with_gateway(rollout(tmp_path), test)


# ------------------------------------------------------------------------------- 8: clock jumps


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0], ids=["a day on", "a day back"])
def test_the_clock_jumps(tmp_path: Path, jump: float) -> None:
    now = [1_000_000.0]

    async def test(world: World) -> None:
        controller, engine = world.gateway.controller, world.engines["spec"]
        answers = [await world.ask(f"{i}") for i in range(3)]
        engine.status = 500
        answers += [await world.ask(f"bad {i}") for i in range(4)]
        now[0] += jump
        world.gateway.tick()
        # The window of events is measured on the monotonic clock: the fifth still is one too many.
        answers.append(await world.ask("bad"))
        assert phase(world) == "rolled_back" and "server_errors 5 times" in why(world)
        world.gateway.tick()
        assert phase(world) == "rolled_back"  # no timer has run out
        answers += [await world.ask(f"after {i}") for i in range(3)]
        assert {answer.status for answer in answers} == {200}
        history = Ledger(controller.config.state).history()
        assert history.fault is None and history.entries[-1]["at"] == now[0]
        engine.status = None
        assert (await world.order("arm")).status == 200
        controller._gates_due = 0.0  # gates are looked at every few seconds
        world.gateway.tick()
        assert (await world.ask("again")).headers["x-outrider-profile"] == "spec"

    values = rollout(tmp_path, ramp={"automatic": False, "least_s": 0, "rearm_s": 3600})
    with_gateway(values, test, wall=lambda: now[0])


# --------------------------------------------------------------------------------- 9: disk full


def test_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def test(world: World) -> None:
        engine, gateway = world.engines["spec"], world.gateway
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            patch.setattr(os, "replace", full)
            patch.setattr(audit, "write_json", lambda *_, **__: _raise())
            patch.setattr(Path, "open", full)
            engine.status = 500
            answers = [await world.ask(f"{i}") for i in range(8)]
            assert {answer.status for answer in answers} == {200}
            assert phase(world) == "rolled_back"  # in force before it is written
            assert gateway.controller.weights.serving.get("spec", 0) == 0
            gateway.tick()
            assert "No space left" in gateway.controller.unsaved
            assert world.sample("outrider_rollout_unsaved") == 1
        gateway.controller._write_due = 0.0
        gateway.tick()
        assert not gateway.controller.unsaved and world.sample("outrider_rollout_unsaved") == 0
        history = Ledger(gateway.stage.config.state).history()
        assert history.fault is None and "server_errors" in history.entries[-1]["why"]

    def _raise() -> None:
        raise audit.RecordFileError("state.json cannot be written: No space left on device")

    feedback = {"folder": str(tmp_path / "feedback"), "text": True}
    with_gateway(rollout(tmp_path, feedback=feedback), test)


# ------------------------------------------------------------------- 10: a reload while streaming


def test_a_reload_while_streaming(tmp_path: Path) -> None:
    path = tmp_path / "rollout.yaml"
    values = rollout(tmp_path)
    path.write_text(yaml.safe_dump(values))

    async def test(world: World) -> None:
        old = world.gateway.stage.lanes["spec"]
        world.engines["spec"].token_s = 0.01
        streams = [
            asyncio.create_task(world.ask(f"{i}", stream=True, max_tokens=8)) for i in range(3)
        ]
        await until(lambda: world.engines["spec"].running == 3)
        made = {**world.gateway.stage.lanes}
        world.engines["new"] = FakeEngine(name="new")

        async def rebuild(config: Any, lanes: Any) -> Any:
            upstream = type(old.upstream)(world.engines["new"])  # type: ignore[call-arg]
            made["spec"] = type(old)("spec", config.profiles["spec"], upstream, old.kind, old.read)
            return made

        world.gateway._rebuild = rebuild
        values["profiles"]["spec"]["num_speculative_tokens"] = 5
        path.write_text(yaml.safe_dump(values))
        assert (await world.admin.request("POST", "/rollout/reload", {})).status == 200
        assert whole(await world.ask("new", stream=True))
        assert len(world.engines["new"].requests) == 1
        assert all(whole(answer) for answer in await asyncio.gather(*streams))
        assert len(world.engines["spec"].requests) == 3 and world.engines["spec"].aborted == 0
        path.write_text("profiles: [broken")
        assert (await world.admin.request("POST", "/rollout/reload", {})).status == 409
        assert whole(await world.ask("still", stream=True))

    with_gateway(values, test, source=path)


# -------------------------------------------------------------------- 11: a truncated drafter file

LOADS = """
import pathlib, sys
data = pathlib.Path(sys.argv[1]).read_bytes()
sys.exit(f"SafetensorError: incomplete metadata, {len(data)} bytes in {sys.argv[1]}")
"""


def test_a_truncated_drafter_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that should load it does not come up: its profile gets nothing, the baseline
    everything, and the engine's own word is in the log."""
    drafter = tmp_path / "model.safetensors"
    drafter.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    monkeypatch.setattr(
        engines, "command_of", lambda launch: [sys.executable, "-c", LOADS, str(launch.drafter)]
    )

    async def test(world: World) -> None:
        spec = {"method": "eagle3", "drafter": str(drafter), "backend": {"engine": "vllm"}}
        config = make_rollout(rollout(tmp_path, spec=spec))
        baseline = world.gateway.stage.lanes["baseline"]
        maker = Engines(embedded=None, told=world.gateway.happened, patience=QUICK)
        monkeypatch.setattr(engines, "same_engine", lambda one, two: one is not two)
        lanes = await maker.lanes(config, keep={"baseline": baseline})
        world.gateway.stage.lanes["spec"].upstream = lanes["spec"].upstream  # type: ignore[index]
        answers = await asyncio.gather(*(world.ask(f"{i}", stream=True) for i in range(6)))
        assert all(whole(answer) for answer in answers)
        for _ in range(3):
            await world.gateway.look()
        assert phase(world) == "rolled_back"
        assert "server_errors" in why(world) or "unhealthy" in why(world)
        assert "incomplete metadata" in caplog.text
        await lanes["spec"].close()

    with_gateway(rollout(tmp_path), test)


# ------------------------------------------------------------------------------------- 12: NaN


@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind a word"])
def test_nan_in_the_engine(tmp_path: Path, behind: bool) -> None:
    error = b'data: {"error":{"message":"logits of request 3 are nan"}}\n\n'

    async def test(world: World) -> None:
        upstream: Any = world.gateway.stage.lanes["spec"].upstream
        world.engines["spec"].hang_before = True
        waiting = asyncio.create_task(world.ask("waiting", stream=True))
        await until(lambda: world.engines["spec"].running == 1)
        upstream._app = saying(WORD, error) if behind else saying(error)
        answer = await world.ask("poisoned", stream=True)
        if behind:
            events = parse_events(answer.body)
            assert "nan" in events[-1]["error"]["message"] and "[DONE]" not in events
            assert len(events) == 2  # the engine's own word, and no second end behind it
        else:
            assert whole(answer)
        assert phase(world) == "rolled_back" and "non_finite" in why(world)  # at the first one
        assert whole(await waiting)  # cut, since the engine is not to be trusted, and saved
        assert faults(world, "non_finite") == 1
        assert whole(await world.ask("next", stream=True))

    with_gateway(rollout(tmp_path), test)


def test_nan_in_the_log_probabilities(tmp_path: Path) -> None:
    """JSON has no NaN, and engines write it all the same: it is no evidence and no crash."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        tops = '[{"token":"a","logprob":NaN},{"token":"b","logprob":-Infinity}]'
        entry = f'{{"token":"a","logprob":NaN,"top_logprobs":{tops}}}'
        choice = '{"index":0,"finish_reason":"stop","message":{"role":"x","content":"a"},'
        data = f'{{"choices":[{choice}"logprobs":{{"content":[{entry}]}}}}]}}'.encode()
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def test(world: World) -> None:
        upstream: Any = world.gateway.stage.lanes["spec"].upstream
        upstream._app = engine
        for number in range(4):
            assert (await world.ask(f"{number}", temperature=1)).status == 200
            assert (await world.ask(f"{number}", temperature=0)).status == 200
        await world.gateway.flow.mirrors.quiet()
        tested = {"profile": "spec", "outcome": "tested"}
        assert world.sample("outrider_gateway_law_tokens_total", **tested) == 0

    shadow = {"start": "shadow", "automatic": False, "least_s": 0}
    with_gateway(rollout(tmp_path, spec={"shadow": "100%"}, ramp=shadow), test, exact=False)


# ------------------------------------------------------- 13: another tokenizer behind the profile


@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_another_tokenizer_in_shadow(tmp_path: Path, temperature: int, stream: bool) -> None:
    """Texts may agree all the same; how many tokens a prompt has does not."""

    async def test(world: World) -> None:
        ask = {"temperature": temperature, "stream": stream}
        answers = [await world.ask(f"{i}", **ask) for i in range(3)]
        await world.gateway.flow.mirrors.quiet()
        assert phase(world) == "shadow"  # one tokenizer: nothing is wrong
        world.engines["spec"].prompt_tokens = 7  # its engine comes back with another
        answers += [await world.ask(f"after {i}", **ask) for i in range(3)]
        await world.gateway.flow.mirrors.quiet()
        assert {answer.status for answer in answers} == {200}
        assert {answer.headers["x-outrider-profile"] for answer in answers} == {"baseline"}
        assert phase(world) == "rolled_back" and "parity" in why(world)
        assert "5 and 7 tokens" in why(world) and "tokenizer" in why(world)
        history = Ledger(world.gateway.stage.config.state).history()
        assert "tokenizer" in history.entries[-1]["why"]

    shadow = {"start": "shadow", "automatic": False, "least_s": 0}
    values = rollout(tmp_path, spec={"shadow": "100%"}, ramp=shadow)
    with_gateway(values, test, exact=False)


def test_another_tokenizer_while_it_serves(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = await world.ask("first")
        assert first.headers["x-outrider-profile"] == "spec"
        await world.gateway.flow.mirrors.quiet()
        assert phase(world) != "rolled_back"
        engine, lane = world.engines["spec"], world.gateway.stage.lanes["spec"]
        engine.hang_before = True
        waiting = asyncio.create_task(world.ask("waiting", stream=True))
        await until(lambda: engine.running == 1)
        engine.hang_before, engine.prompt_tokens = False, 7
        assert whole(await world.ask("changed", stream=True))
        await world.gateway.flow.mirrors.quiet()
        assert phase(world) == "rolled_back" and "tokenizer" in why(world)
        assert whole(await waiting)  # cut, since its prompt was misread as well, and saved
        assert lane.gate.running == 0
        after = await world.ask("after")
        assert after.status == 200 and after.headers["x-outrider-profile"] == "baseline"

    with_gateway(rollout(tmp_path, spec={"shadow": "100%"}), test, exact=False)


def test_another_tokenizer_where_nothing_is_copied(tmp_path: Path) -> None:
    """The gateway asks by itself, at the start and now and then."""

    async def test(world: World) -> None:
        lane = world.gateway.stage.lanes["spec"]
        engine, before = world.engines["spec"], phase(world)
        await world.gateway.compare_prompts()
        assert len(engine.requests) == 3 and phase(world) == before != "rolled_back"
        engine.prompt_tokens = 7
        engine.status = 503  # tells nothing: that is the health probe's business
        await world.gateway.compare_prompts()
        assert phase(world) == before
        engine.status, engine.usage = None, False
        await world.gateway.compare_prompts()
        assert phase(world) == before
        engine.usage = True
        await world.gateway.compare_prompts()
        assert phase(world) == "rolled_back" and "5 and 7 tokens" in why(world)
        assert lane.gate.running == 0
        after = await world.ask("after")
        assert after.status == 200 and after.headers["x-outrider-profile"] == "baseline"

    with_gateway(rollout(tmp_path, spec={"rollout": "100%"}), test, exact=False)
