"""A smaller model as the drafter: chains and trees, its own cache, always caught up.

Its cache holds committed tokens only, ever. Every proposal starts with one pass over the committed
tokens it has not seen (after none, some or all guesses were accepted this is the same code), and
what it writes while guessing is dropped before it returns. The catch-up pass *is* the first draft
pass, so this costs no extra pass.

Source: Leviathan et al., arXiv 2211.17192; trees by expected acceptance as in EAGLE-2, arXiv
2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.drafters.growth import Growth, TreeShape
from outrider.errors import DrafterMismatch, InvalidParameter
from outrider.models.target import Segment, Target

CATCH_UP_CHUNK = 256


@dataclass(frozen=True)
class DraftModelConfig:
    """Attributes:
    branching: children per expanded node; 1 drafts a chain.
    beam: nodes expanded per depth (trees only).
    sequences: sequences that can be held at once.
    length: positions per sequence; `None` takes the model's context.
    """

    branching: int = 1
    beam: int = 4
    sequences: int = 4
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("branching", "beam", "sequences"):
            if getattr(self, name) < 1:
                raise InvalidParameter(
                    f"draft model: {name} is {getattr(self, name)}; use 1 or more"
                )


class DraftModelDrafter:
    """Drafts with a second model that shares the target's tokenizer."""

    def __init__(
        self, model: Target, config: DraftModelConfig | None = None, *, name: str = "draft_model"
    ) -> None:
        self.name = name
        self.config = config or DraftModelConfig()
        self._model = model
        self._length = self.config.length or model.context_length
        rows = self._length + 64
        self.needs = Needs(
            memory_bytes=model.cache_shape.nbytes(self.config.sequences, rows),
            trees=self.config.branching > 1,
        )
        self._cache = model.new_cache(slots=self.config.sequences, length=rows)
        self._tokens: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}
        self._free = list(range(self.config.sequences))

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._tokens.setdefault(commit.sequence, []).extend(commit.tokens)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._tokens.pop(sequence, None)
            slot = self._slots.pop(sequence, None)
            if slot is not None:
                self._cache.truncate(slot, 0)
                self._free.append(slot)

    def relative_cost(self, target: Target) -> float:
        """A draft pass in units of the target's: the ratio of weights read, a lower bound."""
        return self._model.weight_bytes / max(target.weight_bytes, 1)

    def cached_length(self, sequence: int) -> int:
        """Committed tokens of a sequence that are in the drafter's cache."""
        return self._cache.lengths[self._slots[sequence]] if sequence in self._slots else 0

    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        shape = TreeShape(self.config.branching, self.config.beam)
        growths = [Growth(v, b, shape) for v, b in zip(views, budgets, strict=True)]
        able = [g for g in growths if g.wants_more and self._has_room(g)]
        for growth in able:
            self._catch_up(growth.view)
        while active := [g for g in able if g.wants_more]:
            for growth, logits in zip(active, self._expand(active), strict=True):
                growth.grow(logits)
        return [growth.tree() for growth in growths]

    def _has_room(self, growth: Growth) -> bool:
        view = growth.view
        known = view.id in self._tokens  # a stranger's history was never observed
        if not known or len(view.tokens) + growth.budget.depth > self._length:
            return False
        if view.id not in self._slots:
            if not self._free:
                return False
            self._slots[view.id] = self._free.pop()
        return True

    def _catch_up(self, view: SequenceView) -> None:
        """Cache all committed tokens but the last few: what a single draft pass can carry."""
        slot, tokens = self._slots[view.id], self._tokens[view.id]
        while len(tokens) - self._cache.lengths[slot] > CATCH_UP_CHUNK:
            start = self._cache.lengths[slot]
            chunk = tuple(tokens[start : start + CATCH_UP_CHUNK])
            self._model.forward([Segment(slot, chunk)], self._cache)
            self._cache.keep(slot, range(len(chunk)))

    def _expand(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        """One pass: logits [nodes so far, V] for each growing tree."""
        segments = []
        for growth in growths:
            slot, tokens = self._slots[growth.view.id], self._tokens[growth.view.id]
            prefix = tuple(tokens[self._cache.lengths[slot] : -1])
            segments.append(Segment(slot, prefix, growth.pass_tree()))
        logits = self._model.forward(segments, self._cache).logits
        for segment in segments:
            # Committed tokens stay, guesses go. The root stays out of the cache until it has a
            # successor, as in the target.
            self._cache.keep(segment.slot, range(len(segment.prefix)))
        return logits


def vocabulary_differences(
    target_pieces: Sequence[str],
    drafter_pieces: Sequence[str],
    *,
    target_ends: frozenset[int],
    drafter_ends: frozenset[int],
    limit: int = 5,
) -> list[str]:
    """What keeps a model from drafting for a target, a line each; empty when they fit.

    Args:
        target_pieces, drafter_pieces: the vocabularies, padding rows of the weights left out.
        target_ends, drafter_ends: their end tokens.
        limit: differing tokens that are listed one by one.
    """
    found = []
    if len(target_pieces) != len(drafter_pieces):
        found.append(f"target has {len(target_pieces)} tokens, drafter {len(drafter_pieces)}")
    differing = [
        f"token {i}: target {a!r}, drafter {b!r}"
        for i, (a, b) in enumerate(zip(target_pieces, drafter_pieces, strict=False))
        if a != b
    ]
    if len(differing) > limit:
        differing = [*differing[:limit], f"and {len(differing) - limit} more tokens"]
    found += differing
    if target_ends != drafter_ends:
        found.append(f"end tokens: target {sorted(target_ends)}, drafter {sorted(drafter_ends)}")
    return found


def refuse_mismatch(differences: Sequence[str]) -> None:
    """Raises:
    DrafterMismatch: with the list of differences, if there are any."""
    if differences:
        raise DrafterMismatch(
            "the draft model does not fit the target: "
            + "; ".join(differences)
            + "; use a model with the target's own tokenizer"
        )
