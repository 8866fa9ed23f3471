"""The gateway on real sockets: the embedded engine behind it, engines that die, the verb."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from gateway_fakes import served
from outrider.backends.base import EngineUnfit
from outrider.backends.supervise import Patience, Supervisor
from outrider.cli.main import run
from outrider.cli.session import Session
from outrider.engine import FixedBudget
from outrider.rollout.config import RolloutConfig, make_rollout
from outrider.serve.gateway.engines import embedded_config
from outrider.serve.service import Service
from outrider.testing.serving import FakeModel

CHAT = "/v1/chat/completions"
WAIT_S = 20


def config(tmp_path: Path, profiles: dict[str, Any]) -> RolloutConfig:
    values = {"target": "fake", "profiles": profiles, "state": str(tmp_path / "state")}
    return make_rollout({**values, "port": 0, "admin_port": 0})


def ask(**more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    return {"model": "fake", "messages": [message], "max_tokens": 12, "seed": 3, **more}


def test_the_embedded_engine_says_the_same_under_both_profiles(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    fast = {"speculative": True, "method": "suffix", "rollout": "100%", "shadow": "100%"}
    rollout = config(tmp_path, {"fast": fast})
    server = embedded_config(rollout, {"engine": {"slots": 4, "context": 512}})
    assert server is not None
    embedded = Service(server, FakeModel(), budget=FixedBudget(nodes=8, depth=6))

    async def test() -> None:
        async with served(rollout, embedded) as (api, admin), aiohttp.ClientSession() as session:
            answers = []
            for stop in ("fast", "baseline"):
                async with session.post(api + CHAT, json=ask(temperature=0.7)) as response:
                    assert response.headers["x-outrider-profile"] == stop
                    told = await response.json()
                    answers.append(told["choices"][0]["message"]["content"])
                async with session.post(api + CHAT, json=ask(stream=True)) as response:
                    assert (await response.text()).endswith("data: [DONE]\n\n")
                words = ["rollout", "rollback", "--url", admin, "--why", "a test"]
                assert await asyncio.to_thread(run, words, session=Session()) == 0
            assert answers[0] == answers[1] and answers[0]
            for words in (["status"], ["history"], ["status", "--json"]):
                line = ["rollout", *words, "--url", admin]
                assert await asyncio.to_thread(run, line, session=Session()) == 0
            again = ["rollout", "set", "50%", "--url", admin]
            assert await asyncio.to_thread(run, again, session=Session()) == 1
            async with session.get(admin + "/metrics") as response:
                assert 'outrider_rollout_phase{phase="rolled_back",profile="fast"} 1.0' in (
                    await response.text()
                )
                page = await response.text()
                assert 'agreement="same",profile="fast"} 2.0' in page
                assert 'outcome="ok",profile="fast",reason="split"} 2.0' in page
                assert 'outcome="ok",profile="baseline",reason="rolled_back"} 2.0' in page

    uvloop.run(test())
    out = capsys.readouterr().out
    assert "rolled_back" in out and "a test" in out
    assert not [r for r in caplog.records if "server stopped" in str(vars(r).get("facts"))]


def event(text: str) -> bytes:
    data = (
        f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}]}}'
    )
    return f"{data}\n\n".encode()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
Behave = Callable[[asyncio.StreamWriter], None]


def killed_at_once(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def killed_in_the_head(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD[:20])
    writer.transport.abort()


def killed_behind_the_head(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    asyncio.get_running_loop().call_later(0.02, writer.transport.abort)


def half_open(writer: asyncio.StreamWriter) -> None:
    pass


def killed_in_the_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event("one ") + event("two "))
    asyncio.get_running_loop().call_later(0.02, writer.transport.abort)


@contextlib.asynccontextmanager
async def dying(behave: Behave) -> AsyncIterator[str]:
    """A server whose completions go wrong; it says that it is healthy."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                writer.close()
            else:
                behave(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()


BEFORE = [killed_at_once, killed_in_the_head, killed_behind_the_head, half_open]


@pytest.mark.parametrize("behave", [*BEFORE, killed_in_the_stream], ids=lambda b: b.__name__)
def test_an_engine_that_dies_costs_no_answer_that_could_be_saved(
    tmp_path: Path, behave: Behave
) -> None:
    async def test() -> None:
        async with dying(behave) as url:
            spec = {
                "speculative": True,
                "method": "eagle3",
                "rollout": "100%",
                "backend": {"engine": "vllm", "url": url},
                "timeouts": {"first_byte_s": 0.3},
            }
            rollout = config(tmp_path, {"spec": spec})
            server = embedded_config(rollout, {"engine": {"slots": 2, "context": 512}})
            assert server is not None
            embedded = Service(server, FakeModel(), budget=FixedBudget(0, 0))
            async with served(rollout, embedded) as (api, _), aiohttp.ClientSession() as session:
                async with session.post(api + CHAT, json=ask(stream=True)) as response:
                    assert response.status == 200
                    text = await response.text()
                    profile = response.headers["x-outrider-profile"]
                if behave is killed_in_the_stream:
                    assert profile == "spec" and text.startswith(event("one ").decode())
                    assert '"error"' in text and "[DONE]" not in text
                else:
                    assert profile == "baseline" and text.endswith("data: [DONE]\n\n")

    uvloop.run(test())


ENGINE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *words):
        pass
