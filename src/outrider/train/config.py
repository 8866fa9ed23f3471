"""How a drafter is trained: one frozen configuration for the loop and its losses."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidParameter
from outrider.train.losses import LossKind


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained.

    Attributes:
        epochs: passes over the data.
        rows: rows of a batch, padding included.
        longest: samples are cut to so many tokens.
        unroll: steps of the training-time test; 1 is without it.
        decay: weight of step s is decay^s (Medusa: of head s).
        loss: "kl" or "ce", against the target's softmax over the draft vocabulary.
        feature_weight: of the smooth L1 loss on features (EAGLE-1 only).
        soft_weight: of the loss on tokens.
        muon_rate, rate: peak learning rates of matrices and of all else.
        warm_up: share of the steps.
        floor: learning rate at the end, as a share of the peak.
        clip: largest norm of the gradient.
        weight_decay: of matrices.
        evaluate_every, save_every: steps.
        bf16: multiply matrices in bf16; None does where the device multiplies it itself.
        seed: of the order of the data.
        accumulate: batches of a step.
    """

    epochs: float = 1.0
    rows: int = 3072
    longest: int = 640
    unroll: int = 3
    decay: float = 0.8
    loss: LossKind = "kl"
    feature_weight: float = 0.0
    soft_weight: float = 1.0
    muon_rate: float = 0.01
    rate: float = 0.001
    warm_up: float = 0.03
    floor: float = 0.02
    clip: float = 1.0
    weight_decay: float = 0.0
    evaluate_every: int = 400
    save_every: int = 100
    bf16: bool | None = None
    seed: int = 0
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "longest", "unroll", "evaluate_every", "save_every", "accumulate"):
            if vars(self)[name] < 1:
                raise InvalidParameter(f"{name} is {vars(self)[name]}; use 1 or more")
        for name in ("epochs", "decay", "muon_rate", "rate", "clip"):
            if not vars(self)[name] > 0:
                raise InvalidParameter(f"{name} is {vars(self)[name]}; use a number above 0")
        if self.loss not in ("kl", "ce"):
            raise InvalidParameter(f"loss is {self.loss!r}; use kl or ce")
