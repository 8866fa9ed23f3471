"""Prompts to train on: a user's file, or written here without any data.

Without a file, prompts come from three wells: user turns that the target writes itself after its
own empty user turn, tasks with random slots (`data/prompts.json`, ours, CC0), and tasks about text
that the target wrote earlier (summarise, edit, extract, follow up), so that copying is learned too.
Everything is a function of a seed. The module knows messages and text; no engine and no features.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter

Messages = tuple[Mapping[str, str], ...]

HELD_OUT_SHARE = 0.03
_TEXT_FAMILIES = ("extract", "summarize", "edit", "agent")
_PLAIN_FAMILIES = ("chat", "creative", "code", "math")
_SLOT = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"[A-Za-z_]{4,}")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


@dataclass(frozen=True)
class TrainPrompt:
    """A conversation whose next turn is the target's.

    Attributes:
        id: stable, from its text.
        family: where it came from, for reports.
        messages: role and content of each turn.
    """

    id: str
    family: str
    messages: Messages

    @property
    def held_out(self) -> bool:
        """Is it for evaluation only? Decided by its text, so that a rerun decides alike."""
        return int(self.id[:8], 16) / 2**32 < HELD_OUT_SHARE


def make_prompt(family: str, messages: Iterable[Mapping[str, str]]) -> TrainPrompt:
    """A prompt with the id of its text, in which spaces and case do not count."""
    turns = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    text = "\n".join(f"{m['role']}: {' '.join(m['content'].lower().split())}" for m in turns)
    return TrainPrompt(hashlib.sha256(text.encode()).hexdigest()[:16], family, turns)


def unique(prompts: Iterable[TrainPrompt]) -> Iterator[TrainPrompt]:
    """The prompts without repetitions, in order."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id not in seen:
            seen.add(prompt.id)
            yield prompt


class Writer:
    """Writes prompts from the built-in tasks, one random number generator for all."""

    def __init__(self, seed: int) -> None:
        text = resources.files("outrider.train").joinpath("data/prompts.json").read_text("utf-8")
        data: dict[str, Any] = json.loads(text)
        self._slots: dict[str, list[str]] = data["slots"]
        self._tasks: dict[str, list[str]] = data["tasks"]
        self._systems: list[str] = data["systems"]
        self._followups: list[str] = data["followups"]
        self._random = random.Random(seed)

    def task(self) -> TrainPrompt:
        """A task without a text: chat, creative, code or math."""
        family = self._random.choice((*_PLAIN_FAMILIES, "chat", "code"))
        return self._prompt(family, self._fill(self._random.choice(self._tasks[family])))

    def about(self, text: str) -> TrainPrompt:
        """A task about a text that somebody wrote."""
        family = self._random.choice(_TEXT_FAMILIES)
        words = sorted(set(_WORD.findall(text))) or ["text"]
        slots = {
            "text": text,
            "word1": self._random.choice(words),
            "word2": self._random.choice(self._slots["word"]),
        }
        return self._prompt(family, self._fill(self._random.choice(self._tasks[family]), slots))

    def follow_up(self, messages: Sequence[Mapping[str, str]], answer: str) -> TrainPrompt:
        """The next turn of a conversation."""
        turn = self._fill(self._random.choice(self._followups))
        said = {"role": "assistant", "content": answer}
        return make_prompt("followup", [*messages, said, {"role": "user", "content": turn}])

    def _prompt(self, family: str, content: str) -> TrainPrompt:
        system = self._random.choice(self._systems)
        turns = [{"role": "system", "content": system}] if system else []
        return make_prompt(family, [*turns, {"role": "user", "content": content}])

    def _fill(self, template: str, given: Mapping[str, str] | None = None) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            if given and name in given:
                return given[name]
            return self._random.choice(self._slots[name])

        return _SLOT.sub(value, template)


def read_prompts(path: Path) -> list[TrainPrompt]:
    """Prompts from a file, each once.

    A ``.txt`` file holds one prompt a line. Any other holds JSON, one object a line or one array of
    them: ``{"prompt"}``, OpenAI ``{"messages"}`` or ShareGPT ``{"conversations"}``. Closing answers
    are dropped, since the target answers anew; conversations without a user's turn are left out.

    Raises:
        InvalidParameter: the file or an entry of it cannot be used; names the entry.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"{path} cannot be read: {error}; give a JSON lines file") from None
    prompts = []
    for place, entry in _entries(path, text):
        try:
            turns = _turns(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidParameter(
                f"{path}, {place}: need a JSON object with prompt, messages or conversations of "
                "text"
            ) from None
        if turns:
            prompts.append(make_prompt(path.stem, turns))
    found = list(unique(prompts))
    if not found:
        raise InvalidParameter(
            f"{path} holds no prompts; give one JSON object a line, or text in a .txt file"
        )
    return found


def held_out_ids(prompts: Sequence[TrainPrompt]) -> frozenset[str]:
    """Which of a user's prompts are for evaluation only: those that say so themselves, but at least
    a tenth of a small file (and one, where there are two), so that there is something to measure.
    """
    own = {p.id for p in prompts if p.held_out}
    least = min(8, -(-len(prompts) // 10)) if len(prompts) > 1 else 0
    for prompt_id in sorted(p.id for p in prompts):
        if len(own) >= least:
            break
        own.add(prompt_id)
    return frozenset(own)


def _entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Every entry of a file, and where it stands."""
    if path.suffix != ".txt" and text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise InvalidParameter(f"{path} is no JSON array: {error}; mend it") from None
        yield from ((f"entry {number}", entry) for number, entry in enumerate(entries, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield f"line {number}", {"prompt": line.strip()}
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError:
            raise InvalidParameter(
                f"{path}, line {number}: no JSON; need a JSON object with prompt, messages or "
                "conversations"
            ) from None


def _turns(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    if "messages" in entry:
        turns = [{"role": _word(m["role"]), "content": _text(m)} for m in entry["messages"]]
    elif "conversations" in entry:
        turns = [
            {"role": _SHAREGPT_ROLES.get(m["from"], _word(m["from"])), "content": _word(m["value"])}
            for m in entry["conversations"]
        ]
    else:
        turns = [{"role": "user", "content": _word(entry["prompt"])}]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    asked = any(turn["role"] == "user" and turn["content"].strip() for turn in turns)
    return turns if asked else []


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is needed")
    return value


def _text(message: Mapping[str, Any]) -> str:
    """A message's content: text, a list of parts (text alone), or nothing beside a tool call."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_word(part["text"]) for part in content)
    return "" if content is None else _word(content)
