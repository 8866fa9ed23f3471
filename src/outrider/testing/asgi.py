"""A client that calls an ASGI application in this process, with a say over every message.

For tests: no sockets, no threads, and the moment at which the client leaves is exact.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


@dataclass(frozen=True)
class Response:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream: parsed, the end mark as text."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """Server-sent events, the end mark as the text ``[DONE]``, comments left out."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@dataclass
class Call:
    """A request under way. `leave` closes the client's side."""

    task: asyncio.Task[None]
    sent: asyncio.Queue[Message]
    gone: asyncio.Event

    def leave(self) -> None:
        self.gone.set()

    async def message(self) -> Message | None:
        """The next message of the application; `None` once it has returned."""
        getter = asyncio.ensure_future(self.sent.get())
        await asyncio.wait({getter, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not getter.done() and not self.sent.empty():
            await getter
        if getter.done():
            return getter.result()
        getter.cancel()
        return None

    async def messages(self) -> AsyncIterator[Message]:
        """All messages that are still to come."""
        while (message := await self.message()) is not None:
            yield message


@dataclass
class AsgiClient:
    """Calls an application.

    Attributes:
        app: the application.
        headers: sent with every request.
    """

    app: Application
    headers: dict[str, str] = field(default_factory=lambda: {"host": "localhost"})

    def start(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        parts: int = 1,
    ) -> Call:
        """Begin a request; the body is sent in as many parts, values that are no bytes as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else dumps(body)
        step = max(1, -(-len(data) // parts))
        queue: list[Message] = [
            {"type": "http.request", "body": data[i : i + step], "more_body": i + step < len(data)}
            for i in range(0, len(data), step)
        ] or [{"type": "http.request", "body": b"", "more_body": False}]
        sent: asyncio.Queue[Message] = asyncio.Queue()
        gone = asyncio.Event()

        async def receive() -> Message:
            if queue and not gone.is_set():
                return queue.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        kind = {} if body is None else {"content-type": "application/json"}
        both = {**self.headers, **kind, **(headers or {})}
        scope: Message = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in both.items()],
        }
        work = asyncio.ensure_future(self.app(scope, receive, sent.put))
        return Call(work, sent, gone)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request and wait for the whole response."""
        call = self.start(method, path, body, headers=headers)
        status, found, content = 0, {}, b""
        async for message in call.messages():
            if message["type"] == "http.response.start":
                status = message["status"]
                found = {k.decode("latin-1"): v.decode("latin-1") for k, v in message["headers"]}
            else:
                content += message.get("body", b"")
        await call.task
        return Response(status, found, content)

    async def get(self, path: str, **options: Any) -> Response:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Response:
        return await self.request("POST", path, body, **options)


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()
