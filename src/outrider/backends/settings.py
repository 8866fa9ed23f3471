"""Ways to guess, in every engine's own words. Plain data and pure functions; starts nothing.

A `Setting` is engine-neutral; the functions here say it as vLLM's JSON, SGLang's and llama.cpp's
flags, TensorRT-LLM's YAML and our own profile. A method that an engine does not have is refused
with its name, never replaced by another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.backends.base import UnsupportedOption
from outrider.errors import InvalidParameter

BASELINE, SERVED = "baseline", "served"
METHODS = (
    *("none", "ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "hybrid"),
    SERVED,
)
NEEDS_MODEL = ("draft_model", "eagle", "eagle3", "medusa")

_SGLANG = {
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
}
_TENSORRT_LLM = {
    "ngram": "NGram",
    "suffix": "SA",
    "draft_model": "Draft_Target",
    "eagle3": "Eagle3",
    "mtp": "MTP",
}
_LLAMACPP = {
    "ngram": "ngram-simple",
    "draft_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
}
_VLLM = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp")

Schedule = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Setting:
    """A way to guess.

    Attributes:
        method: one of `METHODS`; "none" is plain decoding, "served" whatever a running server does.
        tokens: most guesses per step along a path, the root not counted; `None` leaves it to the
            engine (our own budget, for one).
        nodes: most guesses per step in a tree; `None` for a chain.
        model: the drafter's files, where the method has some; our own engine has heads that ship.
            Of a hybrid, its members, such as "suffix+eagle3".
        more: further fields of the engine's own, such as `prompt_lookup_max`.
        label: the name to go by; `None` for one made of the rest.
    """

    method: str
    tokens: int | None = None
    nodes: int | None = None
    model: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidParameter(f"method {self.method!r} is none of {', '.join(METHODS)}")
        for name in ("tokens", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(f"{name} is {value}; use 1 or more")

    @property
    def name(self) -> str:
        """Short and unique among the settings of one sweep."""
        if self.label is not None:
            return self.label
        if self.method == "none":
            return BASELINE
        parts = [self.method]
        if self.model is not None:
            parts.append(Path(self.model).name)
        parts += [f"k{self.tokens}"] if self.tokens is not None else []
        parts += [f"n{self.nodes}"] if self.nodes is not None else []
        parts += [f"{key}{value}" for key, value in sorted(self.more.items())]
        return "-".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "more": dict(self.more)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Setting:
        """The setting of `to_dict`'s form."""
        return cls(**data)


PLAIN = Setting("none")


def drafter_spec(setting: Setting) -> str:
    """The drafter of our own engine."""
    if setting.model is None:
        return setting.method
    if setting.method in ("draft_model", "hybrid"):
        return f"{setting.method}:{setting.model}"
    return setting.model  # a head's folder says what it is


def own_profile(setting: Setting) -> dict[str, Any]:
    """A profile of our server's configuration."""
    profile: dict[str, Any] = {"drafter": drafter_spec(setting)}
    if setting.tokens is not None:
        profile |= {"max_nodes": setting.nodes or setting.tokens, "max_depth": setting.tokens}
    elif setting.nodes is not None:
        profile["max_nodes"] = setting.nodes
    return profile


def _files(setting: Setting, engine: str) -> str | None:
    """The drafter's files, which only our own engine has of its own.

    Raises:
        UnsupportedOption: the method has some, and they are not named.
    """
    if setting.method in NEEDS_MODEL and not setting.model:
        raise UnsupportedOption(
            f"method {setting.method} needs a model in {engine}; write {setting.method}=PATH"
        )
    return setting.model


def vllm_config(setting: Setting, *, schedule: Schedule = ()) -> dict[str, Any]:
    """The value of `--speculative-config`.

    Args:
        schedule: (from batch size, to batch size, tokens), both ends counted.

    Raises:
        UnsupportedOption: vLLM has no such method, or verifies chains only.
    """
    if setting.method not in _VLLM:
        raise UnsupportedOption(f"vLLM has no method {setting.method}")
    if setting.nodes is not None:
        raise UnsupportedOption("vLLM verifies chains only; leave out the number of nodes")
    config: dict[str, Any] = {"method": setting.method}
    model = _files(setting, "vLLM")
    if model is not None:
        config["model"] = model
    if setting.tokens is not None:
        config["num_speculative_tokens"] = setting.tokens
    if schedule:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return {**config, **setting.more}


