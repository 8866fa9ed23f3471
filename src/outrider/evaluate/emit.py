"""A recommendation as files: for our own server, vLLM, SGLang, TensorRT-LLM and llama.cpp. Pure.

A file for an engine that lacks the method says so instead of naming another one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence

import yaml

from outrider.backends.base import UnsupportedOption
from outrider.backends.settings import (
    Setting,
    llamacpp_flags,
    own_profile,
    sglang_flags,
    tensorrt_llm_config,
    vllm_config,
)
from outrider.evaluate.recommend import Recommendation

OWN, VLLM, SGLANG = "outrider.yaml", "vllm.sh", "sglang.sh"
TENSORRT_LLM, LLAMACPP = "tensorrt_llm.yaml", "llamacpp.sh"


def files(found: Recommendation, *, target: str) -> dict[str, str]:
    """File name to text; for a sweep in which nothing pays, plain decoding for our own server.

    Args:
        target: the model, as the engines are to load it.
    """
    head = [found.headline(), *(choice.reason for choice in found.choices)]
    texts = {OWN: _own(found.setting, target, head)}
    if found.setting is None:
        return texts
    makers: Mapping[str, Callable[[Setting], str]] = {
        VLLM: lambda s: _vllm(s, target, found.schedule),
        SGLANG: lambda s: _command(
            ["python", "-m", "sglang.launch_server", "--model-path", target, *sglang_flags(s)]
        ),
        TENSORRT_LLM: lambda s: _tensorrt_llm(s, found.schedule),
        LLAMACPP: lambda s: _command(["llama-server", "-m", target, *llamacpp_flags(s)]),
    }
    for name, make in makers.items():
        try:
            texts[name] = _comment(head) + make(found.setting)
        except UnsupportedOption as fault:
            texts[name] = _comment([*head, f"{fault}: there is no setting to give."])
    return texts


def _own(setting: Setting | None, target: str, head: Sequence[str]) -> str:
    values: dict[str, object] = {"target": target}
    if setting is not None:
        name = setting.name.replace("/", "-")[:64]
        values |= {"profiles": {name: own_profile(setting)}, "default_profile": name}
    return _comment(head) + str(yaml.safe_dump(values, sort_keys=False))


def _vllm(setting: Setting, target: str, schedule: Sequence[tuple[int, int, int]]) -> str:
    # A table of one entry says nothing that the number of tokens does not.
    useful = schedule if len(schedule) > 1 else ()
    config = vllm_config(setting, schedule=useful)
    if useful and setting.tokens is not None:
        config["num_speculative_tokens"] = max(setting.tokens, *(k for _, _, k in useful))
    text = json.dumps(config)
    return _command(["vllm", "serve", target, "--speculative-config", text])


def _tensorrt_llm(setting: Setting, schedule: Sequence[tuple[int, int, int]]) -> str:
    config = tensorrt_llm_config(setting, schedule=schedule if len(schedule) > 1 else ())
    return str(yaml.safe_dump({"speculative_config": config}, sort_keys=False))


def _command(words: Sequence[str]) -> str:
    return shlex.join(words) + "\n"


def _comment(lines: Sequence[str]) -> str:
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
