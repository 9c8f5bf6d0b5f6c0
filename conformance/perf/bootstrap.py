"""How sure a ratio of two times is: an interval from paired rounds, on a machine that others use too.

Three things lie between a round and the truth, and each is dealt with before anything is called noise:

1. Bursts, modes and drift of the machine. Only times of one round are compared, as the logarithm of their ratio: what
   slows both cancels.
2. Who is measured first. A subject that follows itself finds its data in the cache, which is worth several percent. So
   the rounds of either order are taken apart, and their medians averaged.
3. Luck of a life: where memory came to lie when a subject was started can cost one of two equal ones several percent
   for as long as it lives, and no number of rounds would tell. So subjects are started over again and again, and a life
   says one number. What follows each other in one life is no independent witness; lives are.

Of the lives' numbers the 20 % trimmed mean is the estimate. Its interval is a studentised bootstrap, which resamples
whole lives: how far a resample's mean is off, in its own standard errors (Yuen's, of the winsorised variance), says
how far the estimate may be (bootstrap-t for trimmed means: Wilcox, Introduction to Robust Estimation and Hypothesis
Testing, chapter 4). It is symmetric, because the two sides are alike: swapped, they give the reciprocal interval.

Everything is deterministic: the resamples of n lives are always the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FEWEST = 8
"""Lives below which nothing is said."""
RESAMPLES = 4000
SEED = 20_260_801
TRIM = 0.2
POWER = 0.95
"""An effect is called detectable that is found this often."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a ratio lies."""

    estimate: float
    low: float
    high: float
    """`low` is 0 and `high` infinite where the rounds say nothing."""
    detectable: float
    """The relative change from a limit that rounds like these find in 95 of 100 tries: 0.03 is 3 %; may be infinite."""


def ratio(seconds: Sequence[float], against: Sequence[float], lives: Sequence[int], error: float) -> Interval:
    """The ratio `seconds / against` of paired rounds.

    Args:
        seconds: per round.
        against: of the same rounds; every second round in the other order.
        lives: the first round of each life.
        error: the probability with which the truth may lie above the interval, and the same below.
    """
    return of_logs(np.log(np.asarray(seconds) / np.asarray(against)), lives, error)


def typical(seconds: Sequence[float], lives: Sequence[int], error: float) -> Interval:
    """The typical time of rounds, in seconds; `lives` and `error` as in `ratio`."""
    return of_logs(np.log(np.asarray(seconds)), lives, error)


def of_logs(logs: NDArray[np.float64], lives: Sequence[int], error: float) -> Interval:
    """The exponential of the typical value of `logs`, one per round; `lives` and `error` as in `ratio`."""
    values = told(logs, lives)
    if len(values) < FEWEST:
        estimate = float(np.exp(np.median(logs))) if len(logs) else math.nan
        return Interval(estimate, 0.0, math.inf, math.inf)
    centre, deviation = (float(x[0]) for x in trimmed(values[None]))
    reach = _reach(values, centre, error) if deviation else 0.0
    seen = (reach + NormalDist().inv_cdf(POWER)) * deviation
    half = reach * deviation
    with np.errstate(over="ignore"):  # what cannot be said is infinite
        estimate, low, high, more = (float(np.exp(x)) for x in (centre, centre - half, centre + half, seen))
    return Interval(estimate, low, high, more - 1)


def told(logs: NDArray[np.float64], lives: Sequence[int]) -> NDArray[np.float64]:
    """One number for each life that has rounds of either order."""
    parts = np.split(logs, lives[1:])
    return np.array([(np.median(p[::2]) + np.median(p[1::2])) / 2 for p in parts if len(p) > 1])


def trimmed(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The trimmed mean of each row, and its standard error."""
    n = rows.shape[1]
    cut = int(TRIM * n)
    rows = np.sort(rows, axis=1)
    means = rows[:, cut : n - cut].mean(axis=1)
    rows[:, :cut] = rows[:, cut, None]
    rows[:, n - cut :] = rows[:, n - cut - 1, None]
    return means, rows.std(axis=1, ddof=1) / ((1 - 2 * cut / n) * math.sqrt(n))


def _reach(values: NDArray[np.float64], centre: float, error: float) -> float:
    """How many standard errors the interval reaches to either side."""
    means, deviations = trimmed(values[_resamples(len(values))])
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.abs(means - centre) / deviations
    # resamples of one value only: exactly right, or wrong by more than can be said
    distances[np.isnan(distances)] = 0.0
    return float(np.quantile(distances, 1 - 2 * error, method="higher"))


@lru_cache(maxsize=256)
def _resamples(n: int) -> NDArray[np.int16]:
    return np.random.default_rng(SEED + n).integers(n, size=(RESAMPLES, n), dtype=np.int16)
