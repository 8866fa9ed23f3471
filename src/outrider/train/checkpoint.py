"""Checkpoints in safetensors: tensors, optimiser states, and facts as JSON. Never a pickle.

Writing leaves the former file until the new one is whole.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import NoSpace, TrainingFailed

FACTS = "facts"


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts.

    Raises:
        NoSpace, TrainingFailed: they cannot be written; the former file is untouched.
    """
    fresh = path.with_suffix(".new")
    try:
        content = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(content, fresh, metadata={FACTS: json.dumps(facts)})
        fresh.replace(path)
    except (OSError, SafetensorError) as error:
        fresh.unlink(missing_ok=True)
        kept = "the one before it is whole: " if path.exists() else ""
        if disk_full(error):
            raise NoSpace(
                f"no space left for {path}; {kept}make room and run the same command again"
            ) from None
        raise TrainingFailed(
            f"{path} cannot be written: {error}; {kept}choose another folder"
        ) from None


def disk_full(error: Exception) -> bool:
    """Did writing fail for want of space? safetensors gives the reason as text alone."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or "No space left" in str(error)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote.

    Raises:
        TrainingFailed: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {})[FACTS])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise TrainingFailed(f"{path} is damaged ({error}); remove it to start again") from None
    return tensors, facts


def optimiser_tensors(optimisers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The states of optimisers by names that say whose they are."""
    found: dict[str, Tensor] = {}
    for number, optimiser in enumerate(optimisers):
        for index, state in optimiser.state_dict()["state"].items():
            for name, value in state.items():
                found[f"optimiser.{number}.{index}.{name}"] = torch.as_tensor(value)
    return found


def restore_optimisers(
    optimisers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Put the states of `optimiser_tensors` back. Changes the optimisers."""
    for number, optimiser in enumerate(optimisers):
        content = optimiser.state_dict()
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            home, _, rest = name.partition(f"optimiser.{number}.")
            if not home and rest:
                index, _, key = rest.partition(".")
                states.setdefault(int(index), {})[key] = value
        content["state"] = states
        optimiser.load_state_dict(content)
