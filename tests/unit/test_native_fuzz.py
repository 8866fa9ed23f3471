"""Random models and passes on the native kernels: any shape, any company, the same bits.

Run it with the library built by ``OUTRIDER_SANITIZE=address,undefined`` as well (CONTRIBUTING.md).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.tree import DraftTree
from outrider.kernels import native
from outrider.models.cache import KVCache
from outrider.models.config import ModelConfig
from outrider.models.native import PRECISIONS, NativeTransformer, Precision
from outrider.models.target import Segment
from outrider.models.tiny import tiny_raw
from outrider.models.weights import random_tensors

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())

LENGTH = 96


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    raw: dict[str, Any] = tiny_raw("llama") | {
        "vocab_size": draw(st.integers(3, 140)),
        "hidden_size": draw(st.integers(1, 150)),
        "intermediate_size": 16 * draw(st.integers(1, 8)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from((1, 2, 3, 5, 26))),
        "head_dim": 16 * draw(st.integers(1, 6)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": False,
    }
    return ModelConfig.from_hf(raw)


def make_cache(model: NativeTransformer, slots: int, shift: int) -> KVCache:
    """A cache full of NaN whose tensors begin ``shift`` elements into their memory."""
    cache = model.new_cache(slots=slots, length=LENGTH)
    for name in ("keys", "values"):
        shape = cache.keys.shape
        memory = torch.full((shape.numel() + shift,), float("nan"), dtype=torch.bfloat16)
        setattr(cache, name, memory[shift:].view(shape))
    return cache


@settings(max_examples=60, deadline=None)
@given(
    config=configs(),
    precision=st.sampled_from(PRECISIONS),
    isa=st.sampled_from(native.ISAS),
    threads=st.integers(1, 4),
    shift=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_a_pass_of_many_equals_passes_of_one_row(
    config: ModelConfig, precision: Precision, isa: str, threads: int, shift: int, seed: int
) -> None:
    if not native.use_isa(isa):
        return
    try:
        check_pass(config, precision, threads, shift, random.Random(seed))
    finally:
        native.use_isa("")


def check_pass(
    config: ModelConfig, precision: Precision, threads: int, shift: int, draw: random.Random
) -> None:
    read = random_tensors(config, 1).__getitem__
    model = NativeTransformer.build(
        config, read, precision=precision, name="fuzz", fingerprint="fuzz", threads=threads
    )
    slots = draw.randint(1, 4)
    cache, single = make_cache(model, slots, shift), make_cache(model, slots, 0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(config.vocab_size) for _ in range(count))

    segments, paths = [], []
    for slot in draw.sample(range(slots), draw.randint(1, slots)):
        history, prefix = tokens(draw.randint(0, 40)), tokens(draw.randint(0, 20))
        if history:
            model.forward([Segment(slot, history)], cache)
            cache.keep(slot, range(len(history)))
        nodes = draw.randint(1, 20)
        tree = DraftTree(tokens(nodes), (-1, *(draw.randrange(i) for i in range(1, nodes))))
        segments.append(Segment(slot, prefix, tree))
        paths.append((*history, *prefix))
    got = model.forward(segments, cache, features=(0, model.layers))
    assert got.features is not None
    model.threads = 1
    for segment, path, logits in zip(segments, paths, got.logits, strict=True):
        assert segment.tree is not None
        node = draw.randrange(len(segment.tree))
        chain = (*path, segment.tree.tokens[0], *segment.tree.path_tokens(node))
        for token in chain[:-1]:
            model.forward([Segment(segment.slot, (token,))], single)
            single.keep(segment.slot, (0,))
        last = Segment(segment.slot, (), DraftTree.root_only(chain[-1]))
        (want,) = model.forward([last], single).logits
        single.keep(segment.slot, ())
        assert torch.equal(logits[node], want[0])
        assert logits.isfinite().all()
