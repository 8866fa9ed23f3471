"""Do two answers to one request agree? Pure functions of what was read.

On the exact path they must be equal, at every temperature. Elsewhere only greedy answers are
compared, and a first difference between two tokens that are nearly as likely is a tie: the sums of
a batch are added in another order there, and neither answer is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outrider.serve.gateway.reading import Reading

Agreement = Literal["same", "tie", "different", "unknown"]

TIE_NATS = 0.25  # of log-probability between the two likeliest tokens at the first difference
Top = tuple[str, Sequence[tuple[str, float]]]  # a token, and the likeliest at its place


def comparable(body: Mapping[str, Any], *, exact: bool) -> bool:
    """May answers to this request be compared token by token?"""
    if exact:
        return True
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature == 0


def compare(base: Reading, other: Reading, *, exact: bool) -> tuple[Agreement, str]:
    """Agreement, and where they part, in a line.

    Args:
        base: the baseline's answer.
        other: the other profile's.
        exact: nothing is a tie.
    """
    if not base.complete or not other.complete:
        return "unknown", "one of the answers is not whole"
    if base.content() == other.content():
        return "same", ""
    for choice in sorted(base.texts.keys() | other.texts.keys()):
        one, two = base.text(choice), other.text(choice)
        if one != two:
            place = first_difference(one, two)
            where = f"choice {choice} parts at character {place} of {len(one)} and {len(two)}"
            tops = other.tops.get(choice)
            if not exact and not tops:
                return "unknown", f"{where}; the engine does not tell how likely its tokens were"
            if not exact and near_tie(one, tops or (), place):
                return "tie", where
            return "different", where
    if base.calls != other.calls:
        return "different", "tool calls differ"
    if base.finish != other.finish:
        return "different", f"finished by {base.finish} and {other.finish}"
    if exact and base.completion_tokens is not None and other.completion_tokens is not None:
        return "different", f"{base.completion_tokens} and {other.completion_tokens} tokens"
    return "same", ""


def other_prompt(base: Reading, other: Reading) -> str:
    """How the engines read one prompt, where they read it otherwise, in a line; empty where they
    agree or do not tell. Holds at every temperature: what is sampled does not enter."""
    return unequal_prompts("one prompt", base.prompt_tokens, other.prompt_tokens)


def unequal_prompts(what: str, one: int | None, two: int | None) -> str:
    """That two engines count another number of tokens in one prompt; empty where they do not, or
    do not tell."""
    if one is None or two is None or one == two:
        return ""
    return f"{what} is {one} and {two} tokens: another tokenizer or chat template"


def first_difference(one: str, two: str) -> int:
    """The first character at which two texts differ."""
    place = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            return place
        place += 1
    return place


def near_tie(base: str, tops: Sequence[Top], place: int) -> bool:
    """At the token that holds this character: was the baseline's token nearly as likely?"""
    at = 0
    for token, likeliest in tops:
        if at + len(token) > place:
            chosen = next((p for words, p in likeliest if words == token), None)
            for words, probability in likeliest:
                if words != token and words and base.startswith(words, at):
                    return chosen is not None and abs(chosen - probability) <= TIE_NATS
            return False
        at += len(token)
    return False


def loops(text: str, *, least: int = 120, longest: int = 60) -> bool:
    """Does the text end by repeating itself: the same at most ``longest`` characters at least
    three times over at least ``least``?"""
    tail = text[-max(least, 3 * longest) :]
    if len(tail) < least:
        return False
    for period in range(1, longest + 1):
        span = max(least, 3 * period)
        if len(tail) >= span and tail[-span:-period] == tail[-span + period :]:
            return True
    return False
