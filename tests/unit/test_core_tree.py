"""The draft tree against plain definitions, on random trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.tree import NO_PARENT, DraftTree
from outrider.errors import InvalidTree

ROW = torch.tensor([0.5, 0.5])


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> DraftTree:
    size = draw(st.integers(1, most))
    parents = [NO_PARENT] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    return DraftTree(tuple(tokens), tuple(parents), confidence=(1.0,) + (0.5,) * (size - 1))


@given(trees())
def test_paths_depths_children_and_ancestors_agree(tree: DraftTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert len(path) == tree.depths[node]
        assert tree.path_tokens(node) == tuple(tree.tokens[n] for n in path)
        assert path == (() if node == 0 else (*tree.path(tree.parents[node]), node))
        assert set(torch.nonzero(tree.ancestors[node]).flatten().tolist()) == {0, *path}
        assert tree.children(node) == tuple(n for n in range(len(tree)) if tree.parents[n] == node)
    assert tree.is_chain == (sorted(tree.depths) == list(range(len(tree))))


@given(trees(), st.data())
def test_keeping_an_ancestral_set_keeps_its_paths(tree: DraftTree, data: st.DataObject) -> None:
    leaves = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    nodes = sorted({0}.union(*(tree.path(leaf) for leaf in leaves)))
    kept = tree.keep(nodes)
    assert len(kept) == len(nodes)
    assert kept.confidence is not None
    for new, old in enumerate(nodes):
        assert kept.path_tokens(new) == tree.path_tokens(old)
        assert kept.tokens[new] == tree.tokens[old]


@given(trees(), st.integers(0, 12), st.integers(0, 6))
def test_a_cut_tree_is_within_its_budget_and_as_large_as_it_may_be(
    tree: DraftTree, nodes: int, depth: int
) -> None:
    cut = tree.cut(nodes=nodes, depth=depth)
    assert len(cut) - 1 <= nodes
    assert max(cut.depths) <= depth
    within = sum(0 < d <= depth for d in tree.depths)
    assert len(cut) - 1 == min(nodes, within)
    assert sorted(cut.depths) == sorted(tree.depths)[: len(cut)]


@given(trees(), st.integers(0, 12), st.integers(0, 6))
def test_a_drawn_tree_is_cut_by_whole_depths(tree: DraftTree, nodes: int, depth: int) -> None:
    drawn = DraftTree(tree.tokens, tree.parents, q=dict.fromkeys(tree.parents[1:], ROW))
    cut = drawn.cut(nodes=nodes, depth=depth)
    assert len(cut) - 1 <= nodes
    left = max(cut.depths)
    fitting = [d for d in tree.depths if d <= depth]
    assert left == max(d for d in fitting if sum(0 < other <= d for other in fitting) <= nodes)
    assert len(cut) == sum(d <= left for d in tree.depths)
    for node in range(len(cut)):
        if cut.children(node):
            assert cut.q[node] is ROW


def test_chain_and_root() -> None:
    root = DraftTree.root_only(7)
    assert (root.tokens, root.parents, len(root), root.is_chain) == ((7,), (-1,), 1, True)
    assert root.cut(nodes=0, depth=0) is root
    chain = DraftTree.chain([7, 8, 9], q={0: ROW}, confidence=[1, 0.5, 0.2])
    assert chain.is_chain
    assert chain.depths == (0, 1, 2)
    assert chain.path_tokens(2) == (8, 9)
    assert chain.cut(nodes=1, depth=9).tokens == (7, 8)
    assert not DraftTree((1, 2, 3), (-1, 0, 0)).is_chain


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "at least a root"),
        ((1, 2), (-1,), "2 tokens and 1 parents"),
        ((1,), (0,), "root's parent is 0"),
        ((1, 2), (-1, 1), "node 1 has parent 1"),
        ((1, 2), (-1, -1), "node 1 has parent -1"),
        ((1, 2, 3), (-1, 2, 0), "parents come before children"),
    ],
)
def test_broken_trees_are_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidTree, match=message):
        DraftTree(tokens, parents)


def test_broken_rows_and_confidences_are_refused() -> None:
    with pytest.raises(InvalidTree, match="2 confidences for 1 nodes"):
        DraftTree((1,), (-1,), confidence=(1.0, 1.0))
    for node in (-1, 1):
        with pytest.raises(InvalidTree, match="q rows hang from"):
            DraftTree((1,), (-1,), q={node: ROW})


def test_keep_refuses_orphans_strangers_and_picking_among_draws() -> None:
    chain = DraftTree.chain([1, 2, 3])
    with pytest.raises(InvalidTree, match="node 1 is dropped"):
        chain.keep([2])
    for node in (-1, 3):
        with pytest.raises(InvalidTree, match="cannot keep"):
            chain.keep([node])
    pair = DraftTree((1, 2, 3), (-1, 0, 0), q={0: ROW})
    with pytest.raises(InvalidTree, match="depth only"):
        pair.keep([1])
    assert pair.keep([]).tokens == (1,)
    assert pair.keep([1, 2]).q[0] is ROW


@settings(max_examples=20)
@given(trees(6))
def test_trees_are_values_that_do_not_change(tree: DraftTree) -> None:
    with pytest.raises(AttributeError):
        tree.tokens = ()  # type: ignore[misc]
    before = (tree.tokens, tree.parents)
    tree.cut(nodes=1, depth=1)
    assert (tree.tokens, tree.parents) == before
