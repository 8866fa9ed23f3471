"""llama.cpp's server behind the benchmark's protocol: plain, or one of its n-gram modes.

The figures are the server's own timings, so HTTP is not in them. A mode is a ``--spec-type``, with
sizes behind colons where they are not the defaults: ``ngram-simple:3:8`` looks up 3 tokens and
guesses 8. What a pass costs comes from ``llama-bench``, which computes the logits of the last row
only: that flatters llama.cpp a little, since checking guesses needs the logits of all rows.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wire import About, Answer, NotMeasured, PassTimes, Setting, serve

HOST = "127.0.0.1"
START_S, ANSWER_S = 120, 300
DEPTH, REPEATS = 128, 10


class LlamaCppPeer:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._binaries = Path(setting.options["binaries"])
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [str(self._binaries / "llama-server"), *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _arguments(self) -> list[str]:
        setting = self._setting
        arguments = ["--model", setting.model, "--host", HOST, "--port", str(self._port)]
        arguments += ["--threads", str(setting.threads), "--threads-batch", str(setting.threads)]
        arguments += ["--ctx-size", str(setting.context), "--parallel", "1", "--offline"]
        # No state from one prompt to the next, no page, no probing of devices.
        arguments += ["--cache-ram", "0", "--no-ui", "--no-slots", "--threads-http", "2"]
        return arguments + speculation(setting.mode)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}; see log")
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self._port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready after {START_S} s")

    def about(self) -> About:
        done = subprocess.run(
            [self._binaries / "llama-server", "--version"], capture_output=True, text=True
        )
        lines = (done.stderr + done.stdout).splitlines()
        version = next((line for line in lines if line.startswith("version")), "unknown")
        return About({"llama.cpp": version}, [], "times are the server's own, without HTTP")

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            # The cheapest way to the largest logit: an empty list would draw from all tokens.
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        reply = self._post("/completion", body)
        timings = reply["timings"]
        if timings["prompt_n"] != len(prompt):
            raise RuntimeError(f"{timings['prompt_n']} prompt tokens read, {len(prompt)} sent")
        first = timings["prompt_ms"]
        return Answer(list(reply["tokens"]), first, first + timings["predicted_ms"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{HOST}:{self._port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def pass_ms(self, rows: Sequence[int]) -> PassTimes:
        if self._setting.mode != "plain":
            raise NotMeasured("measured in plain mode; guessing does not change a pass")
        arguments = ["--model", self._setting.model, "--threads", str(self._setting.threads)]
        arguments += ["--n-prompt", ",".join(map(str, rows)), "--n-gen", "0"]
        arguments += ["--n-depth", str(DEPTH), "--repetitions", str(REPEATS), "--output", "json"]
        done = subprocess.run(
            [str(self._binaries / "llama-bench"), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=ANSWER_S,
        )
        times = {int(r["n_prompt"]): min(r["samples_ns"]) / 1e6 for r in json.loads(done.stdout)}
        method = f"llama-bench, best of {REPEATS} behind {DEPTH} positions, logits of the last row"
        return PassTimes(times, method)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()


def speculation(mode: str) -> list[str]:
    """The server's flags for a mode."""
    kind, *sizes = mode.split(":")
    if kind == "plain":
        return []
    flags = ["--spec-type", kind]
    names = ("n-match", "n-max") if kind == "ngram-mod" else ("size-n", "size-m")
    for name, size in zip(names, sizes, strict=False):
        flags += [f"--spec-{kind}-{name}", size]
    if kind == "ngram-mod" and len(sizes) > 1:
        flags += ["--spec-ngram-mod-n-min", "1"]
    return flags


if __name__ == "__main__":
    serve(LlamaCppPeer)
