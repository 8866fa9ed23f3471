"""HTTP as the backends need it: one session, JSON in and out, server-sent events as they come.

Knows aiohttp and the event-stream format, nothing of models.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from outrider.backends.base import EngineUnfit

LONGEST_ERROR = 300
# uvicorn, which serves most engines, closes what has idled for 5 s; a request on its way is lost
KEEP_ALIVE_S = 3.0
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `gap_s` holds for the wait for the first byte and between any two."""

    connect_s: float = 10.0
    gap_s: float = 300.0
    probe_s: float = 10.0


@dataclass(frozen=True)
class Reply:
    """A whole answer: status, parsed JSON if it is some, and the text."""

    status: int
    json: Any
    text: str

    @property
    def object(self) -> Mapping[str, Any]:
        """The JSON object, or an empty one."""
        return self.json if isinstance(self.json, Mapping) else {}


class StreamFault(Exception):
    """A stream broke off or is no event stream; the message is one line."""


def root_of(url: str) -> str:
    """The address in front of `/v1`.

    Raises:
        EngineUnfit: it is no address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineUnfit(f"{url!r} is no address; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def connector(*, dns_s: int) -> aiohttp.TCPConnector:
    """Connections without a limit of number; idle ones are closed before the server does it."""
    return aiohttp.TCPConnector(limit=0, ttl_dns_cache=dns_s, keepalive_timeout=KEEP_ALIVE_S)


class Wire:
    """Connections to one server."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeouts: Timeouts | None = None
    ) -> None:
        self.root = root_of(url)
        self.timeouts = timeouts or Timeouts()
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Made on first use, inside the running loop. No limit of connections: the load decides."""
        if self._session is None:
            times = self.timeouts
            self._session = aiohttp.ClientSession(
                connector=connector(dns_s=600),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=times.connect_s, sock_read=times.gap_s
                ),
                headers=self._headers,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Reply:
        """A short request.

        Raises:
            EngineUnfit: the server cannot be reached.
        """
        try:
            async with asyncio.timeout(self.timeouts.probe_s):
                async with self.session().get(self.root + path) as response:
                    return _reply(response.status, await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, OSError) as fault:
            raise EngineUnfit(f"{self.root} cannot be reached: {reason(fault)}") from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """A request with a whole answer.

        Raises:
            EngineUnfit: the server cannot be reached.
        """
        try:
            async with self.session().post(self.root + path, data=encode(body)) as response:
                return _reply(response.status, await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, OSError) as fault:
            raise EngineUnfit(f"{self.root} cannot be reached: {reason(fault)}") from None


def encode(body: Mapping[str, Any]) -> bytes:
    """A body's bytes."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _reply(status: int, text: str) -> Reply:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return Reply(status, found, text)


def reason(fault: BaseException) -> str:
    """Why a request failed, in one line."""
    if isinstance(fault, TimeoutError):
        return "no answer in time"
    return (str(fault) or type(fault).__name__).splitlines()[0]


def refusal(status: int, text: str) -> str:
    """An HTTP error in one line, with the server's own words."""
    told = _reply(status, text).object
    error = told.get("error", told)
    message = error.get("message") if isinstance(error, Mapping) else error
    words = message if isinstance(message, str) and message else text
    line = " ".join(words.split())[:LONGEST_ERROR]
    return f"HTTP {status}: {line}" if line else f"HTTP {status}"


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an event stream, up to `[DONE]` or the stream's end.

    Comments, event names and ids are skipped; every data line is an object of its own.

    Raises:
        StreamFault: an event is no JSON object, or a line has no end.
    """
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise StreamFault("the stream has a line without an end")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _event(data)
    if rest.startswith(b"data:") and rest[5:].strip() != b"[DONE]":
        raise StreamFault("the stream broke off inside an event")


def _event(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StreamFault(f"the stream has an event that is no JSON object: {data[:60]!r}")
    return found
