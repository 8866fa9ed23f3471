"""One try of one request at one engine: four limits of time, whole events, nothing decided.

It tells what it saw in any case, also where it fails: a verdict counts failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from outrider.rollout.config import BASELINE
from outrider.rollout.verdict import Outcome
from outrider.serve.gateway.lanes import Lane, Request, Running
from outrider.serve.gateway.reading import Malformed, Reader, Reading
from outrider.serve.gateway.relay import Relay
from outrider.serve.gateway.upstream import Reply, UpstreamFault

LONGEST_BODY = 64 * 2**20
LAST_S = 1.0  # for the end of a stream behind its end mark
AGAIN = frozenset({408, 425, 429})
DECLINED = "declined"  # the fault of a profile that finds a request wrong
_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
_NAN = re.compile(r"\bnan\b|non-finite|not finite", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """How a try ended.

    Attributes:
        seen: what was read.
        begin, end: on the clock of `time.perf_counter`.
        outcome: for the verdict.
        status: of HTTP, that the client got or would have got.
        fault: why it failed, a kind; empty where it did not.
        why: in a line, for the log.
        blocked_s: the client kept us waiting so long.
    """

    seen: Reading
    begin: float
    end: float
    outcome: Outcome
    status: int
    fault: str = ""
    why: str = ""
    blocked_s: float = 0.0

    @property
    def ttft_ms(self) -> float | None:
        return None if self.seen.first is None else (self.seen.first - self.begin) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """From usage; `None` where it is unknown or a slow client set the pace."""
        seen, tokens = self.seen, self.seen.completion_tokens
        if seen.first is None or seen.last is None or not tokens or tokens < 2:
            return None
        span = seen.last - seen.first
        if span <= 0 or self.blocked_s > 0.1 * span:
            return None
        return span / (tokens - 1) * 1000


@dataclass
class _Clock:
    """Limits of a try that is under way, moved from phase to phase."""

    timeout: asyncio.Timeout
    total: float
    running: Running
    phase: str = "first byte"

    def wait(self, seconds: float | None) -> None:
        """Of the next wait; `None` leaves the limit in all."""
        if self.running.was_cut:
            return
        loop = asyncio.get_running_loop()
        self.timeout.reschedule(
            self.total if seconds is None else min(self.total, loop.time() + seconds)
        )


class Attempt:
    """One try. `run` once."""

    def __init__(self, lane: Lane, request: Request, relay: Relay) -> None:
        self.lane = lane
        self.request = request
        self.relay = relay
        self.reader = Reader(
            lane.read, chat=request.chat, strip_usage=request.stream and not request.wants_usage
        )
        self.begin = time.perf_counter()
        self._running = Running()
        self._status = 200

    async def run(self) -> Result:
        """Ask, and pass on what comes. Does not raise for what an engine does.

        Raises:
            asyncio.CancelledError: the client left; the engine's work is ended by then.
        """
        self.lane.running.add(self._running)
        try:
            await self._run()
        except UpstreamFault as fault:
            kind = "cut" if self._running.was_cut else fault.kind
            return self._failed(kind, str(fault), status=fault.status)
        except Malformed as fault:
            return self._failed("malformed", str(fault))
        finally:
            self.lane.running.discard(self._running)
        if self._status == 200 and self.reader.seen.error is not None:
            return self._failed("engine", self.reader.seen.error)
        return self._result("ok")

    def left(self) -> Result:
        """The client has left in the middle."""
        return self._result("cancelled")

    def _failed(self, kind: str, why: str, *, status: int | None = None) -> Result:
        outcome: Outcome = "timeout" if kind in ("first byte", "between", "total") else "error"
        if _MEMORY.search(why):
            outcome, kind = "out_of_memory", "out_of_memory"
        elif _NAN.search(why):
            kind = "non_finite"
        return self._result(outcome, fault=kind, why=why, status=status)

    def _result(
        self, outcome: Outcome, *, fault: str = "", why: str = "", status: int | None = None
    ) -> Result:
        return Result(
            seen=self.reader.seen,
            begin=self.begin,
            end=time.perf_counter(),
            outcome=outcome,
            status=status or (502 if fault else self._status),
            fault=fault,
            why=why,
            blocked_s=self.relay.blocked_s,
        )

    async def _run(self) -> None:
        limits = self.lane.profile.timeouts
        async with self._limited(limits.total_s) as clock:
            clock.wait(limits.first_byte_s if self.request.stream else None)
            headers = {
                "content-type": "application/json",
                "x-request-id": self.request.request_id,
                **self.request.headers,
                **self.lane.headers,
            }
            reply = await self.lane.upstream.send(
                self.request.path, self.lane.body(self.request), headers
            )
            try:
                await self._receive(reply, clock)
            finally:
                await reply.close()

    @contextlib.asynccontextmanager
    async def _limited(self, total_s: float) -> AsyncIterator[_Clock]:
        loop = asyncio.get_running_loop()
        clock = None
        try:
            async with asyncio.timeout(total_s) as timeout:
                clock = _Clock(timeout, loop.time() + total_s, self._running)
                self._running.timeout = timeout
                yield clock
        except TimeoutError:
            phase = "total" if clock is None or loop.time() >= clock.total else clock.phase
            raise UpstreamFault(phase, f"the engine was too slow ({phase})", status=504) from None

    async def _receive(self, reply: Reply, clock: _Clock) -> None:
        if reply.status != 200:
            await self._refused(reply)
        elif not self.request.stream:
            body = await _all(reply)
            self.reader.whole(body, time.perf_counter())
            clock.wait(None)
            await self.relay.whole(200, reply.headers, body)
        elif not reply.headers.get("content-type", "").startswith("text/event-stream"):
            raise Malformed(f"the answer is {reply.headers.get('content-type')}, no event stream")
        else:
            await self._stream(reply, clock)

    async def _refused(self, reply: Reply) -> None:
        """An engine's error: passed on as it is where trying again is no use.

        What a profile finds wrong, the baseline may find right (another vocabulary, a parameter
        that only one of them knows): such a request gets its second try there.
        """
        body = await _all(reply)
        if reply.status >= 500 or reply.status in AGAIN or reply.status in (401, 403):
            kind = "refused" if reply.status < 500 else "http"
            line = " ".join(body[:300].decode("utf-8", errors="replace").split())
            raise UpstreamFault(kind, f"HTTP {reply.status}: {line}", status=reply.status)
        if self.lane.name != BASELINE:
            line = f"HTTP {reply.status} where the baseline may answer"
            raise UpstreamFault(DECLINED, line, status=reply.status)
        self._status = reply.status
        await self.relay.whole(reply.status, reply.headers, body)

    async def _stream(self, reply: Reply, clock: _Clock) -> None:
        reader, relay, between = self.reader, self.relay, self.lane.profile.timeouts.between_s
        held = b""
        begun = False
        while not reader.seen.done and (data := await reply.read()):
            passing = reader.feed(data, time.perf_counter())
            if reader.seen.error is not None and not begun:
                raise UpstreamFault("engine", reader.seen.error, status=502)
            if begun:
                clock.wait(None)
                if passing:
                    await relay.part(passing)
            elif reader.seen.first is None and reader.seen.finish is None:
                held += passing
                continue  # the time to the first byte runs on
            else:
                begun = True
                clock.wait(None)
                clock.phase = "between"
                await relay.begin(200, reply.headers)
                await relay.part(held + passing)
            if reader.seen.error is not None:
                break
            clock.wait(between)
        if reader.seen.error is None:
            reader.end()
        clock.wait(None)
        await relay.part(b"", more=False)
        await _drain(reply)


async def _drain(reply: Reply) -> None:
    """Read to the end behind the end mark, so that the connection can be used again."""
    with contextlib.suppress(TimeoutError, UpstreamFault):
        async with asyncio.timeout(LAST_S):
            while await reply.read():
                pass


async def _all(reply: Reply) -> bytes:
    parts, size = [], 0
    while part := await reply.read():
        size += len(part)
        if size > LONGEST_BODY:
            raise Malformed("the answer is too long")
        parts.append(part)
    return b"".join(parts)
