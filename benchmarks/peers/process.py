"""One adapter's process: started, asked, watched and ended. Knows the protocol, no engine."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from catalogue import Side

START_S, ANSWER_S, END_S = 400.0, 300.0, 15.0
_TICKS = os.sysconf("SC_CLK_TCK")


class PeerFailed(Exception):
    """An adapter did not start, did not answer, or answered with an error; the text says which."""


class PeerProcess:
    """A side's process, in a session of its own so that its children end with it."""

    def __init__(self, side: Side, log: Path) -> None:
        """Start it and wait until it is ready.

        Args:
            side: which engine, in which mode.
            log: a file for what the engine prints.

        Raises:
            PeerFailed: it ended, was too slow, or said why it cannot work.
        """
        self.side, self._log = side, log
        threads = str(side.setting.threads)
        common = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(side.python), str(side.script), side.setting.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                bufsize=1,
                env={**os.environ, **common, **side.environment},
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.about = self._answer(START_S)
        except PeerFailed:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the end

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One question and its answer; raises `PeerFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as fault:
            raise PeerFailed(f"its process is gone: {fault}") from None
        return self._answer(ANSWER_S)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise PeerFailed(f"no answer within {seconds:.0f} s; see {self._log}") from None
        if not line:
            raise PeerFailed(f"its process ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1][:200] if lines else 'it said nothing'}; see {self._log}"

    def cpu_seconds(self) -> float:
        """Processor time so far of the process and all its children (Linux)."""
        return sum(_cpu_seconds(pid) for pid in self._members())

    def _members(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                fields = _stat(int(folder.name))
                if fields and int(fields[3]) == self._process.pid:  # the session
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """End it and its children."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return re.sub(r"^.*\) ", "", text, flags=re.DOTALL).split()


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0
