"""The way of one request: assigned, admitted, tried, tried again on the baseline if nothing of the
answer has left yet, and observed.

There is one loop of retries and it is here. Who gets which profile is `rollout.assign`'s to say,
what becomes of the figures is the controller's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.rollout.assign import (
    Assignment,
    RequestFacts,
    assign,
    features_of,
    key_of,
    prompt_type_of,
    spill,
)
from outrider.rollout.config import BASELINE, RolloutConfig
from outrider.rollout.controller import Controller
from outrider.serve.errors import ApiError, bad_request, overloaded
from outrider.serve.exchange import Exchange
from outrider.serve.gateway.attempt import DECLINED, Attempt, Result
from outrider.serve.gateway.feedback import Feedback
from outrider.serve.gateway.guards import Full
from outrider.serve.gateway.lanes import Lane, Request, monotonic
from outrider.serve.gateway.metrics import GatewayMetrics
from outrider.serve.gateway.mirror import Mirrors
from outrider.serve.gateway.observe import WIRES, observation
from outrider.serve.gateway.relay import Relay

log = logging.getLogger(__name__)

PASSED_ON = (b"traceparent", b"tracestate", b"x-outrider-prompt-type")
PROFILE = "x-outrider-profile"
CHARACTERS = 4  # of a token, for bounds on prompts: the gateway has no tokenizer
ONCE_MORE = ("connect", "broken")  # the baseline: a connection that had gone stale


@dataclass(frozen=True)
class Stage:
    """What is in force: replaced whole at a reload, so that a request sees one or the other."""

    config: RolloutConfig
    lanes: Mapping[str, Lane]

    @property
    def lacking(self) -> dict[str, frozenset[str]]:
        return {name: lane.lacking for name, lane in self.lanes.items() if lane.lacking}

    @property
    def model(self) -> str:
        """What clients call the model."""
        return self.config.name or self.config.target.rstrip("/").rsplit("/", 1)[-1]


class Flow:
    """Answers requests.

    Args:
        stage: gives what is in force.
        controller: told of every cohort's requests and of hard events.
        feedback: told of every request of a canary.
        wall: for observations.
    """

    def __init__(
        self,
        stage: Callable[[], Stage],
        controller: Controller,
        metrics: GatewayMetrics,
        *,
        feedback: Feedback,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._stage = stage
        self._feedback = feedback
        self._controller = controller
        self._metrics = metrics
        self._wall = wall
        self.mirrors = Mirrors(controller, metrics, feedback=feedback, wall=wall)

    async def answer(self, exchange: Exchange, body: Mapping[str, Any]) -> None:
        """Answer one request.

        Raises:
            ApiError: nobody could, and nothing has been sent.
        """
        begin = time.perf_counter()
        stage = self._stage()
        facts = self._facts(stage, exchange, body)
        assignment = assign(facts, stage.config, self._controller.weights, lacking=stage.lacking)
        if _again(exchange) and assignment.profile != BASELINE:
            assignment = spill(assignment, "the client tries again")
        request = Request(
            exchange.path, body, exchange.body, exchange.request_id, _passed(exchange)
        )
        if body["model"] != stage.model:  # it named a profile
            request = request.renamed(stage.model)
        pair = self.mirrors.begin(stage, assignment, request, facts)
        self._metrics.own.observe(time.perf_counter() - begin)
        work = _Work(self, stage, facts, pair.request, exchange)
        try:
            result = await work.run(assignment)
            pair.settle(result if work.profile == assignment.profile else None)
        finally:
            pair.settle(None)

    def _facts(self, stage: Stage, exchange: Exchange, body: Mapping[str, Any]) -> RequestFacts:
        headers = {
            name: value
            for name in ("x-outrider-key", "x-session-id", "x-conversation-id")
            if (value := exchange.headers.text(name.encode()))
        }
        kind = prompt_type_of(body, exchange.headers.text(b"x-outrider-prompt-type"))
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        return RequestFacts(
            key=key_of(
                headers,
                body,
                api_key_id=exchange.caller.tenant or None,
                request_id=exchange.request_id,
            ),
            route=exchange.path,
            features=features_of(body),
            prompt_type=kind,
            prompt_tokens=len(exchange.body) // CHARACTERS,
            max_tokens=most if isinstance(most, int) else None,
            forced=self._forced(stage, exchange, body),
        )

    def _forced(self, stage: Stage, exchange: Exchange, body: Mapping[str, Any]) -> str | None:
        """A profile that the request names.

        Raises:
            ApiError: the model is another one, or naming a profile is not allowed here.
        """
        name, _, suffix = str(body["model"]).partition("@")
        wanted = suffix or exchange.headers.text(PROFILE.encode()) or None
        if name != stage.model or (wanted and wanted not in stage.config.profiles):
            raise ApiError(
                404, f"this gateway serves {stage.model}", param="model", code="model_not_found"
            )
        if wanted and not (stage.config.force and exchange.caller.may_use(wanted)):
            raise ApiError(403, "profiles are not chosen here", code="profile_not_permitted")
        return wanted

    def observe(
        self, assignment: Assignment, result: Result, facts: RequestFacts, request: Request
    ) -> None:
        """Hand a request to the cohorts that it belongs to."""
        seen = observation(
            result, facts, body=request.body, request_id=request.request_id, at=self._wall()
        )
        if assignment.reason == "split":
            self._controller.observe(assignment.profile, "canary", seen)
            self._feedback.consider(assignment.profile, seen, request.body)
        for name in assignment.control_for:
            self._controller.observe(name, "control", seen)
        self._count(assignment, result)

    def _count(self, assignment: Assignment, result: Result) -> None:
        metrics, profile, seen = self._metrics, assignment.profile, result.seen
        arm = {"split": "canary", "control": "control"}.get(assignment.reason, "none")
        outcome = result.fault or result.outcome
        metrics.requests.labels(profile, assignment.reason, outcome).inc()
        if result.outcome == "ok" and result.ttft_ms is not None:
            metrics.first.labels(profile, arm).observe(result.ttft_ms / 1000)
            if result.tpot_ms is not None:
                metrics.per_token.labels(profile, arm).observe(result.tpot_ms / 1000)
        metrics.tokens.labels(profile).inc(seen.completion_tokens or 0)
        if seen.acceptance is not None:
            metrics.drafted.labels(profile).inc(seen.acceptance.drafted or 0)
            metrics.accepted.labels(profile).inc(seen.acceptance.accepted)

    def failed(self, lane: Lane, result: Result) -> None:
        """Tell breaker and wires of a try that failed."""
        self._metrics.faults.labels(lane.name, result.fault).inc()
        log.warning("profile %s: %s: %s", lane.name, result.fault, ascii(result.why[:200]))
        if result.fault == "cut":
            lane.breaker.abandoned()
            return
        lane.breaker.failed(monotonic())
        wire = WIRES.get(result.fault)
        if wire is not None and lane.name != BASELINE:
            self._controller.wire(lane.name, wire, detail=result.why)

    def saved(self, profile: str, why: str) -> None:
        self._metrics.saved.labels(profile, why).inc()


class _Work:
    """One request, from its assignment to its end."""

    def __init__(
        self, flow: Flow, stage: Stage, facts: RequestFacts, request: Request, exchange: Exchange
    ) -> None:
        self._flow = flow
        self._stage = stage
        self._facts = facts
        self._request = request
        self._exchange = exchange
        self._relay = Relay(exchange)
        self.profile = BASELINE

    async def run(self, assignment: Assignment) -> Result:
        """Try the assigned profile, then the baseline, as long as nothing has been sent."""
        if assignment.profile != BASELINE:
            lane = self._stage.lanes[assignment.profile]
            why = await self._enter(lane)
            if why is None:
                result = await self._try(lane, assignment)
                if not result.fault or self._relay.begun:
                    return await self._finish(result)
                if result.fault == DECLINED:
                    return await self._second_opinion(lane, assignment, result)
                why, short = result.why, result.fault
            else:
                short = why
            self._flow.saved(lane.name, short)
            assignment = spill(assignment, why)
        return await self._baseline(assignment)

    async def _second_opinion(self, lane: Lane, assignment: Assignment, declined: Result) -> Result:
        """A request that a profile found wrong; the profile's failure if the baseline answers it,
        otherwise the client's own."""
        result = await self._baseline(spill(assignment, declined.why))
        if result.status == 200:
            self._flow.failed(lane, declined)
            self._flow.observe(assignment, declined, self._facts, self._request)
            self._flow.saved(lane.name, DECLINED)
        return result

    async def _baseline(self, assignment: Assignment) -> Result:
        lane = self._stage.lanes[BASELINE]
        for again in (True, False):
            why = await self._enter(lane)
            if why is not None:
                raise overloaded(f"no room: {why}")
            result = await self._try(lane, assignment)
            if not result.fault or self._relay.begun or not again:
                break
            if result.fault not in ONCE_MORE:
                break
        return await self._finish(result)

    async def _enter(self, lane: Lane) -> str | None:
        """Take a place on a lane; why there is none."""
        now = monotonic()
        guarded = lane.name != BASELINE
        if guarded and not lane.breaker.admits(now):
            return "circuit open"
        try:
            await lane.gate.enter(now)
        except Full as full:
            if guarded:
                lane.breaker.abandoned()
            return str(full)
        except BaseException:
            lane.breaker.abandoned()
            raise
        return None

    async def _try(self, lane: Lane, assignment: Assignment) -> Result:
        self.profile = lane.name
        self._head(lane, assignment)
        gate = lane.gate
        attempt = Attempt(lane, self._request, self._relay)
        try:
            result = await attempt.run()
        except asyncio.CancelledError:
            result = attempt.left()
            lane.breaker.abandoned()
            self._flow.observe(assignment, result, self._facts, self._request)
            raise
        finally:
            seen = attempt.reader.seen
            tokens = (seen.prompt_tokens or 0) + (seen.completion_tokens or 0)
            gate.leave(monotonic(), tokens=tokens)
        if result.fault == DECLINED:
            lane.breaker.abandoned()
            return result
        if result.fault:
            self._flow.failed(lane, result)
        else:
            lane.breaker.succeeded()
        if result.status == 200 or result.fault:  # what the engine refuses says nothing of it
            self._flow.observe(assignment, result, self._facts, self._request)
        return result

    def _head(self, lane: Lane, assignment: Assignment) -> None:
        """What every answer says of its way."""
        reason = f"{assignment.reason}: {assignment.detail}"
        self._exchange.extra |= {
            PROFILE: lane.name,
            "x-outrider-reason": ascii(reason)[1:-1][:200],
        }
        self._exchange.extra.pop("x-outrider-approximate", None)
        if lane.profile.approximate:
            self._exchange.extra["x-outrider-approximate"] = "true"

    async def _finish(self, result: Result) -> Result:
        seen = result.seen
        self._exchange.facts |= {
            "profile": self.profile,
            "reason": self._exchange.extra["x-outrider-reason"].partition(":")[0],
            "tokens": seen.completion_tokens,
        }
        if not result.fault:
            return result
        error = _error(result)
        if not self._relay.begun:
            raise error
        if result.seen.error is None:  # otherwise the engine's own error event was passed on
            await self._relay.fail(error)
        return result


