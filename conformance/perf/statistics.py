"""Confidence intervals of times and ratios, and decisions about limits.

Three disturbances separate a round from the true time; each is handled before the rest counts as noise:

1. Bursts, modes and drift of the machine: only times of one round are compared, as the logarithm of their ratio.
2. Order: a subject that runs twice in a row finds its data in the cache, and is several percent faster. The medians of
   the rounds in each order are averaged.
3. Differences between lives: memory placement at start can slow down one of two equal subjects by several percent as
   long as it lives. So subjects are restarted many times, and each life gives one value. Rounds of one life are not
   independent; lives are.

The estimate is the 20 % trimmed mean over lives. Its interval is a studentised bootstrap over whole lives, with Yuen's
standard error of the winsorised variance (bootstrap-t for trimmed means: Wilcox, Introduction to Robust Estimation and
Hypothesis Testing, chapter 4), symmetric because swapping the two sides must give the reciprocal interval. The
resamples of n lives are always the same ones, so results are deterministic.

`decide` looks several times while lives accumulate. Stopping at the first alarm would exceed the allowed error. So each
look may use the share of the error that equals its share of the budget (alpha spending, linear in time); the sum is at
most `ERROR`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FEWEST = 8
"""Minimum number of lives for an interval."""
RESAMPLES = 4000
SEED = 20_260_801
TRIM = 0.2
POWER = 0.95
"""Probability that a detectable effect is found."""

LOOKS = (0.125, 0.25, 0.5, 1.0)
"""Parts of the budget after which `decide` looks."""
ERROR = 0.01
"""Probability of `REGRESSED`, and of `FINE`, if the true value is exactly at the limit."""
FINE = "fine"
REGRESSED = "regressed"
UNDECIDED = "undecided"

CONFIDENCE = 0.95
"""Confidence level of `median_interval`."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate and confidence interval of a time or ratio."""

    estimate: float
    low: float
    high: float
    """`low` is 0 and `high` infinite if there are too few lives."""
    detectable: float
    """Change from a limit that is detected in 95 of 100 tries: 0.03 is 3 %; or infinite."""


def of_logs(logs: NDArray[np.float64], lives: Sequence[int], error: float) -> Interval:
    """Estimate the exponential of the typical value of `logs`, of times or of their ratios.

    Args:
        logs: per round; every second round in the other order.
        lives: the first round of each life.
        error: the probability that the truth lies above the interval, and the same below.
    """
    values = life_values(logs, lives)
    if len(values) < FEWEST:
        estimate = float(np.exp(np.median(logs))) if len(logs) else math.nan
        return Interval(estimate, 0.0, math.inf, math.inf)
    centre, deviation = (float(x[0]) for x in trimmed(values[None]))
    reach = _reach(values, centre, error) if deviation else 0.0
    effect = (reach + NormalDist().inv_cdf(POWER)) * deviation
    half = reach * deviation
    with np.errstate(over="ignore"):  # beyond float64's range it is infinite
        estimate, low, high, more = (float(np.exp(x)) for x in (centre, centre - half, centre + half, effect))
    return Interval(estimate, low, high, more - 1)


def life_values(logs: NDArray[np.float64], lives: Sequence[int]) -> NDArray[np.float64]:
    """Return one value for each life that has rounds in both orders."""
    parts = np.split(logs, lives[1:])
    return np.array([(np.median(p[::2]) + np.median(p[1::2])) / 2 for p in parts if len(p) > 1])


