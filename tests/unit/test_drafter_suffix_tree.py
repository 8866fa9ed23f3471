"""The suffix trees against a twin that counts by scanning the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.suffix_tree import (
    GrowingTree,
    Guess,
    Location,
    Node,
    SharedTree,
    guess_path,
    guess_tree,
)
from outrider.errors import InvalidParameter


def shuffled(seed: int, longest: int) -> list[int]:
    """A text from a seed: generated lists are mostly short and plain, these are neither."""
    rng = random.Random(seed)
    return [rng.randrange(3) for _ in range(rng.randint(longest // 2, longest))]


SEED = st.integers(0, 2**32)
TEXT = st.one_of(st.lists(st.integers(0, 2), max_size=40), SEED.map(lambda s: shuffled(s, 60)))
SHORT = st.one_of(st.lists(st.integers(0, 2), max_size=14), SEED.map(lambda s: shuffled(s, 16)))
DEPTH = st.integers(2, 9)


class Scan:
    """The plain twin: counts in texts by looking at every place."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int) -> None:
        self.texts = [tuple(text) for text in texts]
        self.depth = depth

    def followers(self, context: tuple[int, ...]) -> dict[int, tuple[int, tuple[int, int]]]:
        """token -> (how often it followed the context, when it last did)."""
        found: dict[int, tuple[int, tuple[int, int]]] = {}
        if len(context) >= self.depth:
            return found
        for serial, text in enumerate(self.texts):
            for at in range(len(text) - len(context)):
                if text[at : at + len(context)] == context:
                    token = text[at + len(context)]
                    found[token] = (found.get(token, (0,))[0] + 1, (serial, at))
        return found

    def path(self, context: tuple[int, ...], count: int, floor: float) -> Guess:
        tokens: list[int] = []
        confidence: list[float] = []
        probability, score = 1.0, 0.0
        while len(tokens) < count:
            found = self.followers((*context, *tokens))
            if not found:
                break
            token = max(found, key=lambda t: found[t])
            given_parent = found[token][0] / sum(times for times, _ in found.values())
            if probability * given_parent < floor:
                break
            probability *= given_parent
            score += probability
            tokens.append(token)
            confidence.append(given_parent)
        return Guess(tokens, list(range(-1, len(tokens) - 1)), confidence, score)

    def tree_score(self, context: tuple[int, ...], count: int, depth: int, floor: float) -> float:
        """The sum of the ``count`` largest path probabilities."""
        all_probabilities: list[float] = []

        def visit(path: tuple[int, ...], probability: float) -> None:
            found = self.followers((*context, *path))
            total = sum(times for times, _ in found.values())
            for token, (times, _) in found.items():
                below = probability * (times / total)
                if below >= floor and len(path) < depth:
                    all_probabilities.append(below)
                    visit((*path, token), below)

        visit((), 1.0)
        return sum(sorted(all_probabilities, reverse=True)[:count])

    def matches(self, context: tuple[int, ...]) -> list[int]:
        """Lengths of the context's suffixes that occur with something after them, longest first."""
        longest = min(len(context) - 1, self.depth - 1)
        lengths = range(longest, 0, -1)
        return [n for n in lengths if self.followers(context[-n:])]


def continuing(locations: Sequence[Location]) -> list[Location]:
    """Those with something after them."""
    return [
        m for m in locations if m.node.children or m.position < min(m.node.stop, len(m.node.text))
    ]


def local_matches(tree: GrowingTree) -> list[Location]:
    return [tree.locate(length) for length in range(tree.longest_match(), 0, -1)]


def shared_matches(tree: SharedTree, context: Sequence[int]) -> list[Location]:
    lengths = range(tree.longest_match(context), 0, -1)
    return [tree.locate(context, length) for length in lengths]


def same(guess: Guess, twin: Guess) -> bool:
    return (
        guess.tokens == twin.tokens
        and guess.parents == twin.parents
        and guess.confidence == pytest.approx(twin.confidence)
        and guess.score == pytest.approx(twin.score)
    )


def compare(locations: Sequence[Location], context: tuple[int, ...], scan: Scan) -> None:
    found = continuing(locations)
    assert [m.length for m in found] == scan.matches(context)
    for match in found:
        suffix = context[-match.length :]
        for count, floor in ((1, 0.0), (5, 0.3)):
            guess = guess_path(match, count=count, min_probability=floor, ends=())
            assert same(guess, scan.path(suffix, count, floor))
        bushy = guess_tree(match, count=6, depth=3, min_probability=0.1, ends=())
        assert bushy.score == pytest.approx(scan.tree_score(suffix, 6, 3, 0.1))
        check_tree(bushy, suffix, scan)


