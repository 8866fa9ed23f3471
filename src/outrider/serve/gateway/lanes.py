"""A lane: one profile at work, with its engine, its limits and what is under way on it.

It knows how a request must look for its engine; it decides nothing about who gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.backends.dialect import Json
from outrider.rollout.config import Profile
from outrider.serve.gateway.guards import Breaker, Gate
from outrider.serve.gateway.reading import ReadAcceptance
from outrider.serve.gateway.upstream import Upstream, UpstreamFault
from outrider.serve.wire import encode_json

PROBE_S = 20.0
HEALTH_S = 2.0


@dataclass(frozen=True)
class Request:
    """One request of a client, parsed.

    Attributes:
        path: of the endpoint.
        body: the decoded body; never changed.
        raw: its bytes.
        request_id: what logs and clients call it.
        headers: what of the client's headers goes on.
        seed: given to every engine where the client set none, so that answers can be compared.
    """

    path: str
    body: Mapping[str, Any]
    raw: bytes
    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """The client asked for the usage event itself."""
        options = self.body.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    def seeded(self, seed: int) -> Request:
        return replace(self, seed=seed)

    def renamed(self, model: str) -> Request:
        """For a model of another name."""
        body = {**self.body, "model": model}
        return replace(self, body=body, raw=encode_json(body))


@dataclass(eq=False)
class Running:
    """One try under way. `cut` ends it from outside, in whatever phase it is."""

    timeout: asyncio.Timeout | None = None
    was_cut: bool = False

    def cut(self) -> None:
        self.was_cut = True
        if self.timeout is not None:
            self.timeout.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class Lane:
    """A profile and its engine.

    Attributes:
        name, profile: of the rollout.
        upstream: the engine.
        kind: which engine it is.
        read: from its events to acceptance.
        model: what it calls the model; `None` sends what the client wrote.
        extra: fields added to every request.
        headers: added to every request.
        exact: answers must be the baseline's, token by token, at every temperature.
        stop: ends what was started for it.
        running: tries under way.
        healthy: of the last probe; `None` before the first.
        lacking: request features that the engine was probed not to have.
    """

    name: str
    profile: Profile
    upstream: Upstream
    kind: str = "openai"
    read: ReadAcceptance = lambda event: None
    model: str | None = None
    extra: Json = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    running: set[Running] = field(default_factory=set)
    healthy: bool | None = None
    lacking: frozenset[str] = frozenset()
    breaker: Breaker = field(default_factory=Breaker)
    stop: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self.gate = self._gate()

    def _gate(self) -> Gate:
        limits = self.profile.limits
        return Gate(
            in_flight=limits.in_flight,
            queue=limits.queue,
            queue_s=limits.queue_s,
            per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
        )

    def settle(self, profile: Profile) -> None:
        """Take on changed settings that need no other engine."""
        changed = profile.limits != self.profile.limits
        self.profile = profile
        if changed:
            self.gate = self._gate()

    def body(self, request: Request) -> bytes:
        """The request as this engine gets it."""
        change: dict[str, Any] = dict(self.extra)
        if self.model is not None and request.body.get("model") != self.model:
            change["model"] = self.model
        if request.stream and not request.wants_usage:
            options = request.body.get("stream_options")
            given = options if isinstance(options, Mapping) else {}
            change["stream_options"] = {**given, "include_usage": True}
        if request.seed is not None:
            change["seed"] = request.seed
        return encode_json({**request.body, **change}) if change else request.raw

    def cut(self) -> None:
        """End everything under way."""
        for running in tuple(self.running):
            running.cut()

    async def close(self) -> None:
        """Let go of the engine, and end it where it was started here."""
        await self.upstream.close()
        if self.stop is not None:
            await self.stop()

    async def probe_health(self) -> bool:
        """Does its engine say that it is well?"""
        try:
            status, _ = await self.upstream.get("/health", seconds=HEALTH_S)
        except UpstreamFault:
            status = 0
        self.healthy = status == 200
        return self.healthy

    async def serves(self, path: str) -> bytes | None:
        """A page of its engine; `None` where there is none."""
        try:
            status, body = await self.upstream.get(path, seconds=HEALTH_S)
        except UpstreamFault:
            return None
        return body if status == 200 else None


PROBES: Mapping[str, Json] = {
    "min_p": {"min_p": 0.05, "temperature": 1.0},
    "logit_bias": {"logit_bias": {"1": -1.0}},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "n": {"n": 2, "temperature": 1.0},
    "penalties": {"presence_penalty": 0.1},
    "json_object": {"response_format": {"type": "json_object"}},
    "seed": {"seed": 1},
}


async def probe_features(lane: Lane, *, model: str) -> frozenset[str]:
    """Request features that the engine refuses: found out by asking, once, with one token each."""
    lacking: set[str] = set()
    seconds = min(PROBE_S, lane.profile.timeouts.first_byte_s)
    with contextlib.suppress(TimeoutError, UpstreamFault):
        for feature, fields in PROBES.items():
            messages = [{"role": "user", "content": "Say {}"}]
            asked = {"model": lane.model or model, "messages": messages, "max_tokens": 1, **fields}
            async with asyncio.timeout(seconds):
                reply = await lane.upstream.send(
                    "/v1/chat/completions", encode_json(asked), JSON_BODY
                )
                await reply.close()
            if 400 <= reply.status < 500 and reply.status not in _NO_ANSWER:
                lacking.add(feature)
    return frozenset(lacking)


_NO_ANSWER = (401, 403, 404, 408, 429)
JSON_BODY = {"content-type": "application/json"}


def monotonic() -> float:
    """One clock for breakers, limits and wires."""
    return time.monotonic()
