"""Prompts for the next drafter from what a rollout kept: `outrider train --from-feedback`.

The folder is `outrider.rollout.feedback.FeedbackFolder`'s. Requests of types whose acceptance
drifted are the training set. The business and regression sets are what the next drafter is judged
by, so a folder's prompts of those are left out, and one that is in both sets is as well; who wants
to train on one of them names its file. The module knows files and messages; no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidParameter
from outrider.rollout.feedback import CASES, SETS
from outrider.train.prompts import TrainPrompt, make_prompt, unique

TRAINING: Final = "training"
JUDGING: Final = tuple(sorted(set(SETS.values()) - {TRAINING}))


@dataclass(frozen=True)
class FeedbackPrompts:
    """What a feedback folder, or one set of it, holds to train on.

    Attributes:
        prompts: each once.
        without_text: entries that hold no text: the opt-in was off when they were kept.
        judged_by: prompts left out, since the next drafter is evaluated on them.
    """

    prompts: tuple[TrainPrompt, ...]
    without_text: int = 0
    judged_by: int = 0


def read_feedback(path: Path) -> FeedbackPrompts:
    """The prompts of a feedback folder's training set, or of one named set.

    Raises:
        InvalidParameter: there is nothing to read, a line is damaged, or no entry holds text.
    """
    if path.is_dir():
        return _of_folder(path)
    if path.name == CASES:
        raise InvalidParameter(
            f"{path} holds figures and hashes, no prompts; give its folder or one of the sets in it"
        )
    found, empty = _prompts(path)
    if not found:
        raise InvalidParameter(f"{path} holds no prompt text{_of_cases(empty)}; {_OPT_IN}")
    return FeedbackPrompts(found, empty)


_OPT_IN: Final = "set feedback.text: true in the rollout, so that prompts are kept, redacted"


def _of_folder(folder: Path) -> FeedbackPrompts:
    cases = _count(folder / CASES)
    sets = {kind: folder / f"{kind}.jsonl" for kind in (*JUDGING, TRAINING)}
    there = [kind for kind, file in sets.items() if file.exists()]
    if cases is None and not there:
        raise InvalidParameter(
            f"{folder} holds no feedback (no {CASES}); give the folder that feedback.folder names "
            "in the rollout"
        )
    read = {kind: _prompts(sets[kind]) for kind in there}
    texts = sum(len(found) for found, _ in read.values())
    if not texts:
        empty = max(cases or 0, sum(empty for _, empty in read.values()))
        raise InvalidParameter(f"{folder} holds no prompt text{_of_cases(empty)}; {_OPT_IN}")
    judged = {p.id for kind in JUDGING for p in read.get(kind, ((), 0))[0]}
    training = read.get(TRAINING, ((), 0))[0]
    prompts = tuple(p for p in training if p.id not in judged)
    if not prompts:
        names = " or ".join(str(sets[kind]) for kind in JUDGING if kind in there)
        raise InvalidParameter(
            f"{folder} holds no prompts of drifting types to train on; name {names} to train on "
            "what the next drafter would be judged by"
        )
    kept = sum(found_and_empty[1] for found_and_empty in read.values())
    return FeedbackPrompts(
        prompts,
        without_text=kept if cases is None else max(kept, cases - texts),
        judged_by=len(training) - len(prompts),
    )


def _of_cases(count: int) -> str:
    return f" in any of its {count} cases" if count else ""


def _prompts(path: Path) -> tuple[tuple[TrainPrompt, ...], int]:
    """The prompts of a set, each once, and how many entries hold no text."""
    found, empty = [], 0
    for place, entry in _lines(path):
        if "set" in entry:
            continue
        family = entry.get("family")
        turns = _turns(entry.get("messages"), where=f"{path}, line {place}")
        if turns:
            found.append(make_prompt(family if isinstance(family, str) else "feedback", turns))
        else:
            empty += 1
    return tuple(unique(found)), empty


def _turns(messages: object, *, where: str) -> list[dict[str, str]]:
    """The turns up to the last that is not the model's own; none where nobody said anything."""
    if messages is None:
        return []
    if not isinstance(messages, list):
        raise InvalidParameter(f"{where}: messages is no list; mend or remove the line")
    turns = []
    for message in messages:
        told = message if isinstance(message, Mapping) else {}
        role, content = told.get("role"), told.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidParameter(
                f"{where}: a message needs role and content of text; mend or remove the line"
            )
        turns.append({"role": role, "content": content})
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    asked = any(turn["role"] == "user" and turn["content"].strip() for turn in turns)
    return turns if asked else []


def _count(path: Path) -> int | None:
    """Cases kept, whatever each line holds; `None` where there is no file."""
    try:
        return sum(bool(line.strip()) for line in path.read_text("utf-8").splitlines())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidParameter(f"{path} cannot be read: {fault}; give a feedback folder") from None


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Every entry of a set and its line."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidParameter(
            f"{path} cannot be read: {fault}; give a feedback folder or a set of one"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise InvalidParameter(
                f"{path}, line {number}: no JSON object; mend or remove the line"
            )
        yield number, entry
