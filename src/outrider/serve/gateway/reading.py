"""Reads an answer on its way through: whole events in, the same bytes out.

What passes is what the engine sent, byte for byte and event by event; only a usage event that the
client did not ask for is left out. On the way the reader notes what a verdict needs: when the first
content came, usage, acceptance, how it ended, the text. It knows no profile and no connection.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.backends.base import Acceptance
from outrider.backends.dialect import Json, count, first_choice

ReadAcceptance = Callable[[Json], Acceptance | None]

_BREAK = re.compile(rb"\r?\n\r?\n")
_LONGEST_EVENT = 4 * 2**20
MOST_TEXT = 64 * 2**10  # characters kept of an answer, for comparing


class Malformed(Exception):
    """What came is no answer; the message is one line for the log."""


@dataclass
class Reading:
    """What is known of an answer so far. Times are on the monotonic clock.

    Attributes:
        first: when the first content came; `None` before.
        last: when the latest content came.
        chunks: events with content; no count of tokens.
        prompt_tokens, completion_tokens: from usage; `None` where the engine sent none.
        finish: of the first choice.
        error: the engine's own error event.
        done: the end mark came.
        acceptance: what the engine tells of its guesses.
        texts: text by choice, thoughts included, at most `MOST_TEXT` characters each.
        calls: (name, arguments) by choice and place.
        tops: by choice, each token and the likeliest ones at its place, where asked for.
    """

    first: float | None = None
    last: float | None = None
    chunks: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    done: bool = False
    acceptance: Acceptance | None = None
    texts: dict[int, list[str]] = field(default_factory=dict)
    calls: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    tops: dict[int, list[tuple[str, list[tuple[str, float]]]]] = field(default_factory=dict)

    def text(self, choice: int = 0) -> str:
        return "".join(self.texts.get(choice, ()))

    def content(self) -> tuple[object, ...]:
        """All that two answers must share to be the same, in a comparable form."""
        texts = tuple((choice, "".join(parts)) for choice, parts in sorted(self.texts.items()))
        calls = tuple((place, *call) for place, call in sorted(self.calls.items()))
        return texts, calls, self.finish, self.completion_tokens

    @property
    def complete(self) -> bool:
        """A stream is whole once it says how it finished."""
        return self.finish is not None and self.error is None


class Reader:
    """One answer under way.

    Args:
        read: from an event to acceptance, by the engine's dialect.
        chat: chat completions, not completions.
        strip_usage: leave the usage event out: the client did not ask for it.
    """

    def __init__(self, read: ReadAcceptance, *, chat: bool, strip_usage: bool = False) -> None:
        self.seen = Reading()
        self._read = read
        self._part = "delta" if chat else ""
        self._whole = "message" if chat else ""
        self._strip = strip_usage
        self._rest = b""
        self._sizes: dict[int, int] = {}

    def feed(self, data: bytes, now: float) -> bytes:
        """Take in bytes of a stream; returns what may pass on, whole events only.

        Raises:
            Malformed: it is no stream of JSON events.
        """
        buffer = self._rest + data if self._rest else data
        keep: list[bytes] = []
        start = 0
        for found in _BREAK.finditer(buffer):
            if self._event(buffer[start : found.start()], now):
                keep.append(buffer[start : found.end()])
            start = found.end()
        self._rest = buffer[start:]
        if len(self._rest) > _LONGEST_EVENT:
            raise Malformed("an event has no end")
        return b"".join(keep)

    def end(self) -> None:
        """The stream is over.

        Raises:
            Malformed: it broke off, or never told how it finished.
        """
        if self._rest.strip():
            raise Malformed("the stream broke off inside an event")
        if self.seen.error is None and not self.seen.complete:
            raise Malformed("the stream ended before the answer was finished")

    def whole(self, body: bytes, now: float) -> None:
        """Take in an answer that came in one piece.

        Raises:
            Malformed: it is no answer.
        """
        told = _object(body)
        choices = told.get("choices")
        if not isinstance(choices, list) or not choices:
            raise Malformed("the answer has no choices")
        for choice in choices:
            if isinstance(choice, Mapping):
                self._choice(choice, self._whole)
        self.seen.first = self.seen.last = now
        self._facts(told, final=True)

    def _event(self, event: bytes, now: float) -> bool:
        """Note what an event says; does it pass?"""
        if event.startswith(b"data:") and b"\n" not in event:
            data = event[5:].strip()
        else:
            lines = [line.strip() for line in event.splitlines()]
            data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
            if not data:
                if all(not line or line.startswith((b":", b"event:", b"id:", b"retry:"))
                       for line in lines):  # fmt: skip
                    return True
                raise Malformed(f"an event is none: {event[:60]!r}")
        if data == b"[DONE]":
            self.seen.done = True
            return True
        return self._json(_object(data), now)

    def _json(self, event: Mapping[str, Any], now: float) -> bool:
        error = event.get("error")
        if error:
            message = error.get("message") if isinstance(error, Mapping) else error
            self.seen.error = " ".join(str(message).split())[:300]
            return True
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise Malformed("an event has no choices")
        content = False
        for choice in choices:
            if isinstance(choice, Mapping):
                content = self._choice(choice, self._part) or content
        if content:
            self.seen.first = self.seen.first or now
            self.seen.last = now
            self.seen.chunks += 1
        self._facts(event, final=not choices or "timings" in event or "sglext" in event)
        return bool(choices) or not self._strip or not isinstance(event.get("usage"), Mapping)

    def _choice(self, choice: Mapping[str, Any], key: str) -> bool:
        """Note a choice's content; was there any?"""
        index = choice.get("index")
        place = index if isinstance(index, int) else 0
        part = choice.get(key) if key else choice
        content = False
        if isinstance(part, Mapping):
            text = part.get("content") if key else part.get("text")
            for words in (part.get("reasoning_content") or part.get("reasoning"), text):
                if isinstance(words, str) and words:
                    content = True
                    self._keep(place, words)
            calls = part.get("tool_calls")
            if isinstance(calls, list) and calls:
                content = True
                for at, call in enumerate(calls):
                    self._call(place, at, call)
        if isinstance(choice.get("logprobs"), Mapping):
            self.seen.tops.setdefault(place, []).extend(_tops(choice["logprobs"]))
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish and (self.seen.finish is None or place == 0):
            self.seen.finish = finish
            self.seen.acceptance = self._read({"choices": [choice]}) or self.seen.acceptance
        return content

    def _keep(self, place: int, words: str) -> None:
        size = self._sizes.get(place, 0)
        if size < MOST_TEXT:
            self.seen.texts.setdefault(place, []).append(words[: MOST_TEXT - size])
            self._sizes[place] = size + len(words)

    def _call(self, place: int, at: int, call: object) -> None:
        if not isinstance(call, Mapping):
            return
        index = call.get("index")
        function = call.get("function")
        if isinstance(function, Mapping):
            key = (place, index if isinstance(index, int) else at)
            known = self.seen.calls.setdefault(key, ["", ""])
            known[0] += str(function.get("name") or "")
            known[1] += str(function.get("arguments") or "")

    def _facts(self, event: Mapping[str, Any], *, final: bool) -> None:
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.seen.prompt_tokens = count(usage.get("prompt_tokens"))
            self.seen.completion_tokens = count(usage.get("completion_tokens"))
        if final or first_choice(event).get("finish_reason"):
            self.seen.acceptance = self._read(event) or self.seen.acceptance


def _tops(told: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Tokens with the likeliest ones at their places, from chat's form or that of completions."""
    found = []
    content = told.get("content")
    for entry in content if isinstance(content, list) else ():
        if isinstance(entry, Mapping):
            tops = entry.get("top_logprobs")
            pairs = [
                (t.get("token"), t.get("logprob"))
                for t in (tops if isinstance(tops, list) else ())
                if isinstance(t, Mapping)
            ]
            found.append((str(entry.get("token")), _pairs(pairs)))
    tokens, likeliest = told.get("tokens"), told.get("top_logprobs")
    if isinstance(tokens, list) and isinstance(likeliest, list):
        for token, top in zip(tokens, likeliest, strict=False):
            listed = top.items() if isinstance(top, Mapping) else ()
            found.append((str(token), _pairs(listed)))
    return found


def _pairs(told: Iterable[tuple[object, object]]) -> list[tuple[str, float]]:
    """What is a token with a log-probability; NaN, which engines write all the same, is none."""
    found = []
    for token, value in told:
        if isinstance(token, str) and isinstance(value, int | float) and value <= 0.01:
            found.append((token, float(value)))
    return found


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Malformed(f"what came is no JSON object: {data[:60]!r}")
    return found
