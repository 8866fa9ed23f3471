"""How much of a drafter's guesses the target accepts, measured by serving.

Held-out prompts are answered by the real engine with the drafter under training. Teacher-forced
accuracy says nothing about this (docs/reference/heads.md names the failures), so checkpoints are
chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.growth import TreeShape
from outrider.drafters.heads import make_drafter
from outrider.engine.budget import FixedBudget
from outrider.engine.engine import Engine, EngineConfig
from outrider.errors import TrainingFailed
from outrider.models.heads.files import Head
from outrider.models.target import Target


@dataclass(frozen=True)
class Served:
    """What serving a set of prompts showed.

    Attributes:
        acceptance_length: tokens per target step, the next token included.
        by_position: of the steps that guessed this deep, the share that accepted as deep.
        steps, tokens: target steps that decoded, and what they gave.
        drafted, accepted: nodes put to the target, and those it agreed with.
    """

    acceptance_length: float
    by_position: tuple[float, ...]
    steps: int
    tokens: int
    drafted: int = 0
    accepted: int = 0


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

    @property
    def shape(self) -> TreeShape:
        return TreeShape(1, 1) if self.chain else TreeShape(self.branching, self.beam)


Build = Callable[[TreeShape, int, int], Drafter]
"""A drafter for trees of a shape, so many sequences, and so many positions of each."""


def head_builder(target: Target, head: Head, *, source: Path | None) -> Build:
    """Drafters from a head."""

    def build(shape: TreeShape, sequences: int, length: int) -> Drafter:
        return make_drafter(
            head, target, source=source, shape=shape, sequences=sequences, length=length
        )

    return build


def serve(target: Target, build: Build, prompts: Sequence[Sequence[int]], probe: Probe) -> Served:
    """Answer prompts with a drafter and count.

    Raises:
        TrainingFailed: the drafter failed while serving.
    """
    longest = max(map(len, prompts)) + probe.max_tokens
    length = min(target.context_length, longest)
    drafter = build(probe.shape, probe.slots, length)
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
    requests = [
        engine.add(
            prompt,
            SamplingParams(
                temperature=probe.temperature,
                max_tokens=min(probe.max_tokens, length - len(prompt)),
                seed=0,
            ),
            drafter="head",
        )
        for prompt in prompts
    ]
    while engine.has_work:
        engine.step()
    guessed, accepted = [0] * probe.depth, [0] * probe.depth
    steps = tokens = drafted = agreed = 0
    for request in requests:
        for step in engine.take(request).steps:
            if step.reason.startswith("drafter fault"):
                raise TrainingFailed(f"the drafter failed while serving: {step.reason}")
            if step.proposed:
                steps, tokens = steps + 1, tokens + step.emitted
                drafted, agreed = drafted + step.proposed, agreed + step.accepted
                for depth in range(step.proposed_depth):
                    guessed[depth] += 1
                    accepted[depth] += depth < step.accepted
    by_position = tuple(a / g for a, g in zip(accepted, guessed, strict=True) if g)
    return Served(tokens / max(steps, 1), by_position, steps, tokens, drafted, agreed)


@dataclass(frozen=True)
class Evaluation:
    """Figures of a drafter by serving held-out prompts.

    Attributes:
        assemble: from the learner's tensors to drafters.
        probes: by name; the first gives "acceptance_length".
    """

    target: Target
    prompts: list[Sequence[int]]
    assemble: Callable[[dict[str, Tensor]], Build]
    probes: dict[str, Probe]

    def __call__(self, tensors: dict[str, Tensor]) -> dict[str, float]:
        return self.figures(self.assemble(tensors))

    def figures(self, build: Build) -> dict[str, float]:
        """What the probes find, by name."""
        figures: dict[str, float] = {}
        for name, probe in self.probes.items():
            served = serve(self.target, build, self.prompts, probe)
            figures.setdefault("acceptance_length", served.acceptance_length)
            figures[f"{name}_acceptance_length"] = served.acceptance_length
            figures[f"{name}_drafted"] = float(served.drafted)
            figures[f"{name}_accepted"] = float(served.accepted)
            for position, share in enumerate(served.by_position, 1):
                figures[f"{name}_position_{position}"] = share
        return figures
