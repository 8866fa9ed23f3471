"""EAGLE heads at run time: one small decoder layer that reads the target's hidden states.

`EagleModel` runs EAGLE-1, EAGLE-3 and EAGLE-3.1 heads on the kernels of their target: the layer is
a decoder of one layer (`NativeTransformer` or `Transformer`) whose passes start from given states.
Row i takes token i + 1 and the state of position i, and guesses token i + 2. It knows nothing of
trees' growth, sequences or files.

Sources: EAGLE 2401.15077; EAGLE-3 2503.01840; EAGLE-3.1 2605.09992.

Shapes: M rows of a pass, N rows of trees, R rows, F features, D target width, H head width,
W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import DrafterMismatch
from outrider.kernels.linear import Linear, make_linear
from outrider.kernels.native import PackedMatrix, pack
from outrider.models.cache import CacheShape, KVCache
from outrider.models.config import LayerConfig, ModelConfig
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.kernels import (
    Decoder,
    Tensors,
    applied,
    packed_projection,
    projection,
    refuse_width,
    round_weight,
)
from outrider.models.native import (
    DraftJob,
    DraftNodes,
    DraftRule,
    NativeLayer,
    NativeTransformer,
    NativeWeights,
    interleaved,
)
from outrider.models.rope import Rope
from outrider.models.target import Segment
from outrider.models.transformer import Transformer
from outrider.models.weights import LayerWeights, ModelWeights, rms_norm

LAYER = "layers.0."
ATTENTION = f"{LAYER}self_attn."
MLP = f"{LAYER}mlp."


@dataclass(frozen=True)
class HeadForward:
    """What a pass of a head gives, one entry per segment: the rows of its tree.

    Attributes:
        logits: [N, W] over the draft vocabulary.
        states: [N, H], what a child of the row starts from.
    """

    logits: Sequence[Tensor]
    states: Sequence[Tensor]


class EagleModel:
    """An EAGLE head that runs beside its target.

    Attributes:
        config: the head's.
        features: which of the target's hidden states it reads.
        weight_bytes: bytes of weights that a draft pass reads.
    """

    def __init__(
        self, config: HeadConfig, tensors: Tensors, target: Decoder, head_rows: Tensor | None
    ) -> None:
        """Pack a head's tensors for the kernels of its target.

        Args:
            tensors: by canonical name.
            head_rows: [W, D] rows of the target's head, which EAGLE-1 guesses with.

        Raises:
            DrafterMismatch: widths that do not fit, or a window on kernels without windows.
        """
        refuse_width(config, target)
        self.config = config
        self.features = config.features
        self._target = target
        head = tensors.get("lm_head.weight") if config.kind == "eagle3" else head_rows
        if head is None:
            raise DrafterMismatch("an EAGLE-1 head needs the rows of its target's head")
        if isinstance(target, NativeTransformer):
            self._decoder: Decoder = _native_decoder(config, tensors, target, head)
        else:
            self._decoder = _torch_decoder(config, tensors, target, head)
        self._fc_packed: PackedMatrix | None = None
        if isinstance(target, NativeTransformer):
            self._fc_packed = packed_projection(tensors["fc.weight"], target)
            self._fc = applied(self._fc_packed, target)
        else:
            self._fc = projection(tensors["fc.weight"], target)
        self._token_residual = (
            projection(tensors["token_residual.weight"], target) if config.token_residual else None
        )
        self._vectors = {
            name: tensor.float().to(target.device)
            for name, tensor in tensors.items()
            if tensor.ndim == 1 and tensor.is_floating_point()
        }
        self.cache_shape: CacheShape = self._decoder.cache_shape
        self.weight_bytes = self._decoder.weight_bytes

    def new_cache(self, *, slots: int, length: int) -> KVCache:
        """An empty cache for the head's layer."""
        return self._decoder.new_cache(slots=slots, length=length)

    def fuse(self, features_RFD: Tensor) -> Tensor:
        """[R, H]: what rows start from, made of the target's true states."""
        config, eps = self.config, self.config.norm_eps
        if config.kind == "eagle":
            return self._target.norm(features_RFD[:, 0]).float()
        states = features_RFD.float()
        if config.fc_norm:
            normed = [
                rms_norm(states[:, i], self._vectors[f"fc_norm.{i}.weight"], eps)
                for i in range(states.shape[1])
            ]
            return self._fc(torch.cat(normed, -1))
        joined = states.flatten(1)
        if config.norm_before_fc:
            joined = rms_norm(joined, self._vectors["input_norm.weight"], eps)
        return self._fc(joined)

    def forward(
        self, segments: Sequence[Segment], states_MH: Tensor, cache: KVCache
    ) -> HeadForward:
        """One pass; stages every segment's rows in the cache. The caller keeps or drops them.

        Args:
            states_MH: what every row starts from: a fused state, or the state of its parent.
        """
        ids = [token for segment in segments for token in segment.tokens]
        tokens = torch.tensor(ids, device=self._target.device)
        passed = self._decoder.forward(
            segments, cache, features=(1,), inputs=self._inputs(tokens, states_MH)
        )
        assert passed.features is not None  # they were asked for
        states = []
        for segment, rows in zip(segments, passed.features, strict=True):
            last = rows[len(segment.prefix) :, 0].float()
            states.append(self._decoder.norm(last).float() if self.config.norm_output else last)
        return HeadForward(passed.logits, states)

    @property
    def grows_natively(self) -> bool:
        """Can `draft` be used?"""
        plain = self._token_residual is None and not self.config.norm_before_residual
        return isinstance(self._decoder, NativeTransformer) and plain

    def completed(self, rule: DraftRule) -> DraftRule:
        """A rule with what belongs to the head filled in."""
        first = self.config.kind == "eagle"
        return replace(
            rule,
            norm_output=self.config.norm_output,
            fc=self._fc_packed if first else None,
            fc_bias=self._vectors["fc.bias"] if first else None,
        )

    def draft(self, cache: KVCache, jobs: Sequence[DraftJob]) -> list[DraftNodes]:
        """Grow whole trees in one call of the native kernels, by completed rules."""
        assert isinstance(self._decoder, NativeTransformer)
        return self._decoder.draft(cache, jobs)

    def _inputs(self, tokens_M: Tensor, states_MH: Tensor) -> Tensor:
        config = self.config
        if config.kind == "eagle":
            embedded = self._target.embed(tokens_M)
            return self._fc(torch.cat((embedded, states_MH), -1)) + self._vectors["fc.bias"]
        if self._token_residual is not None:
            norm = self._vectors[f"{LAYER}input_layernorm.weight"]
            token = rms_norm(self._target.embed(tokens_M), norm, config.norm_eps)
            states_MH = states_MH + self._token_residual(token)
        if config.norm_before_residual:
            norm = self._vectors[f"{LAYER}hidden_norm.weight"]
            states_MH = rms_norm(states_MH, norm, config.norm_eps)
        return states_MH


