"""Outrider: speculative decoding that does not change a single token.

The names below are the public ones; everything else may change between releases. They are looked up
when first used, so that `import outrider` and the parts that need no tensor library (records,
rollout, remote backends) stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.core.tree import DraftTree
    from outrider.drafters.base import Commit, Drafter, Needs, NodeBudget, SequenceView
    from outrider.drafters.table import build_drafter, drafter_names
    from outrider.engine import Completion, Engine, EngineConfig, Update
    from outrider.errors import OutriderError
    from outrider.models.load import available_models, load_model
    from outrider.models.target import Target
    from outrider.records.step import StepRecord

__version__ = "0.1.0"

_HOMES = {
    "Engine": "outrider.engine",
    "EngineConfig": "outrider.engine",
    "Completion": "outrider.engine",
    "Update": "outrider.engine",
    "SamplingParams": "outrider.core.sampling",
    "load_model": "outrider.models.load",
    "available_models": "outrider.models.load",
    "Target": "outrider.models.target",
    "build_drafter": "outrider.drafters.table",
    "drafter_names": "outrider.drafters.table",
    "Drafter": "outrider.drafters.base",
    "Needs": "outrider.drafters.base",
    "Commit": "outrider.drafters.base",
    "SequenceView": "outrider.drafters.base",
    "NodeBudget": "outrider.drafters.base",
    "DraftTree": "outrider.core.tree",
    "StepRecord": "outrider.records.step",
    "OutriderError": "outrider.errors",
}

__all__ = [
    "__version__",
    "Engine",
    "EngineConfig",
    "Completion",
    "Update",
    "SamplingParams",
    "load_model",
    "available_models",
    "Target",
    "build_drafter",
    "drafter_names",
    "Drafter",
    "Needs",
    "Commit",
    "SequenceView",
    "NodeBudget",
    "DraftTree",
    "StepRecord",
    "OutriderError",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
