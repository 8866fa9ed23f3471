"""The gateway put together: lanes, the controller and the loops that keep both true.

Loops only look and tell: what follows from what they see is the controller's, and of its changes
this is the one place that acts on engines and tells the outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from outrider.backends.connect import DIALECTS
from outrider.backends.openai import read_counters
from outrider.backends.prometheus import NotPrometheus, parse
from outrider.errors import InvalidParameter, OutriderError
from outrider.rollout.audit import Ledger
from outrider.rollout.config import BASELINE, RolloutConfig, load_rollout
from outrider.rollout.controller import Controller
from outrider.rollout.feedback import Drift
from outrider.rollout.ramp import Change, GateResult
from outrider.rollout.verdict import Report
from outrider.serve.gateway.engines import close_when_idle, modified
from outrider.serve.gateway.feedback import Feedback, withhold
from outrider.serve.gateway.flow import Flow, Stage
from outrider.serve.gateway.lanes import Lane, monotonic
from outrider.serve.gateway.metrics import BREAKER, PHASES, GatewayMetrics
from outrider.serve.gateway.prompts import prompt_tokens, read_otherwise

log = logging.getLogger(__name__)

TICK_S = 0.2
HEALTH_S = 1.0
READINGS_S = 5.0
PROMPTS_S = 60.0  # between two comparisons of how engines read prompts
WEBHOOK_S = 5.0
KEPT = 200  # changes and verdicts for people to look at

Rebuild = Callable[[RolloutConfig, Mapping[str, Lane]], Awaitable[dict[str, Lane]]]


class Gateway:
    """A rollout in front of engines.

    Args:
        config: the rollout.
        lanes: a lane for each of its profiles.
        gates: see `Controller`.
        source: the file to watch; `None` watches none.
        rebuild: makes lanes for another configuration, given those that there are.
        redact: takes personal data out of prompts that are kept as feedback.
        wall: wall-clock seconds.

    Raises:
        RecordFileError: the persisted state is damaged.
    """

    def __init__(
        self,
        config: RolloutConfig,
        lanes: Mapping[str, Lane],
        *,
        gates: Callable[[str], GateResult],
        source: Path | None = None,
        rebuild: Rebuild | None = None,
        redact: Callable[[str], str] = withhold,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.stage = Stage(config, dict(lanes))
        self.metrics = GatewayMetrics()
        self.created = int(wall())
        self.draining = False
        self.reload_fault = ""
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.ledger = Ledger(config.state)
        self._source, self._rebuild = source, rebuild
        self._read = 0.0 if source is None else modified(source)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.controller = Controller(
            config,
            ledger=self.ledger,
            gates=gates,
            wall=wall,
            monotonic=monotonic,
            changed=self._changed,
            judged=self._judged,
        )
        self.flow = Flow(
            lambda: self.stage,
            self.controller,
            self.metrics,
            feedback=Feedback(config, redact=redact, drifted=self._drifted),
            wall=wall,
        )

    @property
    def ready(self) -> bool:
        """The baseline can take requests."""
        return not self.draining and self.stage.lanes[BASELINE].healthy is not False

    async def start(self) -> None:
        """Begin to look after everything."""
        self.tick()
        await self.look()
        for every, work, wait in (
            (TICK_S, self._due, TICK_S),
            (HEALTH_S, self.look, HEALTH_S),
            (READINGS_S, self._readings, READINGS_S),
            (PROMPTS_S, self.compare_prompts, 0.0),
        ):
            self._loops.append(asyncio.create_task(_forever(every, work, wait=wait)))

    async def stop(self) -> None:
        """End the loops and let go of the engines."""
        self.draining = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.flow.mirrors.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lane.close() for lane in self.stage.lanes.values()))
        if self._session is not None:
            await self._session.close()

    def tick(self) -> None:
        """What is due now: kill file, gates, verdicts."""
        self.controller.tick()
        self._figures()

    def happened(self, profile: str, what: str, line: str) -> None:
        """A supervised engine tells of itself."""
        log.warning("profile %s: %s: %s", profile, what, ascii(line))
        if what == "restart":
            self.metrics.restarts.labels(profile).inc()
        if profile != BASELINE and profile in self.stage.lanes:
            if what == "restart":
                self.controller.wire(profile, "restart", detail=line)
            elif what == "out_of_memory":
                self.controller.wire(profile, "out_of_memory", detail=line)
            elif what == "non_finite":
                self.controller.wire(profile, "non_finite", detail=line)

    async def reload(self) -> None:
        """Read the file again. Streams under way keep the engine that they have.

        Raises:
            OutriderError: the file or what it asks for is wrong; all stays as it was.
        """
        if self._source is None or self._rebuild is None:
            raise InvalidParameter("this rollout was not started from a file; restart it")
        self._read = modified(self._source)
        config = load_rollout(self._source)
        old = self.stage
        lanes = await self._rebuild(config, old.lanes)
        for name, lane in lanes.items():
            lane.settle(config.profiles[name])
        self.controller.reload(config)
        self.stage = Stage(config, lanes)
        self.reload_fault = ""
        for name, lane in old.lanes.items():
            if lanes.get(name) is not lane:
                self._spawn(close_when_idle(lane))
        log.info("the rollout was read again")

    async def look(self) -> None:
        """Ask every engine how it is."""
        lanes = list(self.stage.lanes.values())
        for lane, good in zip(
            lanes, await asyncio.gather(*(x.probe_health() for x in lanes)), strict=True
        ):
            self.metrics.healthy.labels(lane.name).set(good)
            if lane.name == BASELINE or self.stage.lanes.get(lane.name) is not lane:
                continue
            if good:
                self.controller.healthy(lane.name)
            else:
                self.controller.wire(lane.name, "unhealthy", detail="its health probe failed")

    async def compare_prompts(self) -> None:
        """Ask every profile's engine of its own whether it reads prompts as the baseline's does."""
        stage = self.stage
        base = stage.lanes[BASELINE]
        others = [
            lane
            for lane in stage.lanes.values()
            if lane is not base and not lane.kind == base.kind == "embedded"
        ]
        if not others:
            return
        wanted = [prompt_tokens(lane, model=stage.config.target) for lane in (base, *others)]
        ours, *theirs = await asyncio.gather(*wanted)
        for lane, counts in zip(others, theirs, strict=True):
            where = read_otherwise(ours, counts)
            if where and self.stage.lanes.get(lane.name) is lane:
                self.controller.wire(lane.name, "parity", detail=where)

    async def _due(self) -> None:
        self.tick()
        if self._source is not None and self._rebuild is not None:
            written = modified(self._source)
            if written and written != self._read:
                try:
                    await self.reload()
                except OutriderError as fault:
                    self.reload_fault = str(fault)
                    log.error("the rollout stays as it was: %s", fault)

    async def _readings(self) -> None:
        """How full the cache of each profile's engine is, where a wire is set for it."""
        bound = self.stage.config.trip_wires.kv_share
        for name, lane in self.stage.lanes.items():
            dialect = DIALECTS.get("outrider" if lane.kind == "embedded" else lane.kind)
            if bound is None or name == BASELINE or dialect is None or dialect.counters is None:
                continue
            page = await lane.serves(dialect.metrics_path)
            if page is None:
                continue
            with contextlib.suppress(NotPrometheus):
                counters = read_counters(parse(page.decode(errors="replace")), dialect.counters)
                if counters.cache_use is not None:
                    self.controller.reading(name, "kv_share", counters.cache_use)

    def _changed(self, change: Change) -> None:
        """The controller has changed something."""
        log.warning(
            "rollout %s: %s by %s: %s to %s: %s",
            *(change.profile or "all", change.action, ascii(change.who), change.before),
            *(change.after, ascii(change.why)),
        )
        self.metrics.changes.labels(change.profile or "all", change.action).inc()
        if change.hard and change.profile in self.stage.lanes:
            self.stage.lanes[change.profile].cut()
        self._tell({"type": "change", **change.to_dict()})

    def _drifted(self, profile: str, drift: Drift) -> None:
        log.warning("profile %s: %s", profile, ascii(drift.why))
        self.metrics.drifts.labels(profile).inc()
        self._tell({"type": "drift", "profile": profile, "why": drift.why})

    def _judged(self, report: Report) -> None:
        told = {"type": "verdict", **report.to_dict()}
        self.verdicts.append(told)
        self.metrics.verdicts.labels(report.profile, report.state).inc()
        self._tell(told)

    def _figures(self) -> None:
        controller, metrics, now = self.controller, self.metrics, monotonic()
        metrics.killed.set(controller.weights.killed)
        metrics.unsaved.set(bool(controller.unsaved))
        for name, lane in self.stage.lanes.items():
            metrics.in_flight.labels(name).set(lane.gate.running)
            if name == BASELINE:
                continue
            metrics.breaker.labels(name).set(BREAKER[lane.breaker.state(now)])
            metrics.weight.labels(name).set(controller.weights.serving.get(name, 0) / 10_000)
            state = controller.state.profiles.get(name)
            for phase in PHASES:
                metrics.phase.labels(name, phase).set(state is not None and state.phase == phase)

    def _tell(self, told: dict[str, Any]) -> None:
        """Post to the webhook; nothing waits for it."""
        if self.stage.config.webhook is not None:
            self._spawn(self._post(self.stage.config.webhook, told))

    async def _post(self, url: str, told: dict[str, Any]) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=WEBHOOK_S), trust_env=False
            )
        try:
            async with self._session.post(url, json=told, allow_redirects=False) as response:
                if response.status >= 400:
                    log.warning("the webhook answered HTTP %d", response.status)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as fault:
            log.warning("the webhook cannot be reached: %s", ascii(str(fault)[:200]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:  # made before the loop runs; nothing is under way then
            work.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _forever(every_s: float, work: Callable[[], Awaitable[None]], *, wait: float) -> None:
    """Do it again and again after a first wait; a fault of one time does not end it."""
    await asyncio.sleep(wait)
    while True:
        try:
            await work()
        except Exception:
            log.exception("looking after the rollout failed; it goes on")
        await asyncio.sleep(every_s)
