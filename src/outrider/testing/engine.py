"""An engine that only pretends: OpenAI's interface, known answers, and faults on demand.

For tests of what stands in front of engines. Its answer is a function of the prompt, the seed and
nothing else, so two of them agree as two exact profiles do; `wrong` makes one that does not. It is
an ASGI application: call it in this process, or serve it on a socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FAKE_WORDS = ("alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine")


class Crash(Exception):
    """The pretended end of the process in the middle of an answer."""


@dataclass
class FakeEngine:
    """One engine; change a field to change how it behaves from then on.

    Attributes:
        first_s, token_s: seconds before the first token and between tokens.
        status: answer with this error instead; `None` answers.
        hang_before, hang_after: wait for ever before the first token, or after that many.
        crash_after: break off after so many tokens.
        garble_after: send what is no JSON after so many tokens.
        usage: send usage, as asked for.
        prompt_tokens: into which its tokenizer cuts any prompt.
        drafted: guesses per step that it claims; 0 tells nothing.
        accepted: of these, accepted.
        wrong: change this word of every answer; `None` for none.
        law: probabilities of `FAKE_WORDS` at temperature 1, told where log-probabilities are asked
            for and sampled from; `None` tells none.
        lean: with this chance the likeliest word comes, whatever the law says: a lossy engine.
        healthy: of `/health`.
        metrics: its Prometheus page.
    """

    name: str = "fake"
    model: str = "fake"
    first_s: float = 0.0
    token_s: float = 0.0
    status: int | None = None
    hang_before: bool = False
    hang_after: int | None = None
    crash_after: int | None = None
    garble_after: int | None = None
    usage: bool = True
    prompt_tokens: int = 5
    drafted: int = 0
    accepted: int = 0
    wrong: int | None = None
    law: tuple[float, ...] | None = None
    lean: float = 0.0
    healthy: bool = True
    metrics: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: int = 0
    running: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def words(self, body: dict[str, Any]) -> list[str]:
        """The answer to a request."""
        asked = json.dumps([body.get("messages"), body.get("prompt"), body.get("seed")])
        digest = hashlib.sha256(asked.encode()).digest()
        most = body.get("max_tokens") or body.get("max_completion_tokens") or 8
        found = [f"{FAKE_WORDS[digest[i % 32] % len(FAKE_WORDS)]} " for i in range(most)]
        if self.law is not None and asked_logprobs(body):
            power = 1 / (body.get("temperature") or 1.0)
            weights = [p**power for p in self.law]
            best = max(range(len(weights)), key=weights.__getitem__)
            found = [
                FAKE_WORDS[best]
                if self._random.random() < self.lean
                else self._random.choices(FAKE_WORDS, weights)[0]
                for _ in range(most)
            ]
        if self.wrong is not None and self.wrong < len(found):
            found[self.wrong] = "weed "
        return found

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            await self._get(scope["path"], send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        asked = json.loads(body)
        self.requests.append(asked)
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        work = asyncio.ensure_future(self._post(scope["path"], asked, send))
        leave = asyncio.ensure_future(receive())
        self.running += 1
        try:
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
            self.aborted += 1
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            for task in (work, leave):
                task.cancel()
            await asyncio.gather(work, leave, return_exceptions=True)

    async def _get(self, path: str, send: Send) -> None:
        pages: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/version": {"version": "1"},
            "/v1/models": {"object": "list", "data": [{"id": self.model, "object": "model"}]},
        }
        if path == "/metrics":
            await _whole(send, 200, self.metrics.encode(), kind="text/plain")
        elif path not in pages:
            await _whole(send, 404, b"{}")
        else:
            good = self.healthy or path != "/health"
            await _whole(send, 200 if good else 503, json.dumps(pages[path]).encode())

    async def _post(self, path: str, asked: dict[str, Any], send: Send) -> None:
        if self.status is not None:
            error = {"error": {"message": "made to fail", "type": "server_error"}}
            await _whole(send, self.status, json.dumps(error).encode())
            return
        await asyncio.sleep(self.first_s)
        if self.hang_before:
            await asyncio.Event().wait()
        chat = path.endswith("/chat/completions")
        words = self.words(asked)
        if asked.get("stream"):
            await self._stream(asked, words, send, chat=chat)
            return
        for _ in words:
            await asyncio.sleep(self.token_s)
        if self.crash_after is not None:
            raise Crash
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if self.law is not None and asked_logprobs(asked):
            choice["logprobs"] = self._told(words, self.law)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        told = {"id": "x", "model": self.model, "choices": [choice], **self._facts(len(words))}
        await _whole(send, 200, json.dumps(told).encode())

    async def _stream(
        self, asked: dict[str, Any], words: list[str], send: Send, *, chat: bool
    ) -> None:
        head = [(b"content-type", b"text/event-stream"), (b"x-engine", self.name.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if chat:
            await self._event(send, {"delta": {"role": "assistant", "content": ""}})
        for number, word in enumerate(words):
            if number == self.crash_after:
                raise Crash
            if number == self.hang_after:
                await asyncio.Event().wait()
            if number == self.garble_after:
                await _part(send, b'data: {"id":"x","choi\n\n')
            if number:
                await asyncio.sleep(self.token_s)
            await self._event(send, {"delta": {"content": word}} if chat else {"text": word})
        await self._event(send, {**({"delta": {}} if chat else {"text": ""}), "finish": "length"})
        if (asked.get("stream_options") or {}).get("include_usage") and self.usage:
            told = {"id": "x", "model": self.model, "choices": [], **self._facts(len(words))}
            await _part(send, b"data: " + json.dumps(told).encode() + b"\n\n")
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    @staticmethod
    def _told(words: list[str], law: tuple[float, ...]) -> dict[str, Any]:
        """Log-probabilities in chat's form."""
        pairs = zip(FAKE_WORDS, law, strict=True)
        top = [{"token": word, "logprob": math.log(p)} for word, p in pairs if p > 0]
        return {"content": [{"token": w, "logprob": -1.0, "top_logprobs": top} for w in words]}

    def _facts(self, tokens: int) -> dict[str, Any]:
        if not self.usage:
            return {}
        prompt = self.prompt_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        if not self.drafted:
            return {"usage": usage}
        steps = max(1, tokens // (self.accepted + 1))
        histogram = [0] * (self.drafted + 1)
        histogram[self.accepted] = steps
        told = {
            "num_accepted_draft_tokens": steps * self.accepted,
            "num_draft_tokens": steps * self.drafted,
            "num_spec_steps": steps,
            "acceptance_histogram": histogram,
        }
        return {"usage": usage, "metrics": {"speculative_decoding": told}}

    async def _event(self, send: Send, choice: dict[str, Any]) -> None:
        finish = choice.pop("finish", None)
        told = {"index": 0, **choice, "finish_reason": finish}
        event = {"id": "x", "model": self.model, "choices": [told]}
        await _part(send, b"data: " + json.dumps(event).encode() + b"\n\n")


def asked_logprobs(body: dict[str, Any]) -> bool:
    """Does a request want more than two likeliest tokens at each place?"""
    return int(body.get("top_logprobs") or 0) > 2


async def _part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _whole(send: Send, status: int, body: bytes, *, kind: str = "application/json") -> None:
    head = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
