"""Tests a build on all its devices, optionally against a base build, within a time limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from conformance.backend.registry import Spec
from conformance.builds.build import Build
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError
from conformance.judge.outcome import Lost, Outcome, Why, coverage
from conformance.judge.verdict import (
    EXECUTED,
    FAILURES,
    Missing,
    MissingCause,
    Request,
    Result,
    Totals,
    Verdict,
    counted,
    grouped,
)
from conformance.llama.live import arch, audit, memory, order, scenario
from conformance.llama.live.functions import family as functions
from conformance.llama.zoo.model import table
from conformance.perf.units import Unit
from conformance.report.compare import State
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.session.impact import Impacted
from conformance.run.session.select import case_ids
from conformance.run.session.settings import WaiverBook, today
from conformance.run.session.spread import families, of_ops, one_each, spread
from conformance.suite.family import LEVELS, Level
from conformance.testrun import Chosen, TestRun

from .cases import NotRun, Sweep
from .causes import Causes, CauseSearch, SharedCause, compared, fails, in_states
from .counts import UnitCounts
from .profiles import Profiles
from .stages import Stages
from .target import CPU, META, MODELS, OPS, TRAJECTORIES, Target, absent

CHANGED, MORE = "changed code", "more of changed code"
"""Stages of the cases that reach changed functions and shaders: the first, and the others."""
FIRST = 128
"""Cases of changed code that run before the other kinds.

