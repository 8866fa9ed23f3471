"""Is what an engine samples what it says it samples? Laws of next tokens, and a test of them.

A `Law` is the distribution of one next token; `law_of` makes one from log-probabilities that an
engine reports. `EProcess` tests tokens against their laws and may be looked at after every token,
whatever the contexts are. Certificates and running rollouts share both. numpy only; it knows no
engine and no model.

Shapes: G groups of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.errors import InvalidParameter

Array = npt.NDArray[np.float64]

EDGES = (1, 2, 3, 4, 6, 10, 64)  # first ranks of the groups after the first; the last is the rest
GROUPS = len(EDGES) + 1
ALPHA = 1e-6
SLACK = 1e-3  # mass of unlisted tokens that may be uncertain
_UNLISTED = 1e-9  # least probability of all tokens that are not listed, where these can come
_TOP_K_EDGE = 0.15  # nats between the last token of a top-k and the next: below, either may be in
_NUCLEUS_EDGE = 0.02  # mass between the nucleus's edge and top-p: below, likewise
_IDS = "token_id:"


@dataclass(frozen=True)
class Setting:
    """One setting of the sampler.

    Attributes:
        name: for people; says whether few tokens remain (narrow) or all (wide).
    """

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Law:
    """What may come next, likeliest first.

    Attributes:
        tokens: the likeliest tokens, by id or by name.
        probabilities: theirs; what is missing to 1 belongs to tokens that are not listed.
        closed: no other token can come, as behind a top-k; one that does is a fault by itself.
    """

    tokens: tuple[Hashable, ...]
    probabilities: tuple[float, ...]
    closed: bool = False

    def __post_init__(self) -> None:
        total = sum(self.probabilities)
        if len(self.tokens) != len(self.probabilities) or not 0 < total <= 1 + 1e-4:
            raise InvalidParameter(
                f"a law of {len(self.tokens)} tokens has {len(self.probabilities)} probabilities "
                f"of sum {total:g}; give one for each, with a sum of at most 1"
            )

    @cached_property
    def _ranks(self) -> dict[Hashable, int]:
        return {token: rank for rank, token in enumerate(self.tokens)}

    @cached_property
    def grouped(self) -> Array:
        """Probabilities [G] of the groups of ranks; they add up to 1."""
        groups = np.zeros(GROUPS)
        for rank, probability in enumerate(self.probabilities):
            groups[group_of(rank)] += probability
        groups[-1] += 0.0 if self.closed else max(_UNLISTED, 1 - sum(self.probabilities))
        grouped: Array = groups / groups.sum()
        return grouped

    def group(self, token: Hashable) -> int:
        """The group of a token; the last for one that is not listed."""
        rank = self._ranks.get(token)
        return GROUPS - 1 if rank is None else group_of(rank)

    def allows(self, token: Hashable) -> bool:
        """May it come at all?"""
        rank = self._ranks.get(token)
        return not self.closed if rank is None else self.probabilities[rank] > 0

    def total_variation(self, other: Law) -> float:
        """Between the groups of two laws of the same tokens: half the sum of the differences."""
        moved = np.zeros(GROUPS)
        for token, probability in zip(other.tokens, other.probabilities, strict=True):
            moved[self.group(token)] += probability
        moved[-1] += max(0.0, 1 - moved.sum())
        return float(np.abs(moved - self.grouped).sum() / 2)


def group_of(rank: int) -> int:
    """The group of a rank, both from 0."""
    return sum(rank >= edge for edge in EDGES)


class EProcess:
    """A test that may be watched while evidence arrives, and stopped whenever one likes.

    Under the null the product of q(token) / p(token), with q chosen before the token is seen, is a
    martingale of mean 1: it exceeds 1 / alpha with a chance of at most alpha, ever (Ville). q is p
    tilted by what the groups have shown so far.
    """

    def __init__(self, *, alpha: float = ALPHA, caution: float = 30.0) -> None:
        self.alpha = alpha
        self.tokens = 0
        self.log_e = 0.0
        self.peak = 0.0
        self._caution = caution
        self._observed = np.zeros(GROUPS)
        self._expected = np.zeros(GROUPS)

    @property
    def rejected(self) -> bool:
        """Has the evidence ever been strong enough?"""
        return self.peak >= -math.log(self.alpha)

    def update(self, law: Law, token: Hashable) -> float:
        """Take in one token; returns the logarithm of the e-value."""
        p_G, group = law.grouped, law.group(token)
        if not law.allows(token):
            self.log_e = math.inf
        else:
            shares = self._expected / max(self._expected.sum(), 1.0)
            prior = self._caution * np.maximum(shares, 0.02)
            q_G = p_G * (self._observed + prior) / (self._expected + prior)
            self.log_e += math.log(q_G[group] / q_G.sum() / p_G[group])
        self.tokens += 1
        self.peak = max(self.peak, self.log_e)
        self._observed[group] += 1
        self._expected += p_G
        return self.log_e

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "log_e": _json_number(self.log_e),
            "peak_log_e": _json_number(self.peak),
            "reject_at_log_e": -math.log(self.alpha),
            "rejected": self.rejected,
        }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def token_label(token: str) -> Hashable:
    """How an engine's name of a token is told apart: its id where it gives one, else its text."""
    number = token.removeprefix(_IDS)
    return int(number) if token.startswith(_IDS) and number.isdecimal() else token


