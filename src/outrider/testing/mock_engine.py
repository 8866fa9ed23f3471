"""A server that looks like vLLM and decodes nothing: known texts, known acceptance, known costs.

For tests and for the tutorial. A request's text is a function of its prompt alone, with and without
guesses, so that outputs agree. How many guesses a step accepts is drawn from the prompt too. A step
sleeps `step_ms * (1 + extra * tokens * running)`: guesses get dearer as more requests run, so that
a sweep has a crossover to find. Faults can be asked for by name.

    python -m outrider.testing.mock_engine --port 8123 --speculative-config '{"method": "ngram",
    "num_speculative_tokens": 3}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import queue
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "mock-model"
WORDS = ("the", "wind", "over", "a", "quiet", "river", "turns", "and", "falls", "again", "light")
FAULTS = (
    "no-usage",  # streams without a usage chunk
    "no-metrics",  # no Prometheus page
    "no-acceptance",  # nothing about guesses in the answer
    "other-model",  # answers come from another model than asked
    "cut",  # streams end in their middle
    "not-json",  # an event that is no JSON
    "mid-error",  # an error event after some tokens
    "http-500",  # every completion fails
    "every-third",  # every third completion fails
    "old",  # a version that is not understood
)


@dataclass
class MockSettings:
    """How the mock behaves; see the module's head.

    Attributes:
        method, tokens: of the guesses; 0 tokens is plain decoding.
        acceptance: mean chance that a guess is accepted; each prompt has its own around it.
        step_ms, extra, prefill_ms: costs.
        faults: of `FAULTS`.
    """

    method: str = "ngram"
    tokens: int = 0
    acceptance: float = 0.7
    step_ms: float = 2.0
    extra: float = 0.03
    prefill_ms: float = 2.0
    faults: frozenset[str] = frozenset()


@dataclass
class _Totals:
    """What the Prometheus page shows."""

    running: int = 0
    requests: int = 0
    prompt: int = 0
    output: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    positions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Reply:
    """A request's whole course, fixed before it begins."""

    words: tuple[str, ...]
    accepted: tuple[int, ...]  # per step
    finish: str


