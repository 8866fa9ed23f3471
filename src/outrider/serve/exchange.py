"""One HTTP request and what is sent back: whole, or as a stream of events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.answers import new_id
from outrider.serve.errors import ApiError, internal
from outrider.serve.keys import Caller
from outrider.serve.metrics import Metrics
from outrider.serve.wire import (
    DONE,
    EVENTS,
    KEEP_ALIVE,
    Events,
    Headers,
    Send,
    encode_json,
    event,
    respond,
    send_head,
    send_part,
)

log = logging.getLogger(__name__)

PAD = 256  # bytes; padded events are a multiple of it


@dataclass
class Exchange:
    """A request under way.

    Attributes:
        request_id: what logs and the client call it.
        caller: who sent it.
        extra: headers of the response, beside those of its kind.
        status: the response's status once it has one.
        over: the response is whole, and work is left that its client need not wait for.
        facts: what the log shall say of it.
    """

    request_id: str
    method: str
    path: str
    headers: Headers
    send: Send
    caller: Caller = field(default_factory=Caller)
    body: bytes = b""
    extra: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    over: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def response_headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id, **self.extra}

    async def reply(self, value: Any, *, status: int = 200) -> None:
        """Answer with JSON."""
        await self.reply_bytes(encode_json(value), status=status, kind="application/json")

    async def reply_bytes(
        self, body: bytes, *, status: int = 200, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        both = {**self.response_headers(), **(headers or {})}
        await respond(self.send, status, body, both, kind=kind)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error object."""
        self.facts["error"] = error.code or error.message
        await self.reply_bytes(
            encode_json(error.body()),
            status=error.status,
            kind="application/json",
            headers=error.response_headers(),
        )


class EventStream:
    """A response of server-sent events; begins with the first event, so that what fails before it
    still gets a status of its own.

    Args:
        exchange: the request.
        metrics: told of the gaps between chunks.
        labels: its labels.
        frame: the fields that all chunks begin with.
        pad: events carry filling, so that their size tells little of their text.
    """

    def __init__(
        self,
        exchange: Exchange,
        metrics: Metrics,
        labels: tuple[str, str],
        *,
        frame: Mapping[str, Any],
        pad: bool,
    ) -> None:
        self._exchange = exchange
        self._gaps = metrics.chunk_gaps(*labels)
        self._events = Events(frame)
        self._pad = pad
        self._last: float | None = None

    @property
    def begun(self) -> bool:
        return self._exchange.status is not None

    async def send(self, chunks: list[dict[str, Any]]) -> None:
        """Send chunks together; they are given without the frame."""
        if not chunks:
            return
        if not self.begun:
            await self._begin()
        now = time.perf_counter()
        if self._last is not None:
            self._gaps.observe(now - self._last)
        self._last = now
        parts = [self._padded(chunk) if self._pad else self._events.of(chunk) for chunk in chunks]
        await send_part(self._exchange.send, b"".join(parts), more=True)

    async def keep_alive(self) -> None:
        """Show that the server is still there."""
        if not self.begun:
            await self._begin()
        await send_part(self._exchange.send, KEEP_ALIVE, more=True)

    async def done(self) -> None:
        await send_part(self._exchange.send, DONE, more=False)

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun: an error event, and no end mark."""
        self._exchange.facts["error"] = error.code or error.message
        await send_part(self._exchange.send, event(error.body()), more=False)

    async def _begin(self) -> None:
        self._exchange.status = 200
        headers = {**EVENTS, **self._exchange.response_headers()}
        await send_head(self._exchange.send, 200, headers)

    def _padded(self, chunk: dict[str, Any]) -> bytes:
        """The event with an `obfuscation` field that brings it to a multiple of `PAD` bytes."""
        bare = len(self._events.of({**chunk, "obfuscation": ""}))
        return self._events.of({**chunk, "obfuscation": new_id("", -bare % PAD)})


def as_api_error(fault: BaseException) -> ApiError:
    """What a client is told of a fault; all else is for the log."""
    if isinstance(fault, ApiError):
        return fault
    log.error("a request failed inside the server", exc_info=fault)
    return internal()
