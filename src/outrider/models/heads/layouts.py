"""How draft heads lie in files: the layouts of several tools, each read into one `HeadConfig` and
one set of tensor names. `writing.py` is the way back.

A layout is a config.json and tensor names. `detect` tells them apart by content, `parse` reads one.
Nothing is guessed: a key that tools read in different ways must be there, and what a head does not
have is refused. The module touches no files and knows no precisions.

==============  =================================================================================
`native`        the nearest layout that another engine reads (eagle3: Speculators, eagle: its
                authors', medusa: vLLM's) and what that has no place for under the key "outrider"
`speculators`   Speculators' Eagle3 (vllm-project/speculators), which vLLM reads
`specforge`     ``LlamaForCausalLMEagle3``: SpecForge and SGLang; llama.cpp converts it
`eagle3`        the authors' own (SafeAILab/EAGLE); so is `eagle`, EAGLE-1's
`vllm-medusa`   what vLLM reads up to 0.32
`medusa`        the authors' own (FasterDecoding/Medusa)
==============  =================================================================================

Numbers of hidden states: i is the state after i layers (vLLM, Speculators, llama.cpp). TensorRT-LLM
and SGLang's ``eagle_config`` count the layer whose output is meant, which is one less.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.heads.config import HeadConfig, Kind, TargetFacts
from outrider.models.heads.keys import Keys, short

Layout = Literal["native", "speculators", "specforge", "eagle3", "eagle", "vllm-medusa", "medusa"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LayerIds = Literal["auto", "state", "output"]
"""How a file numbers hidden states: state i is after i layers; output i is of layer i, counted from
0. "auto": output in ``eagle_config``, state elsewhere."""

OURS = "outrider"  # the key of config.json that holds what other tools have no place for
FORMAT = 1
EMBEDDING = "embed_tokens.weight"
SPECFORGE_CLASS = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MEDUSA_OLD = re.compile(
    r"(?:medusa_heads?\.)?(\d{1,3})\.(\d{1,3})\.(linear\.(?:weight|bias)|weight)"
)
_MEDUSA_NEW = re.compile(r"(?:blocks\.\d+\.layers\.\d+|lm_heads\.\d+)\.\w+")
BASE: dict[Kind, Layout] = {"eagle3": "speculators", "eagle": "eagle", "medusa": "vllm-medusa"}
KIND: dict[Layout, Kind] = {
    "speculators": "eagle3",
    "specforge": "eagle3",
    "eagle3": "eagle3",
    "eagle": "eagle",
    "vllm-medusa": "medusa",
    "medusa": "medusa",
}

# Where another tool's file may leave a key out and mean a default, a native one may not: a flag
# that got lost would change the head without an error.
_STATED: dict[Kind, tuple[str, ...]] = {
    "eagle3": (
        LAYER_IDS,
        "target_hidden_size",
        "draft_vocab_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ),
    "eagle": (),
    "medusa": ("truncated_vocab_size",),
}
_STATED_LAYER = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Parsed:
    """A head read from a layout.

    Attributes:
        config, tensors: the head, by its own names; nothing is checked against shapes yet.
        embedding: the file's copy of the token embedding, if it has one.
        notes: what a reader should know, one line each.
    """

    config: HeadConfig
    tensors: Tensors
    embedding: Tensor | None
    notes: tuple[str, ...]


# ---------------------------------------------------------------------------------- telling apart


def detect(raw: Mapping[str, Any], names: Collection[str], source: str) -> Layout:
    """The layout of a config.json and the names of the tensors beside it.

    Raises:
        ModelError: none that is known.
    """
    if OURS in raw:
        return "native"
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return "speculators"
    if any(_MEDUSA_NEW.fullmatch(name) for name in names):
        return "vllm-medusa"
    if names and all(_MEDUSA_OLD.fullmatch(name) for name in names):
        return "medusa"
    if any(name.startswith("midlayer.") for name in names):
        classes = raw.get("architectures")
        ours = isinstance(classes, list) and SPECFORGE_CLASS in classes
        return "specforge" if ours else "eagle3"
    layer = {name for name in names if name.startswith("layers.0.")}
    if "fc.weight" in names and layer and "layers.0.hidden_norm.weight" not in layer:
        return "eagle"
    raise ModelError(
        f"{source}: this is no draft head of a known layout ({', '.join(LAYOUTS)}); "
        f"its tensors begin with {short(sorted(names)[:3])}"
    )


# ---------------------------------------------------------------------------------------- reading


def parse(
    layout: Layout,
    raw: Mapping[str, Any],
    tensors: Tensors,
    *,
    source: str,
    target: TargetFacts | None,
    layer_ids: LayerIds = "auto",
) -> Parsed:
    """Read a head.

    Args:
        layout: what `detect` found.
        raw, tensors: its config.json and its tensors.
        source: what to call it in messages.
        target: the target; needed by every layout but native, whose files describe it.
        layer_ids: how the file numbers hidden states.

    Raises:
        ModelError: a key is missing, or has a value that this package cannot run faithfully.
    """
    keys = Keys(raw, source)
    if layout == "native":
        return _native(keys, tensors, layer_ids)
    if target is None:
        raise ModelError(
            f"{source} has the layout {layout}, which does not describe its target; name the "
            f"target, or convert the head with `outrider convert`"
        )
    # the hashes are not the file's own
    facts = replace(target, config_hash="", tokenizer_hash="", template_hash="")
    if layout == "medusa":
        return _medusa_authors(keys, tensors, facts)
    if layout == "vllm-medusa":
        return _medusa_vllm(keys, tensors, facts)
    tensors = dict(tensors)
    embedding = tensors.pop(EMBEDDING, None)
    if layout == "eagle":
        parsed = _eagle(keys, tensors, facts)
    elif layout == "speculators":
        parsed = _eagle3_nested(keys, tensors, facts, layer_ids)
    else:
        parsed = _eagle3(keys, keys, tensors, facts, layer_ids)
    return replace(parsed, embedding=embedding)


def _native(keys: Keys, tensors: Tensors, layer_ids: LayerIds) -> Parsed:
    ours = keys.section(OURS)
    if ours.integer("format") != FORMAT:
        raise ours.wrong("format", f"{FORMAT}; a newer Outrider may have written it")
    kind = ours.text("kind")
    known = next((name for name in BASE if name == kind), None)
    if known is None:
        raise ours.wrong("kind", f"one of {', '.join(BASE)}")
    keys.must_state(_STATED[known])
    if known != "medusa":
        nested = known == "eagle3"
        layer = keys.section("transformer_layer_config") if nested else keys
        layer.must_state(_STATED_LAYER)
    facts = _facts(ours.section("target"))
    parsed = parse(
        BASE[known], keys.raw, tensors, source=keys.source, target=facts, layer_ids=layer_ids
    )
    for key in ("width", "vocab_size"):
        said = vars(parsed.config.target)[key]
        if vars(facts)[key] != said:
            raise ours.section("target").wrong(key, f"{said}, as the rest of config.json has it")
    config = replace(
        parsed.config,
        target=facts,
        features=parsed.config.features if known == "eagle3" else ours.integers("features"),
        context_length=ours.integer("context_length", least=1),
        depth=ours.integer("depth", least=1),
        token_residual=ours.flag("token_residual"),
        window=ours.integer("window"),
        sinks=ours.integer("sinks"),
    )
    return replace(parsed, config=config)


def _facts(keys: Keys) -> TargetFacts:
    return TargetFacts(
        name=keys.text("name"),
        architectures=keys.texts("architectures"),
        width=keys.integer("width", least=1),
        layers=keys.integer("layers", least=1),
        vocab_size=keys.integer("vocab_size", least=1),
        config_hash=keys.text("config_hash", ""),
        tokenizer_hash=keys.text("tokenizer_hash", ""),
        template_hash=keys.text("template_hash", ""),
    )


def _eagle3_nested(keys: Keys, tensors: Tensors, facts: TargetFacts, ids: LayerIds) -> Parsed:
    if keys.text("speculators_model_type") != "eagle3":
        raise keys.wrong("speculators_model_type", "eagle3; no other kind can be read")
    keys.refuse("embed_requires_grad", (False,), "a head with its own embedding is not supported")
    if not keys.has("norm_before_residual"):
        raise ModelError(
            f"{keys.source}: norm_before_residual is missing, and tools differ in what that means "
            f"(vLLM: true, Speculators and llama.cpp: false); write what it was trained with"
        )
    wants = keys.section("speculators_config")
    depth = 5
    for index, method in enumerate(wants.sections("proposal_methods")):
        why = "another value changes the law of the output; a head does not decide that"
        method.refuse("verifier_accept_k", (1,), why)
        method.refuse("accept_tolerance", (0, 0.0), why)
        if index == 0:
            depth = method.integer("speculative_tokens", depth, least=1)
    verifier = wants.section("verifier")
    named = replace(
        facts,
        name=verifier.text("name_or_path", facts.name),
        architectures=verifier.texts("architectures") or facts.architectures,
    )
    if not keys.has("transformer_layer_config"):
        raise keys.wrong("transformer_layer_config", "the config of the draft layer")
    layer = keys.section("transformer_layer_config")
    parsed = _eagle3(keys, layer, tensors, named, ids)
    return replace(parsed, config=replace(parsed.config, depth=depth, window=_window(layer)))


def _window(layer: Keys) -> int:
    """The sliding window of the draft layer, where its config switches one on; 0 is none."""
    types = layer.texts("layer_types")
    return layer.integer("sliding_window") if "sliding_attention" in types else 0


def _eagle3(keys: Keys, layer: Keys, tensors: Tensors, facts: TargetFacts, ids: LayerIds) -> Parsed:
    """An EAGLE-3 head whose flags are in ``keys`` and whose sizes are in ``layer``."""
    tensors = {name.replace("midlayer.", "layers.0.", 1): t for name, t in tensors.items()}
    nested = keys.section("eagle_config")
    facts = replace(
        facts,
        width=keys.integer("target_hidden_size", facts.width, least=1),
        vocab_size=layer.integer("vocab_size", least=1),
    )
    states = _count_states(tensors, facts, keys.source)
    features, notes = _features(keys, nested, facts, ids, states)
    config = HeadConfig(
        kind="eagle3",
        target=facts,
        features=features,
        width=layer.integer("hidden_size", least=1),
        draft_vocab_size=keys.integer("draft_vocab_size", facts.vocab_size, least=1),
        norm_before_residual=keys.flag("norm_before_residual", False),
        norm_before_fc=nested.flag("norm_before_fc", keys.flag("norm_before_fc", False)),
        fc_norm=keys.flag("fc_norm", False),
        norm_output=keys.flag("norm_output", False),
    )
    return Parsed(_with_layer(config, layer), tensors, None, notes)


def _count_states(tensors: Tensors, facts: TargetFacts, source: str) -> int:
    """How many states `fc` takes, by its width."""
    fc = tensors.get("fc.weight")
    if fc is None:
        raise ModelError(f"{source}: tensor 'fc.weight' is missing")
    if fc.ndim != 2 or fc.shape[1] % facts.width or not fc.shape[1]:
        raise ModelError(
            f"{source}: tensor 'fc.weight' has shape {list(fc.shape)}, which takes no whole number "
            f"of hidden states of {facts.width} numbers (target_hidden_size)"
        )
    return int(fc.shape[1]) // facts.width


def _features(
    keys: Keys, nested: Keys, facts: TargetFacts, ids: LayerIds, states: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Which hidden states a head reads, and what to say about how they were found."""
    layers = facts.layers
    home = keys if keys.has(LAYER_IDS) else nested
    if not home.has(LAYER_IDS):
        default = (2, layers // 2, layers - 3)
        if states != len(default) or min(default) < 0:
            raise keys.wrong(LAYER_IDS, f"given: fc reads {states} states")
        return default, (f"{LAYER_IDS} is not given; the usual {list(default)} is used",)
    found = home.integers(LAYER_IDS)
    outputs = ids == "output" or (ids == "auto" and home is nested)
    features = tuple(i + outputs for i in found)
    notes = []
    if outputs and ids == "auto":
        notes.append(
            f"eagle_config.{LAYER_IDS} {list(found)} is read as layers whose output is meant, as "
            f"SGLang does: states {list(features)} (--layer-ids state reads it as vLLM does)"
        )
    if len(features) == states + 1 and features[-1] == layers:
        features = features[:-1]
        notes.append(f"{LAYER_IDS} names the last state too, which only training reads")
    if len(features) != states:
        raise ModelError(
            f"{keys.source}: {LAYER_IDS} names {len(features)} states, fc.weight takes {states}"
        )
    if not all(0 <= i <= layers for i in features):
        raise ModelError(
            f"{keys.source}: {LAYER_IDS} is {list(found)}; {facts.name} has states 0 to {layers}"
        )
    return features, tuple(notes)


def _check_layer(layer: Keys) -> None:
    """Refuse every kind of decoder layer but the one that heads have."""
    why = "a head's layer is Llama's without biases"
    layer.refuse("model_type", ("llama",), why)
    layer.refuse("hidden_act", ("silu", "swish"), why)
    layer.refuse("num_hidden_layers", (1,), "a head has one layer")
    for key in ("attention_bias", "mlp_bias"):
        layer.refuse(key, (False,), why)
    for key in ("rope_scaling", "rope_parameters"):
        rope = layer.section(key)
        for name in ("rope_type", "type"):
            rope.refuse(name, ("default",), "stretched rotations are not supported in a head")


def _with_layer(config: HeadConfig, layer: Keys) -> HeadConfig:
    """The head with the sizes of its decoder layer."""
    _check_layer(layer)
    heads = layer.integer("num_attention_heads", least=1)
    kv_heads = layer.integer("num_key_value_heads", heads, least=1)
    if heads % kv_heads:
        raise layer.wrong("num_key_value_heads", f"a divisor of {heads} num_attention_heads")
    head_dim = layer.integer("head_dim", max(2, config.width // heads), least=2)
    if head_dim % 2:
        raise layer.wrong("head_dim", "even")
    rope = layer.section("rope_parameters")
    return replace(
        config,
        inner=layer.integer("intermediate_size", least=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=layer.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", layer.number("rope_theta", 10_000.0)),
        context_length=layer.integer("max_position_embeddings", 2048, least=1),
    )


def _eagle(keys: Keys, tensors: Tensors, facts: TargetFacts) -> Parsed:
    width = keys.integer("hidden_size", least=1)
    facts = replace(facts, width=width, vocab_size=keys.integer("vocab_size", least=1))
    notes = []
    fc = tensors.get("fc.weight")
    if keys.has("bias") and keys.flag("bias") != ("fc.bias" in tensors):
        raise keys.wrong("bias", f"{str('fc.bias' in tensors).lower()}, as the tensors have it")
    if fc is not None and fc.ndim and "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros(fc.shape[0], dtype=fc.dtype)
        notes.append("fc has no bias; zeros stand for it")
    config = HeadConfig(
        kind="eagle",
        target=facts,
        features=(facts.layers,),
        width=width,
        draft_vocab_size=keys.integer("draft_vocab_size", facts.vocab_size, least=1),
    )
    return Parsed(_with_layer(config, keys), tensors, None, tuple(notes))


def _medusa_vllm(keys: Keys, tensors: Tensors, facts: TargetFacts) -> Parsed:
    keys.refuse("original_lm_head", (False,), "heads that share the target's are not supported")
    width = keys.integer("hidden_size", least=1)
    vocabulary = keys.integer("vocab_size", least=1)
    counts = {key: keys.integer(key, least=1) for key in ("num_heads", "num_hidden_layers")}
    for key, count in counts.items():
        if count > len(tensors):
            raise keys.wrong(key, f"fewer than the {len(tensors)} tensors of the file")
    config = HeadConfig(
        kind="medusa",
        target=replace(facts, width=width, vocab_size=vocabulary),
        features=(facts.layers,),
        width=width,
        draft_vocab_size=keys.integer("truncated_vocab_size", vocabulary, least=1),
        depth=counts["num_heads"],
        medusa_heads=counts["num_heads"],
        medusa_layers=counts["num_hidden_layers"],
    )
    tensors = dict(tensors)
    token_map = tensors.pop("token_map", None)
    if token_map is not None:
        if token_map.dtype not in (torch.int32, torch.int64) or token_map.ndim != 1:
            raise ModelError(
                f"{keys.source}: tensor 'token_map' is {token_map.dtype} {list(token_map.shape)}; "
                f"it must be a list of int64"
            )
        tensors["d2t"] = token_map.long() - torch.arange(len(token_map))
    biased = any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)
    if keys.flag("medusa_fc_bias", False) != biased:
        raise keys.wrong("medusa_fc_bias", f"{str(biased).lower()}, as the tensors have it")
    return Parsed(config, _with_biases(tensors), None, ())


def _medusa_authors(keys: Keys, tensors: Tensors, facts: TargetFacts) -> Parsed:
    """The file does not give its sizes; they are those of its tensors."""
    found = {name: match for name in tensors if (match := _MEDUSA_OLD.fullmatch(name))}
    heads = 1 + max(int(match[1]) for match in found.values())
    layers = max([int(match[2]) for match in found.values() if match[3] == "weight"], default=0)
    first = next(
        (name for name, match in found.items() if match.groups() == ("0", str(layers), "weight")),
        None,
    )
    if not layers or first is None or max(heads, layers) > len(tensors):
        raise ModelError(f"{keys.source}: the tensors are not those of whole Medusa heads")
    if tensors[first].ndim != 2 or 0 in tensors[first].shape:
        raise ModelError(f"{keys.source}: tensor {first!r} is no head [vocabulary, width]")
    vocabulary, width = tensors[first].shape
    said = keys.integer("medusa_num_heads", heads)
    notes = [f"medusa_num_heads is {said}; the file holds {heads} heads, which are used"]
    config = HeadConfig(
        kind="medusa",
        target=replace(
            facts,
            name=keys.text("base_model_name_or_path", facts.name),
            width=width,
            vocab_size=vocabulary,
        ),
        features=(facts.layers,),
        width=width,
        draft_vocab_size=vocabulary,
        depth=heads,
        medusa_heads=heads,
        medusa_layers=layers,
    )
    renamed = {_medusa_name(match): tensors[name] for name, match in found.items()}
    return Parsed(config, _with_biases(renamed), None, tuple(notes if said != heads else ()))


def _medusa_name(match: re.Match[str]) -> str:
    head, layer, part = match.groups()
    if part == "weight":
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{layer}.{part.removeprefix('linear.')}"


def _with_biases(tensors: Tensors) -> Tensors:
    """Residual blocks without biases get zeros."""
    weights = [name for name in tensors if re.fullmatch(r"blocks\.\d+\.layers\.\d+\.weight", name)]
    biases = {name.removesuffix("weight") + "bias": tensors[name] for name in weights}
    if any(name in tensors for name in biases):
        return tensors  # some have one, so all must
    return tensors | {
        name: torch.zeros(weight.shape[:1], dtype=weight.dtype) for name, weight in biases.items()
    }
