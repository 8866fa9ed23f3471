"""Linear layers whose weight is packed once and applied many times.

`PackedLinear` uses oneDNN's own weight layout on CPUs (1.5 to 2 times faster than `F.linear` for a
few rows, and the same bits for a row however many rows go with it, in bf16 where the processor
multiplies that itself); `PlainLinear` is its slow twin and the path everywhere else. This module
knows nothing of models.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_DTYPES = (torch.float32, torch.bfloat16)
SINGLE_ROW_INPUTS = 1024


class Linear(Protocol):
    """y = x Wᵀ + b for x of shape [M, K]."""

    inputs: int
    outputs: int

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N] for M >= 1 rows in the weight's dtype."""
        ...

    def dense(self) -> Tensor:
        """The weight [N, K] in its plain layout; a copy where the layer is packed."""
        ...


class PlainLinear:
    """The twin without tricks: `F.linear`, on every device and in every dtype."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight_NK.shape
        self._weight = weight_NK
        self._bias = bias_N

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self._weight, self._bias)

    def dense(self) -> Tensor:
        return self._weight


class PackedLinear:
    """A weight in oneDNN's blocked layout (CPU, fp32 and bf16).

    oneDNN sums more than 1,024 inputs in another order for a single row than for two or more, so a
    lone row is computed as two equal ones there: a row's result then does not depend on how many
    rows are computed with it (measured for 1 to 300 rows, one and two threads). Where bf16 is made
    of fp32 products (`cpu_multiplies_bf16` is false), it is not so: the last bit may differ.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight_NK.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        self._bias = bias_N
        self._pad_single = self.inputs > SINGLE_ROW_INPUTS
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self._pad_single and x_MK.shape[0] == 1:
            return self._run(x_MK.expand(2, -1).contiguous())[:1]
        return self._run(x_MK)

    def _run(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = self._apply(x_MK, self._weight, self._bias, "none", [], "")
        return y_MN

    def dense(self) -> Tensor:
        weight: Tensor = self._weight.to_dense()
        return weight


def cpu_multiplies_bf16() -> bool:
    """Does the processor multiply bf16 itself? Known on Linux; elsewhere the answer is no."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return False
    return bool({"avx512_bf16", "amx_bf16"} & set(flags))


def multiplies_bf16(device: torch.device) -> bool:
    """Does the device multiply bf16 itself, and not by way of fp32?"""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and cpu_multiplies_bf16()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Does this build of PyTorch have packed linear layers for the device and dtype?"""
    if device.type != "cpu" or dtype not in PACKED_DTYPES or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def make_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
    """The fastest layer for where the weight lives: packed where that is possible, else plain."""
    if can_pack(weight_NK.device, weight_NK.dtype):
        return PackedLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)
