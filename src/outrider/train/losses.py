"""What a draft head is trained towards: the target's own next-token distribution.

Pure functions of logits. Shapes: N rows, W draft vocabulary, D width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["kl", "ce"]


def soft_loss(logits_NW: Tensor, target_logits_NW: Tensor, kind: LossKind) -> Tensor:
    """[N] divergence from the target's softmax over the draft vocabulary.

    "ce" is the cross-entropy of EAGLE-3 (arXiv 2503.01840); "kl" subtracts the target's entropy,
    which has the same gradient and a value that reaches 0.
    """
    target = torch.log_softmax(target_logits_NW.float(), -1)
    guess = torch.log_softmax(logits_NW.float(), -1)
    p = target.exp()
    loss = -(p * guess).sum(-1)
    return loss + (p * target).sum(-1) if kind == "kl" else loss


def hard_loss(logits_NW: Tensor, tokens_N: Tensor) -> Tensor:
    """[N] cross-entropy with the token that came (Medusa-1, arXiv 2401.10774)."""
    return F.cross_entropy(logits_NW.float(), tokens_N, reduction="none")


def feature_loss(state_ND: Tensor, target_ND: Tensor) -> Tensor:
    """[N] smooth L1 between a predicted and the true feature (EAGLE-1, arXiv 2401.15077)."""
    return F.smooth_l1_loss(state_ND.float(), target_ND.float(), reduction="none").mean(-1)


def mean(losses_N: Tensor) -> Tensor:
    """The mean; 0 where a batch has no row to learn from, so that nothing turns into NaN."""
    return losses_N.sum() / max(len(losses_N), 1)


def first_choice(logits_NW: Tensor) -> Tensor:
    """[N] the likeliest token of each row."""
    return logits_NW.argmax(-1)


def agreement_of(logits_NW: Tensor, wanted_N: Tensor) -> float:
    """How often the likeliest token is the wanted one; teacher-forced, so good for curves only.

    0 where there are no rows.
    """
    if not len(logits_NW):
        return 0.0
    return float(mean((first_choice(logits_NW) == wanted_N).float()))
