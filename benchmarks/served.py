"""A server of its own process for the scripts that measure it: start it, wait for it, end it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

START_S = 120


@dataclass(frozen=True)
class Server:
    """Attributes:
    root: its address.
    pid: of its process.
    """

    root: str
    pid: int

    def memory_mb(self, name: str) -> float:
        """A line of the kernel's account of the process, such as VmRSS, in MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        raise SystemExit(f"the kernel tells no {name}")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def outrider_serve(arguments: Sequence[str], *, log: IO[str] | None = None) -> Iterator[Server]:
    """`outrider serve` with these arguments, listening; what it writes goes to ``log``."""
    port, output = free_port(), subprocess.DEVNULL if log is None else log
    command = [sys.executable, "-m", "outrider", "serve", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
    try:
        for _ in range(10 * START_S):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None:
                raise SystemExit(f"the server ended: {' '.join(command)}")
            time.sleep(0.1)
        yield Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait(30)
