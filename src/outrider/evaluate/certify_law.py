"""The statistics of a certificate: does what an engine says follow the law of its target?

Every token of an output is drawn from a distribution that is known once the tokens before it are
known. So all tokens of all requests count, whatever their contexts: with tokens sorted by
likelihood into groups, the counts minus the sums of the exact probabilities are a sum of martingale
differences, and S' V^- S with V the sum of the exact covariances is chi-square with one degree of
freedom less than there are groups. Nothing is assumed of positions or of acceptance.

Two tools: `Tally` (the test) and `coupling_bound` (what equal outputs at equal seeds prove: the
total variation of two laws is at most the chance of a difference under *any* coupling); the test
that may be looked at after every token is `core.law.EProcess`. It knows no engine and no model.

Shapes: G groups of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from outrider.core.law import ALPHA, GROUPS, Law
from outrider.errors import InvalidParameter

Array = npt.NDArray[np.float64]

GROUP_NAMES = ("1", "2", "3", "4", "5-6", "7-10", "11-64", "rest")
POWER = 0.99
EFFECT = 0.02
_LEAST = 5.0  # expected count of a group that stands alone


@dataclass(frozen=True)
class LawTest:
    """The outcome of one chi-square test.

    Attributes:
        name: what was tested.
        tokens: how many went into it.
        statistic, df, p_value: of chi-square; p is 0 where a token came that cannot come.
        z: (statistic - df) / sqrt(2 df); within 3 of 0 where all is well.
        alpha: p below it fails.
        detectable: the total variation between the groups that is found with `POWER`.
        estimate: half the sum of |observed - expected| shares: noise included, so never 0.
        impossible: tokens that have probability 0.
        groups: per pooled group its name, observed and expected count.
    """

    name: str
    tokens: int
    statistic: float
    df: int
    p_value: float
    z: float
    alpha: float
    detectable: float | None
    estimate: float
    impossible: int
    groups: tuple[tuple[str, int, float], ...]

    @property
    def passed(self) -> bool:
        return self.p_value >= self.alpha and self.impossible == 0

    @property
    def empty(self) -> bool:
        """Nothing could be tested."""
        return self.df < 1 and self.impossible == 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "groups": [list(g) for g in self.groups], "passed": self.passed}


class Tally:
    """Counts tokens against their laws; see the module's head."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.impossible = 0
        self._observed = np.zeros(GROUPS)
        self._expected = np.zeros(GROUPS)
        self._products = np.zeros((GROUPS, GROUPS))

    def add(self, law: Law, token: Hashable) -> None:
        """Take in one token that was drawn where ``law`` held."""
        self.tokens += 1
        self.impossible += not law.allows(token)
        p_G = law.grouped
        self._observed[law.group(token)] += 1
        self._expected += p_G
        self._products += np.outer(p_G, p_G)

    def merge(self, other: Tally) -> None:
        """Take in everything that another tally holds."""
        self.tokens += other.tokens
        self.impossible += other.impossible
        self._observed += other._observed
        self._expected += other._expected
        self._products += other._products

    def shares(self) -> Array:
        """The expected share [G] of each group."""
        return self._expected / max(self.tokens, 1)

    def test(self, *, alpha: float = ALPHA, power: float = POWER) -> LawTest:
        """Chi-square with rare groups pooled."""
        parts = _pooled(self._expected)
        lift = np.zeros((len(parts), GROUPS))
        for row, part in enumerate(parts):
            lift[row, part] = 1
        observed, expected = lift @ self._observed, lift @ self._expected
        difference = observed - expected
        covariance = np.diag(expected) - lift @ self._products @ lift.T
        df = max(0, int(np.linalg.matrix_rank(covariance, tol=1e-6 * max(1.0, expected.max()))))
        statistic = float(difference @ np.linalg.pinv(covariance, rcond=1e-9) @ difference)
        p_value = float(stats.chi2.sf(statistic, df)) if df else 1.0
        if self.impossible:
            p_value = 0.0
        return LawTest(
            name=self.name,
            tokens=self.tokens,
            statistic=statistic,
            df=df,
            p_value=p_value,
            z=(statistic - df) / math.sqrt(2 * df) if df else 0.0,
            alpha=alpha,
            detectable=detectable(self.tokens, df, alpha=alpha, power=power) if df else None,
            estimate=float(np.abs(difference).sum() / (2 * max(self.tokens, 1))),
            impossible=self.impossible,
            groups=tuple(
                ("+".join(GROUP_NAMES[g] for g in part), int(o), float(e))
                for part, o, e in zip(parts, observed, expected, strict=True)
            ),
        )


class ContextTally:
    """Each context by itself: which token came, not only how likely it was.

    Finds errors that ranks average out, such as a leaning towards whatever was guessed. Given a
    context, its next tokens are independent draws from one law, so Pearson's statistics add up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.impossible = 0
        self._seen: dict[Hashable, Counter[Hashable]] = {}
        self._laws: dict[Hashable, Law] = {}

    def add(self, context: Hashable, law: Law, token: Hashable) -> None:
        """Take in one token that came after ``context``."""
        self.tokens += 1
        self.impossible += not law.allows(token)
        self._seen.setdefault(context, Counter())[token] += 1
        self._laws.setdefault(context, law)

    def test(self, *, alpha: float = ALPHA, power: float = POWER) -> LawTest:
        """The sum of Pearson's chi-squares over all contexts seen often enough."""
        statistic, df, used, apart = 0.0, 0, 0, 0.0
        for context, seen in self._seen.items():
            total = seen.total()
            observed, expected = _cells(self._laws[context], seen)
            if len(expected) < 2:
                continue
            statistic += float(((observed - expected) ** 2 / expected).sum())
            apart += float(np.abs(observed - expected).sum()) / 2
            df, used = df + len(expected) - 1, used + total
        p_value = float(stats.chi2.sf(statistic, df)) if df else 1.0
        return LawTest(
            name=self.name,
            tokens=used,
            statistic=statistic,
            df=df,
            p_value=0.0 if self.impossible else p_value,
            z=(statistic - df) / math.sqrt(2 * df) if df else 0.0,
            alpha=alpha,
            detectable=detectable(used, df, alpha=alpha, power=power) if df else None,
            estimate=apart / max(used, 1),
            impossible=self.impossible,
            groups=(),
        )


