"""A server that speaks the OpenAI interface, as the command line's chat needs it: by the standard
library alone, one request at a time.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from outrider.errors import OutriderError

KEY_VARIABLE = "OUTRIDER_API_KEY"
TIMEOUT_S = 600
LONGEST_LINE = 1 << 20


class ServerRefuses(OutriderError):
    """A server cannot be reached, or does not do what was asked."""


@dataclass(frozen=True)
class Part:
    """New text of an answer; tokens are not told by chunk, so a chunk counts as one."""

    text: str
    tokens: int = 1


@dataclass
class Server:
    """A server at an address.

    Attributes:
        url: ends before the paths of the interface, as in http://127.0.0.1:8000/v1.
        key: its API key.
        numbers: of the latest answer, in one line.
    """

    url: str
    key: str | None = None
    numbers: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ServerRefuses(f"{self.url!r} is no address; write http://HOST:PORT/v1")
        self.url = self.url.rstrip("/")

    def models(self) -> list[str]:
        """What it serves.

        Raises:
            ServerRefuses: it cannot be reached, or has no model.
        """
        with self._open("/models", None) as response:
            data = self._parse(response.read(LONGEST_LINE)).get("data") or []
        if not data:
            raise ServerRefuses(f"{self.url} serves no model")
        return [str(model["id"]) for model in data]

    def stream(self, body: dict[str, Any]) -> Iterator[Part]:
        """A chat completion as it grows; leaving the loop closes the connection.

        Raises:
            ServerRefuses: the server refuses, or fails on the way.
        """
        begin, first, last = time.perf_counter(), None, {}
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._open("/chat/completions", asked) as response:
            while line := response.readline(LONGEST_LINE):
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = self._parse(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ServerRefuses(str(event["error"].get("message")))
                last = event
                for choice in event.get("choices", []):
                    text = choice.get("delta", {}).get("content")
                    if text:
                        first = first or time.perf_counter()
                        yield Part(text)
                self.numbers = _numbers(last, begin, first)

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            told = self._parse(error.read(LONGEST_LINE), strict=False).get("error")
            reason = told.get("message") if isinstance(told, dict) else error.reason
            raise ServerRefuses(f"{self.url} answers {error.code}: {reason}") from None
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ServerRefuses(f"{self.url} cannot be reached: {reason}") from None

    def _parse(self, data: bytes, *, strict: bool = True) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if strict:
            raise ServerRefuses(f"{self.url} does not speak the OpenAI interface")
        return {}


def _numbers(last: dict[str, Any], begin: float, first: float | None) -> str:
    """A line about an answer: its tokens, its times, and its speculation where that is told."""
    now = time.perf_counter()
    tokens = (last.get("usage") or {}).get("completion_tokens")
    parts = [] if tokens is None else [f"{tokens} tokens in {now - begin:.2f} s"]
    if first is not None:
        parts.append(f"first token {first - begin:.2f} s")
        if tokens and now > first:
            parts.append(f"{(tokens - 1) / (now - first):.1f} tokens/s")
    told = (last.get("metrics") or {}).get("speculative_decoding") or {}
    if told.get("mean_acceptance_length") is not None:
        parts.append(f"acceptance length {told['mean_acceptance_length']:.2f}")
        if told.get("profile"):
            parts.append(f"profile {told['profile']}")
    return " | ".join(parts)
