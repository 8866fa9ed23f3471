"""How sure a look must be when there are many looks: bounds from a plan that spends the error.

Looking often and stopping at the first breach multiplies false alarms. Here the whole chance of a
false alarm is spent along the information that has come in, most of it towards the planned sample
sizes, where the decisions are wanted (Lan and DeMets, "Discrete sequential boundaries for clinical
trials", Biometrika 1983). A look's bound is found by integrating the law of the statistic over the
looks that did not stop (Armitage, McPherson and Rowe, JRSS A 1969): with information t the score
sqrt(t) * Z is a Brownian motion, as it is for rank statistics and differences of rates.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NORMAL: Final = NormalDist()
FIRST_SHARE: Final = 0.4
"""Of the error, for the first planned size; the others share the rest evenly."""

STEEPNESS: Final = 6
"""How late the error is spent on the way to a planned size: as the sixth power."""

UNREACHABLE: Final = 8.0
"""A bound for looks that have nothing to spend."""

LEAST_STEP: Final = 0.01
"""Information between two looks, relative to the last planned size; more would not be resolved."""

_POINTS = 401
_FLOOR = -7.0  # standard deviations; the law below matters to no bound


class _Stage(NamedTuple):
    """After a look that did not stop: its bound, and the law of the score below it."""

    bound: float
    spent: float
    score: Array
    mass: Array


def spent(information: float, error: float, plan: tuple[int, ...]) -> float:
    """The part of ``error`` that may be spent up to ``information``.

    Args:
        information: 1 at the last planned size.
        error: the whole chance of a false alarm.
        plan: sample sizes, rising.
    """
    shares = [1.0]
    if len(plan) > 1:
        shares = [FIRST_SHARE, *([(1 - FIRST_SHARE) / (len(plan) - 1)] * (len(plan) - 1))]
    reached = [min(1.0, information * plan[-1] / size) ** STEEPNESS for size in plan]
    return error * sum(share * part for share, part in zip(shares, reached, strict=True))


def bound(information: tuple[float, ...], error: float, plan: tuple[int, ...]) -> float:
    """The value that Z must reach at the last of these looks to stop, one-sided.

    Args:
        information: of every look so far, rising by at least `LEAST_STEP`, 1 at the last planned
            size.
        error: the whole chance of a false alarm.
        plan: sample sizes, rising.
    """
    return _stage(information, error, plan).bound


@lru_cache(maxsize=512)
def _stage(information: tuple[float, ...], error: float, plan: tuple[int, ...]) -> _Stage:
    """One look further than the stage before, which the cache holds."""
    now = information[-1]
    if len(information) == 1:
        before, score, mass = 0.0, np.zeros(1), np.ones(1)
        used = 0.0
    else:
        last = _stage(information[:-1], error, plan)
        before, score, mass, used = information[-2], last.score, last.mass, last.spent
    width = math.sqrt(now - before)
    allowed = spent(now, error, plan)
    found = _solve(allowed - used, now, width, score, mass)
    grid = np.linspace(_FLOOR * math.sqrt(now), found * math.sqrt(now), _POINTS)
    steps = (grid[:, None] - score[None, :]) / width
    density = np.exp(-0.5 * steps * steps) @ mass / (width * math.sqrt(2 * math.pi))
    weights = np.full(_POINTS, grid[1] - grid[0])
    weights[[0, -1]] /= 2
    return _Stage(found, max(allowed, used), grid, density * weights)


def _solve(wanted: float, now: float, width: float, score: Array, mass: Array) -> float:
    """The bound that is crossed with chance ``wanted`` at this look, by bisection."""
    if wanted <= 1e-13:
        return UNREACHABLE
    low, high = -2.0, UNREACHABLE
    for _ in range(45):
        middle = (low + high) / 2
        beyond = (middle * math.sqrt(now) - score) / width
        if float(mass @ _upper(beyond)) > wanted:
            low = middle
        else:
            high = middle
    return high


def _upper(z: Array) -> Array:
    """1 - Phi of each; numpy has no erfc."""
    return np.array([math.erfc(value) for value in z / math.sqrt(2)]) / 2
