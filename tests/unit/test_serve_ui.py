"""The page at /ui: off by default, closed to foreign code, and its script does what it shows.

The script runs in Node on a minimal document where Node is installed; no browser is started.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import outrider.serve
from outrider.testing.asgi import AsgiClient
from outrider.testing.serving import chat_body, fake_service, running_server, with_client

PAGE = Path(outrider.serve.__file__).with_name("ui.html")
DRIVER = Path(__file__).with_name("ui_driver.js")
CHAT = "/v1/chat/completions"


def traced(service: Any, **more: Any) -> list[Any]:
    async def ask(client: AsgiClient) -> list[Any]:
        body = chat_body(stream=True, max_tokens=40, **more)
        response = await client.post(CHAT, body, headers={"x-outrider-trace": "1"})
        return response.events[:-1]

    return with_client(service, ask)


def test_the_page_is_there_only_where_it_was_asked_for() -> None:
    assert with_client(fake_service(), lambda client: client.get("/ui")).status == 404
    page = with_client(fake_service(ui=True), lambda client: client.get("/ui"))
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert page.body == PAGE.read_bytes()


def test_the_page_runs_its_own_script_alone_and_loads_nothing() -> None:
    page = with_client(fake_service(ui=True), lambda client: client.get("/ui"))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert "unsafe" not in policy and "http" not in policy
    text = page.body.decode()
    for word in ("http://", "https://", "src=", "innerHTML", "eval(", "document.write", "onclick"):
        assert word not in text


def test_guesses_are_told_on_request_and_only_where_the_page_is_served() -> None:
    assert not any("steps" in event for event in traced(fake_service()))
    events = traced(fake_service(ui=True))
    steps = [step for event in events for step in event.get("steps", [])]
    assert sum(len(step["tokens"]) for step in steps) == 40
    assert 0 < sum(step["accepted"] for step in steps) < 40
    assert all(step["accepted"] <= len(step["tokens"]) for step in steps)
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert "".join(text for step in steps for text in step["tokens"]) == said


def test_a_guess_is_told_the_same_in_the_records() -> None:
    events = traced(fake_service(ui=True), stream_options={"include_usage": True})
    steps = [step for event in events for step in event.get("steps", [])]
    told = events[-1]["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] == sum(step["accepted"] for step in steps)
    assert told["num_spec_steps"] == len(steps)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_the_script_asks_and_shows_the_answer_with_its_guesses() -> None:
    with running_server(fake_service(ui=True)) as address:
        command = ["node", str(DRIVER), str(PAGE), address, "hello"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["models"] == ["fake", "fake@fast", "fake@baseline"]
    assert shown["turns"] == ["turn user", "turn reply"]
    assert shown["tokens"] == 40 and 0 < shown["guessed"] < 40 and len(shown["reply"]) == 40
    assert "40 tokens" in shown["numbers"] and "% of the guesses accepted" in shown["numbers"]
