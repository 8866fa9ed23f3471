"""How engines that speak the OpenAI interface differ. One `Dialect` per engine, in its own file.

A dialect is data and small pure functions: where the engine tells its version, what to add to a
request so that it tells of its guesses, how to read what it then says, and the exact names of its
counters. What a dialect does not name, the engine does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.backends.base import Acceptance

Json = Mapping[str, Any]


@dataclass(frozen=True)
class CounterNames:
    """Exact sample names on an engine's Prometheus page; empty for what it has not.

    Attributes:
        per_position: with a label `position_label` that counts from 0.
        requests: finished requests, all labels added.
        cache_use: a gauge from 0 to 1.
    """

    drafts: str = ""
    drafted: str = ""
    accepted: str = ""
    per_position: str = ""
    position_label: str = "position"
    requests: str = ""
    prompt_tokens: str = ""
    output_tokens: str = ""
    running: str = ""
    waiting: str = ""
    cache_use: str = ""
    preemptions: str = ""


@dataclass(frozen=True)
class TokenizeCall:
    """The request that turns a text or a conversation into tokens.

    Attributes:
        text, chat: from (model, prompt) to a body; `None` where the engine cannot.
    """

    path: str
    text: Callable[[str, str], Json]
    chat: Callable[[str, Sequence[Json]], Json] | None = None


@dataclass(frozen=True)
class Dialect:
    """One engine's ways.

    Attributes:
        kind: its name.
        version_paths: of GET requests, tried in turn.
        read_version: from such an answer to the version.
        owners: values of `owned_by` in the list of models that give it away.
        extra_body: added to every request.
        read: from an answer's object (whole, or a late chunk of a stream) to acceptance.
        metrics_path, counters: its Prometheus page.
        tokenize: see `TokenizeCall`.
        sampling_off: fields that switch off what its sampler does unasked (a model's own top-k, for
            one); `None` where it is not known what its log-probabilities mean or where it tells
            none for tokens that were guessed.
        by_id: fields by which its log-probabilities call tokens by id; empty where it cannot.
        scaled_logprobs: its log-probabilities are those after temperature; at 1 there is no
            difference.
        oldest: the oldest version that the facts hold for; `None` for no bound.
        refused: fields of `Ask` that it has no place for.
        notes: from its version to what a reader of the numbers must know.
    """

    kind: str
    version_paths: tuple[str, ...] = ()
    read_version: Callable[[Json], str | None] = lambda told: _text(told.get("version"))
    owners: tuple[str, ...] = ()
    extra_body: Json = field(default_factory=dict)
    read: Callable[[Json], Acceptance | None] = lambda event: None
    metrics_path: str = "/metrics"
    counters: CounterNames | None = None
    tokenize: TokenizeCall | None = None
    sampling_off: Json | None = None
    by_id: Json = field(default_factory=dict)
    scaled_logprobs: bool = False
    oldest: tuple[int, ...] | None = None
    refused: tuple[str, ...] = ()
    notes: Callable[[str | None], tuple[str, ...]] = lambda version: ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def count(value: object) -> int | None:
    """A count as engines send them, or `None` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and int(value) == value else None


def counts(value: object) -> tuple[int, ...] | None:
    """A list of counts, or `None` for anything else."""
    if not isinstance(value, list | tuple):
        return None
    found = [count(item) for item in value]
    return None if None in found else tuple(item for item in found if item is not None)


def inner(event: Json, *path: str) -> Json | None:
    """The object at a path of keys, or `None`."""
    here: object = event
    for key in path:
        here = here.get(key) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else None


def first_choice(event: Json) -> Json:
    """The first choice of an answer, or an empty object."""
    choices = event.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0]
    return {}


def version_tuple(version: str) -> tuple[int, ...]:
    """``0.32.0+cpu`` as (0, 32, 0); what is no number ends it."""
    numbers: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
