"""The page at /ui in headless Chromium, driven over its debugging protocol.

Runs where Chromium is installed. The page's script is tested in Node as well (test_serve_ui.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from outrider.serve.keys import hash_key
from outrider.testing.serving import FakeModel, fake_service, running_server, text_target

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here")
KEY = "sk-browser-test"
WAIT_S = 30


class Browser:
    """A page of a headless browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = count(1)
        self._session: str | None = None
        self.messages: list[Any] = []

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its result; what else comes is kept."""
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **session}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.messages.append(message)

    def open(self, address: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait for a value; what is not there yet is no error."""
        end = time.monotonic() + WAIT_S
        attempt = f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"
        while not (value := self.run(attempt)):
            assert time.monotonic() < end, f"{script} never became true"
            time.sleep(0.02)
        return value

    @property
    def complaints(self) -> list[str]:
        """Errors that the browser has logged: scripts, policy, network."""
        found = [m["params"]["entry"] for m in self.messages if m.get("method") == "Log.entryAdded"]
        thrown = [m for m in self.messages if m.get("method") == "Runtime.exceptionThrown"]
        return [e["text"] for e in found if e["level"] == "error"] + [str(t) for t in thrown]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"]
    command += ["--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(text for text in process.stderr if "DevTools listening on" in text)
            with connect(line.split()[-1], max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.stderr.close()
            process.wait(20)


def service(**settings: Any) -> Any:
    model = FakeModel(text_target(context=2048))
    return fake_service(model=model, ui=True, engine={"context": 2048}, **settings)


def test_a_conversation_on_the_page(browser: Browser) -> None:
    with running_server(service()) as address:
        browser.open(f"{address}/ui")
        browser.until("document.querySelectorAll('#model option').length === 3")
        browser.run(
            "for (const [id, value] of [['temperature', 0], ['tokens', 60], ['seed', 3],"
            " ['text', 'hello <b>there</b>']]) document.getElementById(id).value = value;"
            "document.getElementById('send').click()"
        )
        browser.until("/60 tokens .*accepted/.test(document.getElementById('numbers').textContent)")
        assert browser.run("document.querySelector('.turn.user').textContent") == (
            "hello <b>there</b>"
        )
        assert browser.run("document.querySelectorAll('.turn.reply span').length") == 60
        guessed = browser.run("document.querySelectorAll('.turn.reply span.guess').length")
        assert 0 < guessed < 60
        colour = "getComputedStyle(document.querySelector('.guess')).backgroundColor"
        assert browser.run(colour) not in ("rgba(0, 0, 0, 0)", "transparent")
        assert browser.complaints == []


def test_a_key_is_asked_for_and_a_refusal_is_shown(browser: Browser) -> None:
    keys = [{"name": "browser", "sha256": hash_key(KEY)}]
    with running_server(service(keys=keys)) as address:
        browser.open(f"{address}/ui")
        browser.until("/API key/.test(document.getElementById('numbers').textContent)")
        browser.run(
            f"const key = document.getElementById('key'); key.value = '{KEY}';"
            "key.dispatchEvent(new Event('change'))"
        )
        browser.until("document.querySelectorAll('#model option').length === 3")
        browser.run(
            "document.getElementById('tokens').value = 100000;"
            "document.getElementById('text').value = 'hello';"
            "document.getElementById('send').click()"
        )
        shown = browser.until(
            "document.querySelector('.turn.error') && "
            "document.querySelector('.turn.error').textContent"
        )
        assert "max_tokens is 100000" in shown


def test_an_answer_can_be_stopped(browser: Browser) -> None:
    made = service()
    with running_server(made) as address:
        browser.open(f"{address}/ui")
        browser.until("document.querySelectorAll('#model option').length === 3")
        browser.run(
            "document.getElementById('tokens').value = 1900;"
            "document.getElementById('text').value = 'hello';"
            "document.getElementById('send').click()"
        )
        browser.until("document.querySelectorAll('.turn.reply span').length > 5")
        browser.run("document.getElementById('stop').click()")
        browser.until("!document.getElementById('send').disabled")
        end = time.monotonic() + WAIT_S
        while made.worker.engine.has_work:
            assert time.monotonic() < end
            time.sleep(0.01)
