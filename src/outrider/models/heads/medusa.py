"""Medusa heads at run time: K guesses from one hidden state, no passes, no cache.

Head k (from 0) reads the target's last state at position i, after the final norm, and guesses token
i + 2 + k; the target's own head gives token i + 1. It knows nothing of trees or sequences.

Source: Medusa, arXiv 2401.10774.

Shapes: R rows, K heads, D width, W draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.kernels import Decoder, Tensors, projection, refuse_width


class MedusaModel:
    """Medusa heads beside their target.

    Attributes:
        features: which of the target's hidden states they read.
        weight_bytes: bytes of weights that a draft reads.
    """

    def __init__(self, config: HeadConfig, tensors: Tensors, target: Decoder) -> None:
        refuse_width(config, target)
        self.config = config
        self.features = config.features
        self._target = target
        blocks = range(config.medusa_layers)
        self._blocks = [
            [
                (
                    projection(tensors[f"blocks.{head}.layers.{layer}.weight"], target),
                    tensors[f"blocks.{head}.layers.{layer}.bias"].float().to(target.device),
                )
                for layer in blocks
            ]
            for head in range(config.medusa_heads)
        ]
        self._heads = [
            projection(tensors[f"lm_heads.{head}.weight"], target, small=True)
            for head in range(config.medusa_heads)
        ]
        values = (
            config.medusa_heads
            * config.width
            * (config.medusa_layers * 2 * config.width + config.draft_vocab_size)
        )
        self.weight_bytes = values

    def fuse(self, features_RFD: Tensor) -> Tensor:
        """[R, D]: the states that the heads read."""
        return self._target.norm(features_RFD[:, 0]).float()

    @torch.no_grad()
    def logits(self, states_RD: Tensor, heads: int) -> Tensor:
        """[R, K, W] of the first ``heads`` heads."""
        found = []
        for blocks, head in zip(self._blocks[:heads], self._heads[:heads], strict=True):
            state = states_RD
            for block, bias in blocks:
                state = state + F.silu(block(state) + bias)
            found.append(head(state))
        return torch.stack(found, 1)
