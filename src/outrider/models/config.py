"""What a decoder looks like: one description for every supported family.

`ModelConfig` holds facts (sizes, norms, rotations, windows), no names of families: the transformer
branches on facts alone. `from_hf` reads a Hugging Face ``config.json``; GGUF metadata is first
written in that form (`gguf_file.py`), so that there is one reader. What it does not understand is
refused: a model that loads runs as its authors meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ModelError
from outrider.models import rope
from outrider.models.rope import Rope

Activation = Literal["silu", "gelu_tanh"]
Raw = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# What a key means that config.json does not hold, per family (it is written by many tools, and
# short where a value is the family's usual one).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "gemma3_text": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "phi3": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    "smollm3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
}

FAMILIES = tuple(_DEFAULTS)


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        window: a row sees this many positions, its own included; `None` for all.
        rope: the rotation of queries and keys; `None` for a layer without positions.
    """

    window: int | None
    rope: Rope | None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    Attributes:
        family: the name in config.json; shown to people, never branched on.
        width: size of the hidden state. `inner`: of the gated MLP.
        layers: one entry per layer.
        heads, kv_heads, head_dim: query heads, key/value heads, size of each.
        norm_eps: epsilon of all RMS norms.
        norm_adds_one: norms scale by 1 + weight, in fp32.
        norm_after: a second norm after attention and after the MLP, before the residual sum.
        qk_norm: queries and keys are normed per head before rotation.
        qkv_bias, out_bias, mlp_bias: biases of those linear layers.
        tied: the head is the embedding.
        embedding_scale: embeddings are multiplied by it (rounded to the model's dtype).
        attention_scale: scores are multiplied by it.
        logit_softcap: logits x become c · tanh(x / c).
        context_length: positions that the model was made for.
        fused_names: the checkpoint stores qkv and gate/up in one matrix each.
    """

    family: str
    vocab_size: int
    width: int
    inner: int
    layers: tuple[LayerConfig, ...]
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    attention_scale: float
    norm_eps: float = 1e-6
    activation: Activation = "silu"
    norm_adds_one: bool = False
    norm_after: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    fused_names: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "inner", "heads", "kv_heads", "head_dim"):
            if vars(self)[name] < 1:
                raise ModelError(f"config: {name} is {vars(self)[name]}, it must be at least 1")
        if not self.layers:
            raise ModelError("config: the model has no layers; at least 1 is needed")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly"
            )
        for layer in self.layers:
            if layer.rope and not (0 < layer.rope.dim <= self.head_dim and layer.rope.dim % 2 == 0):
                raise ModelError(
                    f"config: {layer.rope.dim} rotated entries do not fit heads of {self.head_dim}"
                )
            if layer.window is not None and layer.window < 1:
                raise ModelError(f"config: sliding window {layer.window}; it must be at least 1")

    @classmethod
    def from_hf(cls, raw: Raw) -> ModelConfig:
        """Read a Hugging Face ``config.json``.

        Raises:
            ModelError: an unknown family, or anything this package cannot run faithfully.
        """
        family = raw.get("model_type")
        if family not in _DEFAULTS:
            raise ModelError(
                f"config: architecture {family!r} is not supported; "
                f"use one of {', '.join(FAMILIES)}"
            )
        _refuse_unsupported(raw)
        values = {**_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None}}
        # an explicit null is a statement for these, not an omission
        for key in ("sliding_window", "rope_scaling"):
            if key in raw and raw[key] is None:
                values.pop(key, None)
        try:
            return _read(family, values)
        except KeyError as missing:
            raise ModelError(f"config: {missing.args[0]!r} is missing for {family}") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"config: a value has the wrong type ({error})") from None


def _refuse_unsupported(raw: Raw) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"config: weights quantised with {method!r} are not supported; use the unquantised "
            f"checkpoint or a GGUF file"
        )
    for key in ("num_experts", "num_local_experts", "attn_logit_softcapping"):
        if raw.get(key):
            raise ModelError(f"config: {key}={raw[key]} is not supported")
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config: use_bidirectional_attention is not supported by a decoder")


def _read(family: str, values: Raw) -> ModelConfig:
    heads = int(values["num_attention_heads"])
    width = int(values["hidden_size"])
    head_dim = int(values.get("head_dim") or width // heads)
    gemma = family == "gemma3_text"
    bias = bool(values.get("attention_bias", False)) and family != "phi3"
    scale = float(values["query_pre_attn_scalar"]) if gemma else head_dim
    return ModelConfig(
        family=family,
        vocab_size=int(values["vocab_size"]),
        width=width,
        inner=int(values["intermediate_size"]),
        layers=_layers(family, values, head_dim),
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        context_length=int(values["max_position_embeddings"]),
        attention_scale=scale**-0.5,
        norm_eps=float(values["rms_norm_eps"]),
        activation=_activation(values),
        norm_adds_one=gemma,
        norm_after=gemma,
        qk_norm=gemma or family == "qwen3",
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(values.get("mlp_bias", False)) and family in ("llama", "smollm3"),
        tied=bool(values.get("tie_word_embeddings", False)),
        embedding_scale=width**0.5 if gemma else 1.0,
        logit_softcap=values.get("final_logit_softcapping") if gemma else None,
        fused_names=family == "phi3",
    )


def _activation(values: Raw) -> Activation:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config: activation {name!r} is not supported; known: {known}")
    return _ACTIVATIONS[name]


def _layers(family: str, values: Raw, head_dim: int) -> tuple[LayerConfig, ...]:
    count = int(values["num_hidden_layers"])
    windows = _windows(family, values, count)
    if family == "gemma3_text":
        wide, local = _gemma_ropes(values, head_dim)
        return tuple(LayerConfig(w, wide if w is None else local) for w in windows)
    rotation = _rope(_rope_values(family, values), values, head_dim)
    if family == "smollm3":
        step = int(values["no_rope_layer_interval"])
        flags = values.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(count)]
        if len(flags) < count:
            raise ModelError(f"config: no_rope_layers names {len(flags)} of {count} layers")
        return tuple(
            LayerConfig(w, rotation if on else None) for w, on in zip(windows, flags, strict=False)
        )
    return tuple(LayerConfig(w, rotation) for w in windows)


def _windows(family: str, values: Raw, count: int) -> list[int | None]:
    """The sliding window of each layer."""
    window = values.get("sliding_window")
    if window is None or family == "llama":
        return [None] * count
    window = int(window)
    if family in ("mistral", "phi3"):
        return [window] * count
    if family != "gemma3_text" and not values.get("use_sliding_window", False):
        return [None] * count
    types = values.get("layer_types") or _layer_types(family, values, count)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != count:
        raise ModelError(
            f"config: layer_types must name full_attention or sliding_attention for each of "
            f"{count} layers, got {len(types)} entries, unknown: {sorted(unknown)}"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def _layer_types(family: str, values: Raw, count: int) -> list[str]:
    """Which layers slide where the file does not list them."""
    if family == "gemma3_text":
        step = int(values["sliding_window_pattern"])
        sliding = [(i + 1) % step != 0 for i in range(count)]
    elif family == "smollm3":
        step = int(values["no_rope_layer_interval"])
        sliding = [(i + 1) % step == 0 for i in range(count)]
    else:
        sliding = [i >= int(values["max_window_layers"]) for i in range(count)]
    return ["sliding_attention" if on else "full_attention" for on in sliding]


def _rope_values(family: str, values: Raw) -> dict[str, Any]:
    """The rotation's settings from the old keys (rope_theta, rope_scaling) or the new dict."""
    settings = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    settings.setdefault("rope_theta", values.get("rope_theta", 10_000.0))
    settings.setdefault("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    kind = settings.get("rope_type") or settings.get("type") or "default"
    # early Phi-3 files call it so
    settings["rope_type"] = "longrope" if family == "phi3" and kind in ("su", "yarn") else kind
    return settings


def _gemma_ropes(values: Raw, head_dim: int) -> tuple[Rope, Rope]:
    """Gemma 3 rotates global and local layers differently; only the global ones are stretched."""
    nested = values.get("rope_parameters") or {}
    wide = {"rope_theta": values["rope_theta"]} | (nested.get("full_attention") or {})
    wide |= values.get("rope_scaling") or {}
    local = {"rope_theta": values["rope_local_base_freq"]}
    local |= nested.get("sliding_attention") or {}
    return _rope(wide, values, head_dim), _rope(local, values, head_dim)


def _rope(settings: Raw, values: Raw, head_dim: int) -> Rope:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    dim = int(head_dim * float(settings.get("partial_rotary_factor", 1.0)))
    reach = int(values["max_position_embeddings"])
    original = int(
        values.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or reach
    )
    return Rope(float(settings["rope_theta"]), dim, _scaling(kind, settings, dim, reach, original))


def _scaling(kind: str, settings: Raw, dim: int, reach: int, original: int) -> rope.Scaling | None:
    factor = float(settings.get("factor") or reach / original)
    heat = settings.get("attention_factor")
    match kind:
        case "default":
            return None
        case "linear":
            return rope.Linear(float(settings["factor"]))
        case "llama3":
            low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
            return rope.Llama3(float(settings["factor"]), low, high, original)
        case "yarn":
            mscales = settings.get("mscale"), settings.get("mscale_all_dim")
            if heat is None:
                heat = rope.yarn_attention_factor(
                    factor, mscale=mscales[0], mscale_all_dim=mscales[1]
                )
            return rope.Yarn(
                factor,
                original,
                float(heat),
                beta_fast=float(settings.get("beta_fast") or 32),
                beta_slow=float(settings.get("beta_slow") or 1),
                truncate=bool(settings.get("truncate", True)),
            )
        case "longrope":
            short, long = tuple(settings["short_factor"]), tuple(settings["long_factor"])
            if not len(short) == len(long) == dim // 2:
                raise ModelError(
                    f"config: longrope needs {dim // 2} factors, got {len(short)} and {len(long)}"
                )
            if heat is None:
                heat = rope.longrope_attention_factor(factor, original)
            return rope.LongRope(short, long, original, float(heat))
        case _:
            raise ModelError(
                f"config: rope type {kind!r} is not supported; known: default, linear, llama3, "
                f"yarn, longrope"
            )
