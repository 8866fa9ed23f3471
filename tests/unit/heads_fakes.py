"""Tiny targets and random heads for the tests of draft heads."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.models.heads.config import HeadConfig, TargetFacts
from outrider.models.native import NativeTransformer
from outrider.models.tiny import tiny_config
from outrider.models.transformer import Transformer
from outrider.models.weights import random_tensors

SEED = 5


def tiny_target(kernels: str) -> Transformer | NativeTransformer:
    """A tiny llama in fp32, on PyTorch or on the native kernels, with the same weights."""
    config = tiny_config("llama")
    if kernels == "torch":
        return Transformer.random(config, SEED)
    tensors = random_tensors(config, SEED)
    return NativeTransformer.build(
        config, tensors.__getitem__, precision="fp32", name="tiny", fingerprint="tiny"
    )


def head_config(kind: str = "eagle3", **changes: object) -> HeadConfig:
    """A head for `tiny_target`; its draft vocabulary is every other token."""
    config = tiny_config("llama")
    facts = TargetFacts("tiny", ("LlamaForCausalLM",), config.width, 3, config.vocab_size)
    values: dict[str, object] = {
        "kind": kind,
        "target": facts,
        "features": (1, 2, 3) if kind == "eagle3" else (3,),
        "width": config.width,
        "inner": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "draft_vocab_size": 48,
        "context_length": 256,
    }
    if kind == "medusa":
        values |= {"medusa_heads": 3, "medusa_layers": 1}
    return HeadConfig(**{**values, **changes})  # type: ignore[arg-type]


def random_head(config: HeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a size at which every part of the head matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes().items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * values if "norm" in name else values / shape[-1] ** 0.5
    return tensors


def draft_tokens() -> Tensor:
    """The target ids of the draft vocabulary."""
    return torch.arange(0, 96, 2)


def head_rows(target: Transformer | NativeTransformer) -> Tensor:
    """Rows of the (tied) head for the draft vocabulary."""
    return target.weights.embedding[draft_tokens()].float()
