"""The parameters of a decoder: their names and shapes in a checkpoint, and their form in memory.

Checkpoints use Hugging Face names. Query, key and value matrices become one linear layer, gate and
up another: fewer, larger products. This module knows nothing of files or of attention.

Shapes: V vocabulary, D width, I inner width, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.linear import Linear, make_linear
from outrider.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Progress = Callable[[str, float], None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in fp32 (Zhang and Sennrich 1910.07467)."""
    if weight.ndim == 1:
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight)


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norm weights are fp32 and ready to multiply with, `None` for a norm it lacks.

    Attributes:
        token_norm: of a draft head's layer, whose queries, keys and values are made of the normed
            embedding of the row's token followed by the normed state.
        qkv: D -> (heads + 2 kv_heads) · H, queries first.
        qk_norm: [heads + kv_heads, H].
        gate_up: D -> 2 I, gate first.
    """

    attention_norm: Tensor | None
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    attention_after: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_after: Tensor | None
    token_norm: Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """A whole decoder: embedding [V, D], layers, final norm [D], head D -> V.

    A draft head may lack the final norm, and its head may have fewer outputs.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None
    head: Linear

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that a one-row pass reads."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return sum(m.inputs * m.outputs for m in matrices) * self.embedding.dtype.itemsize


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this model must hold, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.width)}
    for index in range(len(config.layers)):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes[FINAL_NORM] = (config.width,)
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, config.width)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, inner, head_dim = config.width, config.inner, config.head_dim
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    if config.fused_names:
        linear("self_attn.qkv_proj", queries + 2 * keys, width, config.qkv_bias)
    else:
        linear("self_attn.q_proj", queries, width, config.qkv_bias)
        linear("self_attn.k_proj", keys, width, config.qkv_bias)
        linear("self_attn.v_proj", keys, width, config.qkv_bias)
    linear("self_attn.o_proj", width, queries, config.out_bias)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    shapes["post_attention_layernorm.weight"] = (width,)
    if config.norm_after:
        shapes["pre_feedforward_layernorm.weight"] = (width,)
        shapes["post_feedforward_layernorm.weight"] = (width,)
    if config.fused_names:
        linear("mlp.gate_up_proj", 2 * inner, width, config.mlp_bias)
    else:
        linear("mlp.gate_proj", inner, width, config.mlp_bias)
        linear("mlp.up_proj", inner, width, config.mlp_bias)
    linear("mlp.down_proj", width, inner, config.mlp_bias)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Refuse a checkpoint whose tensors are not exactly the expected ones.

    A tied model may carry its head as well, and any model the rotation's frequencies: both are
    derived, and old files store them.

    Raises:
        ModelError: names the first missing, unexpected or mis-shaped tensor.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{source}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    derived = {HEAD} if config.tied else set()
    extra = [
        name
        for name in found
        if name not in expected and name not in derived and not name.endswith(".inv_freq")
    ]
    if extra:
        raise ModelError(
            f"{source}: tensor {extra[0]!r} is unexpected ({len(extra)} in all); "
            f"is the config of another model?"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{source}: tensor {name!r} has shape {list(found[name])}, "
                f"the config says {list(shape)}"
            )


def build_weights(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ModelWeights:
    """Read every tensor once and pack it, layer by layer (so that little is held twice).

    ``read`` gives a tensor by its Hugging Face name, in any floating dtype.
    """

    def get(name: str) -> Tensor:
        return read(name).to(device=device, dtype=dtype)

    def norm(name: str, repeats: int = 0) -> Tensor:
        weight = read(name).to(device, torch.float32)
        weight = 1.0 + weight if config.norm_adds_one else weight
        return weight.expand(repeats, -1) if repeats else weight

    embedding = get(EMBEDDING)
    layers = []
    for index in range(len(config.layers)):
        layers.append(_build_layer(config, f"model.layers.{index}.", get, norm))
        if progress is not None:
            progress("weights", (index + 1) / len(config.layers))
    head = make_linear(embedding if config.tied else get(HEAD))
    return ModelWeights(embedding, tuple(layers), norm(FINAL_NORM), head)


def _build_layer(
    config: ModelConfig, prefix: str, get: Callable[[str], Tensor], norm: Callable[..., Tensor]
) -> LayerWeights:
    def linear(names: list[str], bias: bool) -> Linear:
        weights = [get(f"{prefix}{name}.weight") for name in names]
        biases = [get(f"{prefix}{name}.bias") for name in names] if bias else []
        return make_linear(_joined(weights), _joined(biases) if bias else None)

    qkv = ["qkv_proj"] if config.fused_names else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if config.fused_names else ["gate_proj", "up_proj"]
    attention = f"{prefix}self_attn."
    qk_norm = None
    if config.qk_norm:
        query = norm(f"{attention}q_norm.weight", config.heads)
        qk_norm = torch.cat((query, norm(f"{attention}k_norm.weight", config.kv_heads)))
    second = "pre_feedforward_layernorm" if config.norm_after else "post_attention_layernorm"
    after = config.norm_after
    return LayerWeights(
        attention_norm=norm(f"{prefix}input_layernorm.weight"),
        qkv=linear([f"self_attn.{name}" for name in qkv], config.qkv_bias),
        qk_norm=qk_norm,
        out=linear(["self_attn.o_proj"], config.out_bias),
        attention_after=norm(f"{prefix}post_attention_layernorm.weight") if after else None,
        mlp_norm=norm(f"{prefix}{second}.weight"),
        gate_up=linear([f"mlp.{name}" for name in gate_up], config.mlp_bias),
        down=linear(["mlp.down_proj"], config.mlp_bias),
        mlp_after=norm(f"{prefix}post_feedforward_layernorm.weight") if after else None,
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """A checkpoint with random weights in fp32, for tests: lively logits, stable over any depth."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 0.1 * noise + (0.0 if config.norm_adds_one else 1.0)
        elif name.endswith(".bias"):
            tensors[name] = 0.1 * noise
        else:
            tensors[name] = noise / shape[-1] ** 0.5
    return tensors
