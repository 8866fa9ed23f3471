"""Keeps one engine's process alive: starts it, waits until it is healthy, starts it again when it
ends, and tells what happened. Knows processes and one path of HTTP; nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.backends.base import EngineUnfit
from outrider.backends.wire import Timeouts, Wire

log = logging.getLogger(__name__)

RESTART, OUT_OF_MEMORY, NON_FINITE = "restart", "out_of_memory", "non_finite"
_SIGNS = (
    (OUT_OF_MEMORY, re.compile(r"out of memory|OutOfMemoryError|std::bad_alloc", re.IGNORECASE)),
    (
        NON_FINITE,
        re.compile(r"\bnan\b.*(?:logit|detect)|(?:logit|prob)\w*.*\bnan\b", re.IGNORECASE),
    ),
)
KEPT_LINES = 200
LONGEST_LINE = 64 * 2**10
LAST_WORDS_S = 1.0  # for what an engine said before it ended; a child may hold the pipe open

Told = Callable[[str, str], None]  # what happened, and a line about it


@dataclass(frozen=True)
class Patience:
    """Seconds: until healthy after a start, between looks, from a polite end to a hard one, and
    before a new start, doubled from one to the next up to `most_s`."""

    start_s: float = 600.0
    look_s: float = 0.5
    end_s: float = 15.0
    again_s: float = 1.0
    most_s: float = 60.0


class Supervisor:
    """One engine's process.

    Args:
        command: its command line.
        root: where it answers, as in http://127.0.0.1:9001.
        told: called with what happened: `RESTART`, `OUT_OF_MEMORY`, `NON_FINITE`.
        environment: beside our own.
    """

    def __init__(
        self,
        command: Sequence[str],
        root: str,
        *,
        told: Told,
        environment: dict[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.restarts = 0
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._command = list(command)
        self._wire = Wire(root, timeouts=Timeouts(probe_s=2.0))
        self._told = told
        self._environment = environment or {}
        self._patience = patience or Patience()
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            EngineUnfit: it cannot be started, ended at once, or did not become healthy in time.
        """
        reader = await self._spawn()
        try:
            await self._until_healthy(reader)
        except BaseException:
            await self._end()
            reader.cancel()
            await self._wire.close()
            raise
        self._keeper = asyncio.create_task(self._keep(reader))

    async def stop(self) -> None:
        """End it, politely first."""
        self._ending = True
        await self._end()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._wire.close()

    async def _spawn(self) -> asyncio.Task[None]:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        except OSError as error:
            raise EngineUnfit(f"{self._command[0]} cannot be started: {error.strerror}") from None
        return asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:  # a line without an end; the reader has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", errors="replace").rstrip()
            self.lines.append(line)
            for kind, sign in _SIGNS:
                if sign.search(line):
                    self._told(kind, line[:200])

    async def _until_healthy(self, reader: asyncio.Task[None]) -> None:
        process, patience = self._process, self._patience
        assert process is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + patience.start_s
        while True:
            if process.returncode is not None:
                await asyncio.wait([reader], timeout=LAST_WORDS_S)
                raise EngineUnfit(f"the engine ended with {process.returncode}: {self._last()}")
            with contextlib.suppress(EngineUnfit):
                if (await self._wire.get("/health")).status == 200:
                    return
            if loop.time() > end:
                raise EngineUnfit(
                    f"the engine was not healthy within {patience.start_s:g} s: {self._last()}"
                )
            await asyncio.sleep(patience.look_s)

    def _last(self) -> str:
        return next((line for line in reversed(self.lines) if line.strip()), "it said nothing")

    async def _keep(self, reader: asyncio.Task[None]) -> None:
        wait_s = self._patience.again_s
        while True:
            process = self._process
            assert process is not None
            code = await process.wait()
            await reader
            if self._ending:
                return
            self.restarts += 1
            self._told(RESTART, f"the engine ended with {code}: {self._last()[:160]}")
            await asyncio.sleep(wait_s)
            try:
                reader = await self._spawn()
                await self._until_healthy(reader)
                wait_s = self._patience.again_s
            except EngineUnfit as fault:
                log.warning("%s", fault)
                await self._end()
                wait_s = min(2 * wait_s, self._patience.most_s)

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._patience.end_s):
                await process.wait()
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    """To the engine and the workers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
