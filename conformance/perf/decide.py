"""Regressed, fine or undecided: looking at a ratio more than once without being wrong more often.

Whoever looks after every few rounds and stops at the first alarm has an alarm in the end. So the error that a gate may
make, 1 %, is shared out: a look may spend as much of it as it took of the budget (alpha spending, linear in time). The
looks' errors then add up to 1 % at most, whatever their dependence, and a gate that is clear ends early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from . import bootstrap
from .bootstrap import Interval

LOOKS = (0.125, 0.25, 0.5, 1.0)
"""Parts of the budget after which a look is taken."""
ERROR = 0.01
"""How often a gate may say regressed of what is at its limit, and how often fine of what is at its limit."""

FINE = "fine"
REGRESSED = "regressed"
UNDECIDED = "undecided"


class Measured(Protocol):
    """What `Rounds` is: times that grow on demand."""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Subject -> seconds, one per round."""

    @property
    def lives(self) -> list[int]:
        """The first round of each life."""

    @property
    def spent(self) -> float:
        """Seconds that measuring took so far."""

    def live(self) -> None:
        """Measure the rounds of one more life."""

    def __len__(self) -> int:
        """Rounds so far."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer and what it stands on."""

    answer: str
    """FINE, REGRESSED or UNDECIDED."""
    interval: Interval
    rounds: int
    seconds: float
    """Measuring took them."""


def decide(rounds: Measured, subject: str, against: str | None, limit: float, budget: float) -> Decision:
    """Buy lives until it is clear on which side of `limit` a subject is, or the budget is spent.

    Args:
        rounds: measures both subjects.
        subject: whose time is judged.
        against: by whose time it is divided; None judges its own time, in seconds.
        limit: what the ratio (or time) may be at most.
        budget: seconds of measuring.
    """
    paid = 0.0
    for look in LOOKS:
        while rounds.spent < budget and (rounds.spent < look * budget or len(rounds.lives) < bootstrap.FEWEST):
            rounds.live()
        now = min(rounds.spent / budget, 1.0)
        if now <= paid:
            continue
        interval = measured(rounds, subject, against, ERROR * (now - paid))
        paid = now
        if interval.low > limit or interval.high <= limit or now == 1.0:
            break
    answer = REGRESSED if interval.low > limit else FINE if interval.high <= limit else UNDECIDED
    return Decision(answer, interval, len(rounds), rounds.spent)


def measured(rounds: Measured, subject: str, against: str | None, error: float) -> Interval:
    """The interval of what is judged, from all rounds so far; arguments as in `decide` and `bootstrap.ratio`."""
    own, lives = rounds.seconds[subject], rounds.lives
    if against is None:
        return bootstrap.typical(own, lives, error)
    return bootstrap.ratio(own, rounds.seconds[against], lives, error)
