"""A row's logits do not depend on how many rows are computed with it.

Measured for this build of PyTorch on an AVX-512 CPU: bit-equal in fp32 and bf16 for chains of up to
16 rows and for trees, alone or beside other sequences, across the attention kernel's key blocks. In
bf16 it takes a processor that multiplies bf16 itself.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core.tree import DraftTree
from outrider.kernels.linear import cpu_multiplies_bf16
from outrider.models.attention import KEY_BLOCK
from outrider.models.config import ModelConfig
from outrider.models.target import Segment
from outrider.models.tiny import tiny_raw
from outrider.models.transformer import Transformer

TREE = DraftTree((20, 21, 22, 23, 24, 25, 26), (-1, 0, 0, 1, 2, 3, 0))
CASES = [
    (family, dtype)
    for family in ("llama", "gemma3_text", "qwen2", "phi3")
    for dtype in (torch.float32, *([torch.bfloat16] if cpu_multiplies_bf16() else []))
]


def model_of(family: str, dtype: torch.dtype) -> Transformer:
    raw = tiny_raw(family) | {"max_position_embeddings": 2048, "num_hidden_layers": 2}
    raw |= {"original_max_position_embeddings": 2048} if family == "phi3" else {}
    return Transformer.random(ModelConfig.from_hf(raw), 3, dtype)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("start", [0, 5, 60, KEY_BLOCK - 8, KEY_BLOCK, 1000])
def test_chains_have_the_bits_of_single_rows(family: str, dtype: torch.dtype, start: int) -> None:
    model = model_of(family, dtype)
    cache = model.new_cache(slots=1, length=1100)
    if start:
        model.forward([Segment(0, tuple(ids(start, 1)))], cache)
        cache.keep(0, range(start))
    chain = ids(16, 2)
    single = []
    for token in chain:
        root = Segment(0, (), DraftTree.root_only(token))
        single.append(model.forward([root], cache).logits[0][0])
        cache.keep(0, [0])
    for rows in (2, 3, 5, 8, 16):
        cache.truncate(0, start)
        together = model.forward([Segment(0, (), DraftTree.chain(chain[:rows]))], cache).logits[0]
        cache.keep(0, [])
        assert torch.equal(together, torch.stack(single[:rows])), f"{rows} rows"


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_neighbours_and_branches_do_not_change_bits(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)

    def cache_after(tokens: list[int]) -> tuple[Transformer, object]:
        cache = model.new_cache(slots=3, length=200)
        for slot, length in enumerate((30, 100, 7)):
            model.forward([Segment(slot, tuple(ids(length, slot)))], cache)
            cache.keep(slot, range(length))
        for token in tokens:
            model.forward([Segment(0, (), DraftTree.root_only(token))], cache)
            cache.keep(0, [0])
        return model, cache

    def root_alone(tokens: tuple[int, ...]) -> torch.Tensor:
        _, cache = cache_after(list(tokens[:-1]))
        root = Segment(0, (), DraftTree.root_only(tokens[-1]))
        return model.forward([root], cache).logits[0][0]  # type: ignore[arg-type]

    _, cache = cache_after([])
    segments = [
        Segment(1, (), DraftTree.chain(ids(6, 9))),
        Segment(0, (), TREE),
        Segment(2, (), DraftTree.root_only(3)),
    ]
    packed = model.forward(segments, cache).logits[1]  # type: ignore[arg-type]
    assert torch.equal(packed[0], root_alone((20,)))
    # A node's keys lie after its elder siblings', in another order than on a plain path: the same
    # numbers are summed in another order, so only nearly the same sum comes out.
    for node in range(1, len(TREE)):
        alone = root_alone((20, *TREE.path_tokens(node)))
        bound = 1e-5 if dtype == torch.float32 else 0.05
        assert (packed[node].float() - alone.float()).abs().max() <= bound