The order is a case of each function in turn, so later ones repeat what these asked."""
LATE = "time limit (--budget)"
COUNTING = 1 / 3
"""Share of the time after which no further unit is counted."""
RUNNING = 0.6
"""Share of the time for cases; the rest is for causes."""
UNCAUSED = 0.9
"""The same share if no failure is new by then."""
GRACE = 0.1
"""Share of the time at its end to confirm the last causes."""


def plan(
    targets: Sequence[Target], level: Level, *, models: bool, changed: Mapping[str, Sequence[str]] = {}
) -> list[Sweep]:
    """Return the stages in order, then those of higher levels.

    They are ops; scheduler and memory, which take a minute; trajectories, audits and models, which take the rest. With
    `changed`, the cases of changed code by backend, the `FIRST` of these come first, then one case of each other op,
    what takes a minute, and the others of changed code.
    """
    small, rest = families()
    work = list(_changed(targets, changed, level, models=models))
    begun = bool(work)
    before: set[str] = set()
    for each in LEVELS[: LEVELS.index(level) + 1]:
        for name, of_kind in ((OPS, small), (TRAJECTORIES, rest)):
            ids = [i for i in case_ids(of_kind, (), each) if i not in before]
            own = [t for t in targets if name in t.runs]
            order = spread(ids, before)
            of = {t.kernels: of_ops(order, t.kernels) if t.kernels and name == OPS else order for t in own}
            work += [Sweep(t, f"{name} at {each}", list(of[t.kernels])) for t in own]
            before.update(ids)
            if (each, name) == (LEVELS[0], OPS) and not begun:
                work += _short(targets, level, models=models)
        if each == LEVELS[0]:
            ids = list(audit.FAMILY.ids("standard"))
            work += [Sweep(t, audit.NAME, list(ids)) for t in targets if TRAJECTORIES in t.runs]
        if each == LEVELS[0] and models:
            last = _whole_models()
            work += [Sweep(t, arch.NAME, list(last)) for t in targets if MODELS in t.runs]
    return [w for w in _once(work) if w.left]


def _changed(
    targets: Sequence[Target], changed: Mapping[str, Sequence[str]], level: Level, *, models: bool
) -> Iterator[Sweep]:
    """Yield cases of changed code, a case of each other op, short stages, more of changed code.

    Nothing if no case reaches changed code.
    """
    if not any(changed.values()):
        return
    of = {t.name: changed.get(str(t.build), ()) for t in targets}
    for t in targets:
        yield Sweep(t, CHANGED, list(of[t.name][:FIRST]))
    ids = spread(case_ids(families()[0], (), LEVELS[0]))
    for t in targets:
        own = of_ops(ids, t.kernels) if t.kernels else ids
        if OPS in t.runs:
            yield Sweep(t, "an op each", one_each(own, of[t.name]))
    yield from _short(targets, level, models=models)
    for t in targets:
        if models and t.name == META:
            yield Sweep(t, arch.NAME, [arch.id_of(name, run) for name in arch.FEW for run in arch.RUNS])
    for t in targets:
        if models and MODELS in t.runs and t.name != META:  # scenarios split tensors by themselves
            yield Sweep(t, scenario.NAME, [*scenario.in_turns(arch.FEW), *scenario.FAMILY.ids(level)])
    for t in targets:
        yield Sweep(t, MORE, list(of[t.name][FIRST:]))


def ids_of(targets: Sequence[Target], level: Level) -> dict[Spec, list[str]]:
    """Return the cases of each target, single ops first, each kind in the order of `spread`."""
    small, large = (spread(case_ids(names, (), level)) for names in families())
    return {
        t.build: [
            *(of_ops(small, t.kernels) if t.kernels else small if OPS in t.runs else ()),
            *(large if TRAJECTORIES in t.runs else ()),
        ]
        for t in targets
    }


def _once(work: Iterable[Sweep]) -> Iterator[Sweep]:
    """Yield the stages, each without the cases that an earlier one of its target has."""
    planned: dict[str, set[str]] = {}
    for w in work:
        known = planned.setdefault(w.target.name, set())
        w.left = [i for i in dict.fromkeys(w.left) if i not in known]
        known.update(w.left)
        yield w


def _short(targets: Sequence[Target], level: Level, *, models: bool) -> Iterator[Sweep]:
    """Yield the scheduler on lazy devices and functions, for the CPU alone, then memory."""
    for t in targets:
        if t.name == CPU:
            yield Sweep(t, order.NAME, list(order.FAMILY.ids(level)))
            yield Sweep(t, functions.NAME, list(functions.FAMILY.ids(level)))
    for t in targets:
        if models and MODELS in t.runs:
            yield Sweep(t, memory.NAME, list(memory.BUILDS), then=memory.differing)


def _whole_models() -> list[str]:
    """Return the architectures that llama.cpp runs; those of level smoke come first."""
    first = [i for name in arch.FEW for i in (*(arch.id_of(name, run) for run in arch.RUNS), *scenario.ids_of(name))]
    return list(dict.fromkeys((*first, *arch.FAMILY.ids("standard"))))


class TargetResults(NamedTuple):
    """The results of one target."""

    build: list[Result]
    base: list[Result]
    """Results of the base for the same cases; the base may lack some."""

    @property
    def totals(self) -> Totals:
        """The totals of the build."""
        return Totals.of(self.build)

    @property
    def dropped(self) -> list[str]:
        """Ids of cases that pass on the base and are refused by the build."""
        return [p.case for p in compared(*self) if p.state is State.UNCOVERED]


@dataclass(slots=True)
class Release:
    """A build under test."""

    build: Build
    base: Build | None
    targets: Sequence[Target]
    work: Sequence[Sweep]
    seconds: float
    isolation: Isolation
    search: CauseSearch
    progress: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    found: list[SharedCause] = field(default_factory=list)
    interrupted: bool = False
    path: Path | None = None
    """Path of the run file; each result is beside it at once, until it is written."""
    profiles: Profiles | None = None
    """Measures the targets whose devices declare no rounding."""
    units: Sequence[Unit] = ()
    """Units whose instructions are counted on the CPU."""
    counted: UnitCounts = field(init=False)
    level: Level = "standard"
    """Highest level of the cases."""
    jobs: int | None = None
    """Processes that run cases at a time; None for one per core."""
    learning: float = 0.0
    """Maximum share of the time for that."""
    impacted: Impacted | None = None
    """Differences between the builds; None without a base, or if they cannot be compared."""
    notes: dict[str, str] = field(default_factory=dict)
    """Target -> a note on its rounding."""
    it: TestRun = field(init=False)
    stages: Stages = field(init=False)

    def __post_init__(self) -> None:
        self.counted = UnitCounts(self.units, self.targets)
        bases = {t.build: t.base for t in self.targets if t.base is not None}
        self.it = TestRun(
            Chosen(workers=Workers(self.isolation), json_path=self.path, jobs=self.jobs),
            bases=bases,
            waivers=WaiverBook({}, today()),
            clock=self.clock,
            recovers=False,
        )
        self.stages = Stages(self.it, self.work, self.progress)
        asked: dict[str, list[str]] = {}
        for w in self.work:
            asked.setdefault(str(w.target.build), []).extend(w.left)
        self.it.ask(Request(asked), gating=False)

    def run(self) -> None:
        """Count units, run the cases and find causes. Ctrl-C leaves the results so far."""
        begun = self.clock()
        try:
            for results in self.counted.run(
                self.isolation, self.progress, lambda: self.clock() >= begun + self.seconds * COUNTING
            ):
                self.it.keep(results)
            now = self.clock()
            self._measure(now + (begun + self.seconds - now) * self.learning)
            now = self.clock()
            end, last = (now + (begun + self.seconds - now) * share for share in (RUNNING, UNCAUSED))
            self.stages.run(end, last, self._has_news)
        except KeyboardInterrupt:
            self.interrupted = True
            self.progress("interrupted; only finished results are judged")
        left, grace = max(0.0, begun + self.seconds - self.clock()), GRACE * self.seconds
        causes = Causes(seconds=max(0.0, left - grace), grace=grace, progress=self.progress, clock=self.clock)
        try:
            causes.add_all([(target, *self.results(target)) for target in self.targets], self.search)
        except KeyboardInterrupt:
            self.interrupted = True
            self.progress("interrupted; some failures have no cause")
        self.found = causes.all()

    def _measure(self, end: float) -> None:
        """Measure rounding until `end`; a target that cannot be measured ends alone."""
        wanted = [t for t in self.targets if t.is_measured]
        for i, target in enumerate(wanted if self.profiles else ()):
            assert self.profiles is not None
            share = (end - self.clock()) / (len(wanted) - i)
            try:
                self.notes[target.name] = self.profiles.measure(target, self.build, self.base, share)
            except ConformanceError as e:
                if self.stages.is_over():
                    return
                self.stages.give_up(target, e)

    def _has_news(self) -> bool:
        """Return True if a target has a failure that is new."""
        return any(any(map(fails, in_states(*self.results(t))[State.NEW])) for t in self.targets)

    def results(self, target: Target) -> TargetResults:
        """Return the results of a target."""
        build = [r for r in self.it.results if r.backend == str(target.build)]
        before = self.it.against.before if self.it.against else {}
        return TargetResults(build, [before[r.backend, r.case] for r in build if (r.backend, r.case) in before])

    def fails_on_base(self, found: SharedCause) -> bool:
        """Run the smallest case of a cause on the base of its first device; True if it fails."""
        target = next(t for t in self.targets if t.name in found.devices)
        return target.base is not None and fails(self.search.again(target.base, found.cause.smallest))

    def _left(self) -> Iterator[NotRun]:
        """Yield the planned cases and units of the build without a result; some have no ids."""
        late, cause = LATE, MissingCause.TIME_LIMIT
        if self.interrupted:
            late, cause = "interrupted", MissingCause.INTERRUPTED
        for w in self.work:
            yield from w.rest(late, cause, broken=self.stages.broken.get(w.target.name, ""))
        for t in self.counted.targets:
            yield NotRun(t, "counted units", self.counted.left(t), late, cause)

    def missing(self) -> list[Missing]:
        """Return the planned cases of the build without a result, `grouped`."""
        return grouped((str(n.target.build), i, n.reason, n.cause) for n in self._left() for i in n.ids)

    def not_run(self) -> list[str]:
        """Return sentences about stages and devices that did not run, and why."""
        lines = [n.sentence() for n in self._left() if n.ids]
        lines.append(f"{', '.join(absent(self.build))}: no such device here")
        if unknown := [name for name in self.build.architectures if name not in table()]:
            lines.append(f"{', '.join(unknown)}: architectures of the build for which the suite has no model")
        return [*lines, *(f"{text}: the build lacks it" for text in self.build.left_out)]

    def unproven(self) -> list[str]:
        """Return the devices on which no case passed, except the broken ones."""
        tried = (t for t in self.targets if t.name not in self.stages.broken)
        return [t.name for t in tried if not any(r.verdict is Verdict.PASS for r in self.results(t).build)]

    def executed(self) -> bool:
        """Return True if any case ran."""
        return any(r.verdict in EXECUTED for t in self.targets for r in self.results(t).build)

    def why_not_executed(self) -> str:
        """Return why no cases ran: reasons of missing cases, and the number of UNSUPPORTED ones."""
        left = Counter[str]()
        for m in self.missing():
            left[m.reason] += m.count
        refused = sum(self.results(t).totals.counts[Verdict.UNSUPPORTED] for t in self.targets)
        reasons = [f"{counted(n, 'case')}: {why}" for why, n in left.most_common()]
        reasons += [f"{counted(refused, 'case')} UNSUPPORTED"] if refused else []
        return "; ".join(reasons) or "none was planned"

    def without_causes(self) -> str:
        """Return what it means that no cause was found: a sentence."""
        if not self.executed():
            return f"no cases ran: {self.why_not_executed()}"
        sides = [rows for t in self.targets for rows in self.results(t)]
        if n := sum(r.verdict in FAILURES for rows in sides for r in rows):
            return f"{counted(n, 'failure')}, no cause was found"
        if self.base is None:
            return "no failures"
        ran = any(r.verdict in EXECUTED for rows in sides[1::2] for r in rows)
        return "no failures in either build" if ran else f"no failures; no cases ran on {self.base.name}"

    def outcome(self) -> Outcome:
        """Return the outcome.

        It fails for a new or worse cause, a slower unit, a newly refused case or a broken target.
        """
        states, left = Counter(f.state for f in self.found), Counter[str]()
        for m in self.missing():
            left[m.reason] += m.count if m.cause is not MissingCause.LOST else 0
        before = {t.name: [r.case for r in self.results(t).base if r.verdict is Verdict.PASS] for t in self.targets}
        lost = [Lost(t.name, i, Verdict.UNSUPPORTED) for t in self.targets for i in self.results(t).dropped]
        why = Why.INTERRUPTED if self.interrupted else Why.TIME_LIMIT
        cut = [f"{word}: {counted(n, 'case')} not run" for word, n in left.items() if n]
        return (
            Outcome.of(Why.NEW, [f"{counted(states[s], 'cause')} {s}" for s in (State.NEW, State.WORSE) if states[s]])
            + Outcome.of(Why.FAILED, [r.sentence() for r in self.counted.slower()])
            + coverage(lost, before)
            + Outcome.of(
                Why.BROKEN, [f"{name}: not tested to the end: {why}" for name, why in self.stages.broken.items()]
            )
            + Outcome.of(why, cut or (["interrupted"] if self.interrupted else []))
            + Outcome.of(Why.UNPROVEN, [f"{name}: no case passed" for name in self.unproven()])
            + Outcome.of(Why.UNEXECUTED, [] if self.executed() else [f"no cases ran: {self.why_not_executed()}"])
        )

    def changes(self) -> list[str]:
        """Return lines on the differences between the builds, and the cases that ran of them."""
        return [] if self.impacted is None else list(self.impacted.lines([self.results(t) for t in self.targets]))

    def to_json(self) -> dict[str, JSON]:
        """Return the builds, devices and causes for the run file, without results and missing cases."""
        results = [self.results(t) for t in self.targets]
        return {
            **({"changes": self.impacted.to_json(results)} if self.impacted else {}),
            "build": self.build.to_json(),
            "against": None if self.base is None else self.base.to_json(),
            "devices": [self._device(t) for t in self.targets],
            "causes": [f.to_json(self.targets) for f in self.found],
            "absent": absent(self.build),
        }

    def _device(self, target: Target) -> dict[str, JSON]:
        return {
            "name": target.name,
            "backend": str(target.build),
            "against": None if target.base is None else str(target.base),
            "software": target.software,
            "note": self.stages.broken.get(target.name) or self.notes.get(target.name, ""),
            "dropped": list(self.results(target).dropped),
        }