def _decoder_config(config: HeadConfig, target: Decoder) -> ModelConfig:
    """The head's layer as a decoder; tokens are the target's."""
    rope = Rope(config.rope_theta, config.head_dim)
    return ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        width=config.width,
        inner=config.inner,
        layers=(LayerConfig(config.window or None, rope),),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        attention_scale=config.head_dim**-0.5,
        context_length=target.context_length,
    )


def _norms(config: HeadConfig, tensors: Tensors) -> dict[str, Tensor | None]:
    """The layer's norms in fp32: attention, token, MLP and final."""
    names = {"mlp": f"{LAYER}post_attention_layernorm.weight"}
    if config.kind == "eagle3":
        names |= {"token": f"{LAYER}input_layernorm.weight", "final": "norm.weight"}
        if not config.norm_before_residual:
            names["attention"] = f"{LAYER}hidden_norm.weight"
    found: dict[str, Tensor | None] = dict.fromkeys(("attention", "token", "mlp", "final"))
    return found | {
        key: tensors[name].to(torch.float32, copy=True).contiguous() for key, name in names.items()
    }


def _stacked(tensors: Tensors, prefix: str, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[f"{prefix}{name}_proj.weight"].float() for name in names])


def _native_decoder(
    config: HeadConfig, tensors: Tensors, target: NativeTransformer, head: Tensor
) -> NativeTransformer:
    if config.window:
        raise DrafterMismatch(
            "the head's attention has a window, which the native kernels lack; "
            "load the target with kernels torch"
        )
    norms = _norms(config, tensors)
    assert norms["mlp"] is not None

    def packed(weight: Tensor) -> PackedMatrix:
        return pack(round_weight(weight, target.precision))

    gate_up = _stacked(tensors, MLP, ("gate", "up"))[interleaved(config.inner)]
    layer = NativeLayer(
        attention_norm=norms["attention"],
        mlp_norm=norms["mlp"],
        query_norm=None,
        key_norm=None,
        qkv_bias=None,
        qkv=packed(_stacked(tensors, ATTENTION, ("q", "k", "v"))),
        output=packed(_stacked(tensors, ATTENTION, ("o",))),
        gate_up=packed(gate_up),
        down=packed(_stacked(tensors, MLP, ("down",))),
        token_norm=norms["token"],
    )
    return NativeTransformer(
        _decoder_config(config, target),
        NativeWeights(target.weights.embedding, (layer,), norms["final"], packed(head.float())),
        precision=target.precision,
        name=f"{config.kind} head",
        fingerprint="",
        threads=target.threads,
    )


def _torch_decoder(
    config: HeadConfig, tensors: Tensors, target: Transformer, head: Tensor
) -> Transformer:
    norms = {
        name: None if norm is None else norm.to(target.device)
        for name, norm in _norms(config, tensors).items()
    }
    assert norms["mlp"] is not None

    def linear(weight: Tensor) -> Linear:
        return make_linear(weight.to(target.device, target.dtype))

    layer = LayerWeights(
        attention_norm=norms["attention"],
        qkv=linear(_stacked(tensors, ATTENTION, ("q", "k", "v"))),
        qk_norm=None,
        out=linear(_stacked(tensors, ATTENTION, ("o",))),
        attention_after=None,
        mlp_norm=norms["mlp"],
        gate_up=linear(_stacked(tensors, MLP, ("gate", "up"))),
        down=linear(_stacked(tensors, MLP, ("down",))),
        mlp_after=None,
        token_norm=norms["token"],
    )
    weights = ModelWeights(target.weights.embedding, (layer,), norms["final"], linear(head))
    return Transformer(
        _decoder_config(config, target), weights, name=f"{config.kind} head", fingerprint=""
    )
