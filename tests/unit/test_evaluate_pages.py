"""Every command of the how-to pages about diagnosis, check and certificate runs as written.

A command runs with its own words on stand-ins: the fake model for the real one, a tiny folder for a
model or head of the reader, a server in a thread for a server, and few requests.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from models_files import write_folder
from test_diagnose import AGENT, page

from outrider.testing.fakes import TableTarget

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("certify", "check", "diagnose")
ADDRESS = re.compile(r"http://127\.0\.0\.1:800[01]")


def commands(name: str) -> list[list[str]]:
    """The command lines of a page's console blocks, comments cut."""
    text = (ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]


class Replies(BaseHTTPRequestHandler):
    """A server that knows one model and answers every prompt with the letters of a table."""

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send({"data": [{"id": "m", "owned_by": "vllm"}]})
        elif self.path == "/version":
            self._send({"version": "0.32.0"})
        elif self.path == "/metrics":
            self.server.pages += 10  # type: ignore[attr-defined]
            self._raw(page(self.server.pages).encode(), "text/plain")  # type: ignore[attr-defined]
        else:
            self._send({}, status=404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            return self._send({}, status=404)
        tokens = ["token_id:1"] * min(int(body.get("max_tokens", 4)), 8)
        top = [{"token_id:1": -0.0001, "token_id:2": -9.3} for _ in tokens]
        text = "a" * len(tokens)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length",
            "text": text,
            "message": {"role": "assistant", "content": text},
            "logprobs": {
                "tokens": tokens, "token_logprobs": [-0.0001] * len(tokens), "top_logprobs": top,
            },
        }  # fmt: skip
        usage = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
        answer = {"model": "m", "choices": [choice], "usage": usage}
        if not body.get("stream"):
            return self._send(answer)
        chunk = {**choice, "delta": {"content": text}}
        events = [
            {"model": "m", "choices": [{**chunk, "finish_reason": None}]},
            {"model": "m", "choices": [{**chunk, "delta": {}, "text": ""}]},
            {"model": "m", "choices": [], "usage": usage},
        ]
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return self._raw(data.encode(), "text/event-stream")

    def _send(self, body: object, *, status: int = 200) -> None:
        self._raw(json.dumps(body).encode(), "application/json", status=status)

    def _raw(self, data: bytes, kind: str, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    found.pages = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    thread.join()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before.txt").write_text(page(10))
    (tmp_path / "after.txt").write_text(page(40))
    (tmp_path / "requests.jsonl").write_text('{"ttft_ms": 100, "e2e_ms": 900}\n')
    (tmp_path / "traces.json").write_text(json.dumps(AGENT))
    write_folder(tmp_path / "my-model")
    return tmp_path


def small(words: list[str], *, real: bool) -> list[str]:
    """The same command on stand-ins; `real` for verbs that read a model's files."""
    model = "my-model" if real else "fake"
    found = [model if word == "smollm2-135m" else word for word in words]
    if "--seconds" in found:
        found[found.index("--seconds") + 1] = "1"
    if found[0] == "certify" and "--verify" not in found:
        if "--requests" in found:
            found[found.index("--requests") + 1] = "8"
        else:
            found += ["--requests", "8"]
        if "--parts" not in found:
            found += ["--parts", "greedy,distribution"]
    if real:
        found += ["--weights", "fp32", "--context", "64"]
    return found


CASES = [(name, i) for name in PAGES for i in range(len(commands(name)))]


@pytest.mark.parametrize(("name", "number"), CASES, ids=[f"{n}-{i}" for n, i in CASES])
def test_the_command_runs(cli, real_cli, here, server, name, number):
    words = commands(name)[number]
    assert words.pop(0) == "outrider" and words[0] == name
    real = name == "check"
    run = real_cli if real else cli
    if "--verify" in words:  # the page makes the file in the command before
        made = small(commands(name)[number - 1][1:], real=real)
        run(*made)
    if "my-head" in words:
        words[words.index("my-head")] = "ngram"
    words = [ADDRESS.sub(server, word) for word in small(words, real=real)]
    outcome = run(*words)
    assert outcome.code in (0, 1), outcome.err
    if name != "certify" and "--url" not in words:
        assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.out.strip(), outcome.err


def test_the_fakes_match_what_the_pages_promise():
    assert TableTarget().row_invariant  # equal seeds are promised for such targets alone
    assert len(CASES) >= 15
