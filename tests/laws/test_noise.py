"""The keyed noise is noise: `Noise` follows the weights, and its numbers are independent.

Every test has a fixed seed, so it cannot flake; its level is 1e-6, so a change of the generator has
no more than that chance of failing a right one. A wrong twin fails each test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mutants
import numpy as np
import numpy.typing as npt
import pytest
import torch
from enumerate_law import table
from scipy import stats
from torch import Tensor

from outrider.core import noise as noise_module
from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.tree import DraftTree
from outrider.core.verify import Rule, block, reject, walk

ALPHA = 1e-6
NARROW = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1])
WIDE = torch.softmax(torch.linspace(0, 5, 1000), 0)


def fits(observed: Counter[object], chances: dict[object, float]) -> bool:
    """Pearson's test at level ALPHA; cells that expect fewer than 5 are pooled."""
    total = sum(observed.values())
    if any(chances.get(cell, 0.0) == 0 for cell in observed):
        return False
    big = [cell for cell, chance in chances.items() if chance * total >= 5]
    seen = [observed[cell] for cell in big]
    due = [chances[cell] * total for cell in big]
    if total - sum(due) > 1e-6 * total:
        seen.append(total - sum(seen))
        due.append(total - sum(due))
    statistic = sum((s - d) ** 2 / d for s, d in zip(seen, due, strict=True))
    return bool(stats.chi2.sf(statistic, len(due) - 1) > ALPHA)


def independent(first: Sequence[float], second: Sequence[float], cells: int = 8) -> bool:
    """Are the pairs of uniform numbers uniform on the square? At level ALPHA."""
    pairs = (np.array([first, second]) * cells).astype(int)
    observed: Counter[object] = Counter(zip(*pairs.tolist(), strict=True))
    cell = {(a, b): 1 / cells**2 for a in range(cells) for b in range(cells)}
    return fits(observed, cell)


# ---- Wrong twins ----


class ForgetsPosition(Noise):
    def uniform(self, ids, *, position, purpose):  # type: ignore[no-untyped-def]
        return super().uniform(ids, position=0, purpose=purpose)


class ForgetsPurpose(Noise):
    def uniform(self, ids, *, position, purpose):  # type: ignore[no-untyped-def]
        return super().uniform(ids, position=position, purpose=Purpose.TOKEN)


class AddsSeedAndPosition(Noise):
    """Position t of seed s is position t - 1 of seed s + 1."""

    def uniform(self, ids, *, position, purpose):  # type: ignore[no-untyped-def]
        noise = Noise(self.seed + position)
        return noise.uniform(ids, position=0, purpose=purpose)


class StepsByTheIncrement(Noise):
    """A key without a hash: token i at position t is token i + 1 at position t - 1."""

    def uniform(self, ids, *, position, purpose):  # type: ignore[no-untyped-def]
        noise = Noise(self.seed)
        return noise.uniform(ids + position, position=0, purpose=purpose)


class OneNumberForAll(Noise):
    """All tokens of a row share their number."""

    def _uniform(self, bits, *, position, purpose):  # type: ignore[no-untyped-def]
        return super()._uniform(np.zeros_like(bits), position=position, purpose=purpose)


@dataclass(frozen=True)
class Tempered(Noise):
    """Draws from a power of the weights: a temperature that was forgotten or applied twice."""

    power: float = 1.0

    def sample(self, weights_V, *, position, purpose, count=1, ids=None):  # type: ignore[no-untyped-def]
        weights_V = weights_V**self.power
        return super().sample(weights_V, position=position, purpose=purpose, count=count)


class SecondIsLikeliest(Noise):
    """Draws the first token and fills up with the likeliest others."""

    def sample(self, weights_V, *, position, purpose, count=1, ids=None):  # type: ignore[no-untyped-def]
        first = super().sample(weights_V, position=position, purpose=purpose)
        others = weights_V.argsort(descending=True).tolist()
        return (first + [token for token in others if token not in first])[:count]


# ---- One draw ----


def draws(noise: Noise, weights_V: Tensor, *, number: int, count: int = 1) -> Counter[object]:
    found: Counter[object] = Counter()
    for position in range(number):
        tokens = noise.sample(weights_V, position=position, purpose=Purpose.TOKEN, count=count)
        found[tokens[0] if count == 1 else tuple(tokens)] += 1
    return found


@pytest.mark.parametrize("weights_V", [NARROW, 3 * NARROW, WIDE], ids=["narrow", "scaled", "wide"])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_draw_follows_the_weights(weights_V: Tensor, seed: int) -> None:
    chances = dict(enumerate((weights_V / weights_V.sum()).tolist()))
    assert fits(draws(Noise(seed), weights_V, number=6000), chances)  # type: ignore[arg-type]
    wrong = draws(Tempered(seed, 1.3), weights_V, number=6000)
    assert not fits(wrong, chances)  # type: ignore[arg-type]


