"""Exact laws by enumeration: a `Source` that explores every branch, and a tiny world to verify in.

`law(run)` calls ``run(source)`` once per branch of its random decisions and adds up the branches'
probabilities, in float64. Nothing here is random, so an equality holds or it does not.

Shapes: V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core.noise import Purpose, Source
from outrider.core.tree import DraftTree
from outrider.core.verify import Rule

T = TypeVar("T", bound=Hashable)
Law = dict[tuple[int, ...], float]
Table = Callable[[tuple[int, ...]], Tensor]  # the tokens since the root -> a distribution [V]
EXACT = 1e-12


class Enumerator:
    """A `Source` that follows a script of decisions and takes the first branch after its end.

    Attributes:
        probability: of the branch taken so far.
        taken: (branch, number of branches) of every decision.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.probability = 1.0
        self.taken: list[tuple[int, int]] = []

    def choose(self, weights: Sequence[float]) -> int:
        """The index of the branch taken; branches of weight 0 do not exist."""
        open_branches = [i for i, weight in enumerate(weights) if weight > 0]
        turn = len(self.taken)
        branch = self._script[turn] if turn < len(self._script) else 0
        self.taken.append((branch, len(open_branches)))
        chosen = open_branches[branch]
        self.probability *= weights[chosen] / sum(weights)
        return chosen

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: object = None,
    ) -> list[int]:
        weights = weights_V.tolist()
        tokens: list[int] = []
        while len(tokens) < count and any(weight > 0 for weight in weights):
            tokens.append(self.choose(weights))
            weights[tokens[-1]] = 0.0
        return tokens

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        chance = min(1.0, p / q) if q > 0 else 0.0
        return self.choose([chance, 1.0 - chance]) == 0


class Keyed(Enumerator):
    """An `Enumerator` whose decisions are functions of their key, as those of `Noise` are.

    Asked twice for the same key and weights it gives the same answer. (With other weights it gives
    an independent one, where `Noise` gives a coupled one: use it with rows that do not depend on
    the context.) ``step`` plays the part of `Noise.for_step`.
    """

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(script)
        self.step = 0
        self._tokens: dict[Hashable, list[int]] = {}
        self._verdicts: dict[Hashable, bool] = {}

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: object = None,
    ) -> list[int]:
        step = self.step if purpose is Purpose.DRAFT else 0
        key = (step, position, purpose, count, tuple(weights_V.tolist()))
        if key not in self._tokens:
            self._tokens[key] = super().sample(
                weights_V, position=position, purpose=purpose, count=count
            )
        return self._tokens[key]

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        key = (position, index, p, q)
        if key not in self._verdicts:
            self._verdicts[key] = super().accept(p, q, position=position, index=index)
        return self._verdicts[key]


def law(run: Callable[[Any], T], *, kind: type[Enumerator] = Enumerator) -> dict[T, float]:
    """The exact law of what ``run`` returns: every branch once, depth first."""
    outcomes: defaultdict[T, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        source = kind(script)
        outcomes[run(source)] += source.probability
        taken = source.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        script = [branch for branch, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    return dict(outcomes)


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


def target_law(p: Table, length: int, *, given: tuple[int, ...] = ()) -> Law:
    """The target's own law of the first ``length`` tokens, those ``given`` fixed."""
    laws: Law = {given: 1.0}
    for _ in range(length - len(given)):
        laws = {
            (*prefix, token): chance * weight
            for prefix, chance in laws.items()
            for token, weight in enumerate(p(prefix).tolist())
            if weight > 0
        }
    return laws


def completed(emitted: Law, p: Table, length: int) -> Law:
    """The law of ``length`` tokens when the target goes on alone after each emitted block."""
    whole: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for block, chance in emitted.items():
        if len(block) >= length:
            whole[block[:length]] += chance
            continue
        for tokens, weight in target_law(p, length, given=block).items():
            whole[tokens] += chance * weight
    return dict(whole)


def emit(tree: DraftTree, p: Table, source: Source, rule: Rule) -> tuple[int, ...]:
    """The tokens that one step commits."""
    verdict = rule(tree, lambda node: p(tree.path_tokens(node)), source, start=1)
    return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)


def drawn(
    shape: tuple[int, ...], q: Table, source: Source, *, without_replacement: bool
) -> DraftTree:
    """A tree of ``shape`` (parents, in breadth-first order) whose tokens are drawn from ``q``.

    Where the support has fewer tokens than the node wants children, the rest is left out.
    """
    tokens, parents, rows = [0], [-1], {}
    paths: dict[int, tuple[int, ...]] = {0: ()}
    placed = {0: 0}  # node of the shape -> node of the tree
    for old in range(len(shape)):
        wanted = [child for child, parent in enumerate(shape) if parent == old]
        if old not in placed or not wanted:
            continue
        node = placed[old]
        path = paths[node]
        rows[node] = q(path)
        draw = _draws_without if without_replacement else _draws_with
        drawn_tokens = draw(rows[node], source, count=len(wanted), position=len(path) + 1)
        for child, token in zip(wanted, drawn_tokens, strict=False):
            placed[child] = len(tokens)
            paths[placed[child]] = (*path, token)
            tokens.append(token)
            parents.append(node)
    return DraftTree(
        tuple(tokens),
        tuple(parents),
        q=MappingProxyType(rows),
        without_replacement=without_replacement,
    )


def _draws_without(q_V: Tensor, source: Source, *, count: int, position: int) -> list[int]:
    return source.sample(q_V, position=position, purpose=Purpose.DRAFT, count=count)


def _draws_with(q_V: Tensor, source: Source, *, count: int, position: int) -> list[int]:
    draws = (source.sample(q_V, position=position, purpose=Purpose.DRAFT) for _ in range(count))
    return [token for [token] in draws]


def table(seed: int, vocab: int, *, zeros: float = 0.0, one_hot: bool = False) -> Table:
    """A random table of distributions, a function of the context: float64, some entries 0."""

    def row(context: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([seed, len(context), *context])
        weights = rng.exponential(size=vocab) ** 1.5
        weights[rng.random(vocab) < zeros] = 0.0
        if one_hot or weights.sum() == 0:
            weights = np.eye(vocab)[rng.integers(vocab)]
        return torch.from_numpy(weights / weights.sum())

    known: dict[tuple[int, ...], Tensor] = {}
    return lambda context: known.setdefault(context, row(context))


def shapes(most: int) -> list[tuple[int, ...]]:
    """Every ordered tree of 1 .. ``most`` nodes as breadth-first parents."""
    found = []
    for size in range(1, most + 1):
        for parents in itertools.product(*(range(node) for node in range(1, size))):
            if list(parents) == sorted(parents):  # breadth first: one labelling per ordered tree
                found.append((-1, *parents))
    return found
