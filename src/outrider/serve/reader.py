"""From a growing text to the pieces of an answer: content, reasoning, tool calls.

Readers take text in any cut and give the same pieces for every cut (up to where content is split),
since each decides only on what can no longer change. One reader serves streamed and whole answers,
so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; its arguments follow in `CallArguments`."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A fragment of the arguments of a call, as JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """Takes text as it comes and gives pieces."""

    def feed(self, text: str) -> list[Piece]: ...

    def close(self) -> list[Piece]:
        """No more text will come."""
        ...


class PlainReader:
    """All text is content."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def close(self) -> list[Piece]:
        return []


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest tail of ``text`` that may be the beginning of a mark."""
    longest = max(map(len, marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class Splitter:
    """Finds the first of some marks in a growing text."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """What is certainly before any mark; the mark, if it was met; and what follows it."""
        held = self._held + text
        hits = sorted((held.find(mark), mark) for mark in self._marks if mark in held)
        if hits:
            place, mark = hits[0]
            self._held = ""
            return held[:place], mark, held[place + len(mark) :]
        keep = held_back(held, self._marks)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None, ""

    def close(self) -> str:
        held, self._held = self._held, ""
        return held


class ReasoningReader:
    """Splits ``<think> ... </think>`` from the answer that another reader reads.

    Args:
        answer: reads what is not reasoning.
        inside: the prompt has opened the reasoning already.
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, answer: Reader, *, inside: bool) -> None:
        self._answer = answer
        self._state = "inside" if inside else "before"
        self._open = Splitter(self.OPEN)
        self._close = Splitter(self.CLOSE)
        self._trim = True  # white space at the start of a part is the template's, not the answer's

    def feed(self, text: str) -> list[Piece]:
        if self._state == "before":
            return self._before(text)
        if self._state == "inside":
            return self._inside(text)
        return self._after(text)

    def close(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == "before":
            pieces += self._answer.feed(self._open.close())
        if self._state == "inside":
            rest = self._close.close()
            pieces += [Reasoning(rest)] if rest else []
        return pieces + self._answer.close()

    def _before(self, text: str) -> list[Piece]:
        """Reasoning may only be at the very start."""
        shown, mark, rest = self._open.feed(text)
        if mark is not None and not shown.strip():
            self._state = "inside"
            return self._inside(rest)
        if mark is None and not shown.strip():
            return self._answer.feed(shown) if shown else []
        self._state, self._trim = "after", False
        return self._after(shown + (mark or "") + rest + self._open.close())

    def _inside(self, text: str) -> list[Piece]:
        shown, mark, rest = self._close.feed(text)
        if self._trim:
            shown = shown.lstrip()
            self._trim = not shown
        pieces: list[Piece] = [Reasoning(shown)] if shown else []
        if mark is not None:
            self._state, self._trim = "after", True
            pieces += self._after(rest)
        return pieces

    def _after(self, text: str) -> list[Piece]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return self._answer.feed(text) if text else []
