"""Weights in few bits, and what a linear layer with them computes: the native kernels' slow twins.

Each kind says how a weight matrix is stored and how a product with it is defined, down to the order
of roundings where the kernel's result is a fixed function of it. The module knows nothing of
packing, threads or models.

Shapes: M rows, K inputs, N outputs, G groups of 32 along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32


@dataclass(frozen=True)
class FloatWeight:
    """fp32 or bf16 values [N, K]. A bf16 weight sees activations rounded to bf16."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@dataclass(frozen=True)
class Int8Weight:
    """Symmetric int8 with one scale per output: w = scale · q, |q| <= 127.

    Attributes:
        q: int8 [N, K].
        scale: fp32 [N].
    """

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.q.shape


@dataclass(frozen=True)
class Int8GroupsWeight:
    """int8 in groups of 32 along K, as GGUF's Q8_0: w = scale · q.

    Attributes:
        q: int8 [N, K].
        scale: fp16 [N, G].
    """

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.q.shape


@dataclass(frozen=True)
class Int4Weight:
    """4 bits in groups of 32 along K, as GGUF's Q4_1 (and Q4_0): w = scale · q + minimum.

    Attributes:
        q: uint8 [N, K], 0 to 15.
        scale, minimum: fp16 [N, G].
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.q.shape


Weight = FloatWeight | Int8Weight | Int8GroupsWeight | Int4Weight


def to_int8(weight_NK: Tensor) -> Int8Weight:
    """Round to int8, scale = max |w| / 127 per output."""
    q = torch.empty(weight_NK.shape, dtype=torch.int8)
    scale = torch.empty(len(q))
    for rows in _slices(len(q)):
        weight = weight_NK[rows].float()
        step = weight.abs().amax(1) / 127.0
        inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
        # not in place: an fp32 weight is the caller's own
        q[rows] = weight.mul(inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        scale[rows] = step
    return Int8Weight(q, scale)


def to_int4(weight_NK: Tensor) -> Int4Weight:
    """Round to 4 bits, from the smallest to the largest value of every group of 32."""
    outputs, inputs = weight_NK.shape
    q = torch.empty(outputs, inputs, dtype=torch.uint8)
    scale, minimum = torch.empty(2, outputs, -(-inputs // GROUP), dtype=torch.float16).unbind(0)
    for rows in _slices(outputs):
        groups = _groups(weight_NK[rows].float())
        low, high = groups.amin(2), groups.amax(2)
        scale[rows] = ((high - low) / 15.0).half()
        minimum[rows] = low.half()
        step = scale[rows].float()
        inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
        steps = (groups - minimum[rows].float()[..., None]).mul_(inverse[..., None])
        q[rows] = steps.round_().clamp_(0, 15).flatten(1)[:, :inputs].to(torch.uint8)
    return Int4Weight(q, scale, minimum)


def _slices(outputs: int) -> list[slice]:
    """Few outputs at a time: the largest matrix in fp32 would be the peak of a model's memory."""
    return [slice(first, first + 1024) for first in range(0, outputs, 1024)]


def _groups(x_NK: Tensor) -> Tensor:
    """[N, G, 32], zeros behind the end."""
    padded = F.pad(x_NK, (0, -x_NK.shape[1] % GROUP))
    return padded.view(len(padded), padded.shape[1] // GROUP, GROUP)


def take_rows(weight: Weight, index: Tensor) -> Weight:
    """The outputs ``index`` of a weight, in that order."""
    match weight:
        case FloatWeight(values=values):
            return FloatWeight(values[index])
        case Int8Weight(q=q, scale=scale):
            return Int8Weight(q[index], scale[index])
        case Int8GroupsWeight(q=q, scale=scale):
            return Int8GroupsWeight(q[index], scale[index])
        case Int4Weight(q=q, scale=scale, minimum=minimum):
            return Int4Weight(q[index], scale[index], minimum[index])


def joined(weights: Sequence[Weight]) -> Weight:
    """The outputs of several weights of one kind, one after the other."""
    match list(weights):
        case [one]:
            return one
        case [Int8Weight(), *_]:
            int8 = [w for w in weights if isinstance(w, Int8Weight)]
            return Int8Weight(torch.cat([w.q for w in int8]), torch.cat([w.scale for w in int8]))
        case [Int8GroupsWeight(), *_]:
            rows = [w for w in weights if isinstance(w, Int8GroupsWeight)]
            scales = torch.cat([w.scale for w in rows])
            return Int8GroupsWeight(torch.cat([w.q for w in rows]), scales)
        case [Int4Weight(), *_]:
            int4 = [w for w in weights if isinstance(w, Int4Weight)]
            return Int4Weight(
                torch.cat([w.q for w in int4]),
                torch.cat([w.scale for w in int4]),
                torch.cat([w.minimum for w in int4]),
            )
        case _:
            return FloatWeight(torch.cat([w.values for w in weights if isinstance(w, FloatWeight)]))


def dense(weight: Weight) -> Tensor:
    """The fp32 values [N, K] that a weight stands for."""
    match weight:
        case FloatWeight(values=values):
            return values.float()
        case Int8Weight(q=q, scale=scale):
            return q.float() * scale[:, None]
        case Int8GroupsWeight(q=q, scale=scale):
            spread = scale.float().repeat_interleave(GROUP, 1)[:, : q.shape[1]]
            return q.float() * spread
        case Int4Weight(q=q, scale=scale, minimum=minimum):
            spread = scale.float().repeat_interleave(GROUP, 1)[:, : q.shape[1]]
            lift = minimum.float().repeat_interleave(GROUP, 1)[:, : q.shape[1]]
            return q.float() * spread + lift


def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as int8 [M, G, 32] and fp32 scales [M, G]: scale = max |x| / 127 of the group.

    One scale per row is not enough: a few inputs of a row are a hundred times the others, and with
    those the logits of SmolLM2-135M lose five times more (mean KL divergence 0.040 and 0.008).
    """
    groups = _groups(x_MK)
    most = groups.abs().amax(2)
    inverse = torch.where(most > 1e-30, 127.0 / most, torch.zeros_like(most))
    q = (groups * inverse[..., None]).round_().to(torch.int8)
    return q, most / 127.0


def linear(x_MK: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ [M, N] in fp32, in higher precision than the kernels, which add groups (or, for the
    float kinds, single products) in order in fp32.
    """
    if isinstance(weight, FloatWeight):
        x = x_MK.to(weight.values.dtype).double()
        return (x @ weight.values.double().T).float()
    q, scale = quantise_rows(x_MK)
    x = (q.double() * scale.double()[..., None]).flatten(1)[:, : x_MK.shape[1]]
    return (x @ dense(weight).double().T).float()
