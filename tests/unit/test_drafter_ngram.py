"""Prompt lookup: the longest match, then the newest, against a scan of the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, NodeBudget, SequenceView
from outrider.drafters.ngram import Match, NgramConfig, NgramDrafter, NgramIndex
from outrider.errors import InvalidParameter


def scan(tokens: Sequence[int], config: NgramConfig) -> Match | None:
    """The plain twin: compare every place with the end of the text."""
    best: Match | None = None
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while (
            length < min(config.max_match, end) and tokens[end - 1 - length] == tokens[-1 - length]
        ):
            length += 1
        if length >= config.min_match and (best is None or length > best.length):
            best = Match(end, length)
    return best


def guess(
    tokens: Sequence[int], *, count: int = 4, ends: frozenset[int] = frozenset()
) -> DraftTree:
    drafter = NgramDrafter()
    drafter.observe([Commit(1, tuple(tokens))])
    stream = Stream(Noise(0), Purpose.DRAFT)
    view = SequenceView(1, tokens, 1, SamplingParams(), ends, stream)
    return drafter.propose([view], [NodeBudget(count, count)])[0]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=50),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 7),
)
def test_the_index_finds_what_a_scan_finds(
    tokens: list[int], size: int, more: int, chunk: int
) -> None:
    config = NgramConfig(min_match=size, max_match=size + more)
    index = NgramIndex(config)
    for start in range(0, len(tokens), chunk):
        index.extend(tokens[start : start + chunk])
        assert index.find() == scan(index.tokens, config)


def test_the_longest_match_wins_over_a_newer_one() -> None:
    assert guess([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).tokens[1] == 7


def test_of_equal_matches_the_newest_wins() -> None:
    assert guess([2, 3, 7, 9, 2, 3, 8, 6, 2, 3]).tokens[1] == 8


def test_the_end_of_the_text_is_continued_as_a_period() -> None:
    assert guess([5, 1, 2, 3, 1, 2, 3], count=7).tokens == (3, 1, 2, 3, 1, 2, 3, 1)


def test_guesses_stop_after_an_end() -> None:
    assert guess([1, 2, 3, 9, 4, 1, 2], ends=frozenset({9})).tokens == (2, 3, 9)


def test_confidence_grows_with_the_match_and_with_depth() -> None:
    short = guess([1, 2, 3, 4, 5, 9, 2]).confidence
    assert short is None or short == (1.0,)
    two = guess([7, 1, 2, 3, 4, 5, 8, 1, 2]).confidence
    four = guess([7, 9, 6, 1, 2, 3, 4, 5, 9, 6, 1, 2]).confidence
    assert two is not None
    assert four is not None
    assert list(two[1:]) == sorted(two[1:])
    assert all(a < b < 1 for a, b in zip(two[1:], four[1:], strict=True))


def test_no_match_no_guess() -> None:
    assert len(guess([1, 2, 3, 4])) == 1
    assert len(guess([1])) == 1


def test_the_search_is_bounded() -> None:
    config = NgramConfig(min_match=1, max_match=4, max_occurrences=2)
    index = NgramIndex(config)
    index.extend([1, 2, 3, 7, 3, 8, 3, 9, 1, 2, 3])  # the longest match is the third newest
    assert index.find() == Match(7, 1)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"min_match": 0}, "min_match 0"),
        ({"min_match": 5, "max_match": 4}, "min_match 5 with max_match 4"),
        ({"max_occurrences": 0}, "max_occurrences is 0"),
    ],
)
def test_impossible_settings_are_refused(kwargs: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        NgramConfig(**kwargs)
