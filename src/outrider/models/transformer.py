"""One decoder for every family: `Transformer` implements `Target` from a `ModelConfig`.

A pass packs the rows of all segments: linear layers and norms run once for all of them, attention
runs per segment (`attention.py`). Per layer there are about twenty small operations, kept few
because on a CPU each costs microseconds beside a step of milliseconds. The hidden state that layers
add to is fp32 in every dtype: it costs nothing and halves the error of bf16 logits. The module
knows nothing of files, tokenizers, drafters or sampling. The CPU path is tested; on CUDA the same
code uses plain linear layers, unpadded attention and has not been tested.

Shapes: M rows of a pass, D width, V vocabulary, K key/value heads, G query heads per key/value
head, A = K·G + K heads of queries and keys together, H head size, F features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.models.attention import KEY_BLOCK, Planner, SegmentPlan, attend_prefix, attend_tree
from outrider.models.cache import CacheShape, KVCache
from outrider.models.config import LayerConfig, ModelConfig
from outrider.models.rope import Rope
from outrider.models.target import Forward, Segment, check_inputs, check_segments, stage_all
from outrider.models.weights import (
    LayerWeights,
    ModelWeights,
    build_weights,
    random_tensors,
    rms_norm,
)

Rotation = tuple[Tensor, Tensor]
PRECISION_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Pass:
    """Everything about a pass that its layers share: rotations [M, 1, D'] and attention plans.

    Attributes:
        embedded: [M, D] the tokens' embeddings, where they are not what the pass starts from.
    """

    rotations: dict[Rope, Rotation]
    segments: tuple[SegmentPlan, ...]
    embedded: Tensor | None = None


class Layer:
    """One decoder layer: attention, then the gated MLP, each added to the hidden state."""

    def __init__(
        self, config: ModelConfig, index: int, weights: LayerWeights, dtype: torch.dtype
    ) -> None:
        self.index = index
        self.dtype = dtype
        self.facts: LayerConfig = config.layers[index]
        self.config = config
        self.weights = weights
        self.activate = F.silu if config.activation == "silu" else _gelu_tanh

    def __call__(self, x_MD: Tensor, step: Pass) -> Tensor:
        """The next layer's input. Changes ``x_MD`` (fp32) and the staged rows of the cache."""
        weights = self.weights
        y_MD = weights.out(self._attention(self._attention_input(x_MD, step), step))
        if weights.attention_after is not None:
            y_MD = self._norm(y_MD, weights.attention_after)
        x_MD += y_MD
        gate, up = weights.gate_up(self._norm(x_MD, weights.mlp_norm)).chunk(2, -1)
        y_MD = weights.down(self.activate(gate).mul_(up))
        if weights.mlp_after is not None:
            y_MD = self._norm(y_MD, weights.mlp_after)
        x_MD += y_MD
        return x_MD

    def _attention_input(self, x_MD: Tensor, step: Pass) -> Tensor:
        """What queries, keys and values are made of: [M, D], or [M, 2D] in a draft head."""
        weights = self.weights
        norm = weights.attention_norm
        y_MD = x_MD.to(self.dtype) if norm is None else self._norm(x_MD, norm)
        if weights.token_norm is None:
            return y_MD
        assert step.embedded is not None
        return torch.cat((self._norm(step.embedded, weights.token_norm), y_MD), -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.norm_eps).to(self.dtype)

    def _attention(self, x_MD: Tensor, step: Pass) -> Tensor:
        config = self.config
        rows, heads, kv_heads, size = len(x_MD), config.heads, config.kv_heads, config.head_dim
        qkv = self.weights.qkv(x_MD).view(rows, heads + 2 * kv_heads, size)
        qk_MAH, v_MKH = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.weights.qk_norm is not None:
            qk_MAH = self._norm(qk_MAH, self.weights.qk_norm)
        if self.facts.rope is not None:
            qk_MAH = rotate(qk_MAH, step.rotations[self.facts.rope], self.facts.rope.dim)
        q_MKGH = qk_MAH[:, :heads].reshape(rows, kv_heads, -1, size)
        k_MKH = qk_MAH[:, heads:]
        outputs = []
        for segment in step.segments:
            segment.keys[self.index].copy_(k_MKH[segment.rows].transpose(0, 1))
            segment.values[self.index].copy_(v_MKH[segment.rows].transpose(0, 1))
            for block in segment.blocks:
                attend = attend_tree if block.tree else attend_prefix
                view = block.views[self.facts.window]
                outputs.append(attend(q_MKGH[block.rows], view, self.index, config.attention_scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def rotate(x_MAH: Tensor, rotation: Rotation, dim: int) -> Tensor:
    """Rotate the first ``dim`` entries of every head; the tables come from `Rope.tables`."""
    cos, sin = rotation
    if dim == x_MAH.shape[-1]:
        return (x_MAH * cos).add_(x_MAH.roll(dim // 2, -1).mul_(sin))
    turned, kept = x_MAH[..., :dim], x_MAH[..., dim:]
    return torch.cat((rotate(turned, rotation, dim), kept), -1)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Transformer:
    """A decoder in memory. Implements `outrider.models.target.Target`.

    Attributes:
        config: what it is made of.
        dtype, device: of weights, cache, logits and features.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        name: str,
        fingerprint: str,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
        self.weights = weights
        self.name = name
        self.fingerprint = fingerprint
        self.end_tokens = end_tokens
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.width = config.width
        self.layers = len(config.layers)
        self.weight_bytes = weights.matrix_bytes
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.precision = PRECISION_NAMES[self.dtype]
        self.row_invariant = False  # of chains on a CPU, not of trees; see attention.py
        self.cache_shape = CacheShape(self.layers, config.kv_heads, config.head_dim, self.dtype)
        self._layers = [
            Layer(config, i, layer, self.dtype) for i, layer in enumerate(weights.layers)
        ]
        self._ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._tables: dict[tuple[Rope, int], Rotation] = {}
        self._planner = Planner(
            group=config.heads // config.kv_heads,
            windows=frozenset(layer.window for layer in config.layers),
            device=self.device,
        )

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype = torch.float32,
        *,
        device: str = "cpu",
        end_tokens: frozenset[int] = frozenset(),
    ) -> Transformer:
        """A model with random weights, for tests and measurements."""
        tensors = random_tensors(config, seed)
        weights = build_weights(
            config, tensors.__getitem__, dtype=dtype, device=torch.device(device)
        )
        name = f"random-{config.family}-{seed}"
        return cls(
            config,
            weights,
            name=name,
            fingerprint=f"{name}-{hash_config(config)}-{dtype}".replace("torch.", ""),
            end_tokens=end_tokens,
        )

    def first_layers(self, count: int) -> Transformer:
        """The model of this one's first ``count`` layers, sharing all weights: a cheap drafter."""
        if not 1 <= count <= self.layers:
            raise InvalidParameter(f"{self.name} has {self.layers} layers; cannot keep {count}")
        return Transformer(
            replace(self.config, layers=self.config.layers[:count]),
            replace(self.weights, layers=self.weights.layers[:count]),
            name=f"{self.name}[:{count}]",
            fingerprint=f"{self.fingerprint}[:{count}]",
            end_tokens=self.end_tokens,
        )

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        """An empty cache; on CPUs with room behind the last position for whole key blocks."""
        room = -(-length // KEY_BLOCK) * KEY_BLOCK if self._planner.pad else length
        cache = KVCache(self.cache_shape, slots=slots, length=room, device=self.device)
        cache.capacity = length
        return cache

    @torch.no_grad()
    def forward(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        *,
        features: tuple[int, ...] = (),
        inputs: Tensor | None = None,
    ) -> Forward:
        """One pass. Stages every segment's rows in the cache; the caller keeps or drops them.

        Args:
            inputs: [M, D], the hidden states to start from, for draft heads; otherwise the tokens'
                embeddings.

        Raises:
            InvalidParameter: a token or feature that the model does not have, an empty segment, a
                slot that is full or staged already; nothing is staged then.
        """
        check_segments(self, segments, features)
        tokens = [token for segment in segments for token in segment.tokens]
        if inputs is not None:
            check_inputs(inputs, rows=len(tokens), width=self.config.width)
        starts = stage_all(segments, cache)
        embedded_MD = self.embed(torch.tensor(tokens, device=self.device))
        x_MD = embedded_MD if inputs is None else inputs.to(torch.float32, copy=True)
        step = self._plan(segments, cache, starts)
        if inputs is not None:
            step = replace(step, embedded=embedded_MD)
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in features:
                captured[index] = x_MD.to(self.dtype, copy=True)
            x_MD = layer(x_MD, step)
        captured[self.layers] = x_MD.to(self.dtype)
        sizes = [segment.rows for segment in segments]
        states = None
        if features:
            states = torch.split(torch.stack([captured[i] for i in features], 1), sizes)
        return Forward(self._tree_logits(x_MD, segments), states)

    def embed(self, tokens_M: Tensor) -> Tensor:
        """[M, D] in fp32: the hidden states entering layer 0."""
        x_MD = self.weights.embedding[tokens_M]
        if self.config.embedding_scale != 1.0:
            x_MD *= torch.tensor(self.config.embedding_scale, dtype=self.dtype)
        return x_MD.float()

    def norm(self, x_MD: Tensor) -> Tensor:
        """The final norm, which stands between the last layer's output and the head."""
        if self.weights.norm is None:
            return x_MD.to(self.dtype)
        return rms_norm(x_MD, self.weights.norm, self.config.norm_eps).to(self.dtype)

    def head(self, x_MD: Tensor) -> Tensor:
        """[M, V] logits of normed hidden states."""
        logits_MV = self.weights.head(x_MD)
        cap = self.config.logit_softcap
        return logits_MV if cap is None else logits_MV.div_(cap).tanh_().mul_(cap)

    def _tree_logits(self, x_MD: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
        rows: list[int] = []
        first = 0
        for segment in segments:
            rows.extend(range(first + len(segment.prefix), first + segment.rows))
            first += segment.rows
        if not rows:
            return [x_MD.new_empty(0, self.weights.head.outputs) for _ in segments]
        if len(rows) < len(x_MD):
            x_MD = x_MD[torch.tensor(rows, device=self.device)]
        sizes = [len(segment.tree) if segment.tree else 0 for segment in segments]
        return list(torch.split(self.head(self.norm(x_MD)), sizes))

    def _plan(self, segments: Sequence[Segment], cache: KVCache, starts: Sequence[int]) -> Pass:
        plans: list[SegmentPlan] = []
        positions: list[int] = []
        for segment, start in zip(segments, starts, strict=True):
            plans.append(self._planner.plan(segment, cache, len(positions), start))
            positions.extend(start + offset for offset in segment.offsets())
        index = torch.tensor(positions, device=self.device)
        rotations = {}
        for rope in self._ropes:
            cos, sin = self._rotation_table(rope, cache.capacity)
            rotations[rope] = cos[index], sin[index]
        return Pass(rotations, tuple(plans))

    def _rotation_table(self, rope: Rope, length: int) -> Rotation:
        table = self._tables.get((rope, length))
        if table is None:
            cos, sin = (t.to(self.device, self.dtype)[:, None] for t in rope.tables(length))
            table = self._tables[rope, length] = (cos, sin)
        return table


def hash_config(config: ModelConfig) -> str:
    """A short, stable hash of what the config says."""
    return hashlib.sha256(repr(config).encode()).hexdigest()[:16]
