"""GGUF files: read, and converted once into the folder form that everything else reads.

`read_gguf` translates metadata into a Hugging Face config and tensors into Hugging Face names;
`converted` keeps the result (safetensors, config, tokenizer) in the cache folder under the hash of
the file's content. Quantised weights are dequantised to bf16, floating-point ones keep their type.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.quantised import (
    GROUP,
    Int4Weight,
    Int8GroupsWeight,
    Weight,
    take_rows,
)
from outrider.models.config import ModelConfig
from outrider.models.paths import cache_folder, complete_folder, disk_full, file_hash
from outrider.models.safetensors_files import INDEX, SINGLE, read_json

# Part of the cache's key: raise it when the conversion changes.
CONVERSION = 2
SHARD_BYTES = 2 << 30

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SUPPORTED_TYPES = (*_FLOATS, *_QUANTS)

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "smollm3": "smollm3",
}
# llama.cpp rotates neighbours (2i, 2i + 1) for these; their files hold Q and K reordered for it.
_INTERLEAVED = ("llama", "smollm3")

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FAMILY_NAMES = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
# Divisors of the rotation's frequencies; they become part of the config.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file in Hugging Face's terms.

    Attributes:
        raw: the config.json that the metadata stands for.
        metadata: the file's own.
        tensors: yields (name, tensor); reading happens as it goes.
        types: of the tensors, as GGUF names them.
        nbytes: of all tensors together.
        count: of tensors.
    """

    path: Path
    raw: dict[str, Any]
    metadata: dict[str, Any]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    types: frozenset[str]
    nbytes: int
    count: int


def read_gguf(path: Path) -> GgufModel:
    """Read a GGUF file's metadata and prepare its tensors.

    Raises:
        ModelError: missing, not GGUF, cut short, or of a kind that is not supported.
    """
    return _model(path, _open(path))


def _model(path: Path, reader: gguf.GGUFReader) -> GgufModel:
    metadata = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    }
    architecture = metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported; "
            f"use one of {', '.join(_FAMILIES)}"
        )
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in SUPPORTED_TYPES:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} is of type {tensor.tensor_type.name}, which is "
                f"not supported; use a file of {', '.join(SUPPORTED_TYPES)}"
            )
    raw = _config(path, architecture, metadata, by_name)
    names = {name: _hf_name(path, architecture, name) for name in by_name if _is_weight(name)}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, target in names.items():
            yield target, _tensor(by_name[name], target, architecture, raw)

    sizes = [2 * int(by_name[name].n_elements) for name in names]
    types = frozenset(by_name[name].tensor_type.name for name in names)
    return GgufModel(path, raw, metadata, tensors, types, sum(sizes), len(names))


def is_quantised(folder: Path) -> bool:
    """Was a converted folder made from a file with quantised weights?"""
    return bool(set(read_json(folder / "source.json").get("types", ())) - set(_FLOATS))


def _open(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it begins with {magic!r})")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{path} is damaged or cut short ({type(error).__name__}); fetch it again"
        ) from None


def _is_weight(name: str) -> bool:
    return name not in _ROPE_TENSORS and not name.endswith("attn_rot_embd.weight")


def _hf_name(path: Path, architecture: str, name: str) -> str:
    parts = name.split(".")
    stem, kind = ".".join(parts[:-1]), parts[-1]
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    known = _LAYER_NAMES | _FAMILY_NAMES.get(architecture, {})
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in known:
        return f"model.layers.{parts[1]}.{known[parts[2]]}.{kind}"
    raise ModelError(f"{path}: tensor {name!r} is unknown for {architecture}")


def _array(tensor: gguf.ReaderTensor) -> Tensor:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.reshape([int(n) for n in reversed(tensor.shape)]).copy())


