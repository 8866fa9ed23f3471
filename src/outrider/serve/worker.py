"""The one thread that owns the engine, and the asyncio side of what runs there.

The engine is synchronous; the event loop must never wait for it. Commands go in through a thread-
safe queue, what a step brought comes back in one call per step. A request's fault ends its stream,
an engine's fault ends the streams that were running, and the thread goes on.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outrider.core.grammar import Grammar
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import NodeBudget
from outrider.engine import Completion, Engine, Update
from outrider.engine.engine import Load
from outrider.models.tokenizer import Decoder

log = logging.getLogger(__name__)

RETRIES = 1  # of a step that failed, before what is running is given up
UNHEALTHY = 3  # steps that failed in a row
STOP_S = 10  # for the step under way when the thread is told to end
PAUSE_S = 0.2  # after a failed step, so that a broken engine does not burn a core
ENGINE_FAILED = "the engine failed; this request is lost, others can be sent"


@dataclass(frozen=True)
class Job:
    """One sequence to decode: the arguments of `Engine.add`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    drafter: str = "none"
    tenant: str = ""
    grammar: Grammar | None = None
    most: NodeBudget | None = None
    tokenizer: Decoder | None = None
    rule: str | None = None


class Observer(Protocol):
    """Told of every step, in the engine's thread."""

    def stepped(self, load: Load, seconds: float) -> None: ...

    def engine_failed(self) -> None: ...


class Group:
    """What comes back of the jobs of one request; used in the event loop's thread only.

    Attributes:
        completions: the finished ones by index, once their last update was taken.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.members = [Member(self, index, job) for index, job in enumerate(jobs)]
        self.completions: dict[int, Completion] = {}
        self._inbox: deque[tuple[int, Update, Completion | None]] = deque()
        self._fault: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0  # the loop's time at which the waiter is woken for nothing
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self._fault is not None or len(self.completions) == len(self.members)

    @property
    def ready(self) -> bool:
        """`take` has something."""
        return bool(self._inbox) or self._fault is not None

    def deliver(self, index: int, update: Update, completion: Completion | None) -> None:
        self._inbox.append((index, update, completion))
        self._wake()

    def fail(self, fault: Exception) -> None:
        self._fault = self._fault or fault
        self._wake()

    async def wait(self, seconds: float) -> None:
        """Return once `take` has something, or after so long.

        The time given must not end before that of an earlier wait: the alarm stays set in between,
        so that it costs something now and then and not with every token.
        """
        if self.ready:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._until = loop.time() + seconds
        if self._alarm is None:
            self._alarm = loop.call_at(self._until, self._ring, loop)
        await self._waiter

    def close(self) -> None:
        """Nobody will wait any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def take(self) -> list[tuple[int, Update]]:
        """Index and update of all that came since the last call; the last of an index has a finish
        reason.

        Raises:
            OutriderError: the engine refused a job.
            EngineGone: the engine's thread has ended.
        """
        if self._fault is not None:
            raise self._fault
        news = []
        while self._inbox:
            index, update, completion = self._inbox.popleft()
            if completion is not None:
                self.completions[index] = completion
            news.append((index, update))
        return news

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._waiter is None or self._waiter.done():
            return
        if self._until > loop.time():  # set for a wait that is over
            self._alarm = loop.call_at(self._until, self._ring, loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, eq=False)
class Member:
    """One job of a group."""

    group: Group
    index: int
    job: Job


class EngineGone(Exception):
    """The engine's thread has ended; nothing can be decoded any more."""


@dataclass(frozen=True)
class _Add:
    member: Member


@dataclass(frozen=True)
class _Cancel:
    member: Member


class _Stop:
    pass


_Command = _Add | _Cancel | _Stop
_Given = TypeVar("_Given")
_Delivery = tuple[Member, Update, Completion | None]


