"""Engines of others, started from the user's own command for as long as a setting is measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from outrider.backends.base import EngineUnfit
from outrider.backends.connect import connect
from outrider.backends.openai import OpenAIBackend
from outrider.backends.settings import Setting, engine_flags
from outrider.errors import InvalidParameter

TAIL_LINES = 5
END_S = 20.0
POLL_S = 0.2


@contextlib.asynccontextmanager
async def started(
    command: str,
    setting: Setting,
    *,
    kind: str,
    folder: Path,
    model: str | None = None,
    ready_s: float = 600.0,
) -> AsyncIterator[OpenAIBackend]:
    """An engine, started for a setting and ended afterwards; its output goes to a file.

    Args:
        command: with ``{port}`` and ``{speculative}`` where these belong; the second is nothing for
            plain decoding. It is run without a shell.

    Raises:
        EngineUnfit: it ends at once, or is not ready in time; the last lines it wrote are told.
        UnsupportedOption: the engine has no such setting.
    """
    port = _free_port()
    words = command_words(command, port=port, extra=engine_flags(kind, setting, folder=folder))
    log = folder / f"engine-{setting.name.replace('/', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as fault:
            raise EngineUnfit(f"{words[0]} cannot be started: {fault.strerror}") from None
        try:
            backend = await _ready(process, port, kind, model, ready_s, log)
            try:
                yield backend
            finally:
                await backend.close()
        finally:
            await _end(process)


def command_words(command: str, *, port: int, extra: Sequence[str]) -> list[str]:
    """The command with its places filled.

    Raises:
        InvalidParameter: it lacks one of the places, or has an open quote.
    """
    if "{port}" not in command or "{speculative}" not in command:
        raise InvalidParameter(
            "the command to start an engine needs {port} and {speculative} where these belong"
        )
    try:
        split = shlex.split(command)
    except ValueError as fault:
        raise InvalidParameter(f"the command to start an engine cannot be read: {fault}") from None
    words: list[str] = []
    for word in split:
        words += extra if word == "{speculative}" else [word.replace("{port}", str(port))]
    return words


async def _ready(
    process: asyncio.subprocess.Process,
    port: int,
    kind: str,
    model: str | None,
    ready_s: float,
    log: Path,
) -> OpenAIBackend:
    end = time.monotonic() + ready_s
    while True:
        try:
            return await connect(f"http://127.0.0.1:{port}", kind=kind, model=model)
        except EngineUnfit as fault:
            if process.returncode is not None:
                told = f"the engine ended with code {process.returncode}: {_tail(log)}"
                raise EngineUnfit(told) from None
            if time.monotonic() > end:
                raise EngineUnfit(f"not ready after {ready_s:g} s: {fault}") from None
        await asyncio.sleep(POLL_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End our own process and its children, which share its group: politely, then by force."""
    if process.returncode is not None:
        return
    _signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        _signal(process, signal.SIGKILL)
        await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
    return " | ".join(line.strip() for line in lines) or f"see {log}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
