"""How far gates can be trusted on this machine: how often they cry wolf, and what they find.

A unit is started twice and measured against itself, in lives as a gate does it. Nothing differs between the two, so a
gate that says one of them regressed gives a false alarm, be it by noise or by the luck of a life. In the same lives the
second one is also measured slowed: it burns processor time inside its measurement, 3, 5, 10 or 20 % of what it usually
takes. What it lost by that is measured too, not assumed.

A thousand gates of 90 s would take a day. So a *trial* is a gate whose lives are replayed: whole lives as they were
measured, shuffled, the sides of A against A swapped by the toss of a coin, for they are equals. No life comes twice
before all have come: a bootstrap makes little of values that occur twice, and real ones do not.
No time is simulated or scaled. A life costs a trial what it costs a gate, and has no more rounds than there. But trials
share the lives they are drawn from, and what happens once an hour is in them only if it happened. `once` is the gate on
the recording as it was measured.

Beside it stands pytest-benchmark's `--benchmark-compare-fail`, which sees the rounds of the same trials.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import UsageError

from . import bootstrap, yardstick
from .bench import Bench
from .decide import ERROR, FINE, LOOKS, REGRESSED, UNDECIDED, Decision, decide, measured
from .rounds import Rounds, Subject
from .units import Unit

BASE, HEAD = "base", "head"
SAME = 0.0
"""The share by which A against A is slowed."""
SLOWDOWNS = (0.03, 0.05, 0.10, 0.20)
MARGIN = 1.02
"""What a build may lose before it counts as regressed, where nobody says otherwise."""
TRIALS = 1000
SEED = 20_261_121
YARDSTICKS = ("mean:5%", "median:5%", "min:5%")
DEMANDED: Sequence[tuple[float, float]] = ((0.05, 0.70), (0.10, 0.95))
"""Slowdown -> how often gates must find it; their false alarms may be `ERROR`."""
_RECENT = 31
_PATIENCE = 3
"""How many times the seconds that it is given a recording may take where lives are slow, to have `FEWEST` of them."""


class Slowed:
    """A subject that works on, inside its measurement, until it burnt `share` of its usual time more.

    What it burns is processor time of this thread, so whatever keeps a program waiting keeps this waiting too, and its
    measurement says how long that really took.
    """

    def __init__(self, subject: Subject, share: float) -> None:
        self.lost: list[float] = []
        """By how much each measurement was longer, as a fraction."""
        self._inner, self._share = subject, share
        self._recent: list[float] = []

    def run(self) -> float:
        """One measurement, in seconds."""
        seconds = self._inner.run()
        self._recent = [*self._recent[1 - _RECENT :], seconds]
        start, until = time.perf_counter(), time.thread_time() + self._share * median(self._recent)
        while time.thread_time() < until:
            pass
        longer = time.perf_counter() - start
        self.lost.append(longer / seconds)
        return seconds + longer


@dataclass(frozen=True, slots=True)
class Life:
    """Rounds of two subjects in one life, in the order measured."""

    base: tuple[float, ...]
    head: tuple[float, ...]
    cost: float
    """Seconds that a gate takes for such a life: to start it, and for rounds that last at least as long."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Lives of a unit against itself."""

    unit: str
    backend: str
    lives: dict[float, list[Life]]
    """Share by which the second is slowed -> lives."""
    lost: dict[float, float]
    """Share -> what was really lost, the median of all rounds."""

    def to_json(self) -> dict[str, JSON]:
        """Every second measured."""
        listed = [
            {
                "share": share,
                "lost": self.lost.get(share, 0.0),
                "base": list(x.base),
                "head": list(x.head),
                "cost": x.cost,
            }
            for share, lives in self.lives.items()
            for x in lives
        ]
        return {"unit": self.unit, "backend": self.backend, "lives": listed}


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
        return recorded(unit.name, str(spec), pair[0], pair[1], seconds, clock)


def recorded(
    unit: str,
    backend: str,
    base: Subject,
    head: Subject,
    seconds: float,
    clock: Callable[[], float],
    slowdowns: Sequence[float] = SLOWDOWNS,
) -> Recording:
    """As `record`, of two subjects that are equal."""
    slow = {share: Slowed(head, share) for share in slowdowns}
    runs = {SAME: head.run, **{share: s.run for share, s in slow.items()}}
    lives: dict[float, list[Life]] = {share: [] for share in runs}
    begin = clock()
    while (passed := clock() - begin) < seconds or (
        len(lives[SAME]) < bootstrap.FEWEST and passed < _PATIENCE * seconds
    ):
        start = clock()
        for subject in (base, head):
            if subject.renew:
                subject.renew()
        opening = clock() - start
        turn = len(lives[SAME]) % len(runs)
        for share in [*list(runs)[turn:], *list(runs)[:turn]]:
            # of one life, so nobody is started over
            pair = [Subject(BASE, base.run, base.renew), Subject(HEAD, runs[share], head.renew)]
            rounds = Rounds(pair, clock=clock)
            rounds.live()
            b, h = rounds.seconds[BASE], rounds.seconds[HEAD]
            lives[share].append(Life(tuple(b), tuple(h), opening + max(opening, rounds.spent)))
    if len(lives[SAME]) < bootstrap.FEWEST:
        raise UsageError(
            f"{unit} on {backend}: time for {bootstrap.FEWEST} lives expected, for {len(lives[SAME])} found"
        )
    return Recording(unit, backend, lives, {share: median(s.lost) for share, s in slow.items()})


