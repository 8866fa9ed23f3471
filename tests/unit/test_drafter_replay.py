"""Replay: proposes what was recorded while it agrees, and reads traces with care."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Commit, NodeBudget, SequenceView
from outrider.drafters.replay import (
    Recording,
    ReplayDrafter,
    load_recordings,
    prompt_sha,
    save_recordings,
)
from outrider.errors import InvalidParameter

PROMPT = (4, 5, 6)


def guesses(drafter: ReplayDrafter, output: tuple[int, ...], *, count: int = 3) -> tuple[int, ...]:
    drafter.observe([Commit(1, PROMPT)])
    for token in output:
        drafter.observe([Commit(1, (token,))])
    stream = Stream(Noise(0), Purpose.DRAFT)
    tokens = (*PROMPT, *output)
    view = SequenceView(1, tokens, len(PROMPT), SamplingParams(), frozenset(), stream)
    [tree] = drafter.propose([view], [NodeBudget(count, count)])
    drafter.forget([1])
    assert tree.is_chain
    assert tree.tokens[0] == tokens[-1]
    return tree.tokens[1:]


def test_it_proposes_the_recording_while_it_agrees() -> None:
    drafter = ReplayDrafter([Recording.of(PROMPT, (1, 2, 3, 4, 5))])
    assert guesses(drafter, ()) == (1, 2, 3)
    assert guesses(drafter, (1, 2)) == (3, 4, 5)
    assert guesses(drafter, (1, 2, 3, 4)) == (5,)
    assert guesses(drafter, (1, 2, 3, 4, 5)) == ()
    assert guesses(drafter, (1, 2, 3, 4, 5, 6)) == ()
    assert guesses(drafter, (1, 9)) == ()
    assert guesses(drafter, (), count=0) == ()


def test_of_several_recordings_one_that_agrees_speaks() -> None:
    drafter = ReplayDrafter([Recording.of(PROMPT, (1, 2, 3)), Recording.of(PROMPT, (1, 7, 8))])
    assert guesses(drafter, (1,)) == (2, 3)
    assert guesses(drafter, (1, 7)) == (8,)


def test_other_prompts_get_nothing() -> None:
    assert guesses(ReplayDrafter([Recording.of((4, 5), (6, 1, 2))]), ()) == ()


def test_prompts_are_named_by_their_tokens() -> None:
    assert prompt_sha([1, 23]) != prompt_sha([12, 3])
    assert prompt_sha(PROMPT) == prompt_sha(list(PROMPT))


def test_a_trace_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recordings = [Recording.of(PROMPT, (1, 2)), Recording.of((9,), ())]
    save_recordings(path, recordings)
    assert load_recordings(path, vocab_size=10) == recordings
    assert guesses(ReplayDrafter.load(path), ()) == (1, 2)


GOOD = {"prompt_sha": prompt_sha(PROMPT), "prompt_tokens": 3, "tokens": [1, 2]}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "found list"),
        (json.dumps({"tokens": [1]}), "a recording has"),
        (json.dumps({**GOOD, "more": 1}), "a recording has"),
        (json.dumps({**GOOD, "prompt_sha": "xyz"}), "prompt_sha is 'xyz'"),
        (json.dumps({**GOOD, "prompt_sha": 5}), "prompt_sha is 5"),
        (json.dumps({**GOOD, "prompt_tokens": 0}), "prompt_tokens is 0"),
        (json.dumps({**GOOD, "prompt_tokens": True}), "prompt_tokens is True"),
        (json.dumps({**GOOD, "tokens": "12"}), "tokens is '12'"),
        (json.dumps({**GOOD, "tokens": [1, -1]}), "token -1"),
        (json.dumps({**GOOD, "tokens": [1.5]}), "token 1.5"),
        (json.dumps({**GOOD, "tokens": [10]}), "token 10; the target has 10 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(InvalidParameter, match=r"trace\.jsonl:3: ") as caught:
        load_recordings(path, vocab_size=10)
    assert named in str(caught.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="does not exist"):
        load_recordings(tmp_path / "none.jsonl")