def check_tree(guess: Guess, suffix: tuple[int, ...], scan: Scan) -> None:
    """Every node's confidence is the frequency of its token after its path; no siblings agree."""
    paths: list[tuple[int, ...]] = []
    for token, parent, confidence in zip(
        guess.tokens, guess.parents, guess.confidence, strict=True
    ):
        above = () if parent < 0 else paths[parent]
        found = scan.followers((*suffix, *above))
        assert confidence == pytest.approx(
            found[token][0] / sum(times for times, _ in found.values())
        )
        paths.append((*above, token))
    assert len(set(paths)) == len(paths)


def nodes(root: Node) -> list[Node]:
    waiting, found = [root], []
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += node.children.values()
    return found


@settings(max_examples=80, deadline=None)
@given(TEXT, DEPTH)
def test_the_growing_tree_counts_like_a_scan(text: list[int], depth: int) -> None:
    tree = GrowingTree(depth)
    for i, token in enumerate(text):
        tree.extend([token])
        if i % 5 == 4 or i == len(text) - 1:
            own = tuple(text[: i + 1])
            compare(local_matches(tree), own, Scan([own], depth))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), SHORT), max_size=10),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    DEPTH,
)
def test_the_shared_tree_counts_like_a_scan_through_evictions(
    history: list[list[int] | None], context: list[int], depth: int
) -> None:
    tree, live = SharedTree(depth), []
    for text in history:
        if text is not None:
            tree.insert(text)
            live.append(text)
        elif live:
            tree.remove_oldest()
            live.pop(0)
        assert (len(tree), tree.tokens) == (len(live), sum(map(len, live)))
        check_shared(tree, live)
        compare(shared_matches(tree, context), tuple(context), Scan(live, depth))


def check_shared(tree: SharedTree, live: list[list[int]]) -> None:
    """Counts add up, labels point to live texts only, and no node is there without need."""
    texts = {tuple(text) for text in live}
    for node in nodes(tree.root):
        assert node.through == sum(child.count for child in node.children.values())
        if node is not tree.root:
            assert node.count >= max(1, node.through)
            assert node.text in texts
            assert len(node.children) != 1 or node.through < node.count


def test_a_text_that_ends_inside_a_label_renews_the_guess() -> None:
    tree = SharedTree(8)
    for text in ([1, 2, 3, 5], [1, 2, 3, 6]):
        tree.insert(text)
    context = [0, 1, 2, 3]
    guess = guess_path(tree.locate(context, 3), count=1, min_probability=0.1, ends=())
    assert guess.tokens == [6]
    tree.insert([1, 2])
    guess = guess_path(tree.locate([0, 1, 2], 2), count=2, min_probability=0.1, ends=())
    assert guess.tokens == [3, 6]


@pytest.mark.parametrize("length", range(1, 12))
def test_a_match_is_shorter_than_its_context(length: int) -> None:
    tree = SharedTree(9)
    text = list(range(length))
    tree.insert(text)
    assert tree.longest_match(text) == min(length - 1, 8)
    assert tree.longest_match([99, *text]) == min(length, 8)


def test_an_emptied_tree_is_empty() -> None:
    tree = SharedTree(8)
    for text in ([1, 2, 1, 2, 1], [1, 2, 3], [2, 1, 2]):
        tree.insert(text)
    for _ in range(3):
        tree.remove_oldest()
    assert (tree.root.children, tree.root.through, tree.tokens, len(tree)) == ({}, 0, 0, 0)


def test_a_long_repeat_stays_small() -> None:
    tree = GrowingTree(64)
    tree.extend([7] * 500)
    assert len(nodes(tree.root)) == 2
    assert [m.length for m in local_matches(tree)] == list(range(63, 0, -1))


def test_guesses_stop_after_an_end() -> None:
    tree = GrowingTree(16)
    tree.extend([1, 2, 3, 9, 4, 5, 1, 2])
    match = local_matches(tree)[0]
    path = guess_path(match, count=5, min_probability=0.1, ends=frozenset({9}))
    assert (path.tokens, path.score) == ([3, 9], 2.0)
    assert guess_tree(match, count=5, depth=5, min_probability=0.1, ends={9}).tokens == [3, 9]


@pytest.mark.parametrize("kind", [GrowingTree, SharedTree])
def test_a_tree_needs_depth(kind: type[GrowingTree] | type[SharedTree]) -> None:
    with pytest.raises(InvalidParameter, match="depth 1"):
        kind(1)