class MockEngine:
    """The mock's state and its answers; `_Connection` speaks HTTP for it."""

    def __init__(self, settings: MockSettings) -> None:
        unknown = settings.faults - set(FAULTS)
        if unknown:
            raise ValueError(f"no such fault: {', '.join(sorted(unknown))}")
        self.settings = settings
        self.totals = _Totals(positions=[0] * settings.tokens)
        self.seen = 0

    def page(self, path: str, body: Mapping[str, Any]) -> tuple[int, str, str] | None:
        """Status, content type and text of a whole answer; `None` for a completion."""
        if path in ("/v1/chat/completions", "/v1/completions"):
            return None
        if path == "/v1/models":
            model = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 4096}
            return 200, "application/json", json.dumps({"object": "list", "data": [model]})
        if path == "/version":
            version = "0.1.0" if "old" in self.settings.faults else "0.33.0"
            return 200, "application/json", json.dumps({"version": version})
        if path == "/health":
            return 200, "application/json", "{}"
        if path == "/tokenize":
            text = str(body.get("prompt") or body.get("messages"))
            tokens = [len(word) for word in text.split()]
            return 200, "application/json", json.dumps({"tokens": tokens, "count": len(tokens)})
        if path == "/metrics" and "no-metrics" not in self.settings.faults:
            return 200, "text/plain; version=0.0.4", self.metrics()
        return 404, "application/json", json.dumps({"error": {"message": f"no path {path}"}})

    def metrics(self) -> str:
        """The Prometheus page, with the traps of the real one."""
        t = self.totals
        counters = {
            "vllm:request_success": t.requests,
            "vllm:prompt_tokens": t.prompt,
            "vllm:generation_tokens": t.output,
        }
        if self.settings.tokens:
            counters |= {
                "vllm:spec_decode_num_drafts": t.drafts,
                "vllm:spec_decode_num_draft_tokens": t.drafted,
                "vllm:spec_decode_num_accepted_tokens": t.accepted,
            }
        lines = []
        for name, value in counters.items():
            lines += [f"# TYPE {name} counter", f'{name}_total{{engine="0"}} {value}']
            lines += [f"# TYPE {name}_created gauge", f'{name}_created{{engine="0"}} 1.7e+09']
        if self.settings.tokens:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            lines.append(f"# TYPE {name} counter")
            lines += [f'{name}_total{{position="{p}"}} {n}' for p, n in enumerate(t.positions)]
        lines += [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running {t.running}",
        ]
        lines += ["# TYPE vllm:num_requests_waiting gauge", "vllm:num_requests_waiting 0"]
        lines += [
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc 0.{t.running}",
        ]
        return "\n".join(lines) + "\n"

    def reply(self, body: Mapping[str, Any]) -> _Reply:
        """The course of a request: words from the prompt, acceptance from the prompt and k."""
        prompt = json.dumps(body.get("messages") or body.get("prompt"), sort_keys=True)
        digest = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")
        words_rng = random.Random(digest)
        length = int(body.get("max_tokens") or 16)
        own = 8 + digest % 120
        n = min(length, own)
        words = tuple(words_rng.choice(WORDS) + " " for _ in range(n))
        rng = random.Random(digest + 1)
        chance = min(0.98, max(0.02, self.settings.acceptance + rng.uniform(-0.2, 0.2)))
        accepted, left = [0], n - 1  # the first token comes from prefill
        while left > 0:
            run = 0
            while run < self.settings.tokens and rng.random() < chance:
                run += 1
            run = min(run, left - 1)
            accepted.append(run)
            left -= run + 1
        return _Reply(words, tuple(accepted), "length" if n == length else "stop")

    async def steps(self, reply: _Reply) -> Any:
        """Yields the words of each step at its time, and counts."""
        s, at = self.settings, 0
        self.totals.running += 1
        try:
            await asyncio.sleep(s.prefill_ms / 1000)
            for number, accepted in enumerate(reply.accepted):
                if number:
                    cost = 1 + s.extra * s.tokens * self.totals.running
                    await asyncio.sleep(s.step_ms * cost / 1000)
                words = reply.words[at : at + accepted + 1]
                at += accepted + 1
                yield words
        finally:
            self.totals.running -= 1

    def count(self, reply: _Reply) -> None:
        """A request is finished."""
        t, spec = self.totals, self.settings.tokens
        t.requests += 1
        t.prompt += 7
        t.output += len(reply.words)
        if spec:
            steps = reply.accepted[1:]
            t.drafts += len(steps)
            t.drafted += spec * len(steps)
            t.accepted += sum(steps)
            for position in range(spec):
                t.positions[position] += sum(a > position for a in steps)

    def told(self, reply: _Reply) -> dict[str, Any]:
        """vLLM's account of a request's guesses."""
        spec, steps = self.settings.tokens, reply.accepted[1:]
        if not spec or "no-acceptance" in self.settings.faults:
            return {}
        histogram = [sum(a == j for a in steps) for j in range(spec + 1)]
        drafted = spec * len(steps)
        found = {
            "mean_acceptance_length": 1 + sum(steps) / len(steps) if steps else None,
            "draft_acceptance_rate": sum(steps) / drafted if drafted else None,
            "acceptance_histogram": histogram,
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": sum(steps),
            "num_draft_tokens": drafted,
            "num_spec_tokens": spec,
            "per_step_accepted": list(steps),
            "per_step_drafted": [spec] * len(steps),
        }
        return {"metrics": {"speculative_decoding": found}}


