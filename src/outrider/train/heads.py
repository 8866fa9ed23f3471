"""Draft heads as they are trained: the same arithmetic as at run time, over whole sequences.

`HeadModule` holds a head's tensors under their canonical names (`models/heads/config.py`) as
parameters in fp32. `unroll` is EAGLE-3's training-time test: step s feeds the head its own output
of step s - 1 and the true token, so that it learns to go on from its own guesses. It knows nothing
of data, losses or optimisers.

Row i of a sequence takes token i + 1 and the target's state at i; at step s the same row stands for
position i + s: it takes token i + 1 + s and its own last state, sees the first step's keys up to
row i and of later steps its own row only (arXiv 2503.01840, section 3.2).

Shapes: B sequences, L rows, N wanted rows of all sequences, F features, D target width, H head
width, A query heads, K key heads, G query heads of a key head, E head size, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.rope import Rope

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."


@dataclass(frozen=True)
class Frozen:
    """What a head borrows from its target and never changes.

    Attributes:
        embedding: [V, D].
        norm: the final norm's weight [D].
        norm_eps: its epsilon.
        head: rows of the target's head for the draft vocabulary [W, D].
    """

    embedding: Tensor
    norm: Tensor
    norm_eps: float
    head: Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


class HeadModule(nn.Module):
    """A head's parameters and one step of it."""

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, Tensor], spread: Tensor | None = None
    ) -> None:
        """Make parameters of tensors.

        Args:
            spread: how widely each input of `fc` is spread, in powers of two (`input_spread`).
                Training sees inputs divided by it; what `tensors` gives is folded back.
        """
        super().__init__()
        self.config = config
        self._names = {name: name.replace(".", "__") for name in config.shapes()}
        inputs = config.shapes().get("fc.weight", (0, 0))[1]
        self.spread: Tensor
        self.register_buffer("spread", torch.ones(inputs) if spread is None else spread)
        for name, plain in self._names.items():
            value = tensors[name].detach().float().clone()
            self.register_parameter(plain, nn.Parameter(value))
        self.restore(tensors)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def tensor(self, name: str) -> Tensor:
        """A parameter by its canonical name."""
        parameter: Tensor = getattr(self, self._names[name])
        return parameter

    def tensors(self) -> dict[str, Tensor]:
        """All parameters, detached, by canonical name."""
        found = {name: self.tensor(name).detach().clone() for name in self._names}
        if "fc.weight" in found:
            found["fc.weight"] /= self.spread
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, to the bit."""
        for name in self._names:
            self.tensor(name).copy_(tensors[name])
        if "fc.weight" in self._names:
            self.tensor("fc.weight").mul_(self.spread)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensor(f"{name}.weight"))

    # -- EAGLE --------------------------------------------------------------------------------

    def fuse(self, features_BLFD: Tensor, embedded_BLD: Tensor) -> Tensor:
        """The head's first state [B, L, H] from the target's features."""
        config = self.config
        if config.kind == "eagle":
            joined = torch.cat((embedded_BLD, features_BLFD[..., 0, :]), -1) / self.spread
            return self.linear(joined, "fc") + self.tensor("fc.bias")
        if config.fc_norm:
            states = [
                rms(features_BLFD[..., i, :], self.tensor(f"fc_norm.{i}.weight"), config.norm_eps)
                for i in range(features_BLFD.shape[2])
            ]
            return self.linear(torch.cat(states, -1), "fc")
        joined = features_BLFD.flatten(2)
        if config.norm_before_fc:
            joined = rms(joined, self.tensor("input_norm.weight"), config.norm_eps)
        return self.linear(joined / self.spread, "fc")

    def attention_input(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What q, k and v are made of, and the residual stream."""
        config, eps = self.config, self.config.norm_eps
        if config.kind == "eagle":
            return state, state
        token = rms(embedded, self.tensor("layers.0.input_layernorm.weight"), eps)
        if config.token_residual:
            state = state + self.linear(token, "token_residual")
        normed = rms(state, self.tensor("layers.0.hidden_norm.weight"), eps)
        residual = normed if config.norm_before_residual else state
        return torch.cat((token, normed), -1), residual

    def mlp(self, x: Tensor) -> Tensor:
        """The layer's second half, residual included."""
        eps = self.config.norm_eps
        y = rms(x, self.tensor("layers.0.post_attention_layernorm.weight"), eps)
        gated = F.silu(self.linear(y, f"{MLP}gate_proj")) * self.linear(y, f"{MLP}up_proj")
        return x + self.linear(gated, f"{MLP}down_proj")

    def outputs(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into the head, and what is fed to the next step."""
        if self.config.kind == "eagle":
            return state, state
        normed = rms(state, self.tensor("norm.weight"), self.config.norm_eps)
        return normed, normed if self.config.norm_output else state

    def logits(self, normed: Tensor, frozen: Frozen) -> Tensor:
        """[.., W] over the draft vocabulary."""
        if self.config.kind == "eagle":
            return F.linear(normed, frozen.head)
        return self.linear(normed, "lm_head")

    def heads(self, x: Tensor, name: str) -> Tensor:
        """Queries, keys or values [.., heads, E]; ``name`` is q, k or v."""
        return split(self.linear(x, f"{ATTENTION}{name}_proj"), self.config.head_dim)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [C, 1, E] for positions 0 .. length."""
        if length not in self._tables:
            rope = Rope(self.config.rope_theta, self.config.head_dim)
            cos, sin = rope.tables(length)
            device = next(self.parameters()).device
            self._tables[length] = cos[:, None].to(device), sin[:, None].to(device)
        return self._tables[length]

    # -- Medusa -------------------------------------------------------------------------------

    def medusa_state(self, head: int, state: Tensor) -> Tensor:
        """The residual blocks of one head (arXiv 2401.10774, section 2.1.1)."""
        for layer in range(self.config.medusa_layers):
            name = f"blocks.{head}.layers.{layer}"
            state = state + F.silu(self.linear(state, name) + self.tensor(f"{name}.bias"))
        return state


def split(x: Tensor, size: int) -> Tensor:
    """The last axis [.. N * E] as two, [.., N, E]."""
    return x.view(*x.shape[:-1], x.shape[-1] // size, size)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[.., heads, E] turned to its positions; `sin` is signed, as `Rope.tables` gives it."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Packed:
    """Some rows [N, ..] of sequences [B, L, ..], and the way there and back.

    A head's matrices see only the rows whose guesses count; prompts and padding need no more than
    keys and values of the first step.
    """

    def __init__(self, wanted_BL: Tensor) -> None:
        self._shape = wanted_BL.shape
        self._flat = wanted_BL.flatten().nonzero()[:, 0]
        self.places = self._flat % wanted_BL.shape[1]  # [N] rows within their sequences

    def take(self, x_BL: Tensor) -> Tensor:
        """[N, ..] of [B, L, ..]."""
        return x_BL.flatten(0, 1)[self._flat]

    def put(self, x_N: Tensor) -> Tensor:
        """[B, L, ..] of [N, ..], zeros elsewhere."""
        empty = x_N.new_zeros(self._shape.numel(), *x_N.shape[1:])
        return empty.index_copy(0, self._flat, x_N).view(*self._shape, *x_N.shape[1:])


def unroll(
    module: HeadModule,
    frozen: Frozen,
    tokens_BL1: Tensor,
    features_BLFD: Tensor,
    steps: int,
    wanted_BL: Tensor,
) -> Iterator[Tensor]:
    """What goes into the head at each step of the training-time test, [N, H]: the wanted rows.

    Args:
        tokens_BL1: [B, L + 1]; row i takes token i + 1. Beyond the end tokens are 0.
        steps: 1 is training without it.
        wanted_BL: the rows whose guesses count at any step.
    """
    config = module.config
    length = features_BLFD.shape[1]
    padded = F.pad(tokens_BL1[:, 1:], (0, steps))
    cos, sin = module.rotation(config.context_length + steps)
    mask = _visible(config, length, features_BLFD.device)
    rows = Packed(wanted_BL)
    embedded = F.embedding(padded[:, :length], frozen.embedding)
    state = module.fuse(features_BLFD, embedded)
    x, residual = module.attention_input(embedded, state)
    keys = rotate(module.heads(x, "k"), cos[:length], sin[:length])
    values = module.heads(x, "v")
    x, residual = rows.take(x), rows.take(residual)
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        turn = cos[rows.places + step], sin[rows.places + step]
        if step:
            embedded = F.embedding(rows.take(padded[:, step : step + length]), frozen.embedding)
            if config.kind == "eagle":
                state = module.fuse(state[:, None], embedded)
            x, residual = module.attention_input(embedded, state)
            own.append((rotate(module.heads(x, "k"), *turn), module.heads(x, "v")))
        query = rotate(module.heads(x, "q"), *turn)
        mixed = _attend(query, keys, values, own, mask, rows)
        state = module.mlp(residual + module.linear(mixed.flatten(1), f"{ATTENTION}o_proj"))
        normed, state = module.outputs(state)
        yield normed


def _visible(config: HeadConfig, length: int, device: torch.device) -> Tensor:
    """[L, L]: 0 where a row sees another at the first step, minus infinity elsewhere."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if config.window:
        near = torch.ones_like(causal).triu(1 - config.window)
        near[:, : config.sinks] = True
        causal &= near
    return torch.zeros(length, length, device=device).masked_fill_(~causal, -math.inf)


def _attend(
    q_NAE: Tensor,
    k_BLKE: Tensor,
    v_BLKE: Tensor,
    own: list[tuple[Tensor, Tensor]],
    mask_LL: Tensor,
    rows: Packed,
) -> Tensor:
    """[N, A, E] of A query heads: the first step's keys causally, later steps' of the row alone."""
    batch, length, kv, size = k_BLKE.shape
    group, scale = q_NAE.shape[1] // kv, 1.0 / math.sqrt(size)
    q_NKGE = q_NAE.view(len(q_NAE), kv, group, size)
    q = rows.put(q_NKGE).permute(0, 2, 3, 1, 4).reshape(batch, kv, group * length, size)
    k, v = k_BLKE.transpose(1, 2), v_BLKE.transpose(1, 2)
    scores = (q @ k.transpose(-1, -2)).view(batch, kv, group, length, length).float() * scale
    scores = scores + mask_LL
    if own:
        later = torch.stack([(q_NKGE * key[:, :, None]).sum(-1) for key, _ in own], -1)
        later = rows.put(later.float() * scale).permute(0, 2, 3, 1, 4)
        scores = torch.cat((scores, later), -1)
    weights = torch.softmax(scores, -1).to(v.dtype)
    mixed = (weights[..., :length].flatten(2, 3) @ v).view(batch, kv, group, length, size)
    found = rows.take(mixed.permute(0, 3, 1, 2, 4))
    if own:
        shares = rows.take(weights[..., length:].permute(0, 3, 1, 2, 4))
        for index, (_, value) in enumerate(own):
            found = found + shares[..., index, None] * value[:, :, None]
    return found.flatten(1, 2)
