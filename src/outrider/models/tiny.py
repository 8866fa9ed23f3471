"""Tiny configurations, one per family, for tests: every feature of the family in a few thousand
parameters, windows shorter than a test's sequences.
"""

from __future__ import annotations

from typing import Any

from outrider.models.config import ModelConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10_000.0, "tie_word_embeddings": True},
    "mistral": {"head_dim": 32, "sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 512},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
}

TINY_FAMILIES = tuple(_FAMILIES)


def tiny_raw(family: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of a family."""
    return {"model_type": family, **_COMMON, **_FAMILIES[family]}


def tiny_config(family: str = "llama") -> ModelConfig:
    """A tiny model of a family: `Transformer.random(tiny_config("qwen3"), seed)`."""
    return ModelConfig.from_hf(tiny_raw(family))
