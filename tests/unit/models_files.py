"""Writes small model files of every kind, for the tests of loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.tiny import tiny_raw
from outrider.models.weights import random_tensors

# A byte-level vocabulary: specials, 256 bytes, a few merges; 270 tokens in all.
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "Ġ w", "Ġ 1"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 270


def byte_alphabet() -> list[str]:
    """GPT-2's printable spelling of the 256 bytes, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def pieces() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    found = [*SPECIALS, *byte_alphabet(), *merged]
    return found + [f"[unused{i}]" for i in range(VOCAB - len(found))]


def write_folder(folder: Path, *, family: str = "llama", **changes: Any) -> Path:
    """A complete model folder in Hugging Face's form, tokenizer included."""
    raw = tiny_raw(family) | {"vocab_size": VOCAB, "eos_token_id": 2} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(ModelConfig.from_hf(raw), 5), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {piece: i for i, piece in enumerate(pieces())}
    merges = [(a, b) for a, b in (m.split(" ") for m in MERGES)]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str, architecture: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, index, *middle, kind = name.split(".")
    table = _GEMMA if architecture == "gemma3" else _LAYER
    return f"blk.{index}.{table['.'.join(middle)]}.{kind}"


def as_llama_cpp(name: str, tensor: Tensor, architecture: str, raw: dict[str, Any]) -> Tensor:
    """What llama.cpp's converter does to a tensor of a Hugging Face checkpoint."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if architecture in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        heads = raw["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def write_gguf(
    path: Path,
    raw: dict[str, Any],
    architecture: str,
    *,
    tensors: dict[str, Tensor] | None = None,
    kinds: dict[str, Any] | None = None,
    blobs: dict[str, tuple[np.ndarray, Any]] | None = None,
    metadata: dict[str, Any] | None = None,
    tokenizer: str | None = "smollm",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file of a model.

    Args:
        tensors: Hugging Face names and values; random ones if not given.
        kinds: a quantisation per GGUF tensor name (default: F32).
        blobs: ready-made quantised data per GGUF tensor name.
        metadata: further ``architecture.key`` values.
        tokenizer: the name of its text split; `None` leaves the tokenizer out.
        extra: tensors beside the model's.
    """
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_dimension_count(int(head_dim * raw.get("partial_rotary_factor", 1.0)))
    if "rope_theta" in raw:
        writer.add_rope_freq_base(raw["rope_theta"])
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{architecture}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    values = tensors if tensors is not None else random_tensors(ModelConfig.from_hf(raw), 5)
    for name, tensor in values.items():
        target = gguf_name(name, architecture)
        if target in (blobs or {}):
            data, kind = (blobs or {})[target]
            writer.add_tensor(target, data, raw_dtype=kind)
            continue
        array = as_llama_cpp(name, tensor, architecture, raw).contiguous().numpy()
        kind = (kinds or {}).get(target)
        if kind is None:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, split: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(pieces())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (VOCAB - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def random_like(raw: dict[str, Any]) -> dict[str, Tensor]:
    return random_tensors(ModelConfig.from_hf(raw), 5)


def same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.float(), right.float())
