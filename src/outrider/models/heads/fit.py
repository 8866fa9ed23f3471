"""Does a draft head belong to a target? Hashes of what decides the target's hidden states.

A head is trained on one target's hidden states. Sizes that differ would crash; the same sizes with
other rotations or another tokenizer would not, and accept nothing. `target_facts` describes a
target by hashes that do not depend on the file format or precision, so that a GGUF file, its
conversion and the original checkpoint agree; `check_fit` compares. It knows nothing of weights: two
trainings of one architecture look the same here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.errors import DrafterMismatch
from outrider.models.config import LayerConfig, ModelConfig
from outrider.models.heads.config import HeadConfig, TargetFacts
from outrider.models.heads.keys import Keys
from outrider.models.rope import Linear, Rope, Yarn
from outrider.models.safetensors_files import read_json
from outrider.models.tokenizer import Tokenizer


class Vocabulary(Protocol):
    """What is hashed of a tokenizer."""

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        ...

    def pieces(self) -> list[str]:
        """Every token as the vocabulary spells it, by id."""
        ...


def folder_facts(folder: Path, *, name: str, tokenizer: Vocabulary | None = None) -> TargetFacts:
    """The facts of a model folder, as `load_model` reads one (`LoadedModel.source`).

    Args:
        folder: with config.json and, where ``tokenizer`` is not given, tokenizer files.
        name: how the target is called.
        tokenizer: its tokenizer, where it is loaded already.

    Raises:
        ModelError: the config or the tokenizer is missing, damaged or not supported.
    """
    raw = read_json(folder / "config.json")
    return target_facts(
        ModelConfig.from_hf(raw),
        name=name,
        architectures=Keys(raw, str(folder)).texts("architectures"),
        tokenizer=tokenizer if tokenizer is not None else Tokenizer.load(folder),
    )


def target_facts(
    config: ModelConfig,
    *,
    name: str,
    architectures: Sequence[str] = (),
    tokenizer: Vocabulary | None = None,
) -> TargetFacts:
    """The facts of a target; without a tokenizer its hashes are empty and not compared."""
    spelled = "" if tokenizer is None else _hash(tokenizer.pieces())
    template = "" if tokenizer is None else _hash(tokenizer.template)
    return TargetFacts(
        name=name,
        architectures=tuple(architectures),
        width=config.width,
        layers=len(config.layers),
        vocab_size=config.vocab_size,
        config_hash=config_hash(config),
        tokenizer_hash=spelled,
        template_hash=template,
    )


def config_hash(config: ModelConfig) -> str:
    """A hash of what decides the hidden states: sizes, layers, norms, rotations.

    Left out: the vocabulary (compared by itself), the head over it, the context length, and how a
    checkpoint names its tensors. Numbers count to six digits: GGUF files hold them in fp32.
    """
    facts: dict[str, Any] = {
        "sizes": [config.width, config.inner, config.heads, config.kv_heads, config.head_dim],
        "layers": [_layer(layer) for layer in config.layers],
        "norms": [
            _digits(config.norm_eps),
            config.norm_adds_one,
            config.norm_after,
            config.qk_norm,
        ],
        "biases": [config.qkv_bias, config.out_bias, config.mlp_bias],
        "activation": config.activation,
        "scales": [_digits(config.embedding_scale), _digits(config.attention_scale)],
    }
    return _hash(facts)


def _layer(layer: LayerConfig) -> list[Any]:
    return [layer.window, None if layer.rope is None else _rotation(layer.rope)]


def _rotation(rope: Rope) -> list[Any]:
    """What a rotation does, however a file says it: Llama 3.1's stretch is a table in GGUF."""
    match rope.scaling:
        case None:
            return [_digits(rope.theta), rope.dim]
        case Linear(factor=factor):
            return [_digits(rope.theta), rope.dim, "linear", _digits(factor)]
        case Yarn() as yarn:
            numbers = (yarn.factor, yarn.attention_factor, yarn.beta_fast, yarn.beta_slow)
            return [
                _digits(rope.theta),
                rope.dim,
                "yarn",
                yarn.original_length,
                yarn.truncate,
                *(_digits(number) for number in numbers),
            ]
        case scaling:
            lengths = (1, scaling.original_length + 1)
            tables = [[f"{f:.3g}" for f in rope.frequencies(n).tolist()] for n in lengths]
            return [rope.dim, *tables]


def _digits(number: float) -> str:
    return f"{number:.6g}"


def _hash(content: object) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Check:
    """One fact that must be equal: its key, what it is to a person, and both values."""

    key: str
    what: str
    made_for: int | str
    given: int | str

    @property
    def differs(self) -> bool:
        """Empty is unknown, and differs from nothing."""
        return bool(self.made_for) and bool(self.given) and self.made_for != self.given


def check_fit(head: HeadConfig, facts: TargetFacts) -> list[str]:
    """Refuse a head made for another target; returns warnings, one line each.

    Raises:
        DrafterMismatch: width, layers, vocabulary, config or tokenizer differ; names the first.
    """
    made = head.target
    checks = (
        _Check("width", "numbers in a hidden state", made.width, facts.width),
        _Check("layers", "layers", made.layers, facts.layers),
        _Check("vocab_size", "tokens", made.vocab_size, facts.vocab_size),
        _Check("config_hash", "configuration", made.config_hash, facts.config_hash),
        _Check("tokenizer_hash", "tokenizer", made.tokenizer_hash, facts.tokenizer_hash),
    )
    for check in checks:
        if check.differs:
            raise DrafterMismatch(
                f"the head was made for {made.name}: target.{check.key} ({check.what}) is "
                f"{_brief(check.made_for)}, that of {facts.name} is {_brief(check.given)}; "
                f"use a head made for {facts.name}"
            )
    template = _Check("template_hash", "", made.template_hash, facts.template_hash)
    if template.differs:
        return [
            f"the head was trained with another chat template (template_hash "
            f"{_brief(template.made_for)}, {facts.name} has {_brief(template.given)}); "
            f"fewer guesses may be accepted"
        ]
    return []


def _brief(value: int | str) -> str:
    return str(value)[:12]
