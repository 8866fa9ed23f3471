"""Command lines that start an engine of others: one function per engine, no process yet.

A launch is plain data; what an engine cannot be told is refused here and not found out at start.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.backends.base import EngineUnfit

VLLM_PYTHON = "OUTRIDER_VLLM_PYTHON"  # the interpreter that vLLM is installed for
LLAMA_SERVER = "OUTRIDER_LLAMA_SERVER"  # path of the server's program
DRAFT_FREE = ("ngram", "ngram_gpu", "suffix", "mtp")  # methods of vLLM without weights of their own


@dataclass(frozen=True)
class Launch:
    """An engine to start.

    Attributes:
        engine: vllm or llamacpp.
        model: what it loads.
        name: what it calls the model.
        port: on this machine alone.
        method: its own word for how to guess; `None` guesses nothing.
        drafter: the drafter's weights, where the method has any.
        guesses: most guesses per step.
        args: more of its own arguments, unchanged and last, so that they win.
    """

    engine: str
    model: str
    name: str
    port: int
    method: str | None = None
    drafter: str | None = None
    guesses: int | None = None
    args: tuple[str, ...] = ()


def speculative_config(launch: Launch) -> Mapping[str, Any] | None:
    """vLLM's JSON for a launch; `None` where nothing is guessed.

    Raises:
        EngineUnfit: the method needs weights and none are named.
    """
    if launch.method is None:
        return None
    if launch.drafter is None and launch.method not in DRAFT_FREE:
        raise EngineUnfit(f"vLLM's method {launch.method} needs weights; name them as drafter")
    found: dict[str, Any] = {"method": launch.method}
    if launch.drafter is not None:
        found["model"] = launch.drafter
    if launch.guesses is not None:
        found["num_speculative_tokens"] = launch.guesses
    if launch.method in ("ngram", "ngram_gpu"):
        found |= {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
    return found


def vllm_command(launch: Launch) -> list[str]:
    """vLLM's OpenAI server. The module is run, since the `vllm` program is not in every build."""
    command = [
        *(os.environ.get(VLLM_PYTHON) or sys.executable, "-m"),
        "vllm.entrypoints.openai.api_server",
        *("--model", launch.model, "--served-model-name", launch.name),
        *("--host", "127.0.0.1", "--port", str(launch.port)),
        *("--per-request-spec-decode-metrics", "summary"),
    ]
    config = speculative_config(launch)
    if config is not None:
        command += ["--speculative-config", json.dumps(config, sort_keys=True)]
    return [*command, *launch.args]


_LLAMA_METHODS = {
    "draft_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "ngram": "ngram-simple",
}


def llamacpp_command(launch: Launch) -> list[str]:
    """llama.cpp's server.

    Raises:
        EngineUnfit: a method that needs weights has none.
    """
    command = [
        os.environ.get(LLAMA_SERVER) or "llama-server",
        *("-m", launch.model, "--alias", launch.name),
        *("--host", "127.0.0.1", "--port", str(launch.port)),
        *("--metrics", "--offline", "--no-webui"),
    ]
    if launch.method is not None:
        kind = _LLAMA_METHODS.get(launch.method, launch.method)
        command += ["--spec-type", kind]
        if launch.drafter is not None:
            command += ["--spec-draft-model", launch.drafter]
        elif kind.startswith("draft-") and kind != "draft-mtp":
            raise EngineUnfit(f"llama.cpp's method {kind} needs weights; name them as drafter")
        if launch.guesses is not None and kind.startswith("draft-"):
            command += ["--spec-draft-n-max", str(launch.guesses)]
    return [*command, *launch.args]


COMMANDS: Mapping[str, Callable[[Launch], list[str]]] = {
    "vllm": vllm_command,
    "llamacpp": llamacpp_command,
}


def command_of(launch: Launch) -> list[str]:
    """The command line of a launch.

    Raises:
        EngineUnfit: this kind of engine is not started by us, or cannot be told that.
    """
    build = COMMANDS.get(launch.engine)
    if build is None:
        kinds = ", ".join(COMMANDS)
        raise EngineUnfit(
            f"{launch.engine} is not started here ({kinds} are); start it and give its url"
        )
    return build(launch)
