"""Our one decoder against transformers' models, per family and per rotation.

Tiny random models are saved by transformers and read by our folder loader: every claim here covers
config reading, weight names and arithmetic at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.core.tree import DraftTree
from outrider.models.load import open_folder
from outrider.models.target import Segment
from outrider.models.tiny import TINY_FAMILIES, tiny_raw
from outrider.models.transformer import Transformer
from outrider.models.weights import build_weights

TOLERANCE = 1e-4
LENGTH = 40

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 16,
        "beta_slow": 2,
    },
}


def hf_model(folder: Path, raw: dict[str, Any], seed: int = 0) -> Any:
    """A random transformers model, saved to ``folder`` with a config.json as people have them."""
    torch.manual_seed(seed)
    raw = {**raw, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if "norm" in name or name.endswith("bias") else 0.2
            parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    config, tensors = open_folder(folder)
    weights = build_weights(config, tensors.read, dtype=dtype, device=torch.device("cpu"))
    return Transformer(config, weights, name="t", fingerprint="t")


def tokens(vocab: int, count: int = LENGTH) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def in_one_pass(model: Transformer, ids: list[int], **cache: int) -> torch.Tensor:
    """Logits of every position: all rows as one chain."""
    room = model.new_cache(slots=1, length=cache.get("length", len(ids)))
    return model.forward([Segment(0, (), DraftTree.chain(ids))], room).logits[0]


def in_pieces(model: Transformer, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of every position: chunks of prefill-like chains, then single rows."""
    cache = model.new_cache(slots=1, length=len(ids))
    rows, first = [], 0
    for size in [*sizes, *[1] * (len(ids) - sum(sizes))]:
        chain = DraftTree.chain(ids[first : first + size])
        rows.append(model.forward([Segment(0, (), chain)], cache).logits[0])
        cache.keep(0, range(size))
        first += size
    return torch.cat(rows)


def by_prefix(model: Transformer, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits of the last position: the rest goes in as prefix, in chunks."""
    cache = model.new_cache(slots=1, length=len(ids))
    body = ids[:-1]
    while len(body) > chunk:
        model.forward([Segment(0, tuple(body[:chunk]))], cache)
        cache.keep(0, range(chunk))
        body = body[chunk:]
    last = Segment(0, tuple(body), DraftTree.root_only(ids[-1]))
    return model.forward([last], cache).logits[0]


def check_parity(model: Any, folder: Path, *, length: int = LENGTH) -> None:
    mine = ours(folder)
    ids = tokens(mine.vocab_size, length)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].float()
    assert expected.std() > 0.1  # a model that says nothing would agree with anything
    for got in (in_one_pass(mine, ids), in_pieces(mine, ids, [9, 16])):
        assert (got - expected).abs().max() <= TOLERANCE
    for chunk in (7, length):
        assert (by_prefix(mine, ids, chunk) - expected[-1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_families_agree_with_transformers(family: str, tmp_path: Path) -> None:
    check_parity(hf_model(tmp_path, tiny_raw(family)), tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "smollm3", "qwen2"])
def test_the_other_kind_of_head(family: str, tmp_path: Path) -> None:
    raw = tiny_raw(family)
    raw["tie_word_embeddings"] = not raw["tie_word_embeddings"]
    check_parity(hf_model(tmp_path, raw), tmp_path)


@pytest.mark.parametrize("name", ROPES)
def test_rotations_agree_with_transformers(name: str, tmp_path: Path) -> None:
    raw = tiny_raw("llama") | {"rope_parameters": {"rope_theta": 5000.0, **ROPES[name]}}
    check_parity(hf_model(tmp_path, raw), tmp_path)


def test_gemma_stretches_only_its_global_layers(tmp_path: Path) -> None:
    raw = tiny_raw("gemma3_text")
    raw["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    check_parity(hf_model(tmp_path, raw), tmp_path)


@pytest.mark.parametrize("length", [30, 60])
def test_longrope_short_and_long(length: int, tmp_path: Path) -> None:
    """The factors follow the cache's length; where the text fills it, transformers agrees."""
    raw = tiny_raw("phi3") | {"original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
    raw["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.7 * i for i in range(8)],
    }
    check_parity(hf_model(tmp_path, raw), tmp_path, length=length)


@pytest.mark.parametrize(
    "change",
    [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 24}, {"num_key_value_heads": 4}],
    ids=["biases", "head_dim", "one query head per key head"],
)
def test_llama_variants(change: dict[str, Any], tmp_path: Path) -> None:
    check_parity(hf_model(tmp_path, tiny_raw("llama") | change), tmp_path)


def test_softcapped_logits(tmp_path: Path) -> None:
    raw = tiny_raw("gemma3_text") | {"final_logit_softcapping": 3.0}
    check_parity(hf_model(tmp_path, raw), tmp_path)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_features_are_the_states_entering_the_layers(family: str, tmp_path: Path) -> None:
    model, mine = hf_model(tmp_path, tiny_raw(family)), ours(tmp_path)
    ids = tokens(mine.vocab_size)
    states: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _m, _a, out, i=index: states.update({i + 1: out}))
        layer.register_forward_pre_hook(
            lambda _m, args, kwargs, i=index: states.update(
                {i: args[0] if args else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(torch.tensor([ids]))
    wanted = (mine.layers, 0, 2)
    cache = mine.new_cache(slots=1, length=LENGTH)
    chain = Segment(0, tuple(ids[:5]), DraftTree.chain(ids[5:]))
    result = mine.forward([chain], cache, features=wanted)
    assert result.features is not None
    assert result.features[0].shape == (LENGTH, len(wanted), mine.config.width)
    for column, index in enumerate(wanted):
        assert (result.features[0][:, column] - states[index][0]).abs().max() <= TOLERANCE
