"""Prompt lookup: the text so far, read as its own draft.

If the last tokens of a sequence occurred before, what followed them then is guessed to follow now
(prompt lookup decoding, Saxena 2023). The module knows nothing of models or other sequences.

One idea keeps it cheap: as in LZ77, only n-grams of the shortest useful length are indexed, each
occurrence linked to the one before. A token costs one dictionary entry whatever the longest match
may be, and a look-up follows the links from the newest occurrence and compares backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.errors import InvalidParameter


@dataclass(frozen=True)
class NgramConfig:
    """How prompt lookup matches.

    Attributes:
        min_match: the shortest match that is believed. One token is nearly always found and nearly
            always followed by something else; two are the shortest that say what is being copied.
        max_match: matches are not told apart beyond this length; at 16 tokens two places of a text
            are copies of each other.
        max_occurrences: how many earlier occurrences are compared, newest first; bounds the time of
            a look-up in text that repeats itself.
    """

    min_match: int = 2
    max_match: int = 16
    max_occurrences: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise InvalidParameter(
                f"min_match {self.min_match} with max_match {self.max_match}; "
                "use 1 <= min_match <= max_match"
            )
        if self.max_occurrences < 1:
            raise InvalidParameter(
                f"max_occurrences is {self.max_occurrences}; compare at least 1 occurrence"
            )


@dataclass(frozen=True)
class Match:
    """An earlier copy of the last ``length`` tokens; ``end`` is the position that followed it."""

    end: int
    length: int


@dataclass
class NgramIndex:
    """One sequence's tokens and where its n-grams occurred. Grows only.

    A place is indexed once a token follows it, so the newest n-gram never finds itself.
    """

    config: NgramConfig
    tokens: list[int] = field(default_factory=list)
    _newest: dict[tuple[int, ...], int] = field(default_factory=dict)
    _earlier: dict[int, int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; constant time for each."""
        size, text = self.config.min_match, self.tokens
        first = max(len(text), size)
        text.extend(tokens)
        for end in range(first, len(text)):
            gram = tuple(text[end - size : end])
            if gram in self._newest:
                self._earlier[end] = self._newest[gram]
            self._newest[gram] = end

    def find(self) -> Match | None:
        """The longest earlier copy of the newest tokens; of equally long ones, the newest."""
        size = self.config.min_match
        end = self._newest.get(tuple(self.tokens[-size:]))
        best: Match | None = None
        for _ in range(self.config.max_occurrences):
            if end is None:
                break
            length = self._match_length(end)
            if best is None or length > best.length:
                best = Match(end, length)
            if best.length == self.config.max_match:
                break
            end = self._earlier.get(end)
        return best

    def _match_length(self, end: int) -> int:
        """How many tokens before ``end`` equal the newest ones, at most `max_match`."""
        text, last = self.tokens, len(self.tokens)
        longest = min(self.config.max_match, end)
        length = self.config.min_match
        while length < longest and text[end - length - 1] == text[last - length - 1]:
            length += 1
        return length

    def continuation(self, match: Match, count: int) -> list[int]:
        """The ``count`` tokens that followed the match.

        Where they run into the present end, the copy goes on with its own guesses: text with a
        period keeps it. The period is the distance to the match.
        """
        period = self.tokens[match.end : match.end + count]
        return [period[i % len(period)] for i in range(count)]


class NgramDrafter:
    """Prompt lookup as a chain without `q`.

    The confidence of a node is 1 - 1 / (length of the match + depth): by the time that a node is
    judged, the guesses above it have lengthened the match.
    """

    name: str = "ngram"
    needs: Needs = Needs(trees=False)

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self._indexes: dict[int, NgramIndex] = {}

    def __len__(self) -> int:
        """Sequences with state."""
        return len(self._indexes)

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            index = self._indexes.get(commit.sequence)
            if index is None:
                index = self._indexes[commit.sequence] = NgramIndex(self.config)
            index.extend(commit.tokens)

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        return [self._guess(v, min(b.nodes, b.depth)) for v, b in zip(views, budgets, strict=True)]

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._indexes.pop(sequence, None)

    def _guess(self, view: SequenceView, count: int) -> DraftTree:
        index = self._indexes.get(view.id)
        # A sequence that was never observed, or not up to its present end, gets no guess.
        if count < 1 or index is None or len(index.tokens) != len(view.tokens):
            return DraftTree.root_only(view.root)
        match = index.find()
        if match is None:
            return DraftTree.root_only(view.root)
        guesses = index.continuation(match, count)
        end = next((i + 1 for i, token in enumerate(guesses) if token in view.ends), count)
        confidence = [1 - 1 / (match.length + depth) for depth in range(1, end + 1)]
        return DraftTree.chain([view.root, *guesses[:end]], confidence=[1.0, *confidence])
