"""What keeps one profile from harming others: a circuit breaker, and limits of its own.

Both take the time as a number, so that tests need not wait. They know no request and no engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
MINUTE_S = 60.0


@dataclass
class Breaker:
    """Opens after failures in a row, lets one request try again after a while.

    Attributes:
        failures: in a row, until it opens.
        rest_s: how long it stays open.
    """

    failures: int = 5
    rest_s: float = 10.0
    _in_row: int = 0
    _opened: float | None = None
    _trying: bool = False

    def state(self, now: float) -> str:
        if self._opened is None:
            return CLOSED
        return HALF_OPEN if now - self._opened >= self.rest_s else OPEN

    def admits(self, now: float) -> bool:
        """May a request go there? Half-open admits one, whose end must be told."""
        state = self.state(now)
        if state == HALF_OPEN and not self._trying:
            self._trying = True
            return True
        return state == CLOSED

    def succeeded(self) -> None:
        self._in_row, self._opened, self._trying = 0, None, False

    def failed(self, now: float) -> None:
        self._in_row += 1
        if self._in_row >= self.failures or self._trying:
            self._opened = now
        self._trying = False

    def abandoned(self) -> None:
        """The request that tried ended without telling anything, as when its client left."""
        self._trying = False


class Full(Exception):
    """No room under a profile's limits; the message names the limit."""


class Gate:
    """Limits of one profile: in flight, in the queue, requests and tokens per minute.

    A limit of `None` does not bound. Tokens are charged when an answer is over, so the count may
    go above its bound by what was under way: an admitted answer is never cut.
    """

    def __init__(
        self,
        *,
        in_flight: int | None = None,
        queue: int = 0,
        queue_s: float = 1.0,
        per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self._most, self._queue, self._queue_s = in_flight, queue, queue_s
        self._per_minute, self._tokens_per_minute = per_minute, tokens_per_minute
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._requests: deque[float] = deque()
        self._tokens: deque[tuple[float, int]] = deque()
        self._token_sum = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, now: float) -> None:
        """Take a place; `leave` gives it back.

        Raises:
            Full: there is none.
        """
        self._forget(now)
        if self._per_minute is not None and len(self._requests) >= self._per_minute:
            raise Full("requests per minute")
        if self._tokens_per_minute is not None and self._token_sum >= self._tokens_per_minute:
            raise Full("tokens per minute")
        if self._most is not None and self.running >= self._most:
            await self._wait()
        else:
            self.running += 1
        if self._per_minute is not None:
            self._requests.append(now)

    async def _wait(self) -> None:
        """Wait for a place that `leave` hands over, counted as running already."""
        if len(self._waiting) >= self._queue:
            raise Full("in flight")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._queue_s):
                await asyncio.shield(place)
        except BaseException as fault:
            if place.done():
                self._pass_on()
            else:
                self._waiting.remove(place)
                place.cancel()
            if isinstance(fault, TimeoutError):
                raise Full("in flight") from None
            raise

    def leave(self, now: float, *, tokens: int = 0) -> None:
        """Give a place back, and charge what the answer cost."""
        if self._tokens_per_minute is not None and tokens:
            self._tokens.append((now, tokens))
            self._token_sum += tokens
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1

    def _forget(self, now: float) -> None:
        while self._requests and now - self._requests[0] >= MINUTE_S:
            self._requests.popleft()
        while self._tokens and now - self._tokens[0][0] >= MINUTE_S:
            self._token_sum -= self._tokens.popleft()[1]
