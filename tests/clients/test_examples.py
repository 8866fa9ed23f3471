"""The examples do what they say, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KEY = "sk-client-test-key"


def run(server: str, *command: str) -> str:
    environment = {
        **os.environ,
        "OUTRIDER_URL": server,
        "OUTRIDER_API_KEY": KEY,
        "OUTRIDER_MODEL": "fake",
        "LANGSMITH_TRACING": "false",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_openai(server: str) -> None:
    out = run(server, sys.executable, str(EXAMPLES / "openai_chat.py"))
    assert "equal: True" in out and "fake@baseline: 1.00 tokens per step" in out
    assert "A given form: mood=" in out


def test_langchain(server: str) -> None:
    out = run(server, sys.executable, str(EXAMPLES / "langchain_chat.py"))
    assert "-> the light in the" in out


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(server: str) -> None:
    out = run(server, "bash", str(EXAMPLES / "curl.sh"))
    assert '"id":"fake@baseline"' in out and "data: [DONE]" in out
    assert '"content":"yes"' in out or '"content":"no"' in out


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".sh"):
            assert f"[{path.name}]" in listed and path.name in tests