class FarNeverWins(Noise):
    """Lets only tokens near the likeliest race."""

    def sample(self, weights_V, *, position, purpose, count=1, ids=None):  # type: ignore[no-untyped-def]
        near = weights_V * (weights_V > 1e-4 * weights_V.max())
        return super().sample(near, position=position, purpose=purpose, count=count)


@pytest.mark.parametrize("kind", [Noise, FarNeverWins])
def test_many_unlikely_tokens_race_as_one_and_come_first_as_often_as_they_should(
    kind: type[Noise],
) -> None:
    """Three likely tokens, and thousands below 2^-14 of them that weigh an eighth together."""
    size = 6000
    weights = torch.full((size,), 1e-5)
    weights[size // 2 :] = 3e-5
    weights[[7, 4000, 5999]] = torch.tensor([0.5, 0.25, 0.13])
    found: Counter[object] = Counter()
    for token, count in draws(kind(6), weights, number=12_000).items():
        assert isinstance(token, int)
        likely = token in (7, 4000, 5999)
        found[token if likely else f"far {token * 4 // size}"] += count
    total = float(weights.sum())
    chances: dict[object, float] = {t: float(weights[t]) / total for t in (7, 4000, 5999)}
    for quarter in range(4):
        part = weights[size // 4 * quarter : size // 4 * (quarter + 1)]
        chances[f"far {quarter}"] = float(part[part < 1e-4].sum()) / total
    assert fits(found, chances) == (kind is Noise)


def test_an_unnormalised_weight_of_one_is_no_certainty() -> None:
    found = draws(Noise(3), torch.tensor([1.0, 0.5, 0.5]), number=4000)
    assert fits(found, {0: 0.5, 1: 0.25, 2: 0.25})


def test_a_row_without_independent_numbers_fails() -> None:
    """With one number for all tokens the likeliest wins always."""
    found = draws(OneNumberForAll(5), NARROW, number=2000)
    assert not fits(found, dict(enumerate(NARROW.tolist())))  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [Noise(7), SecondIsLikeliest(7)], ids=["right", "wrong"])
def test_several_draws_are_without_replacement(noise: Noise) -> None:
    weights = [w / float(NARROW.sum()) for w in NARROW.tolist()]
    chances: dict[object, float] = {
        (a, b): weights[a] * weights[b] / (1 - weights[a])
        for a in range(5)
        for b in range(5)
        if a != b and weights[a] * weights[b] > 0
    }
    assert fits(draws(noise, NARROW, number=6000, count=2), chances) == (type(noise) is Noise)


def test_draws_are_a_prefix_of_more_draws_and_end_with_the_support() -> None:
    wide = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    for position in range(30):
        all_of_it = Noise(8).sample(wide, position=position, purpose=Purpose.DRAFT, count=5000)
        assert sorted(all_of_it) == list(range(3000))
        for count in (1, 2, 40):
            some = Noise(8).sample(wide, position=position, purpose=Purpose.DRAFT, count=count)
            assert some == all_of_it[:count]
    peaked = torch.tensor([1.0, 1e-9, 0.0, 1e-9])
    assert set(Noise(8).sample(peaked, position=0, purpose=Purpose.TOKEN, count=4)) == {0, 1, 3}
    assert Noise(8).sample(torch.zeros(3), position=0, purpose=Purpose.TOKEN) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_weights_stay_finite_and_in_proportion(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    weights = torch.tensor([tiny, 3 * tiny, 0.0], dtype=dtype)
    assert fits(draws(Noise(9), weights, number=3000), {0: 0.25, 1: 0.75})
    least = torch.tensor([0.0, 1.0, 5e-324], dtype=torch.float64)
    assert all(token == 1 for token in draws(Noise(9), least, number=200))


def test_a_draw_depends_on_the_support_only_through_its_winner() -> None:
    """Removing tokens that did not win changes nothing: what couples a drafter to its target."""
    for position in range(200):
        [token] = Noise(10).sample(WIDE, position=position, purpose=Purpose.TOKEN)
        kept = WIDE.clone()
        kept[torch.arange(1000) % 7 == position % 7] = 0
        kept[token] = WIDE[token]
        again = Noise(10).sample(kept / kept.sum(), position=position, purpose=Purpose.TOKEN)
        assert again == [token]


# ---- Independence ----

IDS: npt.NDArray[np.int64] = np.arange(4000)


def _shifted(
    noise: Callable[[int], Noise],
    *,
    seed: int = 0,
    position: int = 0,
    ids: int = 0,
    purpose: int = 0,
) -> bool:
    """Is the number at a key independent of the one at the key shifted by these?"""
    first, second = [], []
    for base in range(5):
        first += noise(90 + base).uniform(IDS, position=3 + base, purpose=Purpose.TOKEN).tolist()
        moved = noise(90 + base + seed).uniform(
            IDS + ids, position=3 + base + position, purpose=Purpose(purpose)
        )
        second += moved.tolist()
    return independent(first, second)


@pytest.mark.parametrize(
    ("shift", "wrong"),
    [
        ({"position": 1}, ForgetsPosition),
        ({"position": 1, "seed": -1}, AddsSeedAndPosition),
        ({"position": 1, "ids": -1}, StepsByTheIncrement),
        ({"purpose": 1}, ForgetsPurpose),
        ({"purpose": 2}, ForgetsPurpose),
        ({"seed": 1}, None),
        ({"seed": 2}, None),
        ({"seed": 2**32}, None),
        ({"position": 2}, None),
        ({"ids": 1}, OneNumberForAll),
        ({"ids": 2}, None),
    ],
    ids=str,
)
def test_neighbouring_keys_are_independent(
    shift: dict[str, int], wrong: type[Noise] | None
) -> None:
    assert _shifted(Noise, **shift)
    assert wrong is None or not _shifted(wrong, **shift)


def test_one_token_over_many_positions_and_seeds_is_uniform() -> None:
    def numbers(noises: Sequence[Noise], positions: Sequence[int]) -> list[float]:
        one = np.array([17])
        return [
            float(noise.uniform(one, position=position, purpose=Purpose.TOKEN)[0])
            for noise, position in zip(noises, positions, strict=True)
        ]

    along = numbers([Noise(1)] * 4001, range(4001))
    across = numbers([Noise(seed) for seed in range(4001)], [5] * 4001)
    for series in (along, across):
        assert independent(series[:-1], series[1:], cells=6)
        assert stats.kstest(series, "uniform").pvalue > ALPHA


def test_the_noise_of_steps_is_independent() -> None:
    for start in range(5):
        own = Noise(4).for_step(start)
        for other in (Noise(4), Noise(4).for_step(start + 1), Noise(5).for_step(start)):
            first = own.uniform(IDS, position=9, purpose=Purpose.DRAFT)
            second = other.uniform(IDS, position=9, purpose=Purpose.DRAFT)
            assert independent(first.tolist(), second.tolist(), cells=5)
    assert Noise(4).for_step(3) == Noise(4).for_step(3)


def test_zero_and_one_cannot_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bits the hash gives."""
    for bits in (0, 2**64 - 1):

        def fill(values: npt.NDArray[np.uint64], bits: int = bits) -> None:
            values[:] = np.uint64(bits)

        monkeypatch.setattr(noise_module, "_mix_array", fill)
        [number] = Noise(0).uniform(np.array([0]), position=0, purpose=Purpose.TOKEN)
        assert 0 < number < 1


# ---- Accept ----


def test_accept_has_its_probability() -> None:
    for p, q in ((0.1, 0.4), (0.3, 0.4), (1e-3, 1e-2)):
        yes = sum(Noise(6).accept(p, q, position=i, index=i % 3) for i in range(4000))
        assert stats.binomtest(yes, 4000, p / q).pvalue > ALPHA
        assert stats.binomtest(yes, 4000, (p / q) ** 1.4).pvalue < ALPHA
    for index in range(100):
        assert Noise(6).accept(0.5, 0.5, position=1, index=index)
        assert not Noise(6).accept(0.0, 0.5, position=1, index=index)
        assert not Noise(6).accept(0.5, 0.0, position=1, index=index)
        assert not Noise(6).accept(0.0, 0.0, position=1, index=index)


# ---- Whole steps with real noise ----

P = torch.tensor([0.40, 0.38, 0.12, 0.10])
Q = torch.tensor([0.02, 0.30, 0.30, 0.38])


def _first_tokens(purpose: Purpose, *, rule: Rule, number: int = 5000) -> Counter[object]:
    """The first two tokens of steps with two guesses drawn under ``purpose``."""
    found: Counter[object] = Counter()
    for seed in range(number):
        noise = Noise(seed)
        stream = Stream(noise.for_step(1) if purpose is Purpose.DRAFT else noise, purpose)
        tokens = [0]
        for position in (1, 2):
            tokens += stream.sample(Q, position=position)
        tree = DraftTree.chain(tokens, q={0: Q, 1: Q})
        verdict = rule(tree, lambda node: P, noise, start=1)
        out = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        if len(out) == 1:
            out += noise.sample(P, position=2, purpose=Purpose.TOKEN)
        found[tuple(out[:2])] += 1
    return found


@pytest.mark.parametrize("rule", [reject, block], ids=["reject", "block"])
def test_draft_and_residual_must_not_share_noise(rule: Rule) -> None:
    """Independent draws pass; with the verifier's own noise they fail (vLLM's sampler tests)."""
    chances: dict[object, float] = {(a, b): float(P[a] * P[b]) for a in range(4) for b in range(4)}
    assert fits(_first_tokens(Purpose.DRAFT, rule=rule), chances)
    assert not fits(_first_tokens(Purpose.TOKEN, rule=rule), chances)


# ---- Walk under keyed noise: the same tokens, whatever was guessed ----

TARGET = table(70, 5, zeros=0.1)
DRAFT = table(170, 5)
LENGTH = 12
Drafting = Callable[[tuple[int, ...], Noise], DraftTree]


def nothing(context: tuple[int, ...], noise: Noise) -> DraftTree:
    return DraftTree.root_only(0)


def _mixed(context: tuple[int, ...]) -> Tensor:
    return 0.7 * TARGET(context) + 0.3 * DRAFT(context)


def coupled_chain(context: tuple[int, ...], noise: Noise) -> DraftTree:
    """Guesses with the target's own noise."""
    tokens: tuple[int, ...] = ()
    for depth in range(4):
        position = len(context) + depth
        row = _mixed((*context, *tokens))
        tokens += tuple(Stream(noise, Purpose.TOKEN).sample(row, position=position))
    return DraftTree.chain((0, *tokens))


def coupled_tree(context: tuple[int, ...], noise: Noise) -> DraftTree:
    """Two guesses under the root and under each of them, with the target's noise."""
    tokens, parents = [0], [-1]
    for node in range(3):
        path = DraftTree(tuple(tokens), tuple(parents)).path_tokens(node)
        row = _mixed((*context, *path))
        position = len(context) + len(path)
        tokens += Stream(noise, Purpose.TOKEN).sample(row, position=position, count=2)
        parents += [node, node]
    return DraftTree(tuple(tokens), tuple(parents))


def independent_chain(context: tuple[int, ...], noise: Noise) -> DraftTree:
    own = Stream(noise.for_step(len(context)), Purpose.DRAFT)
    guesses = [own.sample(DRAFT(()), position=len(context) + d)[0] for d in range(3)]
    return DraftTree.chain((0, *guesses))


def constant_tree(context: tuple[int, ...], noise: Noise) -> DraftTree:
    return DraftTree((0, 1, 2, 1, 3, 0, 4), (-1, 0, 0, 0, 1, 1, 2))


def decode(rule: Rule, drafting: Drafting, seed: int) -> tuple[tuple[int, ...], int]:
    """LENGTH tokens and the number of accepted guesses."""
    noise, context, accepted = Noise(seed), (), 0
    while len(context) < LENGTH:
        tree = drafting(context, noise)

        def rows(node: int, tree: DraftTree = tree, context: tuple[int, ...] = context) -> Tensor:
            return TARGET((*context, *tree.path_tokens(node)))

        verdict = rule(tree, rows, noise, start=len(context))
        accepted += len(verdict.path)
        tokens = (tree.tokens[node] for node in verdict.path)
        context = (*context, *tokens, verdict.next_token)
    return context[:LENGTH], accepted


@pytest.mark.parametrize(
    "drafting", [coupled_chain, coupled_tree, independent_chain, constant_tree]
)
def test_walk_gives_the_tokens_of_plain_decoding(drafting: Drafting) -> None:
    taken = 0
    for seed in range(40):
        plain, _ = decode(walk, nothing, seed)
        tokens, accepted = decode(walk, drafting, seed)
        assert tokens == plain
        taken += accepted
    assert taken > 0


@pytest.mark.parametrize("rule", [mutants.walks_on_one_position, mutants.walks_one_position_late])
def test_walking_with_another_positions_noise_is_seen(rule: Rule) -> None:
    differs = [
        decode(rule, coupled_chain, seed)[0] != decode(walk, nothing, seed)[0] for seed in range(40)
    ]
    assert sum(differs) > 20


def test_coupled_guesses_are_accepted_more_often_than_independent_ones() -> None:
    """And at least as often as Daliri et al. (2408.07978) promise: (1 - TV) / (1 + TV)."""
    p, q = TARGET(()), _mixed(())
    agreed = {Purpose.TOKEN: 0, Purpose.DRAFT: 0}
    for position in range(2000):
        [token] = Noise(3).sample(p, position=position, purpose=Purpose.TOKEN)
        for purpose in agreed:
            [guess] = Noise(3).sample(q, position=position, purpose=purpose)
            agreed[purpose] += guess == token
    distance = 0.5 * float((p - q).abs().sum())
    assert agreed[Purpose.TOKEN] > 2000 * (1 - distance) / (1 + distance)
    assert agreed[Purpose.TOKEN] > 1.3 * agreed[Purpose.DRAFT]
