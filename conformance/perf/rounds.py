"""Paired measuring: every subject once per round, in changing order, so that what the machine does hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.ggml.errors import BackendError, UsageError

LIFE = 0.5
"""Seconds of rounds in a life, at least; at least as long as opening took, so that half of all time measures."""
LIFE_ROUNDS = 4
"""In a life, at least."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that can be measured again and again."""

    name: str
    run: Callable[[], float]
    """One measurement, in seconds, of whatever the subject times itself."""
    renew: Callable[[], None] | None = None
    """Starts the subject over, in other memory; None where every measurement does."""


class Rounds:
    """Measurements of several subjects, interleaved.

    Every second round runs in the reverse order of the one before it, so of any two subjects each was first equally
    often: with two, the order is swapped each round. After such a couple of rounds the order begins two subjects later,
    so that no subject keeps its neighbours.
    """

    def __init__(
        self, subjects: Sequence[Subject], warmup: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Nothing is measured yet.

        Args:
            subjects: at least one, of different names.
            warmup: rounds to run at the beginning of a life, before the first that counts; they are forgotten.
            clock: by which `spent` is told, in seconds.

        Raises:
            UsageError: no subjects, or two of one name.
        """
        names = [s.name for s in subjects]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"rounds: subjects of different names expected, {names} found")
        self.seconds: dict[str, list[float]] = {n: [] for n in names}
        """Subject -> seconds, one per round; the lists are of one length."""
        self.lives: list[int] = []
        """The first round of each life of the subjects."""
        self.spent = 0.0
        """Seconds that passed while measuring: starting anew, warming up and whatever is not timed included."""
        self._subjects = tuple(subjects)
        self._warmup = warmup
        self._clock = clock

    def __len__(self) -> int:
        """Rounds so far."""
        return len(self.seconds[self._subjects[0].name])

    def more(self, n: int = 1) -> None:
        """Measure `n` more rounds; a round in which a subject fails is not kept.

        Raises:
            BackendError: a subject gave no time above 0 (or whatever else it raises itself).
        """
        start = self._clock()
        try:
            if not self.lives:
                self._begin()
            for _ in range(n):
                for name, seconds in self._round(len(self)).items():
                    self.seconds[name].append(seconds)
        finally:
            self.spent += self._clock() - start

    def live(self) -> None:
        """Start all subjects over, unless none was measured yet, and measure an even number of rounds.

        They last as long as it took to start, and `LIFE`, at least. Where every measurement starts its subject over
        anyway, each round of either order is a life.

        Raises:
            BackendError: as `more` does.
        """
        if not any(s.renew for s in self._subjects):
            if self.lives:
                self.lives.append(len(self))
            self.more(2)
            return
        start = self._clock()
        if self.lives:
            for subject in self._subjects:
                if subject.renew:
                    subject.renew()
            self._begin()
        opening = self._clock() - start
        self.spent += opening
        first, until = len(self), self.spent + max(opening, LIFE)
        while self.spent < until or len(self) < first + LIFE_ROUNDS:
            self.more(2)

    def _begin(self) -> None:
        for _ in range(self._warmup):
            # in the order of a round before, so that the first that counts finds what every other one does
            self._round(len(self) - 1)
        self.lives.append(len(self))

    def _round(self, r: int) -> dict[str, float]:
        found = {}
        for i in order(r, len(self._subjects)):
            subject = self._subjects[i]
            seconds = subject.run()
            if not (math.isfinite(seconds) and seconds > 0):
                raise BackendError(f"{subject.name}: a time above 0 s expected, {seconds} s measured")
            found[subject.name] = seconds
        return found


def order(r: int, n: int) -> list[int]:
    """In which order `n` subjects are measured in round `r`."""
    first = 2 * (r // 2)
    turn = [(first + i) % n for i in range(n)]
    return turn[::-1] if r % 2 else turn