def _error(result: Result) -> ApiError:
    """What a client is told of an engine's failure: nothing of its inside."""
    if result.outcome == "timeout":
        return ApiError(504, "the engine did not answer in time", code="timeout", retry_after=1)
    if result.status == 429:
        return overloaded("the engine has no room")
    if result.status == 503 or result.fault == "connect":
        return ApiError(503, "the engine is not there", code="unavailable", retry_after=2)
    return ApiError(502, "the engine failed", code="engine_failed", retry_after=1)


def _passed(exchange: Exchange) -> dict[str, str]:
    found = {}
    for name in PASSED_ON:
        value = exchange.headers.text(name)
        if value and value.isprintable() and len(value) <= 512:
            found[name.decode()] = value
    return found


def _again(exchange: Exchange) -> bool:
    """The client's own library tries this for a further time."""
    count = exchange.headers.text(b"x-stainless-retry-count") or "0"
    return count.isdigit() and int(count[:9]) > 0


def checked_body(data: bytes, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """The request's object.

    Raises:
        ApiError: it is none, or names no model.
    """
    try:
        body = parse(data)
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON", code="invalid_json") from None
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise bad_request("the body needs a model", param="model")
    if body.get("stream") not in (None, True, False):
        raise bad_request("stream is true or false", param="stream")
    return body