def _tensor(tensor: gguf.ReaderTensor, name: str, architecture: str, raw: dict[str, Any]) -> Tensor:
    """A tensor as its Hugging Face checkpoint holds it."""
    values = _array(tensor)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        values = values - 1.0  # these files hold 1 + weight
    if architecture in _INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
        heads = raw["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        values = _halves(values, heads)
    if values.ndim == 1:
        return values.float()
    return values.to(_FLOATS.get(tensor.tensor_type.name, torch.bfloat16)).contiguous()


def stored_weights(path: Path) -> Callable[[str], Weight | None]:
    """Gives weights by Hugging Face name in the very bits of a GGUF file, without rounding again.

    `None` for tensors whose type has no counterpart here (only Q4_0, Q4_1 and Q8_0 have one).

    Raises:
        ModelError: as `read_gguf`.
    """
    reader = _open(path)
    model = _model(path, reader)
    raw, architecture = model.raw, str(model.metadata["general.architecture"])
    found = {
        _hf_name(path, architecture, tensor.name): tensor
        for tensor in reader.tensors
        if _is_weight(tensor.name)
    }

    def stored(name: str) -> Weight | None:
        tensor = found.get(name)
        weight = None if tensor is None else _blocks(tensor)
        if weight is None or architecture not in _INTERLEAVED or "self_attn" not in name:
            return weight
        rows = torch.arange(weight.shape[0])
        if ".q_proj." in name:
            rows = _halves(rows, raw["num_attention_heads"])
        elif ".k_proj." in name:
            rows = _halves(rows, raw["num_key_value_heads"])
        return take_rows(weight, rows)

    return stored


def _blocks(tensor: gguf.ReaderTensor) -> Weight | None:
    """A matrix of Q4_0, Q4_1 or Q8_0 blocks of 32 values, taken apart."""
    inputs, outputs = (int(n) for n in tensor.shape)
    data = torch.from_numpy(tensor.data.copy()).view(outputs, inputs // GROUP, -1)

    def half(first: int) -> Tensor:
        return data[:, :, first : first + 2].contiguous().view(torch.float16)[..., 0]

    match tensor.tensor_type.name:
        case "Q4_1":
            scale, minimum, nibbles = half(0), half(2), data[:, :, 4:]
        case "Q4_0":
            scale, nibbles = half(0), data[:, :, 2:]
            minimum = -8 * scale
        case "Q8_0":
            q = data[:, :, 2:].contiguous().view(torch.int8).reshape(outputs, inputs)
            return Int8GroupsWeight(q, half(0))
        case _:
            return None
    q = torch.cat((nibbles & 15, nibbles >> 4), dim=2).reshape(outputs, inputs)
    return Int4Weight(q, scale, minimum)


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undo the reordering for interleaved rotation: entry pairs become two halves of a head."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _config(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, gguf.ReaderTensor]
) -> dict[str, Any]:
    """The config.json of a file."""

    def need(key: str) -> Any:
        try:
            return metadata[f"{architecture}.{key}"]
        except KeyError as missing:
            raise ModelError(f"{path}: metadata {missing.args[0]!r} is missing") from None

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if get("expert_count", 0):
        raise ModelError(f"{path}: mixtures of experts are not supported ({get('expert_count')})")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor 'token_embd.weight' is missing")
    heads = need("attention.head_count")
    head_dim = get("attention.key_length") or need("embedding_length") // heads
    rotated = get("rope.dimension_count", head_dim)
    raw: dict[str, Any] = {
        "model_type": _FAMILIES[architecture],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": get("rope.freq_base", 10_000.0),
        "sliding_window": get("attention.sliding_window") or None,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
    }
    if rotated != head_dim:
        raw["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(path, raw, get, tensors)
    if scaling is not None:
        raw["rope_scaling"] = scaling
    raw |= _family_facts(architecture, raw, get)
    ids = {"bos": "bos_token_id", "eos": "eos_token_id"}
    raw |= {
        target: metadata[f"tokenizer.ggml.{target}"]
        for target in ids.values()
        if f"tokenizer.ggml.{target}" in metadata
    }
    ModelConfig.from_hf(raw)  # refuse now what cannot be run
    return raw


def _family_facts(
    architecture: str, raw: dict[str, Any], get: Callable[..., Any]
) -> dict[str, Any]:
    """What llama.cpp's code knows of a family and its files do not say."""
    if architecture == "gemma3":
        wide = raw["num_hidden_layers"] == 62  # only the 27B model scales queries by its width
        width = raw["hidden_size"] // raw["num_attention_heads"]
        return {
            "query_pre_attn_scalar": width if wide else raw["head_dim"],
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": get("rope.freq_base_swa", 10_000.0),
            "sliding_window_pattern": 6,
        }
    if architecture == "smollm3":
        return {"no_rope_layer_interval": 4}
    if architecture == "phi3":
        original = get("rope.scaling.original_context_length", raw["max_position_embeddings"])
        return {"original_max_position_embeddings": original}
    return {}


def _rope_scaling(
    path: Path,
    raw: dict[str, Any],
    get: Callable[..., Any],
    tensors: dict[str, gguf.ReaderTensor],
) -> dict[str, Any] | None:
    reach = raw["max_position_embeddings"]
    original = get("rope.scaling.original_context_length", reach)
    long, short = (tensors.get(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": _array(long).tolist(),
            "short_factor": _array(short).tolist(),
            "original_max_position_embeddings": original,
            "attention_factor": get("rope.scaling.attn_factor"),
        }
    if "rope_freqs.weight" in tensors:  # Llama 3.1's stretch, as one divisor per frequency
        factors = _array(tensors["rope_freqs.weight"]).tolist()
        return {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": reach,
            "attention_factor": 1.0,
        }
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = get("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": get("rope.scaling.yarn_beta_fast"),
            "beta_slow": get("rope.scaling.yarn_beta_slow"),
        }
    raise ModelError(f"{path}: rope scaling {kind!r} is not supported")


def converted(path: Path, progress: Callable[[str, float], None] | None = None) -> Path:
    """The cached folder of a GGUF file; converts it the first time.

    Raises:
        ModelError: the file cannot be used, or the disk is full (then nothing is left behind).
    """
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    final = cache_folder() / "gguf" / f"{file_hash(path)[:32]}-{CONVERSION}"
    if final.exists():
        return final
    model = read_gguf(path)
    with complete_folder(final) as folder:
        if shutil.disk_usage(folder).free < model.nbytes:
            raise disk_full(final)
        _write_weights(model, folder, progress)
        _write_json(folder / "config.json", _config_file(model))
        source = {"file": path.name, "sha256": file_hash(path), "types": sorted(model.types)}
        _write_json(folder / "source.json", source)
        from outrider.models.gguf_tokenizer import convert_tokenizer

        convert_tokenizer(model, folder)
        if progress is not None:
            progress("convert", 1.0)
    return final


def _config_file(model: GgufModel) -> dict[str, Any]:
    """config.json for us and, for the families it knows, for transformers."""
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}
    classes |= {"phi3": "Phi3", "smollm3": "SmolLM3"}
    name = classes[model.raw["model_type"]]
    return model.raw | {"architectures": [f"{name}ForCausalLM"], "torch_dtype": "bfloat16"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    model: GgufModel, folder: Path, progress: Callable[[str, float], None] | None
) -> None:
    """Write the tensors in shards of bounded size, so that little is held in memory."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        try:
            save_file(held, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        except SafetensorError as error:
            if "No space" in str(error) or "os error 28" in str(error):
                raise disk_full(folder) from None
            raise ModelError(f"cannot write {folder}: {error}") from None
        shards.append(list(held))
        held.clear()

    for done, (name, tensor) in enumerate(model.tensors()):
        held[name] = tensor
        if sum(t.nbytes for t in held.values()) >= SHARD_BYTES:
            flush()
        if progress is not None:
            progress("convert", 0.9 * done / model.count)
    if held:
        flush()
    if len(shards) == 1:
        os.rename(folder / "0.part", folder / SINGLE)
        return
    homes: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        os.rename(folder / f"{index}.part", folder / final)
        homes |= dict.fromkeys(names, final)
    _write_json(folder / INDEX, {"metadata": {}, "weight_map": homes})
