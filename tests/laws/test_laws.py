"""L0: the emitted tokens follow the target's law exactly, for every rule and every small tree."""

from __future__ import annotations

import itertools

import pytest
import torch
from enumerate_law import (
    EXACT,
    Enumerator,
    Keyed,
    Table,
    completed,
    drawn,
    emit,
    law,
    shapes,
    table,
    target_law,
    total_variation,
)
from torch import Tensor

from outrider.core.noise import Purpose, Source
from outrider.core.tree import DraftTree
from outrider.core.verify import Rule, block, reject, walk

SHAPES = shapes(5)
CHAINS = [tuple(range(-1, depth)) for depth in (1, 2, 3)]


def depth_of(shape: tuple[int, ...]) -> int:
    return max(DraftTree(tuple(0 for _ in shape), shape).depths)


def assert_exact(run: object, p: Table, length: int) -> None:
    emitted = law(run)  # type: ignore[arg-type]
    assert sum(emitted.values()) == pytest.approx(1, abs=EXACT)
    distance = total_variation(completed(emitted, p, length), target_law(p, length))
    assert distance <= EXACT


def check_drawn(
    rule: Rule, shape: tuple[int, ...], p: Table, q: Table, *, without_replacement: bool
) -> None:
    def run(source: Source) -> tuple[int, ...]:
        tree = drawn(shape, q, source, without_replacement=without_replacement)
        return emit(tree, p, source, rule)

    assert_exact(run, p, depth_of(shape) + 1)


def expected(p: Table, rule: Rule, tree: object) -> float:
    """The expected number of accepted guesses; ``tree`` makes one from a source."""
    lengths = law(lambda source: len(emit(tree(source), p, source, rule)) - 1)  # type: ignore[operator]
    return sum(length * chance for length, chance in lengths.items())


# ---- Every tree up to five nodes ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("without_replacement", [False, True], ids=["with", "without"])
def test_reject_is_exact_on_drawn_trees(shape: tuple[int, ...], without_replacement: bool) -> None:
    """Siblings that are drawn with replacement repeat tokens; those without may run out."""
    seed = len(shape)
    p, q = table(seed, 3), table(seed + 100, 3)
    check_drawn(reject, shape, p, q, without_replacement=without_replacement)


@pytest.mark.parametrize("shape", shapes(4), ids=str)
@pytest.mark.parametrize("without_replacement", [False, True], ids=["with", "without"])
def test_reject_is_exact_with_zeros(shape: tuple[int, ...], without_replacement: bool) -> None:
    """p and q are truncated, each to a support of its own."""
    for seed in (1, 2):
        p, q = table(seed, 3, zeros=0.4), table(seed + 100, 3, zeros=0.4)
        check_drawn(reject, shape, p, q, without_replacement=without_replacement)


