"""Muon: a matrix moves by its momentum made orthogonal (Jordan et al., "Muon", 2024).

PyTorch has it too, and always multiplies in bf16. Where a processor only imitates that, these
products cost half of a training step; here they are in fp32 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.linear import multiplies_bf16

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the published quintic
_ITERATIONS = 5
_SMALLEST = 1e-7


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Meanwhile this thread, and threads that it starts, take numbers below 1e-38 as 0.

    The gradients of attention and losses are full of them (a probability of 1e-35 times a gradient
    of 1e-6), and a product with one takes a processor a hundred times as long. PyTorch's own
    threads are started by its first parallel operation and stay as they are then.
    """
    already = bool(torch.tensor(1e-30) * 1e-10 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def orthogonal(matrix_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] with the matrix's singular vectors and singular values near 1 (0.7 to 1.2)."""
    a, b, c = _COEFFICIENTS
    tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=_SMALLEST)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for matrices alone.

    A step has the size AdamW's would have (0.2 sqrt(larger side), arXiv 2502.16982), so that
    learning rates and weight decays of AdamW fit.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient. A closure is not called."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group)

    def _move(self, matrix_MN: Tensor, gradient_MN: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[matrix_MN], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix_MN)
        kept = state["momentum_buffer"].lerp_(gradient_MN, 1 - momentum)
        ahead = gradient_MN.lerp(kept, momentum)
        size = 0.2 * math.sqrt(max(matrix_MN.shape))
        matrix_MN.mul_(1 - group["lr"] * group["weight_decay"])
        dtype = torch.bfloat16 if multiplies_bf16(matrix_MN.device) else torch.float32
        matrix_MN.add_(orthogonal(ahead, dtype), alpha=-group["lr"] * size)
