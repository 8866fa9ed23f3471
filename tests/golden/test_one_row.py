"""One row at a time: exact on the PyTorch path too, whose trees otherwise are not bit-equal."""

from __future__ import annotations

import pytest
import torch

from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.models.one_row import OneRowAtATime
from outrider.models.target import Segment, Target
from outrider.models.tiny import tiny_config
from outrider.models.transformer import Transformer
from outrider.testing.fakes import TableTarget

TREE = DraftTree((5, 6, 7, 8, 9, 3), (-1, 0, 0, 1, 2, 4))


@pytest.mark.parametrize("features", [(), (0, 2)])
def test_a_tree_gives_each_path_as_plain_decoding_would(features: tuple[int, ...]) -> None:
    inner = Transformer.random(tiny_config("mistral"), 5, torch.bfloat16)
    target = OneRowAtATime(inner)
    cache = target.new_cache(slots=2, length=64)
    prefix = (1, 2, 3, 4)
    result = target.forward([Segment(1, prefix, TREE)], cache, features=features)
    assert cache.staged == [0, len(prefix) + len(TREE)]
    for node in range(len(TREE)):
        plain = inner.new_cache(slots=1, length=64)
        tokens = [*prefix, TREE.tokens[0], *TREE.path_tokens(node)]
        for token in tokens:
            segment = Segment(0, (), DraftTree.root_only(token))
            alone = inner.forward([segment], plain, features=features)
            plain.keep(0, [0])
        assert torch.equal(result.logits[0][node], alone.logits[0][0])
        if features:
            assert result.features is not None and alone.features is not None
            assert torch.equal(result.features[0][len(prefix) + node], alone.features[0][0])


def run(target: Target, drafter: Target | None) -> list[tuple[int, ...]]:
    drafters = {}
    if drafter is not None:
        config = DraftModelConfig(branching=2, sequences=3)
        drafters["d"] = DraftModelDrafter(drafter, config)
    engine = Engine(
        target,
        drafters=drafters,
        config=EngineConfig(slots=3, context=48, prefill_chunk=4),
        budget=FixedBudget(5, 3),
    )
    requests = [
        engine.add(
            [seed + 1, 7, 9, 11, 2, 5],
            SamplingParams(temperature=0.8, seed=seed, max_tokens=16),
            drafter="d" if drafters else "none",
        )
        for seed in range(3)
    ]
    while engine.has_work:
        engine.step()
    results = [engine.take(request) for request in requests]
    if drafter is not None:
        assert sum(s.accepted for r in results for s in r.steps) > 0
    return [result.tokens for result in results]


def test_same_tokens_in_bf16_through_pytorch() -> None:
    inner = Transformer.random(tiny_config("llama"), 3, torch.bfloat16)
    assert run(OneRowAtATime(inner), inner.first_layers(2)) == run(OneRowAtATime(inner), None)


def test_cache_rows_end_up_where_any_target_puts_them() -> None:
    inner = TableTarget(vocab_size=12, seed=3, context_length=48)
    draft = TableTarget(vocab_size=12, seed=3, ripple=0.0, context_length=48)
    assert run(OneRowAtATime(inner), draft) == run(inner, None)
