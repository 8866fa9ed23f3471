"""The drafter's side of the bargain: three verbs and the little it is allowed to see.

A drafter sees committed tokens, features it asked for, and a budget. It never sees cache slots of
the target, masks, batches or the scheduler. The laws it must keep are in `conformance.py`.

Shapes: R rows, F features, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.core.noise import Stream
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import DraftTree


@dataclass(frozen=True)
class Needs:
    """What a drafter wants: hidden states entering these layers, memory of its own, and a rule.

    Attributes:
        layers: layers of the target; empty for most drafters.
        memory_bytes: what it allocates beside its weights, for the engine's memory plan.
        trees: its guesses may branch, so that a rule for chains cannot judge them. A drafter that
            says no is held to it.
    """

    layers: tuple[int, ...] = ()
    memory_bytes: int = 0
    trees: bool = True


@dataclass(frozen=True)
class Commit:
    """Tokens of one sequence that are now certain.

    Attributes:
        sequence: the sequence's id. Its first commit carries the prompt, and the features of
            rows that are in the cache already.
        tokens: the newly committed tokens.
        tenant: whom the sequence belongs to; stores must never mix tenants.
        features: [R, F, D] of the rows that are now in the target's cache, from position
            `features_from` on; `None` when the drafter needs none. The newest committed token has
            no feature yet.
        features_from: the position of the first feature row.
    """

    sequence: int
    tokens: tuple[int, ...]
    tenant: str = ""
    features: Tensor | None = None
    features_from: int = 0


@dataclass(frozen=True)
class SequenceView:
    """A sequence as a drafter may see it; read only.

    Attributes:
        id: the sequence's id.
        tokens: all committed tokens, prompt first.
        prompt_length: how many of them are the prompt's.
        params: what the request asked for.
        ends: tokens that end the output.
        stream: the noise to draw with: the target's own where the rule allows it, else independent.
        tenant: as in `Commit`.
    """

    id: int
    tokens: Sequence[int]
    prompt_length: int
    params: SamplingParams
    ends: frozenset[int]
    stream: Stream
    tenant: str = ""

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.tokens[-1]

    def history(self, path: tuple[int, ...] = ()) -> History:
        """The sampler's view of the past after the guesses ``path``."""
        return History(
            self.tokens[: self.prompt_length],
            self.tokens[self.prompt_length :],
            self.ends,
            path,
        )


@dataclass(frozen=True)
class NodeBudget:
    """How much may be guessed for one sequence.

    Attributes:
        nodes: beside the root.
        depth: of the deepest.
        least: a path less likely than this is not worth another pass of a drafter that runs a
            model; advice, which a tree that carries `q` does not follow.
    """

    nodes: int
    depth: int
    least: float = 0.0


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens. `name` is what records show; `needs` is read once, at start."""

    name: str
    needs: Needs

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn tokens that are now certain, in order; a sequence's prompt comes first."""
        ...

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        """One tree per view, its root the view's last token, within the view's budget.

        A drafter with nothing to say returns a tree of the root alone.
        """
        ...

    def forget(self, sequences: Sequence[int]) -> None:
        """These sequences are finished, cancelled or gone; drop their state."""
        ...
