"""Copies of requests: sent beside the real one, compared with it, and dropped.

In shadow, requests of the baseline are copied to the profile; once a profile serves, some of its
requests are copied to the baseline. A copy costs its client nothing: it takes only free places, and
nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.core.law import Setting
from outrider.rollout.assign import Assignment, RequestFacts, bucket
from outrider.rollout.config import BASELINE
from outrider.rollout.controller import Controller
from outrider.rollout.sampled import SampledLaw
from outrider.serve.gateway.attempt import Attempt, Result
from outrider.serve.gateway.feedback import Feedback
from outrider.serve.gateway.guards import Full
from outrider.serve.gateway.lanes import Lane, Request, monotonic
from outrider.serve.gateway.metrics import GatewayMetrics
from outrider.serve.gateway.observe import WIRES, observation
from outrider.serve.gateway.parity import Agreement, comparable, compare, other_prompt
from outrider.serve.gateway.probe import law_probe
from outrider.serve.gateway.relay import Nowhere
from outrider.serve.wire import encode_json

if TYPE_CHECKING:
    from outrider.serve.gateway.flow import Stage

log = logging.getLogger(__name__)

AT_ONCE = 16  # copies under way, over all profiles


class Pair:
    """A request and its copies.

    Attributes:
        request: as it must be sent, so that the copies can be compared with it.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.original: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()

    def settle(self, result: Result | None) -> None:
        """How the real one ended; `None` where it cannot be compared. The first word counts."""
        if not self.original.done():
            self.original.set_result(result)