class Worker:
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine, *, observer: Observer | None = None) -> None:
        self.engine = engine
        self._observer = observer
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._members: dict[int, Member] = {}
        self._requests: dict[Member, int] = {}
        self._failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="outrider-engine", daemon=True)
        self._ended = False
        self.load: Load = engine.load
        self.last_fault = ""

    # -- the event loop's side ---------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; results are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The thread takes commands."""
        return self._thread.is_alive() and not self._ended

    @property
    def healthy(self) -> bool:
        """The thread lives and the engine's last steps did not all fail."""
        return self.alive and self._failures < UNHEALTHY

    def submit(self, jobs: Sequence[Job]) -> Group:
        """Start jobs; refusals come through their group."""
        group = Group(jobs)
        if self._ended:
            group.fail(EngineGone(self.last_fault))
        for member in group.members:
            self._commands.put(_Add(member))
        return group

    def cancel(self, group: Group) -> None:
        """End what nobody reads any more; what is done is left alone."""
        group.close()
        for member in group.members:
            if member.index not in group.completions:
                self._commands.put(_Cancel(member))

    def stop(self) -> None:
        """End the thread; what is running is given up. Waits a while for the step under way."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.error("a step of the engine does not end; its thread is left behind")

    # -- the engine's side -------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._obey(wait=not self.engine.has_work):
                if self.engine.has_work:
                    self._deliver(self._step())
        except BaseException as fault:
            self.last_fault = f"{type(fault).__name__}: {fault}"
            log.critical("the engine's thread ends: %s", self.last_fault, exc_info=True)
        finally:
            self._ended = True
            self._refuse_all()

    def _obey(self, *, wait: bool) -> bool:
        """Carry out what was asked; false when it is time to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Add):
                self._add(command.member)
            elif command.member in self._requests:
                self.engine.cancel(self._requests[command.member])

    def _add(self, member: Member) -> None:
        job = member.job
        try:
            request = self.engine.add(
                job.prompt,
                job.params,
                drafter=job.drafter,
                tenant=job.tenant,
                grammar=job.grammar,
                most=job.most,
                tokenizer=job.tokenizer,
                rule=job.rule,
            )
        except Exception as refusal:
            self._call(member.group.fail, refusal)
            return
        self._members[request] = member
        self._requests[member] = request

    def _step(self) -> list[Update]:
        begin = time.perf_counter()
        try:
            updates = self.engine.step()
        except Exception as fault:
            return self._failed(fault)
        self._failures = 0
        self.load = self.engine.load
        if self._observer is not None:
            self._observer.stepped(self.load, time.perf_counter() - begin)
        return updates

    def _failed(self, fault: Exception) -> list[Update]:
        """A step failed: try once more, then give up what is running."""
        self._failures += 1
        self.last_fault = f"{type(fault).__name__}: {fault}"
        log.error("the engine failed, %d in a row", self._failures, exc_info=fault)
        if self._observer is not None:
            self._observer.engine_failed()
        if self._failures <= RETRIES:
            return []
        updates = self.engine.abandon(ENGINE_FAILED)
        self.load = self.engine.load
        time.sleep(PAUSE_S)
        return updates

    def _deliver(self, updates: Sequence[Update]) -> None:
        deliveries: list[_Delivery] = []
        for update in updates:
            done = update.finish_reason is not None
            completion = self.engine.take(update.request) if done else None
            member = self._members[update.request]
            if done:
                del self._members[update.request], self._requests[member]
            deliveries.append((member, update, completion))
        if deliveries:
            self._call(_deliver_all, deliveries)

    def _refuse_all(self) -> None:
        """Nobody waits for a thread that has ended."""
        for member in list(self._requests):
            self._call(member.group.fail, EngineGone(self.last_fault))
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Add):
                self._call(command.member.group.fail, EngineGone(self.last_fault))

    def _call(self, function: Callable[[_Given], None], given: _Given) -> None:
        """Call in the event loop; a loop that is closed has nobody left to tell."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, given)
        except RuntimeError:
            log.debug("the event loop is closed")


def _deliver_all(deliveries: Sequence[_Delivery]) -> None:
    for member, update, completion in deliveries:
        member.group.deliver(member.index, update, completion)
