"""The one comparison that says if a result is worse than the base's.

`run --against`, `triage --baseline` and `build test` use it, so that they agree. It compares verdict, error, place and
size of the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from . import wrong
from .evidence import Fault
from .message import by_damage, innermost, without_line
from .verdict import FAILURES, Result, Verdict
from .wrong import Wrong

SEVERITY = {
    Verdict.XPASS: 0,
    Verdict.FAIL: 1,
    Verdict.OVERCLAIM: 2,
    Verdict.VACUOUS: 2,
    Verdict.TIMEOUT: 2,
    Verdict.CRASH: 3,
}
"""Failing verdict -> severity. Another verdict of equal severity is another failure."""


class By(str, Enum):
    """Respect in which a result is worse."""

    VERDICT = "verdict"
    ERROR = "error"
    """Another message, such as another failed assertion."""
    PLACE = "place"
    """Another wrong node."""
    SIZE = "size"
    """Zeros, NaN or Inf instead of numbers, or a much larger error."""


@dataclass(frozen=True, slots=True)
class Worse:
    """How a result is worse than the base's."""

    by: By
    text: str
    """Description for people, such as `CRASH where it was FAIL`."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts of a result that a comparison reads; an empty field is unknown."""

    verdict: Verdict
    error: str = ""
    """Innermost message without addresses, sizes and lines."""
    place: str = ""
    """Op of the node that is wrong or fails by itself."""
    wrong: Wrong | None = None

    @classmethod
    def of(cls, result: Result) -> Seen:
        """Read a result."""
        where, error = result.where, result.error
        place = where.op if where is not None and where.fault is Fault.NODE else ""
        return cls(result.verdict, innermost(error) if error is not None else "", place, result.wrong)


def worse(known: Seen, found: Seen) -> Worse | None:
    """Return how `found` is worse than `known`; None if it is not, or does not fail."""
    if found.verdict not in FAILURES:
        return None
    if known.verdict not in FAILURES:
        was = "it passed" if known.verdict is Verdict.PASS else f"it was {known.verdict}"
        return Worse(By.VERDICT, f"{found.verdict} where {was}")
    if found.verdict is not known.verdict:
        is_milder = SEVERITY[found.verdict] < SEVERITY[known.verdict]
        return None if is_milder else Worse(By.VERDICT, f"{found.verdict} where it was {known.verdict}")
    if known.error and found.error and _differ(known.error, found.error):
        return Worse(By.ERROR, f"{found.verdict} with another message than before")
    if known.place and found.place and known.place != found.place:
        return Worse(By.PLACE, f"{found.verdict} at {found.place}, at {known.place} before")
    much = wrong.worse(known.wrong, found.wrong) if known.wrong and found.wrong else ""
    return Worse(By.SIZE, much) if much else None


def _differ(known: str, found: str) -> bool:
    """Return True for different errors.

    Damaged memory dies of any signal or assertion, at random, and lines of the source move from build to build.
    """
    return without_line(known) != without_line(found) and not by_damage(known)
