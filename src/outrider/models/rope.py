"""Rotary position embeddings: one description, every scaling that the supported families use.

A `Rope` is the table of rotation angles of a layer: which frequencies, over how much of a head, and
how they are stretched for contexts longer than the pre-training's. It knows nothing of layers.

Shapes: C positions, D rotated size of a head (D/2 frequencies).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al. 2306.15595): all frequencies divided by a factor."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: low frequencies divided, high ones kept, a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2309.00071): a ramp over the number of rotations, and hotter attention."""

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2402.13753): a divisor per frequency, one set for short contexts and
    one for long ones."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float


Scaling = Linear | Llama3 | Yarn | LongRope


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `dim` entries of a head.

    Attributes:
        theta: the base of the frequencies.
        dim: how many entries of a head are rotated (even).
        scaling: how the frequencies are stretched; `None` for the original ones.
    """

    theta: float
    dim: int
    scaling: Scaling | None = None

    def frequencies(self, length: int) -> Tensor:
        """The D/2 angles per position for contexts of up to ``length`` positions, fp32.

        Only `LongRope` looks at ``length``. It is the length that the cache was made for, not that
        of the text so far: frequencies that switch in mid-text would leave the cached keys rotated
        by the old ones and make a token depend on how its rows were grouped into passes.
        """
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        base = 1.0 / (self.theta**exponents)
        match self.scaling:
            case None:
                return base
            case Linear(factor=factor):
                return base / factor
            case Llama3():
                return _llama3(base, self.scaling)
            case Yarn():
                return _yarn(base, self)
            case LongRope():
                beyond = length > self.scaling.original_length
                divisors = self.scaling.long_factor if beyond else self.scaling.short_factor
                return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * self.theta**exponents)

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [C, D] in fp32; the first half of sin is negated.

        With these, rotating x is ``x * cos + roll(x, D / 2) * sin``.
        """
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies(length))
        match self.scaling:
            case Yarn(attention_factor=heat) | LongRope(attention_factor=heat):
                pass
            case _:
                heat = 1.0
        cos, sin = angles.cos() * heat, angles.sin() * heat
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _llama3(base: Tensor, scaling: Llama3) -> Tensor:
    wavelengths = 2 * math.pi / base
    long = scaling.original_length / scaling.low_freq_factor
    short = scaling.original_length / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_length / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - smooth) * base / scaling.factor + smooth * base
    stretched = torch.where(wavelengths > long, base / scaling.factor, blended)
    return torch.where(wavelengths < short, base, stretched)


def _yarn(base: Tensor, rope: Rope) -> Tensor:
    assert isinstance(rope.scaling, Yarn)
    scaling = rope.scaling

    def entry(rotations: float) -> float:
        """The (fractional) frequency that turns this often within the original length."""
        turns = scaling.original_length / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = entry(scaling.beta_fast), entry(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def yarn_attention_factor(
    factor: float, *, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The default heat of attention for a stretch by ``factor``."""

    def heat(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return heat(mscale) / heat(mscale_all_dim)
    return heat(1.0)


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """LongRoPE's default heat of attention for a stretch by ``factor``."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length))