@pytest.mark.parametrize("shape", shapes(4), ids=str)
def test_walk_is_exact_on_drawn_trees(shape: tuple[int, ...]) -> None:
    p, q = table(3, 3, zeros=0.2), table(103, 3)
    check_drawn(walk, shape, p, q, without_replacement=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", [walk, reject], ids=["walk", "reject"])
def test_chosen_trees_are_exact(rule: Rule, shape: tuple[int, ...]) -> None:
    """Trees without q: any tokens, also repeated siblings and tokens that p forbids."""
    p = table(5, 3, zeros=0.25)
    for offset in range(3):
        tokens = (0, *((offset + node * node) % 3 for node in range(1, len(shape))))
        tree = DraftTree(tokens, shape)
        assert_exact(lambda source, t=tree: emit(t, p, source, rule), p, depth_of(shape) + 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", [walk, reject], ids=["walk", "reject"])
def test_greedy_targets_are_exact(rule: Rule, shape: tuple[int, ...]) -> None:
    """A one-hot p leaves one outcome, whatever was guessed."""
    p = table(7, 3, one_hot=True)
    tokens = (0, *(node % 3 for node in range(1, len(shape))))
    emitted = law(lambda source: emit(DraftTree(tokens, shape), p, source, rule))
    assert len(emitted) == 1
    whole = completed(emitted, p, 5)
    assert total_variation(whole, target_law(p, 5)) == 0


@pytest.mark.parametrize("without_replacement", [False, True], ids=["with", "without"])
def test_greedy_target_with_soft_draft_is_exact(without_replacement: bool) -> None:
    p, q = table(8, 3, one_hot=True), table(108, 3)
    for shape in shapes(4):
        check_drawn(reject, shape, p, q, without_replacement=without_replacement)


# ---- Chains ----


@pytest.mark.parametrize("shape", CHAINS, ids=lambda shape: f"gamma{len(shape) - 1}")
@pytest.mark.parametrize("rule", [walk, reject, block], ids=["walk", "reject", "block"])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_chains_are_exact(rule: Rule, shape: tuple[int, ...], zeros: float) -> None:
    for seed in (11, 12, 13):
        p, q = table(seed, 3, zeros=zeros), table(seed + 100, 3, zeros=zeros)
        check_drawn(rule, shape, p, q, without_replacement=False)


@pytest.mark.parametrize("rule", [walk, reject, block], ids=["walk", "reject", "block"])
def test_a_small_draft_vocabulary_is_exact(rule: Rule) -> None:
    """The drafter knows tokens 0 and 2 only."""
    inner = table(120, 2)

    def q(context: tuple[int, ...]) -> Tensor:
        row = torch.zeros(4, dtype=torch.float64)
        row[[0, 2]] = inner(context)
        return row

    check_drawn(rule, (-1, 0, 1), table(20, 4), q, without_replacement=False)


@pytest.mark.parametrize("rule", [walk, reject, block], ids=["walk", "reject", "block"])
def test_an_empty_draft_is_plain_decoding(rule: Rule) -> None:
    p = table(21, 4)
    emitted = law(lambda source: emit(DraftTree.root_only(0), p, source, rule))
    assert emitted == pytest.approx({(t,): float(w) for t, w in enumerate(p(()))}, abs=EXACT)


def test_block_takes_chosen_and_mixed_chains() -> None:
    """A chain whose first guess was chosen and whose second was drawn, and the other way round."""
    p, q = table(22, 3), table(122, 3)

    def run(source: Source, drawn_node: int, rule: Rule) -> tuple[int, ...]:
        tokens = [0]
        for node in range(2):
            row = q(tuple(tokens[1:]))
            if node == drawn_node:
                tokens += source.sample(row, position=1 + node, purpose=Purpose.DRAFT)
            else:
                tokens.append(int(row.argmax()))
        rows = {drawn_node: q(tuple(tokens[1 : drawn_node + 1]))}
        return emit(DraftTree.chain(tokens, q=rows), p, source, rule)

    for rule, node in itertools.product((reject, block), (0, 1)):
        assert_exact(lambda source, r=rule, n=node: run(source, n, r), p, 3)


@pytest.mark.parametrize("rule", [walk, reject, block], ids=["walk", "reject", "block"])
def test_single_precision_is_exact_to_its_rounding(rule: Rule) -> None:
    """Also where p and q differ by rounding only, so that the residual is noise."""
    p = table(23, 3)
    for q in (table(123, 3), p, lambda context: 0.999999 * p(context) + 1e-6 / 3):

        def run(source: Source, q: Table = q) -> tuple[int, ...]:
            single = lambda context: q(context).float()  # noqa: E731
            tree = drawn((-1, 0, 1), single, source, without_replacement=False)
            return emit(tree, lambda context: p(context).float(), source, rule)

        assert total_variation(completed(law(run), p, 3), target_law(p, 3)) < 1e-6


# ---- Several steps under keyed noise ----


def _steps(source: Keyed, rule: Rule, p: Table, q: Table, *, for_step: bool) -> tuple[int, ...]:
    """Three tokens by steps of a two-guess chain, every draw a function of its key."""
    out: tuple[int, ...] = ()
    while len(out) < 3:
        start = len(out) + 1
        source.step = start if for_step else 0
        tokens = [0]
        for node in range(2):
            tokens += source.sample(q(()), position=start + node, purpose=Purpose.DRAFT)
        tree = DraftTree.chain(tokens, q={0: q(()), 1: q(())})
        verdict = rule(tree, lambda node: p(()), source, start=start)
        out += (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
    return out[:3]


BINARY_P = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
BINARY_Q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


def constant(row_V: Tensor) -> Table:
    return lambda context: row_V


@pytest.mark.parametrize("rule", [reject, block], ids=["reject", "block"])
def test_steps_with_noise_of_their_own_are_exact(rule: Rule) -> None:
    p, q = constant(BINARY_P), constant(BINARY_Q)
    emitted = law(lambda source: _steps(source, rule, p, q, for_step=True), kind=Keyed)
    assert total_variation(emitted, target_law(p, 3)) <= EXACT


def test_block_must_not_see_a_draw_twice() -> None:
    """Why `Noise.for_step` exists: noise keyed by position alone biases the step after."""
    p, q = constant(BINARY_P), constant(BINARY_Q)
    emitted = law(lambda source: _steps(source, block, p, q, for_step=False), kind=Keyed)
    assert total_variation(emitted, target_law(p, 3)) == pytest.approx(0.0648, abs=1e-4)


# ---- Closed forms ----


@pytest.mark.parametrize(("rule", "accepted"), [(reject, 10 / 9), (block, 11 / 9)])
def test_the_binary_example_of_block_verification(rule: Rule, accepted: float) -> None:
    """Sun et al. (2403.10444), two guesses."""
    q = constant(BINARY_Q)
    tree = lambda source: drawn((-1, 0, 1), q, source, without_replacement=False)  # noqa: E731
    assert expected(constant(BINARY_P), rule, tree) == pytest.approx(accepted, abs=EXACT)


PAIRS = [(table(seed, 5)(()), table(seed + 100, 5)(())) for seed in (30, 31, 32)]


@pytest.mark.parametrize(("p", "q"), PAIRS)
@pytest.mark.parametrize("rule", [reject, block], ids=["reject", "block"])
def test_one_draw_is_accepted_by_the_overlap(rule: Rule, p: Tensor, q: Tensor) -> None:
    tree = lambda source: drawn((-1, 0), constant(q), source, without_replacement=False)  # noqa: E731
    overlap = float(torch.minimum(p, q).sum())
    assert expected(constant(p), rule, tree) == pytest.approx(overlap, abs=EXACT)
    agreement = expected(constant(p), walk, tree)
    assert agreement == pytest.approx(float((p * q).sum()), abs=EXACT)


@pytest.mark.parametrize(("p", "q"), PAIRS)
@pytest.mark.parametrize("rule", [walk, reject], ids=["walk", "reject"])
def test_chosen_siblings_are_accepted_by_their_mass(rule: Rule, p: Tensor, q: Tensor) -> None:
    best = q.argsort(descending=True)[:3].tolist()
    tree = DraftTree((0, *best), (-1, 0, 0, 0))
    accepted = expected(constant(p), rule, lambda source: tree)
    assert accepted == pytest.approx(float(p[best].sum()), abs=EXACT)


def _overlap(p: Tensor, q: Tensor) -> float:
    return float(torch.minimum(p, q).sum())


def _left(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_two_draws_are_accepted_by_the_recursive_overlap(p: Tensor, q: Tensor) -> None:
    """The second draw meets the residual; without replacement it also meets a smaller q."""
    first, r = _overlap(p, q), _left(p, q)
    with_replacement = first + (1 - first) * _overlap(r, q)
    without = first
    for token, weight in enumerate(q.tolist()):
        rejected = weight * max(0.0, 1 - float(p[token]) / weight)
        rest = q.clone()
        rest[token] = 0
        without += rejected * _overlap(r, rest / rest.sum())
    shape = (-1, 0, 0)
    for kind, accepted in ((False, with_replacement), (True, without)):
        tree = lambda source, k=kind: drawn(  # noqa: E731
            shape, constant(q), source, without_replacement=k
        )
        assert expected(constant(p), reject, tree) == pytest.approx(accepted, abs=EXACT)
    assert without > with_replacement


def test_block_accepts_at_least_as_much_as_reject() -> None:
    gains = []
    for seed in range(40, 46):
        p, q = table(seed, 3), table(seed + 100, 3)
        tree = lambda source, q=q: drawn(  # noqa: E731
            (-1, 0, 1), q, source, without_replacement=False
        )
        gains.append(expected(p, block, tree) - expected(p, reject, tree))
    assert min(gains) >= -EXACT
    assert max(gains) > 0.01


def test_block_and_reject_are_one_for_a_single_guess() -> None:
    p, q = table(50, 4), table(150, 4)

    def blocks(rule: Rule) -> dict[tuple[int, ...], float]:
        return law(
            lambda source: emit(
                drawn((-1, 0), q, source, without_replacement=False), p, source, rule
            )
        )

    assert blocks(block) == pytest.approx(blocks(reject), abs=EXACT)


def test_the_enumerator_visits_every_branch_once() -> None:
    """Two draws without replacement from three tokens: six branches, known weights."""
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def run(source: Enumerator) -> tuple[int, ...]:
        return tuple(source.sample(weights, position=0, purpose=Purpose.TOKEN, count=2))

    outcomes = law(run)
    assert len(outcomes) == 6
    assert outcomes[2, 0] == pytest.approx(0.2 * 0.5 / 0.8)
    assert sum(outcomes.values()) == pytest.approx(1)
