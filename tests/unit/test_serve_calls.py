"""Tool calls and reasoning are read the same however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.serve.calls import BareReader, HermesReader, MistralReader
from outrider.serve.reader import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    PlainReader,
    Reader,
    Reasoning,
    ReasoningReader,
)

NAMES = ("get_weather", "add")
Made = Callable[[], Reader]


def summary(pieces: list[Piece]) -> dict[str, object]:
    """What an answer holds, whatever it was cut into."""
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(calls), "calls are numbered in order"
            calls.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            assert piece.index == len(calls) - 1, "arguments belong to the last call"
            calls[piece.index][1] += piece.text
    return {
        "content": "".join(p.text for p in pieces if isinstance(p, Content)),
        "reasoning": "".join(p.text for p in pieces if isinstance(p, Reasoning)),
        "calls": [(name, arguments) for name, arguments in calls],
    }


def read(make: Made, parts: list[str]) -> dict[str, object]:
    reader = make()
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return summary(pieces + reader.close())


def bare() -> Reader:
    return BareReader(NAMES)


def thinking() -> Reader:
    return ReasoningReader(HermesReader(), inside=False)


def opened() -> Reader:
    return ReasoningReader(PlainReader(), inside=True)


W, A = '{"city": "Paris {x} \\"y\\""}', '{"a": 1, "b": [2, {"c": "}"}]}'
ONE = f'{{"name": "get_weather", "arguments": {W}}}'
TWO = f'{{"arguments": {A}, "name": "add"}}'
CASES: dict[str, tuple[Made, str, str, list[tuple[str, str]]]] = {
    "hermes: text alone": (HermesReader, "Hello <tool> world", "Hello <tool> world", []),
    "hermes: one": (HermesReader, f"<tool_call>\n{ONE}\n</tool_call>", "", [("get_weather", W)]),
    "hermes: text before, two calls in a row": (
        HermesReader,
        f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "Let me see.",
        [("get_weather", W), ("add", A)],
    ),
    "hermes: text after": (
        HermesReader,
        f"<tool_call>{ONE}</tool_call>\n\nDone.",
        "Done.",
        [("get_weather", W)],
    ),
    "hermes: no arguments": (
        HermesReader,
        '<tool_call>{"name": "add"}</tool_call>',
        "",
        [("add", "{}")],
    ),
    "hermes: arguments as a string": (
        HermesReader,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "hermes: cut off in the arguments": (
        HermesReader,
        '<tool_call>{"name": "add", "arguments": {"a": 1',
        "",
        [("add", '{"a": 1')],
    ),
    "hermes: cut off in the name": (
        HermesReader,
        '<tool_call>{"name": "ad',
        '<tool_call>{"name": "ad',
        [],
    ),
    "hermes: no object": (HermesReader, "<tool_call>nothing", "<tool_call>nothing", []),
    "hermes: no name": (HermesReader, '<tool_call>{"a": 1} x', '<tool_call>{"a": 1} x', []),
    "hermes: white space at the end": (HermesReader, "Hello \n", "Hello \n", []),
    "llama: one": (bare, ONE.replace("arguments", "parameters"), "", [("get_weather", W)]),
    "llama: tag and two": (
        bare,
        f"<|python_tag|>{ONE}; {TWO}",
        "",
        [("get_weather", W), ("add", A)],
    ),
    "llama: text": (bare, "The answer is {4}.", "The answer is {4}.", []),
    "llama: JSON that is no call": (bare, '{"answer": 4}', '{"answer": 4}', []),
    "llama: a tool that is not there": (
        bare,
        '{"name": "rm", "parameters": {}} x',
        '{"name": "rm", "parameters": {}} x',
        [],
    ),
    "llama: cut off": (bare, '{"name": "add", "parameters": {"a', "", [("add", '{"a')]),
    "llama: cut off early": (bare, ' {"na', ' {"na', []),
    "mistral: list": (
        MistralReader,
        f"[TOOL_CALLS] [{ONE}, {TWO}]",
        "",
        [("get_weather", W), ("add", A)],
    ),
    "mistral: names": (
        MistralReader,
        f"Well. [TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]add{A}",
        "Well.",
        [("get_weather", W), ("add", A)],
    ),
    "mistral: text": (MistralReader, "a [TOOL] b [", "a [TOOL] b [", []),
    "mistral: nothing behind the mark": (
        MistralReader,
        "[TOOL_CALLS] none",
        "[TOOL_CALLS] none",
        [],
    ),
    "reasoning before a call": (
        thinking,
        f"<think>\nHm, <tool_call> or not?\n</think>\n\n<tool_call>{ONE}</tool_call>",
        "",
        [("get_weather", W)],
    ),
    "reasoning that never ends": (thinking, "<think>on and on", "", []),
    "reasoning in the middle is text": (thinking, "a <think>b</think>", "a <think>b</think>", []),
    "reasoning opened by the prompt": (opened, "so\n</think>\n\nyes", "yes", []),
}
PICKED = pytest.mark.parametrize("name", CASES)


@PICKED
def test_an_answer_is_read(name: str) -> None:
    make, text, content, calls = CASES[name]
    found = read(make, [text])
    assert (found["content"], found["calls"]) == (content, calls)


@PICKED
def test_no_cut_changes_what_is_read(name: str) -> None:
    make, text, *_ = CASES[name]
    whole = read(make, [text])
    assert read(make, list(text)) == whole
    for place in range(len(text) + 1):
        assert read(make, [text[:place], text[place:]]) == whole
        for later in range(place, min(place + 12, len(text)) + 1):
            assert read(make, [text[:place], text[place:later], text[later:]]) == whole


def test_reasoning_is_told_apart() -> None:
    text = "<think>\nHm, maybe.\n</think>\n\nYes."
    found = read(lambda: ReasoningReader(PlainReader(), inside=False), [text])
    assert (found["reasoning"], found["content"]) == ("Hm, maybe.\n", "Yes.")


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        ONE,
        TWO,
        "[TOOL_CALLS]",
        "[",
        "]",
        ", ",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        "; ",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "text",
        '"name"',
        ":",
        "add",
        "[ARGS]",
    ]
)


@pytest.mark.parametrize("make", [HermesReader, bare, MistralReader, thinking, opened])
@given(parts=st.lists(FRAGMENTS, max_size=8), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_text_is_read_the_same_in_any_cut(
    make: Made, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    places = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(make, pieces) == read(make, [text])


def test_arguments_come_in_fragments_that_are_the_models_own_text() -> None:
    reader = HermesReader()
    pieces = [p for character in f"<tool_call>{ONE}</tool_call>" for p in reader.feed(character)]
    fragments = [p.text for p in pieces if isinstance(p, CallArguments)]
    assert len(fragments) > 10
    assert json.loads("".join(fragments)) == json.loads(W)
