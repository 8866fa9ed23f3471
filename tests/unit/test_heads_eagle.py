"""EAGLE heads: what is trained is what is served, on both kernels, for chains and trees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads_fakes import (
    draft_tokens,
    head_config,
    head_rows,
    random_head,
    tiny_target,
)
from outrider.core.noise import Noise, Purpose, Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, NodeBudget, SequenceView
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import make_drafter
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import EagleModel
from outrider.models.heads.files import Head
from outrider.models.target import Segment
from outrider.train.features import compute_features
from outrider.train.heads import Frozen, HeadModule, rms, unroll
from outrider.train.setup import with_vocabulary

VARIANTS = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3-residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3-before-fc": ("eagle3", {"norm_before_fc": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "token-residual": ("eagle3", {"token_residual": True}),
}
STEPS = 4


def variant(name: str) -> HeadConfig:
    kind, changes = VARIANTS[name]
    return head_config(kind, **changes)


def trained_logits(
    config: HeadConfig, tensors: dict[str, Tensor], tokens: Tensor, features: Tensor
) -> list[Tensor]:
    """[L, W] per step of the training-time test, in fp32."""
    target = tiny_target("torch")
    frozen = Frozen(
        target.weights.embedding, target.weights.norm, target.config.norm_eps, head_rows(target)
    )
    states = features[None]
    if config.kind == "eagle":
        states = rms(features[:, 0], frozen.norm, frozen.norm_eps)[None, :, None]
    module = HeadModule(config, tensors)
    every = torch.ones(1, len(features), dtype=torch.bool)
    steps = unroll(module, frozen, tokens[None], states, STEPS, every)
    return [module.logits(normed, frozen).detach() for normed in steps]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", VARIANTS)
def test_served_chain_equals_training_time_test(name: str, kernels: str) -> None:
    """Row r at step s of training is the s-th guess after r true rows at run time."""
    config, target = variant(name), tiny_target(kernels)
    tensors = random_head(config)
    tokens = torch.randint(0, 97, (14,), generator=torch.Generator().manual_seed(1))
    [features] = compute_features(target, [tokens.tolist()], config.features)
    wanted = trained_logits(config, tensors, tokens, features)
    model = EagleModel(config, tensors, target, head_rows(target))
    fused = model.fuse(features)
    row = 7  # takes token 8; its guess for token 9 is step 0
    cache = model.new_cache(slots=1, length=64)
    states = fused[: row + 1]
    for step in range(STEPS):
        guessed = tokens[row + 1 : row + 2 + step].tolist()
        tree = DraftTree.chain(guessed)
        segment = Segment(0, tuple(tokens[1 : row + 1].tolist()), tree)
        passed = model.forward([segment], states, cache)
        cache.keep(0, ())
        torch.testing.assert_close(
            passed.logits[0][-1].float(), wanted[step][row], rtol=2e-2, atol=2e-2
        )
        states = torch.cat((states, passed.states[0][-1:]))


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_that_do_not_count_change_nothing(name: str) -> None:
    """Training computes the rows of an answer alone, to the values that they have among all."""
    config, target = variant(name), tiny_target("torch")
    tokens = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(2))
    states = torch.randn(2, 11, len(config.features), 64)
    frozen = Frozen(
        target.weights.embedding, target.weights.norm, target.config.norm_eps, head_rows(target)
    )
    module = HeadModule(config, random_head(config))
    wanted = torch.zeros(2, 11, dtype=torch.bool)
    wanted[0, 4:9] = wanted[1, 7:] = True
    every = torch.ones_like(wanted)
    whole = unroll(module, frozen, tokens, states, STEPS, every)
    some = unroll(module, frozen, tokens, states, STEPS, wanted)
    for expected, found in zip(whole, some, strict=True):
        torch.testing.assert_close(found, expected[wanted.flatten()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_tree_row_sees_its_path_only(kernels: str) -> None:
    """A node's logits in a tree are those of its path alone."""
    config, target = variant("eagle3"), tiny_target(kernels)
    tensors = random_head(config)
    model = EagleModel(config, tensors, target, None)
    prefix = (5, 9, 11)
    fused = torch.randn(4, config.width, generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(slots=1, length=64)
    chain = DraftTree.chain((2, 7))
    alone = model.forward([Segment(0, prefix, DraftTree.root_only(2))], fused, cache)
    cache.keep(0, ())
    states = torch.cat((fused, alone.states[0]))
    want = model.forward([Segment(0, prefix, chain)], states, cache).logits[0][-1]
    cache.keep(0, ())
    tree = DraftTree((2, 8, 7, 4), (-1, 0, 0, 1))
    states = torch.cat((fused, alone.states[0].expand(2, -1), torch.zeros(1, config.width)))
    found = model.forward([Segment(0, prefix, tree)], states, cache).logits[0][2]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_the_check_of_wiring_can_fail() -> None:
    """Feeding the raw state where EAGLE-3.1 feeds the normed one is seen."""
    config = variant("eagle3.1")
    tensors = random_head(config)
    tokens = torch.arange(14)
    features = torch.randn(13, 3, 64, generator=torch.Generator().manual_seed(2))
    right = trained_logits(config, tensors, tokens, features)
    wrong = trained_logits(head_config("eagle3", fc_norm=True), tensors, tokens, features)
    assert torch.equal(right[0], wrong[0])
    assert (right[1] - wrong[1]).abs().max() > 0.1


@pytest.mark.parametrize("least", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", [TreeShape(1, 1), TreeShape(3, 2), TreeShape(4, 4)])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1"])
def test_a_tree_grown_natively_is_the_one_grown_level_by_level(
    name: str, shape: TreeShape, temperature: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native twin of `Growth` makes the same nodes with the same confidence, and neither goes
    on behind paths that are not worth a pass."""
    config, target = variant(name), tiny_target("native")
    tensors = with_vocabulary(random_head(config), draft_tokens(), 97)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 97, (12,), generator=generator).tolist()
    features = torch.randn(11, len(config.features), 64, generator=generator)

    def propose() -> list[DraftTree]:
        drafter = make_drafter(
            Head(config, tensors), target, source=None, shape=shape, sequences=1, length=64
        )
        trees = []
        for seed, end in enumerate((8, 9, 12)):
            start = 0 if seed == 0 else (8, 9)[seed - 1]
            first = max(start - 1, 0)
            drafter.observe([Commit(1, tuple(tokens[start:end]))])
            drafter.observe([Commit(1, (), "", features[first : end - 1], first)])
            params = SamplingParams(temperature=temperature)
            stream = Stream(Noise(seed), Purpose.TOKEN)
            view = SequenceView(1, tokens[:end], 4, params, frozenset({8}), stream)
            trees += drafter.propose([view], [NodeBudget(9, 4, least)])
        return trees

    native_trees = propose()
    monkeypatch.setattr(EagleModel, "grows_natively", False)
    for found, wanted in zip(native_trees, propose(), strict=True):
        assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)
        assert found.confidence == pytest.approx(wanted.confidence, rel=2e-3)
        assert len(found) > 2 or least
        assert (max(found.depths) == 1) == (least == 0.5 and shape.branching > 1)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1"])
def test_trees_grown_together_are_those_grown_alone(name: str) -> None:
    """Sequences of other lengths, budgets and temperatures share the passes, bit for bit."""
    config, target = variant(name), tiny_target("native")
    tensors = with_vocabulary(random_head(config), draft_tokens(), 97)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 97, (20,), generator=generator).tolist()
    features = torch.randn(19, len(config.features), 64, generator=generator)
    ends, budgets = (9, 20, 12), [NodeBudget(9, 4), NodeBudget(3, 1), NodeBudget(12, 6)]

    def propose(groups: list[list[int]]) -> list[DraftTree]:
        shape = TreeShape(4, 4)
        drafter = make_drafter(
            Head(config, tensors), target, source=None, shape=shape, sequences=3, length=64
        )
        views = []
        for index, end in enumerate(ends):
            drafter.observe([Commit(index, tuple(tokens[:end]), "", features[: end - 1])])
            params = SamplingParams(temperature=0.8 * (index == 2))
            stream = Stream(Noise(index), Purpose.TOKEN)
            views.append(SequenceView(index, tokens[:end], 4, params, frozenset({8}), stream))
        trees = []
        for group in groups:
            trees += drafter.propose([views[i] for i in group], [budgets[i] for i in group])
        return trees

    together, alone = propose([[0, 1, 2]]), propose([[0], [1], [2]])
    for found, wanted in zip(together, alone, strict=True):
        assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)
        assert found.confidence == wanted.confidence
        assert len(found) > 2


def test_draft_vocabulary_is_even() -> None:
    assert len(draft_tokens()) == head_config().draft_vocab_size