def trimmed(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the trimmed mean of each row, and its standard error."""
    n = rows.shape[1]
    cut = int(TRIM * n)
    rows = np.sort(rows, axis=1)
    means = rows[:, cut : n - cut].mean(axis=1)
    rows[:, :cut] = rows[:, cut, None]
    rows[:, n - cut :] = rows[:, n - cut - 1, None]
    return means, rows.std(axis=1, ddof=1) / ((1 - 2 * cut / n) * math.sqrt(n))


def _reach(values: NDArray[np.float64], centre: float, error: float) -> float:
    """Return the half-width of the interval in standard errors."""
    means, deviations = trimmed(values[_resamples(len(values))])
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.abs(means - centre) / deviations
    # a resample of one value only has no deviation: 0/0 is exactly right, x/0 infinitely wrong
    distances[np.isnan(distances)] = 0.0
    return float(np.quantile(distances, 1 - 2 * error, method="higher"))


@lru_cache(maxsize=256)
def _resamples(n: int) -> NDArray[np.int16]:
    return np.random.default_rng(SEED + n).integers(n, size=(RESAMPLES, n), dtype=np.int16)


class Measurements(ABC):
    """Times of rounds, measured on demand: `measure.Rounds`, or a replay of recorded rounds."""

    def __init__(self, subjects: Iterable[str]) -> None:
        self.seconds: dict[str, list[float]] = {s: [] for s in subjects}
        """Subject -> seconds, one per round; the lists are of one length."""
        self.lives: list[int] = []
        """Index of the first round of each life."""
        self.spent = 0.0
        """Seconds of measuring so far, with restarts, warm-up and everything else untimed."""

    def __len__(self) -> int:
        """Return the number of rounds so far."""
        return len(next(iter(self.seconds.values())))

    @abstractmethod
    def live(self) -> None:
        """Measure the rounds of one more life."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer and the evidence for it."""

    answer: str
    """FINE, REGRESSED or UNDECIDED."""
    interval: Interval
    rounds: int
    seconds: float
    """Time spent measuring."""


def decide(rounds: Measurements, subject: str, against: str | None, limit: float, budget: float) -> Decision:
    """Measure until it is clear on which side of `limit` a subject is, or time is up.

    Args:
        rounds: measures both subjects.
        subject: the subject to judge.
        against: divides by this subject's time; None judges the time itself, in seconds.
        limit: the largest ratio (or time) that is fine.
        budget: seconds of measuring.
    """
    paid = 0.0
    for look in LOOKS:
        _measure(rounds, look, budget)
        now = min(rounds.spent / budget, 1.0)
        if now <= paid:
            continue
        interval = interval_of(rounds, subject, against, ERROR * (now - paid))
        paid = now
        if interval.low > limit or interval.high <= limit or not fits(rounds, budget):
            break
    answer = REGRESSED if interval.low > limit else FINE if interval.high <= limit else UNDECIDED
    return Decision(answer, interval, len(rounds), rounds.spent)


def _measure(rounds: Measurements, part: float, budget: float) -> None:
    """Measure lives until `part` of the budget is spent, but at least `FEWEST` if they fit."""
    while fits(rounds, budget) and (rounds.spent < part * budget or len(rounds.lives) < FEWEST):
        rounds.live()


def fits(rounds: Measurements, budget: float) -> bool:
    """Return True if another life, as long as the others on average, ends within `budget`."""
    return rounds.spent + rounds.spent / max(1, len(rounds.lives)) <= budget


def foreseen(rounds: Measurements, subject: str, against: str | None, budget: float) -> float:
    """Measure the first part of `budget`; return the change that the whole would detect.

    It is found in 95 of 100 tries. The standard error falls with the square root of the number of lives, and so of the
    time.
    """
    _measure(rounds, LOOKS[0], budget)
    values = life_values(_logs(rounds, subject, against), rounds.lives)
    if len(values) < FEWEST:
        return math.inf
    deviation = float(trimmed(values[None])[1][0]) * math.sqrt(min(1.0, rounds.spent / budget))
    reach = NormalDist().inv_cdf(1 - ERROR * (LOOKS[-1] - LOOKS[-2])) + NormalDist().inv_cdf(POWER)
    return math.expm1(reach * deviation)


def interval_of(rounds: Measurements, subject: str, against: str | None, error: float) -> Interval:
    """Return the interval of all rounds so far; arguments as in `decide` and `of_logs`."""
    return of_logs(_logs(rounds, subject, against), rounds.lives, error)


def _logs(rounds: Measurements, subject: str, against: str | None) -> NDArray[np.float64]:
    own = np.asarray(rounds.seconds[subject], np.float64)
    if against is not None:
        own /= np.asarray(rounds.seconds[against], np.float64)
    return np.asarray(np.log(own), np.float64)


def median_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the exact 95 % interval of the median of `values`, by order statistics.

    Assumes that the values are independent, and nothing about the distribution's shape; None below 6 values, which are
    too few for 95 %.
    """
    n, ordered = len(values), sorted(values)
    tail, k, ways = 0.0, 0, 1  # comb(n, k) from the one before it: a stranger's list may be long
    while k < n // 2 and 2 * (tail + ways / 2**n) <= 1 - CONFIDENCE:
        tail += ways / 2**n
        ways = ways * (n - k) // (k + 1)
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else (None, None)
