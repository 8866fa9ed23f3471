"""`outrider chat --url`: a conversation with a server, and what goes wrong with one."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.serve.keys import hash_key
from outrider.testing.serving import fake_service, running_server

KEY = "sk-chat-test-key"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    keys = [{"name": "chat", "sha256": hash_key(KEY)}]
    with running_server(fake_service(keys=keys)) as found:
        yield f"{found}/v1"


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)

    def say(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))

    return say


def test_a_conversation_with_a_server(cli: Any, says: Any, address: str) -> None:
    says("hello", "and more", "/exit")
    result = cli("chat", "--url", address, "--max-tokens", "12", "--seed", "1")
    assert result.code == 0 and len(result.out) >= 24
    assert result.err.count("12 tokens in") == 2 and "profile fast" in result.err


def test_a_model_is_named_and_the_same_seed_says_the_same(
    cli: Any, says: Any, address: str
) -> None:
    out = []
    for model in ("fake@fast", "fake@baseline"):
        says("hello")
        result = cli("chat", model, "--url", address, "--max-tokens", "12", "--seed", "1")
        assert f"profile {model.split('@')[1]}" in result.err
        out.append(result.out)
    assert out[0] == out[1]


def test_a_refused_turn_is_taken_back(cli: Any, says: Any, address: str) -> None:
    says("x" * 2000, "hello")
    result = cli("chat", "--url", address, "--max-tokens", "12")
    assert result.code == 0
    assert "answers 400" in result.err and "12 tokens in" in result.err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/v1", "cannot be reached"),
        ("file:///etc/passwd", "is no address"),
        ("localhost", "is no address"),
    ],
)
def test_no_server_is_one_line(cli: Any, url: str, message: str) -> None:
    result = cli("chat", "--url", url)
    assert result.code == 2 and message in result.err and len(result.error_lines) == 1


def test_a_wrong_key_is_told(
    cli: Any, says: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "sk-wrong")
    result = cli("chat", "--url", address)
    assert result.code == 2 and "answers 401" in result.err and "sk-wrong" not in result.err
