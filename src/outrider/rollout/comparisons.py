"""Two arms side by side: times by ranks within strata, rates by Fisher's exact test.

Times: the Wilcoxon rank sum statistic within each stratum, the strata combined with van Elteren's
weights (1960), on logarithms, so that a shift is a ratio. Its value at other shifts gives the
Hodges-Lehmann estimate and the interval, all from one function. Rates: Fisher's exact test for the
decision, Newcombe's interval (Statistics in Medicine 1998, method 10) for the difference. numpy
only: importing scipy would cost a gateway two seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SMALLEST: Final = 1e-3  # milliseconds; clocks tick, and zero has no logarithm


@dataclass(frozen=True)
class Times:
    """Logarithms of times of one arm by stratum, sorted; one value per unit."""

    strata: Mapping[str, Array]

    @property
    def n(self) -> int:
        return sum(len(values) for values in self.strata.values())


def times(rows: Sequence[tuple[str, str, float]]) -> Times:
    """The times of one arm.

    Args:
        rows: stratum, unit, milliseconds. Rows of one unit and stratum become one value, their
            mean logarithm, since they are not independent; an empty unit stands alone.
    """
    single: dict[str, list[float]] = {}
    grouped: dict[tuple[str, str], list[float]] = {}
    for stratum, unit, value in rows:
        if unit:
            grouped.setdefault((stratum, unit), []).append(value)
        else:
            single.setdefault(stratum, []).append(value)
    for (stratum, _), values in grouped.items():
        # Back to milliseconds, so that all of a stratum goes through the logarithm at once.
        logs = [math.log(max(value, SMALLEST)) for value in values]
        single.setdefault(stratum, []).append(math.exp(sum(logs) / len(logs)))
    return Times(
        {
            stratum: np.sort(np.log(np.maximum(np.asarray(values), SMALLEST)))
            for stratum, values in single.items()
        }
    )


class RankTest:
    """How far one arm's times lie above another's."""

    def __init__(self, canary: Times, control: Times) -> None:
        both = [s for s in canary.strata if s in control.strata]
        self._pairs = [(canary.strata[s], control.strata[s]) for s in both]
        sizes = [(len(x), len(y)) for x, y in self._pairs]
        self._weights = [1 / (m + n + 1) for m, n in sizes]
        self._scale = math.sqrt(sum(m * n / (12 * (m + n + 1)) for m, n in sizes))

    @property
    def comparable(self) -> bool:
        """Some stratum has both arms."""
        return bool(self._pairs)

    def z(self, shift: float = 0.0) -> float:
        """The statistic after the canary's logarithms are lowered by ``shift``; falls as it rises.

        Standard normal where the arms then agree; above 0 where the canary is slower.
        """
        total = 0.0
        for (x, y), weight in zip(self._pairs, self._weights, strict=True):
            moved = x - shift
            below = y.searchsorted(moved, "left").sum() + y.searchsorted(moved, "right").sum()
            total += weight * (below / 2 - len(x) * len(y) / 2)
        return total / self._scale

    def shift(self, z: float = 0.0) -> float:
        """The shift at which the statistic is ``z``: for 0 the Hodges-Lehmann estimate, for a
        bound and its negative the two ends of the interval. Infinite where no shift gives it."""
        if z >= self.z(-math.inf) or z <= self.z(math.inf):
            return -math.inf if z > 0 else math.inf
        return _root(lambda shift: self.z(shift) - z)


def _root(falling: Callable[[float], float]) -> float:
    """Where a falling step function crosses 0: brackets, then bisects with secants between."""
    low, high = -0.05, 0.05
    while falling(low) < 0:
        low *= 2
    while falling(high) > 0:
        high *= 2
    at_low, at_high = falling(low), falling(high)
    for turn in range(60):
        if high - low < 1e-4:
            break
        middle = (low + high) / 2
        if turn % 2 == 0 and at_low > at_high:
            step = 0.02 + 0.96 * at_low / (at_low - at_high)  # never at an end
            middle = low + (high - low) * step
        value = falling(middle)
        if value > 0:
            low, at_low = middle, value
        else:
            high, at_high = middle, value
    return (low + high) / 2


def fisher(canary: int, of_canary: int, control: int, of_control: int) -> float:
    """The chance of so many events in the canary or more, if both arms have one rate: one-sided."""
    events, total = canary + control, of_canary + of_control
    whole = _choose(total, events)
    terms = (
        math.exp(_choose(of_canary, i) + _choose(of_control, events - i) - whole)
        for i in range(max(canary, events - of_control), min(events, of_canary) + 1)
    )
    return min(1.0, sum(terms))


def _choose(n: int, k: int) -> float:
    """Logarithm of the binomial coefficient."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def rate_difference(
    canary: int, of_canary: int, control: int, of_control: int, *, z: float
) -> tuple[float, float, float]:
    """Canary's rate minus control's, and the interval with ``z`` standard deviations each way."""
    here, there = canary / of_canary, control / of_control
    low_here, high_here = wilson(canary, of_canary, z=z)
    low_there, high_there = wilson(control, of_control, z=z)
    difference = here - there
    low = difference - math.hypot(here - low_here, high_there - there)
    high = difference + math.hypot(high_here - here, there - low_there)
    return difference, low, high


def wilson(events: int, of: int, *, z: float) -> tuple[float, float]:
    """Wilson's interval of a rate."""
    rate, square = events / of, z * z
    middle = (rate + square / (2 * of)) / (1 + square / of)
    half = z / (1 + square / of) * math.sqrt(rate * (1 - rate) / of + square / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)
