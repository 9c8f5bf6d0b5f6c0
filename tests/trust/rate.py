"""The rate of a random sample, and where that of all it was drawn from lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of a random sample are noticed, and what that says of all that it was drawn from."""

    noticed: int
    of: int

    @classmethod
    def of_mutants(cls, statuses: Iterable[str]) -> Rate:
        """Of all mutants that change something: those that are neither equivalent nor invalid."""
        counts = Counter(statuses)
        return cls(counts["noticed"], counts["noticed"] + counts["survived"])

    @property
    def value(self) -> float | None:
        """None of an empty sample."""
        return self.noticed / self.of if self.of else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's; None of an empty sample."""
        if not self.of:
            return None
        n, p, z = self.of, self.noticed / self.of, NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
        return max(0.0, min(low, p)), min(1.0, max(high, p))  # of none or all, rounding would leave the rate outside

    def __str__(self) -> str:
        """`92 % (80 to 98)`: the rate is rounded down, so that only all are 100 %, and the interval outwards."""
        if self.interval is None:
            return "–"
        low, high = self.interval
        return f"{100 * self.noticed // self.of} % ({math.floor(100 * low)} to {math.ceil(100 * high)})"
