"""The parts of a preflight that run: the memory plan, and a short probe of acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.engine import Engine, EngineConfig
from outrider.engine.budget import FixedBudget
from outrider.engine.memory import memory_plan
from outrider.evaluate.preflight import Row, acceptance, memory
from outrider.models.target import Target

PROBE_TOKENS = 32
GUESSES = 4
SLOTS = 4

# Easy text, some of it repeating: a drafter that belongs to its target accepts much of this.
PROBE_PROMPTS = (
    "Count from one to twenty in words.",
    "Repeat this list twice: apple, pear, plum, apple, pear, plum.",
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that adds two numbers.",
)


def memory_row(
    target: Target, drafter: Drafter, *, slots: int, context: int, weights: int = 0
) -> Row:
    """What an engine of so many slots and positions would allocate, draft included.

    Args:
        weights: bytes of the drafter's weights, which are loaded already.
    """
    nodes = EngineConfig().max_nodes
    plan = memory_plan(target, [drafter.needs], slots=slots, context=context, nodes=nodes)
    parts = {
        "target's weights": target.weight_bytes,
        "drafter's weights": weights,
        "cache": plan.cache,
        "drafter's caches": plan.drafters,
        "logits": plan.logits,
    }
    free = plan.available
    # What is loaded does not have to be found again.
    return memory(
        {name: size for name, size in parts.items() if size},
        available=free + target.weight_bytes + weights if free else 0,
        what=f"{slots} slots of {context:,} positions",
    )


def acceptance_row(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, floor: float
) -> Row:
    """Answer a few easy prompts greedily with the drafter and count, position by position."""
    context = min(target.context_length, max(map(len, prompts)) + PROBE_TOKENS)
    engine = Engine(
        target,
        drafters={"probe": drafter},
        config=EngineConfig(
            slots=SLOTS, context=context, max_nodes=GUESSES, max_depth=GUESSES, reuse_prefix=False
        ),
        budget=FixedBudget(GUESSES, GUESSES),
    )
    tokens = min(PROBE_TOKENS, context - max(map(len, prompts)))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=0)
    steps = [s for c in engine.generate(prompts, params, drafter="probe") for s in c.steps]
    fault = next((s.reason for s in steps if s.reason.startswith("drafter fault")), "")
    guessed = [s for s in steps if s.proposed]
    by_position = [
        (
            sum(s.accepted > depth for s in guessed),
            sum(s.proposed_depth > depth and s.accepted >= depth for s in guessed),
        )
        for depth in range(GUESSES)
    ]
    per_step = sum(s.accepted for s in guessed) / max(len(guessed), 1)
    return acceptance(by_position, floor=floor, per_step=per_step, fault=fault)
