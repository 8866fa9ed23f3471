"""Stateless randomness: every random number is a function of (seed, position, purpose, index).

Nothing is consumed, so nothing can get out of step: who guessed a token, how many guesses were
rejected and which requests share the batch cannot change a number. The module knows nothing of
models or drafters.

A draw from weights w is the Gumbel-max trick in its exponential form: each token i of the support
gets an arrival time E_i / w_i with E_i ~ Exp(1), and the earliest wins; P(i wins) = w_i / sum(w).
argmin E_i / w_i equals argmax(log w_i + G_i) with G_i = -log E_i. Because E_i depends on the token
and not on the support, two distributions that share the noise tend to pick the same token, which
is what couples a drafter to its target (Daliri et al., arXiv 2408.07978). The first k arrivals are
k draws without replacement.

Most tokens of a large vocabulary are far less likely than the likeliest. In a single draw the far
ones race as one, with the sum of their weights and a number of its own; only where they come first
does each get its time. The first of several exponentials is exponential with the sum of their
rates, and who it is does not depend on when, so the law is the same.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; output function "mix13" by
Stafford), entered at a key that hashes seed, position and purpose.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
MAX_SEED = _MASK
_FAR = 2.0**-14  # of the largest weight: tokens below race as one
_MANY = 1024  # places from which on that saves anything


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    TOKEN = 0  # the target's own draw at a position, and the residual draw of `reject` and `block`
    DRAFT = 1  # a drafter's draw where it must be independent of the verifier: see `for_step`
    ACCEPT = 2  # the accept or reject decision
    FAR = 3  # when the first of all unlikely tokens arrives


class Source(Protocol):
    """Where verifiers and drafters get their random decisions from.

    `Noise` is the one used in earnest; the law tests plug in a source that explores every branch.
    """

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> list[int]:
        """``count`` distinct places drawn without replacement, in order, from weights [V] >= 0.

        Fewer are returned where the support is smaller.

        Args:
            ids: the tokens that the weights belong to, whose noise decides; `None` where a place is
                its token.
        """
        ...

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        """True with probability min(1, p / q); never true for p = 0 or q = 0."""
        ...


def _mix(value: int) -> int:
    """SplitMix64's output function on a Python integer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` on an array, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _spread(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Where the ids stand in the generator's sequence, relative to its key."""
    bits = ids.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(_GAMMA)
    return bits


@lru_cache(maxsize=8)
def _all_spread(size: int) -> npt.NDArray[np.uint64]:
    """`_spread` of all ids of a vocabulary; read only."""
    bits = _spread(np.arange(size))
    bits.setflags(write=False)
    return bits


@dataclass(frozen=True)
class Noise:
    """The keyed noise of one request: a `Source` that is a pure function of its seed."""

    seed: int

    def for_step(self, start: int) -> Noise:
        """Noise of its own for the step whose first guess is for position ``start``.

        It is what a drafter draws with where it must be independent of the verifier. `block` looks
        at guesses that it then drops; if the next step drew them again from the same numbers, they
        would no longer follow their `q` (a total variation of 0.065 in tests/laws/).
        """
        return Noise(_mix((self.seed ^ _mix((start + _GAMMA) & _MASK)) & _MASK))

    def key(self, position: int, purpose: Purpose) -> int:
        """Where the generator is entered for a position: the numbers of its tokens follow."""
        key = _mix((self.seed + _GAMMA) & _MASK)
        key = _mix(((key ^ position) + _GAMMA) & _MASK)
        return _mix(((key ^ int(purpose)) + _GAMMA) & _MASK)

    def uniform(
        self, ids: npt.NDArray[np.int64], *, position: int, purpose: Purpose
    ) -> npt.NDArray[np.float64]:
        """Uniform numbers in the open interval (0, 1), one per id; 0 and 1 cannot occur."""
        return self._uniform(_spread(ids), position=position, purpose=purpose)

    def _uniform(
        self, bits: npt.NDArray[np.uint64], *, position: int, purpose: Purpose
    ) -> npt.NDArray[np.float64]:
        """`uniform` from spread ids, which are not changed."""
        bits = bits + np.uint64(self.key(position, purpose))
        _mix_array(bits)
        bits >>= np.uint64(12)  # with 53 bits the added half would round, and 1 could occur
        uniform = bits.astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-52
        return uniform

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> list[int]:
        weights = weights_V.detach().to("cpu").numpy()
        support = weights > 0
        size = int(np.count_nonzero(support))
        if size <= 1:  # one-hot, as at temperature 0, needs no noise
            return list(map(int, np.flatnonzero(support)))
        # with most of it left it is cheaper to give zeros a number too: they never arrive
        places = None if 2 * size > len(weights) else np.flatnonzero(support)

        def arrivals(places: npt.NDArray[np.int64] | None) -> npt.NDArray[np.float64]:
            """Minus the times of these places, or of all."""
            if places is None:
                bits = _all_spread(len(weights)) if ids is None else _spread(ids)
            else:
                bits = _spread(places if ids is None else ids[places])
            arrival = self._uniform(bits, position=position, purpose=purpose)
            np.log(arrival, out=arrival)
            with np.errstate(over="ignore", divide="ignore"):  # a subnormal weight: at infinity
                arrival /= weights if places is None else weights[places]
            return arrival

        if count == 1 and size >= _MANY:
            near = np.flatnonzero(weights >= _FAR * weights.max())
            if 4 * len(near) < size:
                arrival = arrivals(near)
                first = int(arrival.argmax())
                far = weights.copy()
                far[near] = 0
                together = float(far.sum(dtype=np.float64))
                number = np.array([int(purpose)])
                [alone] = np.log(self.uniform(number, position=position, purpose=Purpose.FAR))
                if not (together > 0 and alone / together > arrival[first]):
                    return [int(near[first])]
                places = np.flatnonzero(far)
        found = _first(arrivals(places), min(count, size))
        return list(map(int, found if places is None else places[found]))

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        u = self.uniform(np.array([index]), position=position, purpose=Purpose.ACCEPT)[0]
        return bool(q > 0 and u * q < p)


def _first(arrival: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Indices of the ``count`` first arrivals in order; times are negated, the largest is first."""
    if count == 1:
        return np.array([arrival.argmax()])
    count = min(count, len(arrival))
    # The count-th of some cannot come before the count-th of all, and is far cheaper to find.
    some = arrival[::16] if len(arrival) >= 16 * count else arrival
    edge = np.partition(some, len(some) - count)[len(some) - count]
    near = np.flatnonzero(arrival >= edge)
    return near[np.argsort(-arrival[near], kind="stable")[:count]]


@dataclass(frozen=True)
class Stream:
    """A source bound to one purpose: what a drafter is given to draw with."""

    source: Source
    purpose: Purpose

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        count: int = 1,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> list[int]:
        """See `Source.sample`."""
        return self.source.sample(
            weights_V, position=position, purpose=self.purpose, count=count, ids=ids
        )


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)
