"""Exact decoding of many sequences, with or without guesses."""

from outrider.engine.budget import Budget, CostBudget, CostTable, FixedBudget
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.sequence import Completion, Update

__all__ = [
    "Budget",
    "Completion",
    "CostBudget",
    "CostTable",
    "Engine",
    "EngineConfig",
    "FixedBudget",
    "Update",
]
