"""Replay: guesses that are known to be right, because they were recorded.

It proposes the recorded output of a prompt for as long as the committed output agrees with it. That
gives the upper bound of what any drafter can gain on a machine, and a test of the engine in which
everything is accepted.

A trace is JSONL, one object per finished output:
`{"prompt_sha": "<64 hex digits>", "prompt_tokens": 12, "tokens": [5, 17, ...]}`. The prompt is
named by a hash, so a trace does not give prompts away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.errors import InvalidParameter

_KEYS = {"prompt_sha", "prompt_tokens", "tokens"}
_HEX = set("0123456789abcdef")


def prompt_sha(prompt: Sequence[int]) -> str:
    """SHA-256 of the prompt's token ids in decimal, joined by commas; 64 hex digits."""
    return hashlib.sha256(",".join(map(str, prompt)).encode("ascii")).hexdigest()


@dataclass(frozen=True)
class Recording:
    """One finished output.

    Attributes:
        prompt_sha: names the prompt, see `prompt_sha`.
        prompt_tokens: the prompt's length.
        tokens: the output.
    """

    prompt_sha: str
    prompt_tokens: int
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Sequence[int], output: Sequence[int]) -> Recording:
        """The recording of ``output`` after ``prompt``."""
        return cls(prompt_sha(prompt), len(prompt), tuple(output))


def save_recordings(path: Path, recordings: Iterable[Recording]) -> None:
    """Write a trace."""
    lines = (json.dumps(asdict(recording)) + "\n" for recording in recordings)
    path.write_text("".join(lines), encoding="utf-8")


def load_recordings(path: Path, *, vocab_size: int | None = None) -> list[Recording]:
    """Read a trace, and check it against the target's vocabulary where that is known.

    Empty lines are skipped.

    Raises:
        InvalidParameter: there is no such file, a line is not a recording, or holds a token that
            the target lacks; the message gives file and line.
    """
    recordings = []
    if not path.is_file():
        raise InvalidParameter(f"the trace {path} does not exist; record one first")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path.name}:{number}"
                recordings.append(_parse(line, where=where, vocab_size=vocab_size))
    return recordings


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse(line: str, *, where: str, vocab_size: int | None) -> Recording:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidParameter(f"{where}: not JSON ({error.msg}); record the trace anew") from None
    if not isinstance(record, dict) or set(record) != _KEYS:
        what = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise InvalidParameter(f"{where}: found {what}; a recording has {sorted(_KEYS)}")
    sha, length, tokens = record["prompt_sha"], record["prompt_tokens"], record["tokens"]
    if not isinstance(sha, str) or len(sha) != 64 or not set(sha) <= _HEX:
        raise InvalidParameter(f"{where}: prompt_sha is {sha!r}; use 64 lower-case hex digits")
    if not _is_count(length) or length == 0:
        raise InvalidParameter(f"{where}: prompt_tokens is {length!r}; use a positive integer")
    if not isinstance(tokens, list):
        raise InvalidParameter(f"{where}: tokens is {tokens!r}; use a list of token ids")
    for token in tokens:
        if not _is_count(token):
            raise InvalidParameter(f"{where}: token {token!r}; token ids are integers from 0 on")
        if vocab_size is not None and token >= vocab_size:
            raise InvalidParameter(
                f"{where}: token {token}; the target has {vocab_size} tokens, "
                "replay a trace that it recorded itself"
            )
    return Recording(sha, length, tuple(tokens))


@dataclass
class _State:
    """A sequence's recordings that agree with it, and how much output it has."""

    agreeing: list[Recording]
    done: int = 0


class ReplayDrafter:
    """Proposes from recordings. Where a prompt has several, the first that agrees speaks."""

    name: str = "replay"
    needs: Needs = Needs(trees=False)

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self._recordings: dict[tuple[str, int], list[Recording]] = {}
        for recording in recordings:
            key = (recording.prompt_sha, recording.prompt_tokens)
            self._recordings.setdefault(key, []).append(recording)
        self._states: dict[int, _State] = {}

    @classmethod
    def load(cls, path: Path, *, vocab_size: int | None = None) -> ReplayDrafter:
        """The drafter of a trace on disk; errors as `load_recordings`."""
        return cls(load_recordings(path, vocab_size=vocab_size))

    def __len__(self) -> int:
        """Sequences with state."""
        return len(self._states)

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            state = self._states.get(commit.sequence)
            if state is None:
                key = (prompt_sha(commit.tokens), len(commit.tokens))
                self._states[commit.sequence] = _State(list(self._recordings.get(key, ())))
                continue
            end = state.done + len(commit.tokens)
            state.agreeing = [
                r for r in state.agreeing if r.tokens[state.done : end] == commit.tokens
            ]
            state.done = end

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [self._guess(v, min(b.nodes, b.depth)) for v, b in zip(views, budgets, strict=True)]

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)

    def _guess(self, view: SequenceView, count: int) -> DraftTree:
        state = self._states.get(view.id)
        known = state is not None and view.prompt_length + state.done == len(view.tokens)
        if state is None or not known or not state.agreeing:
            return DraftTree.root_only(view.root)
        guesses = state.agreeing[0].tokens[state.done : state.done + max(0, count)]
        return DraftTree.chain([view.root, *guesses], confidence=[1.0] * (1 + len(guesses)))
