"""Linear layers of a draft head on the kernels of its target.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from outrider.errors import DrafterMismatch
from outrider.kernels import native, quantised
from outrider.kernels.linear import make_linear
from outrider.kernels.native import PackedMatrix, pack
from outrider.kernels.quantised import FloatWeight, Weight
from outrider.models.heads.config import HeadConfig
from outrider.models.native import NativeTransformer
from outrider.models.transformer import Transformer

Decoder = NativeTransformer | Transformer
Tensors = Mapping[str, Tensor]
Project = Callable[[Tensor], Tensor]


def round_weight(weight_NK: Tensor, precision: str) -> Weight:
    """A head's weight as it is held beside a target of ``precision``: int8 where that has int8 or
    4 bits, since a head is small."""
    match precision:
        case "bf16":
            return FloatWeight(weight_NK.bfloat16())
        case "fp32":
            return FloatWeight(weight_NK.float())
        case _:
            return quantised.to_int8(weight_NK.float())


def packed_projection(
    weight_NK: Tensor, target: NativeTransformer, *, small: bool = False
) -> PackedMatrix:
    """A weight packed for the native kernels.

    Args:
        small: round as `round_weight` does; otherwise to bf16 at most, since a target's raw states
            are too uneven for int8 rows.
    """
    precision = target.precision if small or target.precision == "fp32" else "bf16"
    return pack(round_weight(weight_NK, precision))


def applied(packed: PackedMatrix, target: NativeTransformer) -> Project:
    """x Wᵀ of a packed weight, fp32 in and out."""
    return lambda x: native.linear(x.float(), packed, threads=native.crew(target.threads))


def refuse_width(config: HeadConfig, target: Decoder) -> None:
    """Raises:
    DrafterMismatch: the head is not as wide as its target."""
    if config.width != target.config.width:
        raise DrafterMismatch(
            f"the head's width is {config.width}, the target's {target.config.width}; "
            "use a head that was trained for this target"
        )


def projection(weight_NK: Tensor, target: Decoder, *, small: bool = False) -> Project:
    """x Wᵀ, fp32 out; ``small`` as in `packed_projection`."""
    if isinstance(target, NativeTransformer):
        return applied(packed_projection(weight_NK, target, small=small), target)
    linear = make_linear(weight_NK.to(target.device, target.dtype))
    return lambda x: linear(x.to(target.dtype)).float()