class Mirrors:
    """All copies under way."""

    def __init__(
        self,
        controller: Controller,
        metrics: GatewayMetrics,
        *,
        feedback: Feedback,
        wall: Callable[[], float],
    ) -> None:
        self._feedback = feedback
        self._controller = controller
        self._metrics = metrics
        self._wall = wall
        self._tasks: set[asyncio.Task[None]] = set()
        self._laws: dict[str, tuple[Lane, SampledLaw]] = {}

    def begin(
        self, stage: Stage, assignment: Assignment, request: Request, facts: RequestFacts
    ) -> Pair:
        """Start the copies of a request."""
        wanted = [(name, stage.lanes[name]) for name in assignment.shadow]
        compared = stage.lanes[assignment.profile]
        audited = assignment.reason == "split" and self._audited(stage, compared, request)
        if audited and comparable(request.body, exact=compared.exact):
            wanted.append((assignment.profile, stage.lanes[BASELINE]))
        if wanted and any(stage.lanes[name].exact for name, _ in wanted):
            sampled = not comparable(request.body, exact=False)
            if sampled and request.body.get("seed") is None:
                request = request.seeded(secrets.randbelow(2**31))
        pair = Pair(request)
        for name, lane in wanted:
            self._spawn(name, self._copy(name, lane, pair, facts, exact=stage.lanes[name].exact))
        for name in (*assignment.shadow, *((assignment.profile,) if audited else ())):
            self._probe_law(stage, stage.lanes[name], request)
        return pair

    def _audited(self, stage: Stage, lane: Lane, request: Request) -> bool:
        """A share of what a profile serves, as large as its share in shadow."""
        if lane.profile.approximate:
            return False
        place = bucket(f"{stage.config.salt}:{lane.name}:audit", request.request_id)
        return place < lane.profile.shadow

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Begin a copy or a probe, where not too many are under way."""
        if len(self._tasks) >= AT_ONCE:
            work.close()
            self._metrics.skipped.labels(name).inc()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _probe_law(self, stage: Stage, lane: Lane, request: Request) -> None:
        """Find out whether an engine that is not exact samples what it says."""
        alpha = stage.config.trip_wires.sampled
        if alpha is None or lane.exact or lane.profile.approximate:
            return
        probe = law_probe(request, lane)
        if probe is not None:
            self._spawn(lane.name, self._law(lane, *probe, alpha=alpha))

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a copy failed inside the gateway", exc_info=task.exception())

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def quiet(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sent(self, name: str, lane: Lane, request: Request) -> Result | None:
        """The answer to a request of ours; `None` where its lane has no free place."""
        gate = lane.gate
        try:
            if gate.waiting:
                raise Full
            await gate.enter(monotonic())
        except Full:
            self._metrics.skipped.labels(name).inc()
            return None
        try:
            return await Attempt(lane, request, Nowhere()).run()
        finally:
            gate.leave(monotonic())

    async def _law(self, lane: Lane, request: Request, setting: Setting, *, alpha: float) -> None:
        """Send a probe and hold its tokens against their laws. One that fails says nothing here:
        the copies tell of failures."""
        result = await self._sent(lane.name, lane, request)
        if result is None or result.fault or result.status != 200:
            return
        known = self._laws.get(lane.name)
        if known is None or known[0] is not lane or known[1].alpha != alpha:
            known = self._laws[lane.name] = (lane, SampledLaw(alpha))
        law = known[1]
        tokens, undecided = law.tokens, law.undecided
        why = law.saw(result.seen.tops.get(0, ()), setting)
        for outcome, count in (
            ("tested", law.tokens - tokens),
            ("undecided", law.undecided - undecided),
        ):
            self._metrics.law_tokens.labels(lane.name, outcome).inc(count)
        self._metrics.law_evidence.labels(lane.name).set(law.evidence)
        if why is not None:
            del self._laws[lane.name]  # whoever arms it again begins anew
            self._controller.wire(lane.name, "parity", detail=why)

    async def _copy(
        self, name: str, lane: Lane, pair: Pair, facts: RequestFacts, *, exact: bool
    ) -> None:
        copy = await self._sent(name, lane, _for_copy(lane, pair.request, exact=exact))
        if copy is None:
            return
        original = await pair.original
        if lane.name != BASELINE:
            self._told(name, copy, original, pair.request, facts)
        if original is not None and not lane.profile.approximate:
            self._compare(name, original, copy, pair.request, facts, exact=exact)

    def _told(
        self,
        name: str,
        copy: Result,
        original: Result | None,
        request: Request,
        facts: RequestFacts,
    ) -> None:
        """In shadow the copies are the canary, and their originals the control."""
        if copy.fault:
            self._metrics.faults.labels(name, copy.fault).inc()
            wire = WIRES.get(copy.fault)
            if wire is not None:
                self._controller.wire(name, wire, detail=copy.why)
        if original is None:
            return
        for arm, result in (("canary", copy), ("control", original)):
            seen = observation(
                result, facts, body=request.body, request_id=request.request_id, at=self._wall()
            )
            self._controller.observe(name, "canary" if arm == "canary" else "control", seen)

    def _compare(
        self,
        name: str,
        original: Result,
        copy: Result,
        request: Request,
        facts: RequestFacts,
        *,
        exact: bool,
    ) -> None:
        if original.fault or copy.fault:
            return
        agreement: Agreement = "different"
        where = other_prompt(original.seen, copy.seen)
        if not where:
            if not comparable(request.body, exact=exact):
                return
            agreement, where = compare(original.seen, copy.seen, exact=exact)
        self._metrics.compared.labels(name, agreement).inc()
        if agreement == "different":
            self._controller.wire(name, "parity", detail=f"{request.request_id}: {where}")
            seen = observation(
                copy, facts, body=request.body, request_id=request.request_id, at=self._wall()
            )
            self._feedback.consider(name, seen, request.body, different=True)


def _for_copy(lane: Lane, request: Request, *, exact: bool) -> Request:
    """A copy tells how likely its tokens were, where that decides whether a difference is a tie."""
    if exact or "logprobs" in lane.lacking or not comparable(request.body, exact=False):
        return request
    if request.body.get("logprobs") not in (None, False):
        return request
    more = {"logprobs": True, "top_logprobs": 2} if request.chat else {"logprobs": 2}
    body = {**request.body, **more}
    return replace(request, body=body, raw=encode_json(body))