class Replay:
    """Lives that were measured before: what `decide` buys instead of new ones.

    Args:
        lives: all there are.
        rng: shuffles them; None plays them in the order measured. None is played twice before all were played.
        swap: whether the sides are equals, to be swapped by the toss of a coin.
    """

    def __init__(self, lives: Sequence[Life], rng: np.random.Generator | None = None, *, swap: bool = False) -> None:
        self.seconds: dict[str, list[float]] = {BASE: [], HEAD: []}
        self.lives: list[int] = []
        self.spent = 0.0
        self._recorded, self._rng, self._swap = lives, rng, swap
        self._ahead: list[int] = []

    def __len__(self) -> int:
        return len(self.seconds[BASE])

    def live(self) -> None:
        """The rounds of one more life."""
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


@dataclass(slots=True)
class Tally:
    """Answers of trials of one kind."""

    answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys((FINE, REGRESSED, UNDECIDED), 0))
    seconds: list[float] = field(default_factory=list)
    """What each trial took."""
    yardstick: dict[str, int] = field(default_factory=lambda: dict.fromkeys(YARDSTICKS, 0))
    """Expression -> how often it failed."""

    @property
    def trials(self) -> int:
        """How many."""
        return sum(self.answers.values())

    def rate(self, answer: str) -> float:
        """Which part of the trials ended so."""
        return self.answers[answer] / self.trials

    def add(self, decision: Decision, replay: Replay) -> None:
        """Count a trial, and what the yardsticks say of its rounds."""
        self.answers[decision.answer] += 1
        self.seconds.append(decision.seconds)
        head, base = (yardstick.stats(replay.seconds[side]) for side in (HEAD, BASE))
        for expression in YARDSTICKS:
            self.yardstick[expression] += bool(yardstick.failing(expression, head, base))

    def to_json(self) -> dict[str, JSON]:
        """`trials`, the number of each answer, the mean `seconds` of a trial, and the yardsticks' alarms."""
        seconds = fmean(self.seconds)
        return {"trials": self.trials, **self.answers, "seconds": seconds, "yardstick": dict(self.yardstick)}


@dataclass(frozen=True, slots=True)
class Trust:
    """What gates on a unit are worth here."""

    recording: Recording
    limit: float
    budget: float
    once: Decision
    """A against A as measured, every life once."""
    same: Tally
    """Trials of A against A."""
    slower: dict[float, Tally]
    """Share -> trials of A against A slowed by it."""
    detectable: float | None
    """The smallest slowdown that a gate would find in 95 of 100 trials; None where none of any size."""

    def to_json(self) -> dict[str, JSON]:
        """All of it; shares are fractions, and `lost` is what the slowed ones really lost."""
        i = self.once.interval
        once = {
            "answer": self.once.answer,
            "estimate": i.estimate,
            "low": i.low,
            "high": None if math.isinf(i.high) else i.high,
        }
        return {
            **self.recording.to_json(),
            "limit": self.limit,
            "budget": self.budget,
            "once": once,
            "same": self.same.to_json(),
            "slower": [{"share": s, "lost": self.recording.lost[s], **t.to_json()} for s, t in self.slower.items()],
            "detectable": self.detectable,
        }


def trust(r: Recording, limit: float, budget: float, trials: int = TRIALS) -> Trust:
    """Try gates on a recording: `trials` of A against A, a third as many of each slowdown."""
    rng = np.random.default_rng(SEED)
    replay = Replay(r.lives[SAME])
    there = sum(x.cost for x in r.lives[SAME][:-1])
    return Trust(
        r,
        limit,
        budget,
        decide(replay, HEAD, BASE, limit, min(budget, there)),
        tried(r, SAME, limit, budget, trials, rng),
        {s: tried(r, s, limit, budget, max(1, trials // 3), rng) for s in SLOWDOWNS},
        detectable(r, limit, budget, max(1, trials // 20), rng),
    )


def tried(r: Recording, share: float, limit: float, budget: float, trials: int, rng: np.random.Generator) -> Tally:
    """Gates on replayed lives in which the second side is slowed by `share`."""
    tally = Tally()
    for _ in range(trials):
        replay = Replay(r.lives[share], rng, swap=share == SAME)
        tally.add(decide(replay, HEAD, BASE, limit, budget), replay)
    return tally


def detectable(r: Recording, limit: float, budget: float, trials: int, rng: np.random.Generator) -> float | None:
    """The smallest detectable slowdown, of the median trial, at the last look of the whole budget."""
    found = []
    for _ in range(trials):
        replay = Replay(r.lives[SAME], rng, swap=True)
        while replay.spent < budget:
            replay.live()
        interval = measured(replay, HEAD, BASE, ERROR * (LOOKS[-1] - LOOKS[-2]))
        found.append(limit * (1 + interval.detectable) - 1)
    middle = float(np.median(found))
    return middle if math.isfinite(middle) else None


def shortcomings(t: Trust) -> list[str]:
    """What is demanded of gates and is not so here, in words; none where all is."""
    alarms = t.same.rate(REGRESSED)
    said = [f"false alarms {alarms:.1%}, at most {ERROR:.0%} demanded"] if alarms > ERROR else []
    for share, demand in DEMANDED:
        rate = t.slower[share].rate(REGRESSED)
        if rate < demand:
            said.append(f"{share:.0%} slower found {rate:.1%}, at least {demand:.0%} demanded")
    return said
