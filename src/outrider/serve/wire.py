"""The little of HTTP that is needed on raw ASGI: headers, bodies, JSON and event streams.

It decides nothing: paths, keys and limits are the app's. Headers are read from the scope as the
server parsed them; no address is ever rebuilt from the Host header.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from outrider.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed its connection."""


class Headers:
    """The request's headers, by lower-case name; of a repeated one the first counts."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self._raw = raw

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self._raw if key.lower() == name), None)

    def count(self, name: bytes) -> int:
        """How often it was sent."""
        return sum(key.lower() == name for key, _ in self._raw)

    def text(self, name: bytes) -> str | None:
        value = self.get(name)
        return None if value is None else value.decode("latin-1")

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def size(self) -> int:
        return sum(len(key) + len(value) for key, value in self._raw)


async def read_body(receive: Receive, headers: Headers, *, limit: int, seconds: float) -> bytes:
    """The whole body.

    One that is somewhat too large is read to its end and thrown away, so that its sender is there
    to read the refusal; of one that is far too large no more is read.

    Raises:
        ApiError: it is larger than ``limit`` (413) or slower than ``seconds`` (408).
        ClientGone: the client left before it was complete.
    """
    announced = headers.text(b"content-length") or ""
    if announced.isdigit() and (len(announced) > 18 or int(announced) > 2 * limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size <= limit:
                    parts.append(part)
                more = message.get("more_body", False)
                if size > limit and (size > 2 * limit or not more):
                    raise _too_large(limit)
                if not more:
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {seconds:g} s", code="body_timeout"
        ) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; send less", code="body_too_large")


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode_json(value: Any) -> bytes:
    return _JSON.encode(value).encode("utf-8", errors="replace")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode_json(value)


class Events:
    """Server-sent events of objects that begin with the same fields, which are encoded once.

    Args:
        frame: these fields; at least one.
    """

    def __init__(self, frame: Mapping[str, Any]) -> None:
        self._head = b"data: " + encode_json(frame)[:-1]

    def of(self, rest: Mapping[str, Any]) -> bytes:
        """The event of an object with these other fields; at least one."""
        return b"%b,%b\n\n" % (self._head, encode_json(rest)[1:])


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        }
    )


async def send_part(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def respond(
    send: Send, status: int, body: bytes, headers: Mapping[str, str], *, kind: str = JSON
) -> None:
    """A whole response."""
    length = {"content-type": kind, "content-length": str(len(body))}
    await send_head(send, status, {**length, **headers})
    await send_part(send, body, more=False)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def beside_client(
    work: Coroutine[Any, Any, None], receive: Receive, *, over: Callable[[], bool] = lambda: False
) -> None:
    """Run while the client is there.

    Args:
        work: cancelled when the client leaves.
        receive: of the connection.
        over: the response is whole: the client may leave, and what is left of the work goes on.

    Raises:
        ClientGone: it left; the work has been cancelled and is over.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
        if over():
            await task
            return
        raise ClientGone
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