def sglang_flags(setting: Setting) -> list[str]:
    """SGLang's flags. Its number of draft tokens counts the root.

    Raises:
        UnsupportedOption: SGLang has no such method.
    """
    if setting.method not in _SGLANG:
        raise UnsupportedOption(f"SGLang has no method {setting.method}")
    flags = ["--speculative-algorithm", _SGLANG[setting.method]]
    model = _files(setting, "SGLang")
    if model is not None:
        flags += ["--speculative-draft-model-path", model]
    if setting.tokens is not None:
        width = setting.nodes or setting.tokens
        flags += ["--speculative-num-draft-tokens", str(width + 1)]
        if setting.method != "ngram":
            topk = 1 if setting.nodes is None else max(2, -(-width // setting.tokens))
            flags += ["--speculative-num-steps", str(setting.tokens)]
            flags += ["--speculative-eagle-topk", str(topk)]
    for key, value in sorted(setting.more.items()):
        flags += [f"--speculative-{key.replace('_', '-')}", str(value)]
    return flags


def tensorrt_llm_config(setting: Setting, *, schedule: Schedule = ()) -> dict[str, Any]:
    """The block `speculative_config` of `trtllm-serve`'s YAML.

    Raises:
        UnsupportedOption: its PyTorch back end has no such method.
    """
    if setting.method not in _TENSORRT_LLM:
        raise UnsupportedOption(f"TensorRT-LLM has no method {setting.method}")
    config: dict[str, Any] = {"decoding_type": _TENSORRT_LLM[setting.method]}
    model = _files(setting, "TensorRT-LLM")
    if model is not None:
        config["speculative_model"] = model
    if setting.tokens is not None:
        config["max_draft_len"] = setting.tokens
    lengths = {to: tokens for _, to, tokens in schedule if tokens}
    if lengths and lengths[min(lengths)] == setting.tokens:
        config["draft_len_schedule"] = lengths
    return {**config, **setting.more}


def llamacpp_flags(setting: Setting) -> list[str]:
    """llama.cpp's flags.

    Raises:
        UnsupportedOption: its server has no such method.
    """
    if setting.method not in _LLAMACPP:
        raise UnsupportedOption(f"llama.cpp has no method {setting.method}")
    flags = ["--spec-type", _LLAMACPP[setting.method]]
    model = _files(setting, "llama.cpp")
    if model is not None:
        flags += ["--spec-draft-model", model]
    if setting.tokens is not None:
        own = setting.method == "ngram"
        flags += ["--spec-ngram-simple-size-m" if own else "--spec-draft-n-max"]
        flags += [str(setting.tokens)]
    for key, value in sorted(setting.more.items()):
        flags += [f"--spec-{key.replace('_', '-')}", str(value)]
    return flags


def engine_flags(kind: str, setting: Setting, *, folder: Path) -> list[str]:
    """What to add to an engine's command line for a setting; nothing for plain decoding.

    Args:
        folder: for engines that want a file.

    Raises:
        UnsupportedOption: the engine cannot do it, or is not one that can be started.
    """
    if setting.method == "none":
        return []
    if kind == "vllm":
        # Without the second flag nothing tells acceptance per request once several run at a time;
        # it is an error without speculation, so it cannot stand in the user's own command.
        told = ["--per-request-spec-decode-metrics", "detailed"]
        return ["--speculative-config", json.dumps(vllm_config(setting)), *told]
    if kind == "sglang":
        return sglang_flags(setting)
    if kind == "llamacpp":
        return llamacpp_flags(setting)
    if kind == "tensorrt_llm":
        path = folder / f"trtllm-{setting.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        # JSON is YAML; nothing more is needed of a file that a program reads.
        path.write_text(json.dumps({"speculative_config": tensorrt_llm_config(setting)}))
        return ["--config", str(path)]
    raise UnsupportedOption(
        f"engine {kind!r} cannot be restarted with a setting; name vllm, sglang, tensorrt_llm or "
        "llamacpp by --engine"
    )