def readable(name: Hashable) -> bool:
    """Is a token's name its whole text, so that no other token has the same?"""
    return isinstance(name, int) or (isinstance(name, str) and name != "" and "\ufffd" not in name)


def law_of(top: Sequence[tuple[str, float]], setting: Setting) -> Law | None:
    """The law at a setting from log-probabilities at temperature 1; `None` if they do not decide.

    With rest mass r behind a last listed probability p_min, unlisted weights at temperature
    T <= 1 add up to at most p_min^(1/T - 1) r.
    """
    ranked = sorted({token_label(t): p for t, p in top}.items(), key=lambda item: -item[1])
    ranked = [(token, p) for token, p in ranked if math.isfinite(p)]
    if not ranked:
        return None
    plain = setting.temperature == 1 and not setting.top_k and setting.top_p == 1
    shared = sum(math.exp(p) for token, p in ranked if not readable(token))
    if shared > SLACK and not plain:
        return None  # several tokens may share such a name, and their ranks count here
    ranked = [(token, p) for token, p in ranked if readable(token)]
    if not ranked:
        return None
    rest = max(0.0, 1 - sum(math.exp(p) for _, p in ranked))
    power = 1 / setting.temperature
    kept = ranked[: setting.top_k] if setting.top_k else ranked
    if setting.top_k and len(kept) < setting.top_k and rest > SLACK:
        return None
    if (
        setting.top_k
        and len(ranked) > len(kept)
        and kept[-1][1] - ranked[len(kept)][1] < _TOP_K_EDGE
    ):
        return None  # in the numbers of another pass, another token may be the last
    weights = [math.exp(power * p) for _, p in kept]
    hidden, unsure = 0.0, 0.0
    if not setting.top_k:
        most = math.exp((power - 1) * ranked[-1][1]) * rest
        if setting.temperature == 1:
            hidden = rest
        elif setting.temperature < 1:
            hidden = unsure = most / 2
        else:
            return None  # nothing bounds how much is hidden at a higher temperature
    total = sum(weights) + hidden
    if unsure / total > SLACK:
        return None
    shares = [weight / total for weight in weights]
    if setting.top_p < 1:
        cut = _nucleus(shares, setting.top_p)
        if cut is None:
            return None
        kept, mass = kept[:cut], sum(shares[:cut])
        shares = [share / mass for share in shares[:cut]]
    closed = bool(setting.top_k) or setting.top_p < 1
    return Law(tuple(t for t, _ in kept), tuple(shares), closed=closed)


def _nucleus(shares: Sequence[float], top_p: float) -> int | None:
    """How many of the likeliest reach the mass; `None` where the listed ones do not, or all but."""
    mass = 0.0
    for count, share in enumerate(shares, 1):
        mass += share
        if abs(mass - top_p) < _NUCLEUS_EDGE:
            return None  # a rounding decides on which side of the edge it ends
        if mass > top_p:
            return count
    return None
