"""vLLM's server on CPU for the scripts of this folder: start it, wait for it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from served import free_port  # noqa: E402

from outrider.kernels.linear import cpu_multiplies_bf16  # noqa: E402

START_S, END_S = 900.0, 30.0
GUESSES = 3
NAME = "target"
DTYPE = "bfloat16" if cpu_multiplies_bf16() else "float32"  # imitated, bf16 takes twice as long
OWN = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def arguments(model: Path, port: int, *, speculate: bool) -> list[str]:
    """The server's command line behind the interpreter."""
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", DTYPE, "--enforce-eager", "--max-model-len", "512"]
    words += ["--max-num-seqs", "32"]
    if speculate:
        config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": GUESSES}
        words += ["--speculative-config", json.dumps(config)]
        words += ["--per-request-spec-decode-metrics", "detailed"]
    return words


@contextlib.contextmanager
def server(
    python: Path, model: Path, log: Path, *, speculate: bool, more: Sequence[str] = ()
) -> Iterator[str]:
    """A running server's address; it and its children end with the block.

    Args:
        more: further words of its command line.
    """
    port = free_port()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(python), *arguments(model, port, speculate=speculate), *more],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OWN},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait(url, process, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it is healthy.

    Raises:
        SystemExit: it ended, or took too long; the log says why.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise SystemExit(f"vLLM's server ended: {' '.join(last)[:200]}; see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(2)
    raise SystemExit(f"vLLM's server was not ready within {START_S:.0f} s; see {log}")