def _cells(law: Law, seen: Counter[Hashable]) -> tuple[Array, Array]:
    """Observed and expected counts of a context's tokens; rare ones share the last cell."""
    total = seen.total()
    alone = [
        (float(seen[token]), total * probability)
        for token, probability in zip(law.tokens, law.probabilities, strict=True)
        if total * probability >= _LEAST
    ]
    rest = (total - sum(o for o, _ in alone), total - sum(e for _, e in alone))
    if rest[1] >= _LEAST:
        alone.append(rest)
    elif alone:
        o, e = alone.pop()
        alone.append((o + rest[0], e + rest[1]))
    cells = np.array(alone, dtype=np.float64).reshape(-1, 2)
    return cells[:, 0], cells[:, 1]


def _pooled(expected_G: Array) -> list[list[int]]:
    """Groups with too few expected tokens joined to the one before them (the first: after it)."""
    parts: list[list[int]] = []
    for group in range(GROUPS):
        if parts and (expected_G[group] < _LEAST or float(expected_G[parts[-1]].sum()) < _LEAST):
            parts[-1].append(group)
        else:
            parts.append([group])
    return parts


@lru_cache(maxsize=256)
def noncentrality(df: int, *, alpha: float = ALPHA, power: float = POWER) -> float:
    """How far from its law a chi-square with ``df`` must be to be found with ``power``."""
    edge = float(stats.chi2.isf(alpha, df))

    def missing(value: float) -> float:
        return float(stats.ncx2.sf(edge, df, value)) - power

    return float(optimize.brentq(missing, 1e-3, 100 * (edge + df)))


def detectable(tokens: int, df: int, *, alpha: float = ALPHA, power: float = POWER) -> float:
    """The total variation that so many tokens find with ``power``, at most 1.

    A difference of total variation d has a noncentrality of at least 4 N d^2 (Cauchy-Schwarz),
    whatever its shape.
    """
    if tokens < 1:
        return 1.0
    return min(1.0, math.sqrt(noncentrality(df, alpha=alpha, power=power) / (4 * tokens)))


def tokens_for(effect: float, df: int, *, alpha: float = ALPHA, power: float = POWER) -> int:
    """How many tokens find a total variation of ``effect`` with ``power``."""
    if not 0 < effect < 1:
        raise InvalidParameter(f"effect is {effect}; use a total variation between 0 and 1")
    return math.ceil(noncentrality(df, alpha=alpha, power=power) / (4 * effect**2))


def simulated_power(
    shares_G: Sequence[float],
    *,
    tokens: int,
    effect: float,
    alpha: float = ALPHA,
    runs: int = 1000,
    seed: int = 0,
) -> float:
    """The share of simulated engines with an error of ``effect`` that the test finds.

    The error is the hardest to find: spread over all groups in proportion to their weight, half of
    the mass too likely and half too unlikely.
    """
    p_G = np.asarray(shares_G, dtype=np.float64)
    p_G = p_G[p_G * tokens >= _LEAST]
    p_G = p_G / p_G.sum()
    if len(p_G) < 2:
        return 0.0
    up = _half(p_G)
    shift = np.where(up, p_G / p_G[up].sum(), -p_G / p_G[~up].sum()) * effect
    wrong = np.maximum(p_G + shift, 0)
    rng = np.random.default_rng(seed)
    seen_RG = rng.multinomial(tokens, wrong / wrong.sum(), size=runs)
    statistic_R = ((seen_RG - tokens * p_G) ** 2 / (tokens * p_G)).sum(axis=1)
    return float((statistic_R > stats.chi2.isf(alpha, len(p_G) - 1)).mean())


def _half(p_G: Array) -> npt.NDArray[np.bool_]:
    """Groups that hold about half of the mass: the heaviest go where less is."""
    up = np.zeros(len(p_G), dtype=np.bool_)
    here = there = 0.0
    for group in np.argsort(-p_G):
        if here <= there:
            up[group], here = True, here + p_G[group]
        else:
            there += p_G[group]
    return up


def coupling_bound(different: int, requests: int, *, alpha: float = ALPHA) -> float:
    """An upper bound, at confidence 1 - alpha, on the total variation of two laws of outputs.

    Two engines answered ``requests`` requests, each with its own seed and the same seed on both
    sides, and ``different`` answers differed. The chance of a difference is at least the total
    variation of the laws of the whole outputs; this is its Clopper-Pearson bound.
    """
    if not 0 <= different <= requests:
        raise InvalidParameter(f"{different} of {requests} requests differ; give a count of them")
    if requests == 0 or different == requests:
        return 1.0
    return float(stats.beta.isf(alpha, different + 1, requests - different))
