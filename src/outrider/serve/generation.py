"""Runs the jobs of one request and counts what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.engine import Completion, Update
from outrider.serve.errors import ApiError, bad_request, from_engine, internal, overloaded
from outrider.serve.exchange import EventStream, Exchange
from outrider.serve.profiles import Choice
from outrider.serve.service import Service
from outrider.serve.worker import EngineGone, Group, Job

if TYPE_CHECKING:
    from outrider.serve.traces import Finished

News = list[tuple[int, Update]]
OUTCOMES = {400: "rejected", 429: "expired", 504: "expired"}  # by status; all others are errors


@dataclass
class Generation:
    """The jobs of a request under way.

    Attributes:
        prompt_type: a bounded label.
        stepwise: updates are handed on one by one, as the engine brought them.
        outcome: how it ended, for the metrics.
    """

    service: Service
    choice: Choice
    prompt_type: str
    jobs: Sequence[Job]
    prompt_tokens: int
    operation: str
    exchange: Exchange
    stepwise: bool = False
    outcome: str = "cancelled"
    _group: Group | None = None
    _deadline: float = 0.0
    _begin_ns: int = 0
    _last: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gaps = self.service.metrics.token_gaps(*self.labels)

    @property
    def labels(self) -> tuple[str, str]:
        return self.choice.name, self.prompt_type

    @property
    def completions(self) -> list[Completion]:
        """The finished sequences in order."""
        assert self._group is not None
        return [self._group.completions[index] for index in sorted(self._group.completions)]

    async def __aenter__(self) -> Generation:
        """Start the jobs. Leaving the block cancels what still runs."""
        self._group = self.service.worker.submit(self.jobs)
        self._begin_ns = time.time_ns()
        self._deadline = time.monotonic() + self.service.config.limits.request_s
        return self

    async def __aexit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        assert self._group is not None
        if self._group.done and fault is None:
            self.outcome = _outcome(self.completions)
        elif isinstance(fault, ApiError):
            self.outcome = OUTCOMES.get(fault.status, "error")
        elif isinstance(fault, Exception):
            self.outcome = "error"
        self.service.worker.cancel(self._group)
        self._count(self._group)
        if self.service.traces is not None:
            self.service.traces.finished(self._finished())

    @property
    def done(self) -> bool:
        """All sequences are finished."""
        return self._group is not None and self._group.done

    async def news(self, stream: EventStream | None = None) -> News:
        """What the engine has brought since the last call; waits for something.

        With a stream the client is told now and then that the server is still there, and updates
        are gathered as the profile says.

        Raises:
            ApiError: a job was refused or has failed, or the time is over.
        """
        assert self._group is not None
        interval = self.choice.profile.interval_ms / 1000
        if stream is not None and interval:
            await asyncio.sleep(interval)
        await self._wait(self._group, stream)
        news = _taken(self._group)
        for index, update in news:
            self._check(index, update)
        return news if self.stepwise else merged(news)

    async def _wait(self, group: Group, stream: EventStream | None) -> None:
        limits = self.service.config.limits
        while True:
            left = self._deadline - time.monotonic()
            await group.wait(left if stream is None else min(left, limits.keep_alive_s))
            if group.ready:
                return
            if self._deadline <= time.monotonic():
                late = f"not finished within {limits.request_s:g} s"
                raise ApiError(504, late, code="timeout")
            if stream is not None:
                await stream.keep_alive()

    def _check(self, index: int, update: Update) -> None:
        """Note the time of new tokens; turn an end that is no end of an answer into an error."""
        now = time.perf_counter()
        if update.tokens:
            if index in self._last:
                each = (now - self._last[index]) / len(update.tokens)
                for _ in update.tokens:
                    self._gaps.observe(each)
            self._last[index] = now
        if update.finish_reason == "expired":
            raise overloaded(update.error or "the server is busy", retry_after=2)
        if update.finish_reason == "error" and update.refused:
            raise bad_request(update.error or "the request cannot be served", code="too_complex")
        if update.finish_reason == "error":
            raise internal(update.error or "the request failed")
        if update.finish_reason == "cancelled":
            raise ApiError(503, "the server has given this request up", retry_after=2)

    def _finished(self) -> Finished:
        from outrider.serve.traces import Finished

        good = self.outcome in ("stop", "length")
        return Finished(
            operation=self.operation,
            model=self.choice.model,
            profile=self.choice.name,
            request_id=self.exchange.request_id,
            traceparent=self.exchange.headers.text(b"traceparent"),
            prompt_tokens=self.prompt_tokens,
            completions=self.completions,
            begin_ns=self._begin_ns,
            end_ns=time.time_ns(),
            error="" if good else self.outcome,
        )

    def _count(self, group: Group) -> None:
        metrics = self.service.metrics
        metrics.ended(*self.labels, self.outcome)
        if group.completions:
            metrics.prompt_tokens.labels(self.choice.name).inc(self.prompt_tokens)
        for completion in group.completions.values():
            metrics.completed(completion, *self.labels)


def _taken(group: Group) -> News:
    try:
        return group.take()
    except EngineGone:
        raise ApiError(503, "the engine has ended; see the log", retry_after=5) from None
    except Exception as refusal:
        raise from_engine(refusal) from None


def _outcome(completions: Sequence[Completion]) -> str:
    return "length" if any(c.finish_reason == "length" for c in completions) else "stop"


def merged(news: News) -> News:
    """One update per sequence: what came together is told together."""
    if len(news) < 2:
        return news
    found: dict[int, Update] = {}
    for index, update in news:
        before = found.get(index)
        found[index] = (
            update
            if before is None
            else replace(
                update,
                tokens=before.tokens + update.tokens,
                text=before.text + update.text,
                logprobs=before.logprobs + update.logprobs,
                accepted=before.accepted + update.accepted,
            )
        )
    return list(found.items())
