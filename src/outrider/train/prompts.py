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
    """Prompts from JSON lines: ``{"prompt"}``, OpenAI ``{"messages"}`` or ShareGPT
    ``{"conversations"}``. Closing answers are dropped: the target answers anew.

    Raises:
        InvalidParameter: the file or a line of it cannot be used; names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"{path} cannot be read: {error}; give a JSON lines file") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turns = _turns(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidParameter(
                f"{path}, line {number}: need a JSON object with prompt, messages or conversations"
            ) from None
        if turns:
            prompts.append(make_prompt(path.stem, turns))
    found = list(unique(prompts))
    if not found:
        raise InvalidParameter(f"{path} holds no prompts; give one JSON object a line")
    return found


def _turns(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    if "messages" in entry:
        turns = [{"role": str(m["role"]), "content": str(m["content"])} for m in entry["messages"]]
    elif "conversations" in entry:
        turns = [
            {"role": _SHAREGPT_ROLES.get(m["from"], m["from"]), "content": str(m["value"])}
            for m in entry["conversations"]
        ]
    else:
        turns = [{"role": "user", "content": str(entry["prompt"])}]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns
