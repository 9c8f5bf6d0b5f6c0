"""Measures false alarms of gates on this machine, and the slowdowns that they detect.

A unit is started twice and compared with itself, in lives as in a gate. So a gate that answers "regressed" is wrong.
In the same lives the second instance is also slowed down: it burns processor time inside its measurement, 3, 5, 10 or
20 % of its usual time, and the actual loss is measured.

A thousand gates of 90 s would take a day, so a *trial* replays a gate with whole measured lives in random order; for A
against A the two sides are also swapped at random. No life is replayed twice before all were replayed, because repeated
values distort a bootstrap and do not occur in real lives. No time is simulated or scaled, and a life takes as much of a
trial's time as of a gate's. But trials share the same recorded lives, and a disturbance that occurs once an hour is in
them only if it occurred during the recording.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict

from .bench import Bench
from .measure import Rounds, Subject
from .statistics import ERROR, FEWEST, LOOKS, REGRESSED, UNDECIDED, Measurements, decide, interval_of
from .units import Unit

BASE, HEAD = "base", "head"
SAME = 0.0
"""Key for the comparison of a unit with itself, without a slowdown."""
SLOWDOWNS = (0.03, 0.05, 0.10, 0.20)
MARGIN = 1.02
"""The default limit: the slowdown above which a build counts as regressed."""
TRIALS = 1000
SEED = 20_261_121
DEMANDED: Sequence[tuple[float, float]] = ((0.05, 0.70), (0.10, 0.95))
"""Slowdown -> rate at which gates must detect it; `ERROR` limits false alarms."""
_RECENT = 31
_PATIENCE = 3
"""Factor by which a recording is extended if lives are too slow for `FEWEST` of them."""


class Slowed:
    """A subject that burns `share` of its usual time inside its measurement.

    It burns processor time of this thread, and the measurement grows by what it burnt.
    """

    def __init__(self, subject: Subject, share: float) -> None:
        self.lost: list[float] = []
        """Extra time of each measurement, as a fraction."""
        self._inner, self._share = subject, share
        self._recent: list[float] = []

    def run(self) -> float:
        """Measure once; return seconds."""
        seconds = self._inner.run()
        self._recent = [*self._recent[1 - _RECENT :], seconds]
        start = time.thread_time()
        while (longer := time.thread_time() - start) < self._share * median(self._recent):
            pass
        self.lost.append(longer / seconds)
        return seconds + longer


@dataclass(frozen=True, slots=True)
class Life:
    """Rounds of two subjects in one life, in the order measured."""

    base: tuple[float, ...]
    head: tuple[float, ...]
    cost: float
    """Seconds of a gate for such a life: its start, and rounds that last at least as long."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Lives of a unit against itself."""

    lives: dict[float, list[Life]]
    """Slowdown of the second side -> measured lives (pairs of processes)."""
    lost: dict[float, float]
    """Slowdown -> actual loss, the median of all rounds."""


def record(
    bench: Bench, unit: Unit, spec: Spec, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Recording:
    """Measure lives, plain and slowed, for `seconds`.

    Raises:
        UsageError: nothing is timed in the unit, its case did not PASS, or too few lives fit into the time.
        BackendError: the backend failed.
    """
    with ExitStack() as stack:
        pair = []
        for side in (BASE, HEAD):
            ready = bench.measured(unit, spec, side)
            stack.callback(ready.close)
            pair.append(ready.subject)
        return record_subjects(pair[0], pair[1], seconds, clock)


def record_subjects(
    base: Subject,
    head: Subject,
    seconds: float,
    clock: Callable[[], float],
    slowdowns: Sequence[float] = SLOWDOWNS,
) -> Recording:
    """Measure lives of two equal subjects, as `record` does."""
    slow = {share: Slowed(head, share) for share in slowdowns}
    runs = {SAME: head.run, **{share: s.run for share, s in slow.items()}}
    lives: dict[float, list[Life]] = {share: [] for share in runs}
    begin = clock()
    while (passed := clock() - begin) < seconds or (len(lives[SAME]) < FEWEST and passed < _PATIENCE * seconds):
        start = clock()
        for subject in (base, head):
            if subject.renew:
                subject.renew()
        opening = clock() - start
        turn = len(lives[SAME]) % len(runs)
        for share in [*list(runs)[turn:], *list(runs)[:turn]]:
            # new `Rounds` restart nobody before their first life: all shares are measured in one life
            pair = [Subject(BASE, base.run, base.renew), Subject(HEAD, runs[share], head.renew)]
            rounds = Rounds(pair, clock=clock)
            rounds.live()
            b, h = rounds.seconds[BASE], rounds.seconds[HEAD]
            lives[share].append(Life(tuple(b), tuple(h), opening + max(opening, rounds.spent)))
    if len(lives[SAME]) < FEWEST:
        raise UsageError(f"at least {FEWEST} processes expected, {len(lives[SAME])} measured; allow more time")
    return Recording(lives, {share: median(s.lost) for share, s in slow.items()})


class Replay(Measurements):
    """Recorded lives for `decide`, shuffled by `rng`, with sides swapped if they are equal."""

    def __init__(self, lives: Sequence[Life], rng: np.random.Generator | None = None, *, swap: bool = False) -> None:
        super().__init__((BASE, HEAD))
        self._recorded, self._rng, self._swap = lives, rng, swap
        self._ahead: list[int] = []

    def live(self) -> None:
        """Replay the rounds of one more life."""
        rng = self._rng
        if not self._ahead:
            n = len(self._recorded)
            self._ahead = list(range(n)) if rng is None else rng.permutation(n).tolist()
        life = self._recorded[self._ahead.pop(0)]
        sides = (life.base, life.head)
        if self._swap and rng is not None and rng.random() < 0.5:
            sides = (life.head, life.base)
        self.lives.append(len(self))
        for side, seconds in zip((BASE, HEAD), sides, strict=True):
            self.seconds[side] += seconds
        self.spent += life.cost


def calibrate(r: Recording, limit: float, budget: float, trials: int = TRIALS) -> dict[str, float]:
    """Run gates on a recording: `trials` of A against A, a third as many of each slowdown.

    Returns:
        `regressed.S` and `undecided.S`, the share of trials with that answer at a slowdown of S % (0 is A against A),
        `lost.S`, the actual loss in %, `seconds`, of a trial of A against A, `lives`, and `detectable`, the smallest
        slowdown in % that a gate detects in 95 of 100 trials, if there is one.
    """
    rng = np.random.default_rng(SEED)
    metrics: dict[str, float] = {"lives": len(r.lives[SAME])}
    for share, lives in r.lives.items():
        n = trials if share == SAME else max(1, trials // 3)
        tries = [decide(Replay(lives, rng, swap=share == SAME), HEAD, BASE, limit, budget) for _ in range(n)]
        answers = [d.answer for d in tries]
        percent = f"{100 * share:g}"
        metrics |= {f"{word}.{percent}": answers.count(word) / n for word in (REGRESSED, UNDECIDED)}
        metrics |= {f"lost.{percent}": 100 * r.lost[share]} if share in r.lost else {}
        if share == SAME:
            metrics["seconds"] = fmean(d.seconds for d in tries)
    found = _detectable(r, limit, budget, max(1, trials // 20), rng)
    return {**metrics, **({"detectable": 100 * found} if math.isfinite(found) else {})}


def _detectable(r: Recording, limit: float, budget: float, trials: int, rng: np.random.Generator) -> float:
    """Return the smallest slowdown that the median trial detects with the whole budget."""
    effects = []
    for _ in range(trials):
        replay = Replay(r.lives[SAME], rng, swap=True)
        while replay.spent < budget:
            replay.live()
        interval = interval_of(replay, HEAD, BASE, ERROR * (LOOKS[-1] - LOOKS[-2]))
        effects.append(limit * (1 + interval.detectable) - 1)
    return float(np.median(effects))


def result_of(unit: Unit, spec: Spec, metrics: dict[str, float]) -> Result:
    """Judge a calibration: FAIL if gates miss their required rates."""
    alarms = metrics[f"{REGRESSED}.0"]
    wrong = [f"false alarms {alarms:.1%}, at most {ERROR:.0%} allowed"] if alarms > ERROR else []
    for share, least in DEMANDED:
        rate = metrics[f"{REGRESSED}.{100 * share:g}"]
        if rate < least:
            wrong.append(f"{share:.0%} slower found {rate:.1%}, at least {least:.0%} required")
    error = Error("; ".join(wrong), "gates are not reliable here") if wrong else None
    verdict = Verdict.FAIL if wrong else Verdict.PASS
    return Result(f"calibrate/{unit.name}/{unit.model}@1", str(spec), verdict, error=error, metrics=metrics)
