"""The decoder as a `Target`: trees, packing, staging, sharing. Tiny random models only."""

from __future__ import annotations

import pytest
import torch

from outrider.core.tree import DraftTree
from outrider.errors import InvalidParameter
from outrider.models.cache import KVCache
from outrider.models.target import Segment
from outrider.models.tiny import TINY_FAMILIES, tiny_config
from outrider.models.transformer import Transformer

PROMPT = tuple(range(3, 17))
# two branches of different depth, a leaf at the root, parents far from children
BUSHY = DraftTree((20, 21, 22, 23, 24, 25, 26, 27, 28), (-1, 0, 0, 1, 2, 3, 0, 4, 5))


def tiny(family: str = "llama", dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer.random(tiny_config(family), 7, dtype)


def filled(model: Transformer, length: int = 64, slots: int = 1) -> KVCache:
    cache = model.new_cache(slots=slots, length=length)
    for slot in range(slots):
        model.forward([Segment(slot, PROMPT)], cache)
        cache.keep(slot, range(len(PROMPT)))
    return cache


def chain_logits(model: Transformer, tokens: tuple[int, ...]) -> torch.Tensor:
    """The last row's logits after PROMPT and ``tokens``, one row at a time."""
    cache = filled(model)
    logits = torch.empty(0)
    for token in tokens:
        logits = model.forward([Segment(0, (), DraftTree.root_only(token))], cache).logits[0]
        cache.keep(0, [0])
    return logits[-1]


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("prefix", [(), (40, 41, 42)], ids=["no prefix", "prefix"])
def test_a_tree_equals_each_of_its_paths(family: str, prefix: tuple[int, ...]) -> None:
    model = tiny(family)
    logits = model.forward([Segment(0, prefix, BUSHY)], filled(model)).logits[0]
    for node in range(len(BUSHY)):
        path = (*prefix, BUSHY.tokens[0], *BUSHY.path_tokens(node))
        assert (logits[node] - chain_logits(model, path)).abs().max() < 1e-4, f"node {node}"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_after_keeping_a_path_the_sequence_goes_on_as_if_nothing_else_had_been_there(
    family: str,
) -> None:
    model = tiny(family)
    cache = filled(model)
    model.forward([Segment(0, (), BUSHY)], cache)
    kept = (0, *BUSHY.path(7))
    cache.keep(0, kept)
    after = model.forward([Segment(0, (), DraftTree.root_only(50))], cache).logits[0][0]
    path = (*(BUSHY.tokens[n] for n in kept), 50)
    assert (after - chain_logits(model, path)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_packed_segments_equal_lone_ones(family: str) -> None:
    model = tiny(family)
    segments = [
        Segment(0, (), DraftTree.root_only(5)),
        Segment(1, (8, 9), BUSHY),
        Segment(2, (6, 7)),
        Segment(3, (), DraftTree.chain([10, 11, 12])),
    ]
    wanted = (0, model.layers)
    together = model.forward(segments, filled(model, slots=4), features=wanted)
    assert [len(row) for row in together.logits] == [1, 9, 0, 3]
    assert together.features is not None
    for index, segment in enumerate(segments):
        alone = model.forward([segment], filled(model, slots=4), features=wanted)
        assert alone.features is not None
        assert torch.allclose(together.logits[index], alone.logits[0], atol=1e-5)
        assert torch.allclose(together.features[index], alone.features[0], atol=1e-5)
        assert together.features[index].shape == (segment.rows, 2, model.config.width)


def test_what_a_slot_held_before_does_not_matter() -> None:
    model = tiny()
    fresh = filled(model)
    used = filled(model)
    used.truncate(0, 0)
    used.keys[:, 0] = float("nan")
    used.values[:, 0] = float("nan")
    dirty = KVCache(model.cache_shape, slots=1, length=64)
    dirty.keys.fill_(float("nan"))
    dirty.values.fill_(float("nan"))
    for cache in (used, dirty):
        model._planner._written.clear()
        model.forward([Segment(0, PROMPT)], cache)
        cache.keep(0, range(len(PROMPT)))
        got = model.forward([Segment(0, (), BUSHY)], cache).logits[0]
        cache.keep(0, [])
        expected = model.forward([Segment(0, (), BUSHY)], fresh).logits[0]
        fresh.keep(0, [])
        assert torch.allclose(got, expected, atol=1e-6)


def test_rows_left_by_a_rejected_tree_are_not_seen() -> None:
    """Also where they hold NaN: a masked row still takes part as 0 · NaN."""
    model = tiny()
    cache = filled(model)
    expected = model.forward([Segment(0, (), DraftTree.root_only(9))], cache).logits[0]
    cache.keep(0, [])
    model.forward([Segment(0, (), BUSHY)], cache)
    start = cache.lengths[0]
    cache.keys[:, 0, :, start : start + 9] = float("nan")
    cache.values[:, 0, :, start : start + 9] = float("nan")
    cache.keep(0, [])
    got = model.forward([Segment(0, (), DraftTree.root_only(9))], cache).logits[0]
    assert torch.equal(got, expected)


def test_forward_stages_and_the_caller_keeps() -> None:
    model = tiny()
    cache = model.new_cache(slots=2, length=20)
    assert cache.capacity == 20
    model.forward([Segment(1, (4, 5), BUSHY)], cache)
    assert (cache.lengths, cache.staged) == ([0, 0], [0, 11])
    cache.keep(1, [0, 1, 2])
    cache.check_integrity()
    assert cache.lengths == [0, 3]


@pytest.mark.parametrize(
    ("segments", "features", "message"),
    [
        ([], (), "at least one segment"),
        ([Segment(0)], (), "no rows"),
        ([Segment(0, (97,))], (), "token 97"),
        ([Segment(0, (-1,))], (), "token -1"),
        ([Segment(0, (1,))], (4,), "features 0 to 3"),
        ([Segment(0, (1,)), Segment(0, (1,))], (), "staged rows"),
        ([Segment(0, (1,)), Segment(1, tuple([1] * 21))], (), "the cache holds 20"),
    ],
)
def test_refused_passes_leave_the_cache_as_it_was(
    segments: list[Segment], features: tuple[int, ...], message: str
) -> None:
    model = tiny()
    cache = model.new_cache(slots=2, length=20)
    with pytest.raises(InvalidParameter, match=message):
        model.forward(segments, cache, features=features)
    cache.check_integrity()
    assert cache.lengths == [0, 0]


def test_first_layers_share_weights_and_run() -> None:
    model = tiny("qwen3")
    small = model.first_layers(2)
    assert small.layers == small.cache_shape.layers == 2
    assert small.weights.layers[0] is model.weights.layers[0]
    assert small.fingerprint != model.fingerprint
    chain = Segment(0, PROMPT, DraftTree.root_only(5))
    whole = model.forward([chain], model.new_cache(slots=1, length=32), features=(2,))
    half = small.forward([chain], small.new_cache(slots=1, length=32), features=(2,))
    assert whole.features is not None
    assert half.features is not None
    assert torch.equal(whole.features[0], half.features[0])
    last = half.features[0][-1:, 0]
    assert torch.allclose(small.head(small.norm(last)), half.logits[0], atol=1e-6)
    for count in (0, 4):
        with pytest.raises(InvalidParameter, match="3 layers"):
            model.first_layers(count)


def test_embed_gives_the_first_features() -> None:
    model = tiny("gemma3_text")
    cache = model.new_cache(slots=1, length=32)
    result = model.forward([Segment(0, PROMPT)], cache, features=(0,))
    assert result.features is not None
    assert torch.equal(model.embed(torch.tensor(PROMPT)), result.features[0][:, 0])


def test_random_models_repeat_and_differ_by_seed() -> None:
    config = tiny_config()
    one, same, other = (Transformer.random(config, seed) for seed in (1, 1, 2))
    chain = [Segment(0, PROMPT, DraftTree.root_only(5))]
    rows = [m.forward(chain, m.new_cache(slots=1, length=32)).logits[0] for m in (one, same, other)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert one.fingerprint == same.fingerprint != other.fingerprint
