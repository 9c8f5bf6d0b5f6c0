"""Where a series of nightly rates changed: E-divisive with a t-test, as Apache Otava has it. Told, never a gate.

Otava is an extra: it pins NumPy and brings clients of services that nothing here talks to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from conformance.ggml.errors import UnavailableError

from .series import Point, Series

FEWEST = 7
"""Points below which a series is not asked about: Otava itself needs 3 on each side for a test to say anything."""
WINDOW = 50
"""Points that Otava looks at together; its own default."""
MAX_P = 0.001
"""Otava's default: how likely a change is called that is none."""


@dataclass(frozen=True, slots=True)
class Change:
    """From one run to the next a rate became another."""

    series: Series
    at: Point
    """The first run that has the new rate."""
    since: Point
    """The last run that had the old one: what lies between the two is to blame."""
    before: float
    """Mean rate from the change before (or the begin) to this one."""
    after: float
    """Mean rate from this change to the next (or the end)."""
    p: float
    """Of the t-test: how likely such a step is if nothing changed."""

    @property
    def ratio(self) -> float:
        """Of the rates; under 1 it became slower."""
        return self.after / self.before


class _Otava(Protocol):
    def compute_change_points(
        self, series: Sequence[float], window_len: int, max_pvalue: float, min_magnitude: float
    ) -> tuple[Sequence[Any], Any]: ...


def changes(found: Iterable[Series], least: float = 0.0) -> list[Change]:
    """The change points of each series of at least 7 points, oldest first.

    Args:
        found: of nightly runs (`series.series`).
        least: relative changes up to this are not told: 0.02 is 2 %.

    Raises:
        UnavailableError: there is such a series, and Apache Otava is not installed.
    """
    asked = [s for s in found if len(s.points) >= FEWEST]
    if not asked:
        return []
    otava = _otava()
    told: list[Change] = []
    for one in asked:
        points, _ = otava.compute_change_points([p.rate for p in one.points], WINDOW, MAX_P, least)
        for c in points:
            stats, at = c.stats, c.index
            told.append(
                Change(
                    one,
                    one.points[at],
                    one.points[at - 1],
                    float(stats.mean_1),
                    float(stats.mean_2),
                    float(stats.pvalue),
                )
            )
    return told


def _otava() -> _Otava:
    try:
        return cast("_Otava", importlib.import_module("otava.analysis"))
    except ImportError as e:
        raise UnavailableError(
            f"change points need Apache Otava, which is not here ({e}): pip install 'ggml-conformance[history]', best "
            "into an environment of its own, since it pins NumPy; the history can be read from there"
        ) from None
