"""The client's side of one exchange: nothing is sent until there is something worth sending.

So a try that fails before that leaves no trace, and another one may answer. Afterwards there is no
way back: a stream that breaks ends with an error event and without an end mark.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from outrider.serve.errors import ApiError
from outrider.serve.exchange import Exchange
from outrider.serve.wire import event, send_head, send_part

# Said anew by whoever sends, or of one connection only.
_NOT_OURS = frozenset(
    {
        *("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "date"),
        *("server", "proxy-authenticate", "proxy-authorization", "set-cookie", "x-request-id"),
    }
)


class Relay:
    """What one client gets.

    Attributes:
        begun: the response has a head; no other try can answer any more.
        blocked_s: how long the client kept us waiting, as a slow reader does.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.blocked_s = 0.0

    @property
    def begun(self) -> bool:
        return self._exchange.status is not None

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._exchange.status = status
        passed = {k: v for k, v in headers.items() if k not in _NOT_OURS}
        both = {**passed, **self._exchange.response_headers()}
        await send_head(self._exchange.send, status, both)

    async def part(self, data: bytes, *, more: bool = True) -> None:
        before = time.perf_counter()
        self._exchange.over = not more
        await send_part(self._exchange.send, data, more=more)
        self.blocked_s += time.perf_counter() - before

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.part(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun."""
        self._exchange.facts["error"] = error.code or error.message
        await self.part(event(error.body()), more=False)


class Nowhere(Relay):
    """Of a mirrored request: what comes is read and dropped."""

    def __init__(self) -> None:
        self.blocked_s = 0.0

    @property
    def begun(self) -> bool:
        return False

    async def begin(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def part(self, data: bytes, *, more: bool = True) -> None: ...

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...

    async def fail(self, error: ApiError) -> None: ...
