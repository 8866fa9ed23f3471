"""One exchange with an engine: over HTTP, or with an ASGI application in this process.

A reply is its head, and then bytes until there are none. Closing it early ends the work behind it:
over HTTP by closing the connection, inside the process by a disconnect and a cancelled task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import aiohttp

from outrider.backends.wire import connector, reason, root_of
from outrider.serve.wire import Message, Receive, Scope, Send

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
LAST_S = 1.0  # for what an application does behind its last byte
AHEAD = 8  # parts that an application in this process may be ahead of its reader
_BROKEN = (aiohttp.ClientError, OSError, ValueError)


class UpstreamFault(Exception):
    """An engine did not answer, or broke off.

    Attributes:
        kind: connect, timeout, broken, malformed, http ...
        status: of HTTP, where it answered.
    """

    def __init__(self, kind: str, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class Reply(Protocol):
    """An engine's answer under way."""

    status: int
    headers: Mapping[str, str]  # by lower-case name

    async def read(self) -> bytes:
        """The next bytes; none at the end.

        Raises:
            UpstreamFault: it broke off.
        """
        ...

    async def close(self) -> None:
        """End it, also in the middle."""
        ...


class Upstream(Protocol):
    """An engine that takes requests."""

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Post a body; returns once the head of the answer is there.

        Raises:
            UpstreamFault: there is no answer.
        """
        ...

    async def get(self, path: str, *, seconds: float) -> tuple[int, bytes]:
        """A short question, such as for its health.

        Raises:
            UpstreamFault: there is no answer.
        """
        ...

    async def close(self) -> None: ...


class _HttpReply:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = {k.lower(): v for k, v in response.headers.items()}
        self._response = response

    async def read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except _BROKEN as fault:
            raise UpstreamFault("broken", reason(fault)) from None

    async def close(self) -> None:
        self._response.close()  # what is not read to its end is not reused


class HttpUpstream:
    """A server at an address.

    Args:
        url: with or without `/v1`.
        api_key: sent instead of what the client sent.
        connect_s: for the connection alone; other times are the caller's.

    Raises:
        EngineUnfit: the address is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None, connect_s: float = 5.0) -> None:
        self.root = root_of(url)
        self._headers = {"accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=connector(dns_s=60),
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=self._connect_s, sock_connect=self._connect_s
                ),
                headers=self._headers,
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        try:
            response = await self._open().post(
                self.root + path, data=body, headers=headers, allow_redirects=False
            )
        except TimeoutError:
            raise UpstreamFault("connect", f"{self.root} takes no connection in time") from None
        except aiohttp.ClientConnectorError as fault:
            raise UpstreamFault("connect", reason(fault)) from None
        except _BROKEN as fault:
            raise UpstreamFault("broken", reason(fault)) from None
        return _HttpReply(response)

    async def get(self, path: str, *, seconds: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(seconds):
                async with self._open().get(self.root + path, allow_redirects=False) as response:
                    return response.status, await response.read()
        except TimeoutError:
            raise UpstreamFault("timeout", f"{self.root}{path} did not answer") from None
        except _BROKEN as fault:
            raise UpstreamFault("connect", reason(fault)) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _AsgiReply:
    def __init__(self, app: Application, scope: Scope, body: bytes) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue(AHEAD)
        self._gone = asyncio.Event()
        self._body: bytes | None = body
        self._over = False
        self._task = asyncio.ensure_future(self._run(app, scope))

    async def _run(self, app: Application, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._sent.put)
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                self._sent.put_nowait(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def head(self) -> None:
        message = await self._next()
        if message is None:
            raise UpstreamFault("broken", "the engine gave no answer")
        self.status = int(message["status"])
        raw: list[tuple[bytes, bytes]] = message["headers"]
        self.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in raw}

    async def read(self) -> bytes:
        while not self._over:
            message = await self._next()
            if message is None:
                raise UpstreamFault("broken", "the engine broke off")
            self._over = not message.get("more_body", False)
            part: bytes = message.get("body", b"")
            if part:
                return part
        return b""

    async def _next(self) -> Message | None:
        """The next message; `None` once the application is over without one."""
        if self._task.done() and self._sent.empty():
            return None
        return await self._sent.get()

    async def close(self) -> None:
        if self._over and not self._task.done():  # its last bytes are out: let it come to its end
            await asyncio.wait({self._task}, timeout=LAST_S)
        self._gone.set()
        if not self._task.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class AsgiUpstream:
    """An application in this process, such as the embedded engine's server."""

    def __init__(self, app: Application, *, api_key: str | None = None) -> None:
        self._app = app
        self._key = api_key

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        return await self._call("POST", path, body, headers)

    async def _call(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> _AsgiReply:
        given = {"host": "localhost", "content-length": str(len(body)), **headers}
        if self._key:
            given["authorization"] = f"Bearer {self._key}"
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in given.items()],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }
        reply = _AsgiReply(self._app, scope, body)
        try:
            await reply.head()
        except BaseException:
            await reply.close()
            raise
        return reply

    async def get(self, path: str, *, seconds: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(seconds):
                reply = await self._call("GET", path, b"", {})
                try:
                    parts = []
                    while part := await reply.read():
                        parts.append(part)
                finally:
                    await reply.close()
        except TimeoutError:
            raise UpstreamFault("timeout", f"{path} did not answer") from None
        return reply.status, b"".join(parts)

    async def close(self) -> None: ...
