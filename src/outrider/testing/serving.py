"""A server around a model with known answers, for tests of the server and of what talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import uvloop
from torch import Tensor

from outrider.engine import Budget, FixedBudget
from outrider.models.target import Target
from outrider.serve.app import App
from outrider.serve.config import make_config
from outrider.serve.run import serve
from outrider.serve.service import Service
from outrider.testing.asgi import AsgiClient
from outrider.testing.fakes import END, ByteTokenizer, TableTarget

NAME = "fake"
_Result = TypeVar("_Result")


class TextTarget(TableTarget):
    """A table target that writes printable ASCII only; it may end its text where `ends` is set."""

    ends: bool = False

    def _logits(self, seen_T2: Any) -> Tensor:
        row = super()._logits(seen_T2)
        ids = np.arange(self.vocab_size)
        wanted = (ids >= 32) & (ids < 127) | ((ids == END) & self.ends)
        return torch.where(torch.from_numpy(wanted), row, torch.full_like(row, -50.0))


def text_target(*, context: int = 2048, kind: type[TextTarget] = TextTarget) -> TextTarget:
    """A target over the byte tokenizer's vocabulary that soon repeats itself."""
    return kind(
        vocab_size=ByteTokenizer.vocab_size,
        order=1,
        sharpness=8.0,
        ripple=0.0,
        context_length=context,
        end_tokens=ByteTokenizer.end_tokens,
        name=NAME,
    )


@dataclass(frozen=True)
class FakeModel:
    """A target and its tokenizer, as a loader gives them."""

    target: Target = field(default_factory=text_target)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    source: Path = Path("fake")


def fake_service(
    *, model: FakeModel | None = None, budget: Budget | None = None, **settings: Any
) -> Service:
    """A service with profiles "fast" (suffix, the default) and `baseline`, small and quick.

    Args:
        model: another target or tokenizer.
        budget: how much is guessed; a fixed tree by default, so that guesses do not depend on time.
        settings: of `ServerConfig`, on top of these.
    """
    values: dict[str, Any] = {
        "target": NAME,
        "port": 0,
        "profiles": {"fast": {"drafter": "suffix"}},
        **settings,
        "engine": {"slots": 4, "context": 1024, "prefill_chunk": 32, **settings.get("engine", {})},
    }
    model = model or FakeModel()
    return Service(make_config(values), model, budget=budget or FixedBudget(nodes=8, depth=6))


def with_client(
    service: Service,
    test: Callable[[AsgiClient], Awaitable[_Result]],
    *,
    headers: dict[str, str] | None = None,
    admin: bool = False,
) -> _Result:
    """Run an asynchronous test against a service; start and stop it around."""

    async def run() -> _Result:
        service.start()
        try:
            client = AsgiClient(App(service, admin=admin))
            client.headers |= headers or {}
            async with asyncio.timeout(60):
                return await test(client)
        finally:
            await asyncio.to_thread(service.stop)

    return asyncio.run(run())


def chat_body(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A small chat request."""
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "seed": 7,
        **more,
    }


@contextlib.contextmanager
def running_server(service: Service) -> Iterator[str]:
    """A server on a free port of this machine, in a thread of its own; yields its address."""
    ready: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    ends: list[Callable[[], object]] = []

    async def run() -> None:
        task = asyncio.ensure_future(serve(service, listening=ready.put, signals=False))
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(task.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def main() -> None:
        try:
            uvloop.run(run())
        except BaseException as fault:
            ready.put(fault)

    thread = threading.Thread(target=main, name="test-server")
    thread.start()
    try:
        first = ready.get(timeout=30)
        if isinstance(first, BaseException):
            raise first
        yield first
    finally:
        for end in ends:
            end()
        thread.join(30)