class _Connection(asyncio.Protocol):
    """One connection: requests by Content-Length, streams in chunked coding."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self._data = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._out = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._data[:end].decode("latin-1")
        length = 0
        for line in head.lower().split("\r\n"):
            if line.startswith("content-length:"):
                length = int(line[15:])
        if len(self._data) < end + 4 + length:
            return
        raw = self._data[end + 4 : end + 4 + length]
        self._data = self._data[end + 4 + length :]
        path = head.split(" ", 2)[1]
        body = json.loads(raw) if raw else {}
        page = self._engine.page(path, body)
        if page is not None:
            self._whole(*page)
        else:
            self._task = asyncio.ensure_future(self._complete(path, body))

    def _whole(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        self._out.write(head.encode() + data)

    async def _complete(self, path: str, body: Mapping[str, Any]) -> None:
        engine, faults = self._engine, self._engine.settings.faults
        engine.seen += 1
        if "http-500" in faults or ("every-third" in faults and engine.seen % 3 == 0):
            return self._whole(500, "application/json", '{"error": {"message": "mock fault"}}')
        chat, reply = path.endswith("chat/completions"), engine.reply(body)
        usage = {"prompt_tokens": 7, "completion_tokens": len(reply.words)}
        usage["total_tokens"] = sum(usage.values())
        model = "another" if "other-model" in faults else body.get("model")
        if not body.get("stream"):
            async for _ in engine.steps(reply):
                pass
            engine.count(reply)
            text = "".join(reply.words)
            part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": reply.finish, **part}
            answer = {"model": model, "choices": [choice], "usage": usage, **engine.told(reply)}
            return self._whole(200, "application/json", json.dumps(answer))
        self._out.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await self._stream(reply, chat=chat, usage=usage, model=model)

    async def _stream(
        self, reply: _Reply, *, chat: bool, usage: Mapping[str, int], model: Any
    ) -> None:
        engine, faults, sent = self._engine, self._engine.settings.faults, 0
        if chat:
            self._event({"model": model, "choices": [{"index": 0, "delta": {"role": "x"}}]})
        async for words in engine.steps(reply):
            sent += len(words)
            text = "".join(words)
            finish = reply.finish if sent == len(reply.words) else None
            part = {"delta": {"content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": finish, **part}
            self._event({"model": model, "choices": [choice]})
            if "cut" in faults:
                self._out.close()
                return
            if "not-json" in faults:
                self._chunk(b"data: {oops\n\n")
            if "mid-error" in faults:
                self._event({"error": {"message": "mock fault in mid-stream"}})
        engine.count(reply)
        if "no-usage" not in faults:
            self._event({"model": model, "choices": [], "usage": usage, **engine.told(reply)})
        self._chunk(b"data: [DONE]\n\n")
        self._out.write(b"0\r\n\r\n")

    def _event(self, event: Mapping[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._out.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(
    settings: MockSettings, *, port: int = 0, ready: queue.SimpleQueue[str] | None = None
) -> None:
    """Serve until cancelled; the address goes to ``ready``, or to standard output."""
    engine = MockEngine(settings)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", port)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    if ready is None:
        print(address, flush=True)
    else:
        ready.put(address)
    async with server:
        await asyncio.Event().wait()


@contextlib.contextmanager
def mock_engine(settings: MockSettings | None = None) -> Iterator[str]:
    """A mock on a free port of this machine, in a thread of its own; yields its address."""
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(settings or MockSettings(), ready=ready))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run, name="mock-engine", daemon=True)
    thread.start()
    try:
        yield ready.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)


def main(words: Sequence[str] | None = None) -> None:
    """The command line; it knows vLLM's flags as far as the mock has them."""
    parser = argparse.ArgumentParser(prog="mock_engine")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--per-request-spec-decode-metrics")  # always told
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--extra", type=float, default=0.03)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--fault", action="append", default=[])
    given = parser.parse_args(words)
    settings = MockSettings(
        method=given.speculative_config.get("method", "ngram"),
        tokens=given.speculative_config.get("num_speculative_tokens", 0),
        acceptance=given.acceptance,
        step_ms=given.step_ms,
        extra=given.extra,
        faults=frozenset(given.fault),
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, port=given.port))


if __name__ == "__main__":
    main()
