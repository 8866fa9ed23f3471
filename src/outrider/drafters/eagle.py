"""EAGLE-1, EAGLE-2, EAGLE-3 and EAGLE-3.1 as drafters: chains and dynamic trees.

The drafter's cache holds rows of committed tokens with the target's true states only, ever: row i
is token i + 1 with the state of position i. Every proposal starts from the rows that are not cached
yet, so what the head guessed from its own states is replaced by the truth after each step. What it
writes while guessing is dropped before it returns.

Sources: EAGLE 2401.15077, EAGLE-2 2406.16858 (trees), EAGLE-3 2503.01840.

Shapes: R rows, N rows of a tree, F features, D target width, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.core.sampling import Subset
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Needs, NodeBudget, SequenceView
from outrider.drafters.growth import HOPELESS, Growth, TreeShape
from outrider.errors import InvalidParameter
from outrider.models.cache import KVCache
from outrider.models.heads.eagle import EagleModel
from outrider.models.native import DraftJob, DraftRows, DraftRule
from outrider.models.target import Segment, Target

CATCH_UP_CHUNK = 256
TREE_ROWS = (
    40  # per node of a level: rows of the head's cache behind the last position, for guesses
)


@dataclass
class _Known:
    """What is known of one sequence.

    Attributes:
        tokens: all committed tokens.
        states: [R, H] fused states of the rows that are not cached.
        features: [R, F, D] of the rows behind those, in the pieces in which they came: a sequence
            that nobody asks a guess for costs nothing.
        slot: in the head's cache.
    """

    tokens: list[int] = field(default_factory=list)
    states: Tensor | None = None
    features: list[Tensor] = field(default_factory=list)
    slot: int | None = None

    def pending(self, model: EagleModel) -> Tensor:
        """[R, H] of all rows that are not cached."""
        if self.features:
            fused = model.fuse(torch.cat(self.features))
            self.states = fused if self.states is None else torch.cat([self.states, fused])
            self.features = []
        assert self.states is not None
        return self.states

    @property
    def rows(self) -> int:
        fused = 0 if self.states is None else len(self.states)
        return fused + sum(map(len, self.features))


class EagleDrafter:
    """Drafts with an EAGLE head."""

    def __init__(
        self,
        model: EagleModel,
        *,
        subset: Subset | None,
        shape: TreeShape | None = None,
        sequences: int = 4,
        length: int,
        name: str = "eagle",
    ) -> None:
        """Make room for a number of sequences.

        Args:
            subset: the head's draft vocabulary; `None` for all of the target's.
            shape: of the trees; a chain is ``TreeShape(branching=1, beam=1)``.
            sequences: sequences that can be held at once.
            length: positions per sequence.
        """
        if sequences < 1:
            raise InvalidParameter(f"eagle: sequences is {sequences}; use 1 or more")
        self.name = name
        self.shape = shape or TreeShape()
        self._model = model
        self._subset = subset
        self._length = length
        rows = length + TREE_ROWS * self.shape.beam
        self.needs = Needs(
            layers=model.features,
            memory_bytes=model.cache_shape.nbytes(sequences, rows),
            trees=self.shape.branching > 1,
        )
        self._cache: KVCache = model.new_cache(slots=sequences, length=rows)
        rule = DraftRule(
            beam=self.shape.beam,
            branching=self.shape.branching,
            nodes=0,
            depth=0,
            hopeless=HOPELESS,
            temperature=0.0,
            ends=frozenset(),
            noise=(),
            norm_output=False,
            ids=None if subset is None else torch.from_numpy(subset.ids).int(),
            fc=None,
            fc_bias=None,
        )
        self._rule = model.completed(rule)
        self._known: dict[int, _Known] = {}
        self._free = list(range(sequences))

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            known = self._known.setdefault(commit.sequence, _Known())
            known.tokens.extend(commit.tokens)
            if commit.features is not None and len(commit.features):
                known.features.append(commit.features)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            known = self._known.pop(sequence, None)
            if known is not None and known.slot is not None:
                self._cache.truncate(known.slot, 0)
                self._free.append(known.slot)

    def relative_cost(self, target: Target) -> float:
        """A draft pass in units of the target's: the ratio of weights read, a lower bound."""
        return self._model.weight_bytes / max(target.weight_bytes, 1)

    def cached_length(self, sequence: int) -> int:
        """Committed tokens of a sequence that are in the head's cache."""
        known = self._known.get(sequence)
        return 0 if known is None or known.slot is None else self._cache.lengths[known.slot]

    @torch.inference_mode()
    def propose(
        self, views: Sequence[SequenceView], budgets: Sequence[NodeBudget]
    ) -> list[DraftTree]:
        growths = [Growth(v, b, self.shape) for v, b in zip(views, budgets, strict=True)]
        able = [g for g in growths if g.wants_more and self._ready(g)]
        for growth in able:
            self._catch_up(self._known[growth.view.id])
        if self._model.grows_natively:
            self._grow_natively([growth for growth in able if growth.is_bare])
        states: dict[int, Tensor] = {}  # by sequence, what the rows of the last pass gave
        while active := [g for g in able if g.wants_more]:
            self._expand(active, states)
        return [growth.tree() for growth in growths]

    def _ready(self, growth: Growth) -> bool:
        """Are all states here, and is there room?"""
        known = self._known.get(growth.view.id)
        if known is None or not known.rows:
            return False
        cached = 0 if known.slot is None else self._cache.lengths[known.slot]
        if cached + known.rows != len(known.tokens) - 1 or len(known.tokens) > self._length:
            return False
        if known.slot is None:
            if not self._free:
                return False
            known.slot = self._free.pop()
        return True

    def _catch_up(self, known: _Known) -> None:
        """Cache all rows but the last few: what a single draft pass can carry."""
        assert known.slot is not None
        while known.rows > CATCH_UP_CHUNK:
            pending, start = known.pending(self._model), self._cache.lengths[known.slot]
            chunk = tuple(known.tokens[start + 1 : start + 1 + CATCH_UP_CHUNK])
            rows = pending[:CATCH_UP_CHUNK]
            self._model.forward([Segment(known.slot, chunk)], rows, self._cache)
            self._cache.keep(known.slot, range(len(chunk)))
            known.states = pending[CATCH_UP_CHUNK:]

    def _grow_natively(self, growths: Sequence[Growth]) -> None:
        """Whole trees in one call; what `_expand` does level by level."""
        if not growths:
            return
        jobs = [self._job(growth) for growth in growths]
        grown = self._model.draft(self._cache, jobs)
        for growth, job, nodes in zip(growths, jobs, grown, strict=True):
            self._known[growth.view.id].states = job.rows.states[-1:]
            growth.fill(nodes.tokens, nodes.parents, nodes.confidence)

    def _job(self, growth: Growth) -> DraftJob:
        known, view = self._known[growth.view.id], growth.view
        assert known.slot is not None
        tokens = tuple(known.tokens[self._cache.lengths[known.slot] + 1 :])
        rule = replace(
            self._rule,
            nodes=growth.budget.nodes,
            depth=growth.budget.depth,
            hopeless=max(HOPELESS, growth.budget.least),
            temperature=view.params.temperature,
            ends=view.ends,
            noise=growth.noise_keys(),
        )
        return DraftJob(known.slot, DraftRows(tokens, known.pending(self._model)), rule)

    def _expand(self, growths: Sequence[Growth], states: dict[int, Tensor]) -> None:
        """One pass for all growing trees; each grows by a level. Changes ``states``."""
        segments, inputs = [], []
        for growth in growths:
            known = self._known[growth.view.id]
            assert known.slot is not None
            prefix = tuple(known.tokens[self._cache.lengths[known.slot] + 1 : -1])
            segments.append(Segment(known.slot, prefix, growth.pass_tree()))
            inputs.append(known.pending(self._model))
            if len(growth.inner) > 1:
                inputs.append(states[growth.view.id][growth.parent_rows()])
        passed = self._model.forward(segments, torch.cat(inputs), self._cache)
        for growth, segment, logits, rows in zip(
            growths, segments, passed.logits, passed.states, strict=True
        ):
            known = self._known[growth.view.id]
            # True states stay, guesses go; the root stays out until it has a successor.
            self._cache.keep(segment.slot, range(len(segment.prefix)))
            known.states = known.pending(self._model)[len(segment.prefix) :]
            states[growth.view.id] = rows
            growth.grow(logits, self._subset)
