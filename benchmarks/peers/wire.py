"""What runner and adapters say to each other: JSON lines on standard input and output.

Standard library only, since every adapter runs in its engine's own environment. An adapter is a
script with a class that keeps the `Peer` protocol; its process holds one engine in one mode, so
that no two engines share a thread pool. The order of a conversation:

    adapter: {"ready": true, "versions": {...}, "build_flags": [...], "note": "..."}
    runner:  {"op": "generate", "prompt_tokens": [...], "max_tokens": 96}
    adapter: {"tokens": [...], "ttft_ms": 31.2, "total_ms": 710.5, "n": 96}
    runner:  {"op": "pass_ms", "rows": [1, 8]}
    adapter: {"pass_ms": {"1": 7.0, "8": 20.5}, "method": "..."}

Any answer may be {"error": "one line"} instead. The end of the input ends the adapter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Setting:
    """What an adapter is started with.

    Attributes:
        model: the file or folder that this engine reads.
        threads: compute threads.
        mode: "plain", or the name of a way to guess from the text; each adapter knows its own.
        options: words that only this adapter knows, such as a precision or a program's folder.
        context: positions that a request may need.
    """

    model: str
    threads: int
    mode: str = "plain"
    options: dict[str, str] = field(default_factory=dict)
    context: int = 4096

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Answer:
    """One greedy continuation: its tokens, and milliseconds to the first and to the last."""

    tokens: list[int]
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True)
class About:
    """What ran: versions by package, build flags, and anything a reader must know."""

    versions: dict[str, str]
    build_flags: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of one pass by number of rows, and how that was measured."""

    milliseconds: dict[int, float]
    method: str


class NotMeasured(Exception):
    """This engine offers no way to measure that; the text says why."""


class Peer(Protocol):
    """One engine in one mode."""

    def about(self) -> About: ...

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        """Exactly ``max_tokens`` greedy tokens; end tokens do not end the answer."""

    def pass_ms(self, rows: Sequence[int]) -> PassTimes:
        """What a pass over so many rows costs; raises `NotMeasured`."""

    def close(self) -> None: ...


class Stamps:
    """Times at which tokens arrived, from the moment it is made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append((time.perf_counter() - self._begin) * 1000)

    def answer(self, tokens: list[int]) -> Answer:
        """The answer with the first and the last stamp."""
        return Answer(tokens, self._times[0], self._times[-1])


def serve(build: Callable[[Setting], Peer]) -> None:
    """Build the peer from the setting on the command line and answer until the input ends.

    Standard output is for the protocol alone: what an engine prints goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        peer = build(Setting(**json.loads(sys.argv[1])))
        say({"ready": True, **asdict(peer.about())})
    except Exception as fault:
        say({"error": _line(fault)})
        raise
    try:
        for line in sys.stdin:
            say(_reply(peer, json.loads(line)))
    finally:
        peer.close()


def _reply(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["op"] == "generate":
            answer = peer.generate(request["prompt_tokens"], request["max_tokens"])
            return {**asdict(answer), "n": len(answer.tokens)}
        times = peer.pass_ms(request["rows"])
        return {"pass_ms": times.milliseconds, "method": times.method}
    except Exception as fault:  # whatever an engine raises becomes a row with a reason
        return {"error": _line(fault)}


def _line(fault: Exception) -> str:
    text = " ".join(str(fault).split())
    return text[:300] if isinstance(fault, NotMeasured) else f"{type(fault).__name__}: {text[:300]}"