print("CUDA out of memory, said a line", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
QUICK = Patience(start_s=15, look_s=0.02, end_s=2, again_s=0.01)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_supervised_engine_is_started_again_and_ended() -> None:
    async def test() -> None:
        port = free_port()
        told: list[tuple[str, str]] = []
        command = [sys.executable, "-c", ENGINE, str(port)]
        engine = Supervisor(
            command,
            f"http://127.0.0.1:{port}",
            told=lambda *what: told.append(what),
            patience=QUICK,
        )
        await engine.start()
        first = engine.pid
        assert first is not None and told[0][0] == "out_of_memory"
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while engine.pid == first:
                await asyncio.sleep(0.01)
        assert engine.restarts == 1 and (
            told[1][0],
            told[1][1].partition(":")[0],
        ) == ("restart", "the engine ended with -9")
        last = engine.pid
        await engine.stop()
        assert last is not None
        with pytest.raises(ProcessLookupError):
            os.kill(last, 0)

    uvloop.run(test())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-program"], "cannot be started"),
        ([sys.executable, "-c", "print('no such model'); raise SystemExit(4)"], "no such model"),
    ],
)
def test_an_engine_that_does_not_come_up_says_why(command: list[str], words: str) -> None:
    async def test() -> None:
        root = f"http://127.0.0.1:{free_port()}"
        engine = Supervisor(command, root, told=lambda *what: None, patience=QUICK)
        with pytest.raises(EngineUnfit, match=words):
            await engine.start()

    uvloop.run(test())


VLLM = """#!{python}
import http.server, json, sys
words = sys.argv[1:]
assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"], words
given = dict(zip(words[2::2], words[3::2]))
config = json.loads(given.get("--speculative-config", "null"))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if config and "min_p" in asked:
            return self.answer(400, {{"error": {{"message": "min_p"}}}})
        message = {{"role": "assistant", "content": json.dumps(config)}}
        told = {{"choices": [{{"index": 0, "message": message, "finish_reason": "stop"}}],
                "model": given["--served-model-name"],
                "usage": {{"prompt_tokens": 2, "completion_tokens": 8}}}}
        if config:
            told["metrics"] = {{"speculative_decoding": {{
                "num_accepted_draft_tokens": 4, "num_draft_tokens": 9, "num_spec_steps": 3,
                "num_spec_tokens": 3, "acceptance_histogram": [0, 2, 1, 0]}}}}
        self.answer(200, told)
    def answer(self, status, told):
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *words):
        pass
port = int(given["--port"])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_vllm_is_started_asked_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python-of-vllm"
    program.write_text(VLLM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("OUTRIDER_VLLM_PYTHON", str(program))
    backend = {"engine": "vllm"}
    spec = {
        "speculative": True,
        "method": "eagle3",
        "drafter": "head",
        "num_speculative_tokens": 3,
        "rollout": "100%",
        "backend": backend,
    }
    plain = {"speculative": False, "backend": backend}
    rollout = config(tmp_path, {"baseline": plain, "spec": spec})

    async def test() -> None:
        async with served(rollout, None) as (api, admin), aiohttp.ClientSession() as session:
            async with session.post(api + CHAT, json=ask()) as response:
                assert response.headers["x-outrider-profile"] == "spec"
                told = await response.json()
            said = json.loads(told["choices"][0]["message"]["content"])
            assert said == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
            assert told["metrics"]["speculative_decoding"]["num_draft_tokens"] == 9
            async with session.post(api + CHAT, json=ask(min_p=0.1)) as response:
                assert response.headers["x-outrider-profile"] == "baseline"
                assert "min_p" in response.headers["x-outrider-reason"]
            async with session.get(admin + "/metrics") as response:
                page = await response.text()
                assert 'outrider_gateway_accepted_tokens_total{profile="spec"} 4.0' in page

    uvloop.run(test())
