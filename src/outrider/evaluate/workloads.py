"""Workloads: the prompts that an evaluation runs. Knows files and text, no model and no tokenizer.

Eight families are built in, written for this project and free of rights (CC0): ``builtin:chat``
and so on, or ``builtin:all``. Any other name is the path of a JSON lines file, one prompt a line:

    {"id": "...", "family": "...", "tags": ["short"], "licence": "...",
     "messages": [{"role": "user", "content": "..."}]}

Only the text is needed; ``{"prompt": "..."}`` is the shortest line. Other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter

FAMILIES = ("chat", "code", "math", "edit", "extract", "summarize", "agent", "creative")
ROLES = ("system", "user", "assistant", "tool")  # the chat format's own words

_BUILTIN = "builtin:"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One prompt: a conversation whose next turn is the model's.

    Attributes:
        id: unique within its workload.
        family: what kind of work it is; numbers are reported by family.
        tags: free words; the built-in prompts carry "short" or "long" (over 600 words).
        licence: under which terms the text may be used; "unknown" if the file does not say.
        messages: the conversation.
    """

    id: str
    family: str
    tags: tuple[str, ...]
    licence: str
    messages: tuple[Message, ...]

    @property
    def words(self) -> int:
        """Words of all turns together, split at white space."""
        return sum(len(message.content.split()) for message in self.messages)

    def chat(self) -> list[dict[str, str]]:
        """The conversation as chat templates and servers take it."""
        return [{"role": m.role, "content": m.content} for m in self.messages]


def load_workload(spec: str, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """The prompts of ``builtin:<family>``, of ``builtin:all``, or of a JSON lines file, in order.

    ``builtin:all`` takes the families in turn, so that a small ``limit`` still covers each.

    Args:
        limit: take the first so many prompts; `None` takes all.

    Raises:
        InvalidParameter: there is no such family or file, a line is not a prompt (the line is
            named), or two prompts share an id.
    """
    if limit is not None and limit < 1:
        raise InvalidParameter(f"limit is {limit}; use at least 1, or none for all prompts")
    if spec == f"{_BUILTIN}all":
        rounds = zip_longest(*(_builtin(family) for family in FAMILIES))
        prompts: Sequence[Prompt] = [p for turn in rounds for p in turn if p is not None]
    elif spec.startswith(_BUILTIN):
        prompts = _builtin(spec.removeprefix(_BUILTIN))
    else:
        prompts = _from_file(spec)
    return tuple(prompts[:limit])


def parse_workload(data: bytes, *, name: str, family: str) -> tuple[Prompt, ...]:
    """The prompts in the bytes of a JSON lines file; blank lines are skipped.

    Args:
        name: what errors call the file.
        family: the family of lines that name none; their ids are ``family:line number``.

    Raises:
        InvalidParameter: as in `load_workload`.
    """
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{name}, line {number}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as fault:
            raise InvalidParameter(
                f"{where}: byte {fault.start + 1} is not UTF-8; save the file as UTF-8"
            ) from None
        if not text.strip():
            continue
        prompt = _prompt(text, where, family=family, number=number)
        if prompt.id in lines:
            raise InvalidParameter(
                f"{where}: id {prompt.id!r} is taken by line {lines[prompt.id]}; ids must differ"
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InvalidParameter(f"{name} holds no prompt; give at least one line of JSON")
    return tuple(prompts)


def _builtin(family: str) -> tuple[Prompt, ...]:
    if family not in FAMILIES:
        known = ", ".join((*FAMILIES, "all"))
        raise InvalidParameter(f"no built-in workload {family!r}; choose one of {known}")
    source = resources.files("outrider.evaluate").joinpath("data", f"{family}.jsonl")
    return parse_workload(source.read_bytes(), name=f"{_BUILTIN}{family}", family=family)


def _from_file(spec: str) -> tuple[Prompt, ...]:
    path = Path(spec)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else fault
        raise InvalidParameter(
            f"workload {spec!r} cannot be read: {reason}; give a JSON lines file or "
            f"{_BUILTIN}<family>"
        ) from None
    return parse_workload(data, name=spec, family=path.stem)


def _prompt(text: str, where: str, *, family: str, number: int) -> Prompt:
    return prompt_of(line_object(text, where), where, family=family, number=number)


def line_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object on a line.

    Raises:
        InvalidParameter: it is none; ``where`` is named.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise InvalidParameter(f"{where}: not JSON: {fault}") from None
    if not isinstance(line, dict):
        raise InvalidParameter(f'{where}: a prompt is an object such as {{"prompt": "..."}}')
    return line


def prompt_of(line: Mapping[str, Any], where: str, *, family: str, number: int) -> Prompt:
    """The prompt that a line's object is.

    Args:
        where: what errors call the line.
        family: where the line names none; the id is then ``family:number``.

    Raises:
        InvalidParameter: it is no prompt.
    """
    tags = line.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise InvalidParameter(f"{where}: tags must be a list of strings, got {tags!r}")
    family = _text(line, "family", where, default=family)
    return Prompt(
        id=_text(line, "id", where, default=f"{family}:{number}"),
        family=family,
        tags=tuple(tags),
        licence=_text(line, "licence", where, default="unknown"),
        messages=_messages(line, where),
    )


def _messages(line: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    if ("prompt" in line) == ("messages" in line):
        raise InvalidParameter(f'{where}: give either "prompt" or "messages"')
    if "prompt" in line:
        return (Message("user", _text(line, "prompt", where)),)
    turns = line["messages"]
    if not isinstance(turns, list) or not turns:
        raise InvalidParameter(f"{where}: messages must be a list of at least one message")
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        here = f"{where}, message {i}"
        if not isinstance(turn, dict):
            raise InvalidParameter(f'{here}: must be {{"role": ..., "content": ...}}')
        role = _text(turn, "role", here)
        if role not in ROLES:
            raise InvalidParameter(f"{here}: role {role!r} is none of {', '.join(ROLES)}")
        messages.append(Message(role, _text(turn, "content", here)))
    if messages[-1].role not in ("user", "tool"):
        raise InvalidParameter(
            f"{where}: the last message is the {messages[-1].role}'s; end with the user's or a "
            "tool's, so that the model's turn is next"
        )
    return tuple(messages)


def _text(line: Mapping[str, Any], key: str, where: str, *, default: str | None = None) -> str:
    value = line.get(key, default)
    if not isinstance(value, str) or not value.strip():
        found = repr(value) if key in line else "nothing"
        raise InvalidParameter(f"{where}: {key} must be a non-empty string, got {found}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidParameter(f"{where}: {key} holds half a surrogate pair; remove it")
    return value
