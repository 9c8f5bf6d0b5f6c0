"""Runs the stages of a test in order, each in a share of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from conformance.campaign.player import Player
from conformance.ggml.errors import ConformanceError
from conformance.testrun import TestRun

from .cases import Sweep
from .target import Target


@dataclass(slots=True)
class Stages:
    """The stages of a test; a target that ends early takes no further part in them."""

    it: TestRun
    work: Sequence[Sweep]
    progress: Callable[[str], None]
    broken: dict[str, str] = field(default_factory=dict)
    """Target that ended before its cases, such as one that does not open -> the error."""

    def run(self, end: float, last: float, has_news: Callable[[], bool]) -> None:
        """Run stages until `end`, or until `last` while `has_news` is false.

        Each stage gets half of the remaining time, and its targets share it by their cases. So a change that reaches
        thousands of cases leaves time for other kinds, such as `order`, of which a few cases take seconds.
        """
        specs = [s for w in self.work for s in w.target.specs]
        player = Player(self.it, list(dict.fromkeys(specs)), sum(len(w.target.specs) * len(w.left) for w in self.work))
        slow: set[str] = set()
        try:
            with self.it.runner.quick(locates=False, checks_stale_state=False):
                while left := [w for w in self.work if w.left and w.target.name not in self.broken]:
                    if self.it.clock() >= end:
                        if end >= last or has_news():
                            break
                        end = last
                        continue
                    stages = [list(works) for _, works in groupby(left, key=lambda w: w.stage)]
                    for i, works in enumerate(stages):
                        share = 1.0 if i == len(stages) - 1 else 0.5
                        self._stage(works, player, self.it.clock() + share * (end - self.it.clock()), slow)
        finally:
            player.close()
            self.it.close()

    def _stage(self, works: Sequence[Sweep], player: Player, end: float, slow: set[str]) -> None:
        clock = self.it.clock
        for i, work in enumerate(works):
            share = (end - clock()) * len(work.left) / sum(len(w.left) for w in works[i:])
            if share <= 0:
                return
            if work.target.name in self.broken:
                continue
            self.progress(f"{work.target.name}: {work.stage}: {len(work.left)} left")
            try:
                work.run(player, share, slow)
            except ConformanceError as e:
                if self.is_over():
                    return
                self.give_up(work.target, e)

    def give_up(self, target: Target, error: ConformanceError) -> None:
        """End the part of a target."""
        self.broken[target.name] = str(error)
        self.progress(f"{target.name}: its other cases do not run: {error}")

    def is_over(self) -> bool:
        """Return True at the end of the run, where an error may be a request that was cut short."""
        return self.it.chosen.isolation.until.is_over()
