"""The server on real sockets: clients that vanish, half requests, slow readers, a small soak."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from outrider.engine import FixedBudget
from outrider.serve.app import App
from outrider.serve.service import Service
from outrider.testing.asgi import AsgiClient
from outrider.testing.serving import (
    FakeModel,
    chat_body,
    fake_service,
    running_server,
    text_target,
)

CHAT = "/v1/chat/completions"
WAIT_S = 20  # for what takes milliseconds; no verdict depends on it


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def send(connection: socket.socket, body: Any, *, length: int | None = None) -> None:
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data) if length is None else length}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)


def wait_for(state: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not state():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def ended(service: Service, outcome: str) -> float:
    labels = {"profile": "fast", "prompt_type": "unknown", "outcome": outcome}
    return service.metrics.registry.get_sample_value("outrider_requests_total", labels) or 0


@pytest.mark.parametrize("phase", ["in the queue", "before the first byte", "mid-stream", "whole"])
def test_a_vanished_client_stops_its_work_in_every_phase(phase: str) -> None:
    target = text_target()
    service = fake_service(
        model=FakeModel(target),
        budget=FixedBudget(0, 0),  # a pass for each token
        engine={"slots": 1, "context": 2048, "prefill_chunk": 8},
    )
    engine = service.worker.engine
    long = chat_body("x" * 900, max_tokens=900, stream=phase != "whole")
    with running_server(service) as address:
        holder = connect(address)
        if phase == "in the queue":
            send(holder, chat_body(max_tokens=1900))
            wait_for(lambda: engine.load.running == 1)
        leaver = connect(address)
        send(leaver, long)
        if phase == "in the queue":
            wait_for(lambda: engine.load.waiting == 1)
        elif phase == "mid-stream":
            while b"content" not in leaver.recv(65536):
                pass
        else:
            wait_for(lambda: engine.load.rows > 8)
        leaver.close()
        wait_for(lambda: ended(service, "cancelled") == 1)
        if phase != "in the queue":
            wait_for(lambda: not engine.has_work)
        holder.close()
        wait_for(lambda: not engine.has_work)
        assert target.passes < 900, "it ran on to its end"
        after = connect(address)
        send(after, chat_body())
        assert after.recv(65536).startswith(b"HTTP/1.1 200")
        after.close()


def test_a_body_that_stops_half_way_harms_nobody() -> None:
    service = fake_service(limits={"body_s": 0.2})
    with running_server(service) as address:
        half = connect(address)
        send(half, {"model": "fake"}, length=500)
        other = connect(address)
        send(other, chat_body())
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        assert half.recv(65536).startswith(b"HTTP/1.1 408")
        for connection in (half, other):
            connection.close()


@pytest.mark.parametrize("size", [100_000, 700_000, 3_000_000])
def test_large_bodies_are_taken_or_refused_in_words(size: int) -> None:
    with running_server(fake_service(limits={"body_bytes": 500_000})) as address:
        body = json.dumps({"prompt": "x" * size}).encode()
        request = urllib.request.Request(
            f"{address}/tokenize", body, {"content-type": "application/json"}
        )
        status = 0  # far too large: cut off before its sender is done
        with contextlib.suppress(OSError):
            try:
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    status = answer.status
            except urllib.error.HTTPError as refusal:
                status = refusal.code
        assert status in {100_000: {200}, 700_000: {413}, 3_000_000: {413, 0}}[size]


CHUNKED = (
    b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x00\xff garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
        b"GET /health\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        CHUNKED + b"content-length: 3\r\n\r\n0\r\n\r\n",
        CHUNKED + b"transfer-encoding: identity\r\n\r\n0\r\n\r\n",
        CHUNKED.replace(b"chunked", b"xchunked") + b"\r\n0\r\n\r\n",
    ],
    ids=[
        "tls",
        "version",
        "no host",
        "negative length",
        "large header",
        "two hosts",
        "path",
        "two lengths",
        "two encodings",
        "encoding",
    ],
)
def test_what_is_no_http_is_refused_and_the_server_goes_on(garbage: bytes) -> None:
    with running_server(fake_service()) as address:
        bad = connect(address)
        bad.sendall(garbage)
        answer = bad.recv(65536)
        assert answer == b"" or answer.split(b" ", 2)[1][:1] == b"4"
        bad.close()
        good = connect(address)
        good.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert good.recv(65536).startswith(b"HTTP/1.1 200")
        good.close()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"y" * 1000),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n" * 100),
        (b"GET /", b"y" * 1000),
        (CHUNKED + b"\r\n0\r\n", b"x: y\r\n" * 100),
        (CHUNKED + b"\r\n1;", b"y" * 1000),
    ],
    ids=["a header", "headers", "a path", "trailers", "a chunk's extension"],
)
def test_what_has_no_end_is_cut_off(begin: bytes, more: bytes) -> None:
    with running_server(fake_service()) as address:
        bad = connect(address)
        bad.sendall(begin)
        sent, answer = 0, b""
        bad.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            while sent < 2**20:
                bad.sendall(more)
                sent += len(more)
                with contextlib.suppress(TimeoutError):
                    answer = bad.recv(65536)
                    break
        assert sent < 2**16
        assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        bad.close()


def test_a_slow_reader_does_not_hold_the_others() -> None:
    service = fake_service(engine={"context": 2048})
    with running_server(service) as address:
        slow = connect(address)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        send(slow, chat_body(max_tokens=400, stream=True, logprobs=True, top_logprobs=20))
        for _ in range(3):
            quick = connect(address)
            send(quick, chat_body())
            assert quick.recv(65536).startswith(b"HTTP/1.1 200")
            quick.close()
        content = b""
        while b"[DONE]" not in content[-2000:]:
            content += slow.recv(1 << 16)
        assert content.count(b'"bytes"') == 400 * 21
        slow.close()


# -- soak -----------------------------------------------------------------------------------------

REQUESTS = int(os.environ.get("OUTRIDER_SOAK", "250"))  # 10000 for the long form
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "boolean"}}},
    },
}
KINDS = ("plain", "stream", "cancel early", "cancel late", "bad", "grammar", "tool", "long", "n")


def soak_body(kind: str, rng: random.Random) -> dict[str, Any]:
    body = chat_body(
        f"hello {rng.randrange(50)}",
        model=rng.choice(["fake", "fake@ngram", "fake@hybrid", "fake@baseline"]),
        max_tokens=rng.choice([5, 20, 40]),
        seed=rng.randrange(20),
        temperature=rng.choice([0, 1]),
    )
    more: dict[str, dict[str, Any]] = {
        "stream": {"stream": True},
        "cancel early": {"max_tokens": 400},
        "cancel late": {"max_tokens": 400, "stream": True},
        "bad": {"top_p": -1},
        "grammar": {"response_format": {"type": "regex", "regex": f"[ab]{{{rng.randint(1, 30)}}}"}},
        "tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        "long": {"messages": [{"role": "user", "content": "x y " * 200}]},
        "n": {"n": 3},
    }
    return {**body, **more.get(kind, {})}


def said(response: Any, body: dict[str, Any]) -> str:
    if not body.get("stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    *chunks, end = response.events
    assert end == "[DONE]"
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_soak_loses_crosses_and_keeps_nothing() -> None:
    profiles = {name: {"drafter": name} for name in ("suffix", "ngram", "hybrid")}
    service = fake_service(
        profiles=profiles, default_profile="suffix", engine={"slots": 6, "queue": 500}
    )
    rng = random.Random(0)
    seen: Counter[tuple[str, int]] = Counter()
    texts: dict[str, str] = {}
    memory: dict[int, float] = {}

    async def one(client: AsgiClient, kind: str, body: dict[str, Any]) -> None:
        if kind.startswith("cancel"):
            call = client.start("POST", CHAT, body)
            if kind == "cancel late":
                await call.message()
            else:
                await asyncio.sleep(body["seed"] / 1000)
            call.leave()
            await call.task
            return
        response = await client.post(CHAT, body)
        seen[kind, response.status] += 1
        if kind in ("plain", "stream", "long"):
            same = {key: body[key] for key in ("messages", "max_tokens", "seed", "temperature")}
            text = said(response, body)
            assert texts.setdefault(json.dumps(same), text) == text, "answers crossed"

    async def run() -> None:
        service.start()
        client, room = AsgiClient(App(service)), asyncio.Semaphore(12)

        async def limited(number: int) -> None:
            kind = rng.choice(KINDS)
            async with room:
                await one(client, kind, soak_body(kind, rng))
            if number in (REQUESTS // 5, REQUESTS - 1):
                gc.collect()
                memory[number] = resident()

        await asyncio.gather(*(limited(number) for number in range(REQUESTS)))
        while service.worker.engine.has_work:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(service.stop)

    uvloop.run(run())
    wanted = {kind: 400 if kind == "bad" else 200 for kind in KINDS}
    assert {(kind, status) for kind, status in seen if status != wanted[kind]} == set()
    worker = service.worker
    assert worker.engine.load.running == worker.engine.load.waiting == 0
    assert not worker._members and not worker._requests and not worker.engine._finished
    if REQUESTS >= 10_000:
        first, last = memory[REQUESTS // 5], memory[REQUESTS - 1]
        assert last <= 1.02 * first, f"{first:.0f} MiB grew to {last:.0f} MiB"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make a certificate")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    files = {"certificate": str(certificate), "key": str(key)}
    with running_server(fake_service(tls=files)) as address:
        assert address.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{address}/ready", context=trusted, timeout=WAIT_S) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="certificate"):
            urllib.request.urlopen(f"{address}/ready", timeout=WAIT_S)
