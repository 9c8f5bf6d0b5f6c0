"""The one type for limits of time: a value that is passed on and only gets stricter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf


@dataclass(frozen=True, slots=True)
class Deadline:
    """When work ends: at `end`, and a request after `each` seconds without an answer.

    `end` is a time of `clock`, so that a user waits no longer (`--budget`). `each` counts only while the child can run
    (`worker._Clock`), so that the load of the machine changes no verdict (`--time-limit`).
    """

    end: float = inf
    each: float = inf
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Return the end of work that begins now and may take `seconds`."""
        return cls(clock() + seconds, clock=clock)

    def left(self) -> float:
        """Return the seconds to `end`, negative after it."""
        return self.end - self.clock()

    def is_over(self) -> bool:
        """Return True after `end`."""
        return self.left() <= 0

    def within(self, seconds: float) -> Deadline:
        """Return a deadline that also ends in `seconds`."""
        return replace(self, end=min(self.end, self.clock() + seconds))

    def request(self, seconds: float) -> Deadline:
        """Return a deadline that also limits each request to `seconds`."""
        return replace(self, each=min(self.each, seconds))

    def both(self, other: Deadline) -> Deadline:
        """Return the stricter of two deadlines, in each respect; their clocks may differ."""
        end = self.end if other.end == inf else min(self.end, self.clock() + other.left())
        return replace(self, end=end, each=min(self.each, other.each))

    @property
    def wall(self) -> float:
        """Seconds of wall time in which a request of `each` ends on an idle machine."""
        return min(self.left(), self.each)


FOREVER = Deadline()
"""No limit."""
OVER = Deadline(-inf)
"""The end of work that is to stop at once."""
