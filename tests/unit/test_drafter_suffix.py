"""Suffix decoding: the scoring rule against its definition, and the store across requests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, NodeBudget, SequenceView
from outrider.drafters.suffix import ResponseStore, SuffixConfig, SuffixDrafter
from outrider.drafters.suffix_tree import (
    GrowingTree,
    Guess,
    SharedTree,
    guess_path,
    guess_tree,
)
from outrider.errors import InvalidParameter

BUDGET = NodeBudget(nodes=8, depth=5)


def view(
    tokens: Sequence[int], *, id: int = 1, tenant: str = "", ends: frozenset[int] = frozenset()
) -> SequenceView:
    stream = Stream(Noise(0), Purpose.DRAFT)
    return SequenceView(id, tokens, len(tokens), SamplingParams(), ends, stream, tenant)


def finish(drafter: SuffixDrafter, output: Sequence[int], *, tenant: str = "", id: int = 9) -> None:
    """A request of one prompt token that answered ``output``."""
    drafter.observe([Commit(id, (0,), tenant), Commit(id, tuple(output), tenant)])
    drafter.forget([id])


def propose(drafter: SuffixDrafter, tokens: Sequence[int], **kwargs: Any) -> DraftTree:
    """The tree for a request that has said ``tokens`` so far."""
    shown = view(tokens, **kwargs)
    drafter.observe([Commit(shown.id, tuple(tokens), shown.tenant)])
    [tree] = drafter.propose([shown], [BUDGET])
    return tree


def best_by_definition(
    config: SuffixConfig, text: Sequence[int], outputs: Sequence[Sequence[int]]
) -> Guess:
    """The rule as it is written down: every length of both trees, no length left out."""

    def drafts(locations: Any) -> Guess:
        best = Guess([], [], [], 0.0)
        for match in locations:  # shortest first; later ones win ties
            allowed = math.floor(config.factor * match.length + config.offset)
            count = max(0, min(BUDGET.nodes, allowed))
            floor = config.min_probability
            if config.shape == "path":
                count = min(count, BUDGET.depth)
                guess = guess_path(match, count=count, min_probability=floor, ends=())
            else:
                guess = guess_tree(
                    match, count=count, depth=BUDGET.depth, min_probability=floor, ends=()
                )
            best = guess if guess.score >= best.score else best
        return best

    local, shared = GrowingTree(config.depth), SharedTree(config.depth)
    local.extend(text)
    for output in outputs:
        shared.insert(output)
    here = drafts(local.locate(n) for n in range(1, local.longest_match() + 1))
    there = drafts(shared.locate(text, n) for n in range(1, shared.longest_match(text) + 1))
    return there if there.score > here.score else here


def shuffled(seed: int) -> list[int]:
    """A text from a seed: generated lists are mostly short and plain, these are neither."""
    rng = random.Random(seed)
    return [rng.randrange(3) for _ in range(rng.randint(1, 40))]


TEXT = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 2**32).map(shuffled)
)


@settings(max_examples=250, deadline=None)
@given(
    TEXT,
    st.lists(TEXT, max_size=4),
    st.sampled_from(["path", "tree"]),
    st.sampled_from([(1.0, 0.0), (0.5, 1.0), (2.5, -1.0), (0.0, 3.0)]),
    st.integers(2, 12),
)
def test_the_best_score_wins(
    text: list[int],
    outputs: list[list[int]],
    shape: Any,
    allowance: tuple[float, float],
    depth: int,
) -> None:
    factor, offset = allowance
    config = SuffixConfig(depth=depth, factor=factor, offset=offset, shape=shape)
    drafter = SuffixDrafter(config)
    for output in outputs:
        finish(drafter, output)
    tree = propose(drafter, text)
    wanted = best_by_definition(config, text, outputs)
    assert tree.tokens[1:] == tuple(wanted.tokens)
    assert [parent - 1 for parent in tree.parents[1:]] == wanted.parents
    assert tree.confidence == (1.0, *wanted.confidence)


def test_equal_scores_go_to_the_longer_match() -> None:
    # After 1 2 came 3, which ends. After 2 alone came 5 (2/3), then 6 (1/2): 2/3 + 1/3 is as much.
    text = [1, 2, 3, 4, 2, 5, 6, 7, 2, 5, 8, 9, 1, 2]
    drafter = SuffixDrafter(SuffixConfig(factor=0.0, offset=3.0, shape="path"))
    assert propose(drafter, text, ends=frozenset({3, 6, 8})).tokens == (2, 3)


def test_a_finished_output_helps_the_next_request() -> None:
    drafter = SuffixDrafter()
    assert len(propose(drafter, [1, 2, 3])) == 1
    drafter.forget([1])
    finish(drafter, [1, 2, 3, 4, 5, 6])
    assert propose(drafter, [8, 1, 2, 3]).tokens == (3, 4, 5, 6)


def test_prompts_are_not_stored() -> None:
    drafter = SuffixDrafter()
    drafter.observe([Commit(1, (1, 2, 3, 4, 5))])
    drafter.forget([1])
    assert drafter.store.tokens("") == 0


def test_tenants_do_not_share() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 5, 6], tenant="a")
    assert len(propose(drafter, [1, 2, 3], id=1, tenant="b")) == 1
    assert len(propose(drafter, [9, 1, 2, 3], id=2, tenant="a")) > 1


def test_the_store_may_be_off() -> None:
    for config in (SuffixConfig(cached_requests=0), SuffixConfig(cached_tokens=0)):
        drafter = SuffixDrafter(config)
        finish(drafter, [1, 2, 3, 4, 5, 6])
        assert drafter.store.tree("") is None


def test_the_store_is_bounded_in_requests_tokens_and_tenants() -> None:
    store = ResponseStore(SuffixConfig(cached_requests=3, cached_tokens=20, max_tenants=2))
    for i in range(10):
        store.add("a", [i, i + 1, i + 2])
    tree = store.tree("a")
    assert tree is not None
    assert (len(tree), store.tokens("a")) == (3, 9)
    store.add("a", list(range(100, 118)))
    assert (len(tree), store.tokens("a")) == (1, 18)
    store.add("a", list(range(200, 250)))
    assert store.tokens("a") == 20
    assert tree.longest_match([0, 249]) == 1  # the tail is what is kept
    store.add("b", [1])
    store.add("a", [1])
    store.add("c", [1])
    assert [store.tree(name) is not None for name in "abc"] == [True, False, True]


def test_guesses_stop_after_an_end() -> None:
    drafter = SuffixDrafter(SuffixConfig(offset=4.0))
    tree = propose(drafter, [1, 2, 3, 9, 4, 1, 2], ends=frozenset({9}))
    assert tree.tokens == (2, 3, 9)


def test_tree_mode_hedges_between_continuations() -> None:
    text = [1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    drafter = SuffixDrafter(SuffixConfig(shape="tree", offset=4.0))
    tree = propose(drafter, text)
    assert {tree.tokens[c] for c in tree.children(0)} == {3, 4}
    assert tree.confidence is not None
    assert tree.confidence[1:3] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"depth": 1}, "depth is 1"),
        ({"factor": -1.0}, "factor is -1.0"),
        ({"factor": math.nan}, "factor is nan"),
        ({"offset": math.inf}, "offset is inf"),
        ({"min_probability": 1.5}, "min_probability is 1.5"),
        ({"shape": "bush"}, "shape is 'bush'"),
        ({"cached_requests": -1}, "cached_requests is -1"),
        ({"cached_tokens": -1}, "cached_tokens is -1"),
        ({"max_tenants": 0}, "max_tenants is 0"),
    ],
)
def test_impossible_settings_are_refused(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        SuffixConfig(**kwargs)
