"""How much of a head's guesses the target accepts, measured by serving.

Held-out prompts are answered by the real engine with the head as drafter. Teacher-forced accuracy
says nothing about this (docs/reference/heads.md names the failures), so checkpoints are chosen
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import make_drafter
from outrider.engine.budget import FixedBudget
from outrider.engine.engine import Engine, EngineConfig
from outrider.errors import TrainingFailed
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.files import Head
from outrider.models.target import Target


@dataclass(frozen=True)
class Served:
    """What serving a set of prompts showed.

    Attributes:
        acceptance_length: tokens per target step, the next token included.
        by_position: of the steps that guessed this deep, the share that accepted as deep.
        steps, tokens: target steps that decoded, and what they gave.
    """

    acceptance_length: float
    by_position: tuple[float, ...]
    steps: int
    tokens: int


@dataclass(frozen=True)
class Probe:
    """What acceptance is measured with.

    Attributes:
        nodes, depth: of the trees; a chain where they are equal and `chain` is set.
        max_tokens: per prompt.
        temperature: of the target.
        slots: prompts that are served at once.
    """

    nodes: int = 5
    depth: int = 5
    chain: bool = True
    max_tokens: int = 64
    temperature: float = 0.0
    slots: int = 8
    rule: str = "walk"
    branching: int = 4
    beam: int = 4


def serve(
    target: Target,
    head: Head,
    prompts: Sequence[Sequence[int]],
    probe: Probe,
    *,
    source: Path | None,
) -> Served:
    """Answer prompts with the head as drafter and count.

    Raises:
        TrainingFailed: the drafter failed while serving.
    """
    longest = max(map(len, prompts)) + probe.max_tokens
    length = min(target.context_length, longest)
    shape = TreeShape(1, 1) if probe.chain else TreeShape(probe.branching, probe.beam)
    drafter = make_drafter(
        head, target, source=source, shape=shape, sequences=probe.slots, length=length
    )
    engine = Engine(
        target,
        drafters={"head": drafter},
        config=EngineConfig(
            slots=probe.slots,
            context=length,
            max_nodes=probe.nodes,
            max_depth=probe.depth,
            rule=probe.rule,
        ),
        budget=FixedBudget(nodes=probe.nodes, depth=probe.depth),
    )
    params = SamplingParams(
        temperature=probe.temperature, max_tokens=probe.max_tokens, seed=0, ignore_eos=False
    )
    answers = engine.generate(prompts, params, drafter="head")
    guessed, accepted = [0] * probe.depth, [0] * probe.depth
    steps = tokens = 0
    for answer in answers:
        for step in answer.steps:
            if step.reason.startswith("drafter fault"):
                raise TrainingFailed(f"the head failed while serving: {step.reason}")
            if step.proposed:
                steps, tokens = steps + 1, tokens + step.emitted
                for depth in range(step.proposed_depth):
                    guessed[depth] += 1
                    accepted[depth] += depth < step.accepted
    by_position = tuple(a / g for a, g in zip(accepted, guessed, strict=True) if g)
    return Served(tokens / max(steps, 1), by_position, steps, tokens)


@dataclass(frozen=True)
class Evaluation:
    """Figures of a head by serving held-out prompts.

    Attributes:
        extra: tensors that a head needs beside its parameters: d2t and t2d.
        probes: by name; the first gives "acceptance_length".
    """

    target: Target
    prompts: list[Sequence[int]]
    source: Path | None
    extra: dict[str, Tensor]
    probes: dict[str, Probe]

    def __call__(self, config: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, float]:
        figures: dict[str, float] = {}
        head = Head(config, {**tensors, **self.extra})
        for name, probe in self.probes.items():
            served = serve(self.target, head, self.prompts, probe, source=self.source)
            figures.setdefault("acceptance_length", served.acceptance_length)
            figures[f"{name}_acceptance_length"] = served.acceptance_length
            for position, share in enumerate(served.by_position, 1):
                figures[f"{name}_position_{position}"] = share
        return figures
