"""Draft heads into the layouts of `layouts.py`: what each cannot hold, and what it is written as.

`misfits` makes writing impossible, `losses` makes it a trap, `advice` is what a person should know;
`laid_out` gives config.json and tensors. The module touches no files and knows no precisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.layouts import (
    BASE,
    FORMAT,
    KIND,
    LAYER_IDS,
    OURS,
    SPECFORGE_CLASS,
    Layout,
    Tensors,
)

_VERSION = "0.9.0"  # of Speculators, whose layout is written


def misfits(layout: Layout, config: HeadConfig) -> list[str]:
    """What makes it impossible to write a head in a layout."""
    if layout == "native":
        return []
    wrong = []
    if config.kind != KIND[layout]:
        wrong.append(f"it holds {KIND[layout]} heads, this is {config.kind}")
    if config.token_residual:
        wrong.append("it has no place for token_residual")
    if layout in ("eagle", "medusa") and config.reduced:
        wrong.append("it has no place for a reduced vocabulary")
    if layout == "speculators" and config.sinks:
        wrong.append("it has no place for sinks")
    if layout in ("specforge", "eagle3") and len(config.features) != 3:
        wrong.append(f"its readers take exactly 3 hidden states, this reads {len(config.features)}")
    return wrong


def losses(layout: Layout, config: HeadConfig) -> list[str]:
    """What a reader of the layout would silently do otherwise, so that fewer guesses are accepted.

    A person who knows the reader may still want the files (`--force`).
    """
    if layout not in ("specforge", "eagle3"):
        return []
    flags = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    lost = [
        f"{name}: llama.cpp does not know it and would run the head without it"
        for name, given in flags.items()
        if given
    ]
    if config.window or config.sinks:
        lost.append("window and sinks: they are not in the files; SGLang takes them as flags")
    return lost


def advice(layout: Layout, config: HeadConfig) -> list[str]:
    """What other engines do not read of a head that fits the layout."""
    notes = []
    if layout in ("specforge", "eagle3") and config.norm_before_residual:
        notes.append("norm_before_residual: llama.cpp and vLLM read it, SGLang may not")
    if layout in ("native", "speculators") and config.kind == "eagle3":
        if len(config.features) != 3:
            notes.append(f"{len(config.features)} hidden states: llama.cpp takes exactly 3")
        if config.norm_output:
            notes.append("norm_output: llama.cpp would run the head without it, unannounced")
    if layout == "native":
        if config.token_residual:
            notes.append("token_residual is Outrider's own; no other engine loads this head")
        if config.sinks:
            notes.append("sinks are Outrider's own; another engine would attend without them")
        if config.reduced and config.kind == "eagle":
            notes.append("a reduced vocabulary of EAGLE-1 is Outrider's own")
    if layout in ("native", "vllm-medusa") and config.reduced and config.kind == "medusa":
        notes.append("a reduced vocabulary of Medusa: vLLM 0.32 has it, and fails to load it")
    return notes


def laid_out(
    layout: Layout, config: HeadConfig, tensors: Mapping[str, Tensor], *, dtype: str
) -> tuple[dict[str, Any], Tensors]:
    """The config.json and the tensors of a head in a layout that has no `misfits` with it.

    Args:
        dtype: what tensors are held in, as Hugging Face names it ("bfloat16").
    """
    match layout:
        case "native":
            raw, named = laid_out(BASE[config.kind], _outer(config), tensors, dtype=dtype)
            return raw | {OURS: _ours(config)}, named
        case "speculators":
            return _eagle3_config(config, dtype), dict(tensors)
        case "specforge" | "eagle3":
            named = {name.replace("layers.0.", "midlayer.", 1): t for name, t in tensors.items()}
            return _specforge_config(config, dtype, layout), named
        case "eagle":
            named = dict(tensors)
            if not named["fc.bias"].any():
                del named["fc.bias"]  # vLLM's fc has none
            return _layer_config(config, dtype) | {"bias": "fc.bias" in named}, named
        case "vllm-medusa":
            return _vllm_medusa_config(config, dtype), _vllm_medusa_names(tensors)
        case "medusa":
            return _medusa_config(config, dtype), _medusa_names(config, tensors)


def _outer(config: HeadConfig) -> HeadConfig:
    """What the layout under a native one can say; the rest is said under our own key."""
    return replace(
        config, token_residual=False, sinks=0, window=0 if config.sinks else config.window
    )


def _ours(config: HeadConfig) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "format": FORMAT,
        "kind": config.kind,
        "target": asdict(config.target),
        "depth": config.depth,
        "context_length": config.context_length,
        "token_residual": config.token_residual,
        "window": config.window,
        "sinks": config.sinks,
    }
    if config.kind != "eagle3":
        ours["features"] = list(config.features)
    return ours


def _layer_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """A Llama config of the one layer."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.context_length,
        "vocab_size": config.target.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if config.kind == "eagle" and config.reduced:
        raw["draft_vocab_size"] = config.draft_vocab_size
    return raw


def _flags(config: HeadConfig) -> dict[str, Any]:
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target.width,
        LAYER_IDS: list(config.features),
        "norm_before_residual": config.norm_before_residual,  # never left out: readers differ
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _eagle3_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    layer = _layer_config(config, dtype)
    if len(config.features) != 3:
        layer["num_aux_hidden_states"] = len(config.features)  # where vLLM looks for the count
    if config.window:
        layer |= {"sliding_window": config.window, "layer_types": ["sliding_attention"]}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": config.target.name,
        "architectures": list(config.target.architectures),
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **_flags(config),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def _specforge_config(config: HeadConfig, dtype: str, layout: Layout) -> dict[str, Any]:
    raw = _layer_config(config, dtype) | _flags(config)
    if layout == "specforge":
        raw["architectures"] = [SPECFORGE_CLASS]
        # SGLang looks here and adds one; vLLM and llama.cpp look at the list beside it
        raw["eagle_config"] = {
            "use_aux_hidden_state": True,
            LAYER_IDS: [i - 1 for i in config.features],
        }
    return raw


def _vllm_medusa_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.medusa_heads,
        "num_hidden_layers": config.medusa_layers,
        "hidden_size": config.width,
        "vocab_size": config.target.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": True,
        "torch_dtype": dtype,
    }


def _vllm_medusa_names(tensors: Mapping[str, Tensor]) -> Tensors:
    named = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if "d2t" in tensors:
        named["token_map"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return named


def _medusa_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    return {
        "medusa_num_heads": config.medusa_heads,
        "medusa_num_layers": config.medusa_layers,
        "base_model_name_or_path": config.target.name,
        # for vLLM, which takes the authors' tensor names but needs the sizes
        "model_type": "medusa",
        "hidden_size": config.width,
        "vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": True,
        "torch_dtype": dtype,
    }


def _medusa_names(config: HeadConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    named: Tensors = {}
    for name, tensor in tensors.items():
        group, head, *rest = name.split(".")
        if group == "lm_heads":
            named[f"{head}.{config.medusa_layers}.weight"] = tensor
        else:
            named[f"{head}.{rest[1]}.linear.{rest[2]}"] = tensor
    return named
