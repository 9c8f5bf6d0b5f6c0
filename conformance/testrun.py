"""One run: selected cases on selected backends, their results, and the record.

`conform run`, `conform repro`, pytest and releases get results from `TestRun.play` or from workers. Selection, missing
results, waivers, record and outcome are the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from msgspec import convert

from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.causes.cause import assigned
from conformance.ggml.errors import BrokenError, UnavailableError, UsageError
from conformance.ggml.text import printable
from conformance.judge.cause import Cause
from conformance.judge.outcome import Outcome, Why, judge
from conformance.judge.verdict import FAILURES, Missing, MissingCause, Request, Result, Verdict
from conformance.process import FOREVER, Deadline
from conformance.report.compare import Sides
from conformance.report.runfile import Selection, record, write_json
from conformance.report.runs import read_runs
from conformance.report.scope import Scope, scopes
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.live import is_live
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner
from conformance.run.session import expected
from conformance.run.session.folder import default_folder
from conformance.run.session.identity import Identity, identity
from conformance.run.session.interrupted import left_in, recover
from conformance.run.session.journal import Beside, Continued, Journal
from conformance.run.session.precision import advice
from conformance.run.session.select import (
    FOLDER,
    LARGEST,
    case_ids,
    case_name,
    choose,
    expect_backend,
    fresh_ids,
    new_seed,
    parse_specs,
    probe,
    record_of,
    reseeded,
)
from conformance.run.session.settings import (
    Settings,
    WaiverBook,
    active_settings,
    read_waivers,
    report,
    today,
)
from conformance.run.session.shard import WHOLE, Shard
from conformance.run.start import Starts
from conformance.suite.batch import groups
from conformance.suite.family import LEVELS, Level

ENDED = "the run ended before it"
MOST = 32
"""Maximum number of cases in a batch under a time limit, where a backend may take more."""
SLOW = 5.0
"""Target seconds of a batch under a time limit; after a slower one the next is smaller."""


class Pace:
    """The sizes of batches: one case at first, whose result appears early, then twice as many."""

    def __init__(self, slow: float = inf) -> None:
        """Begin with one case; after a batch of more than `slow` seconds the next is smaller."""
        self._size, self._slow = 1, slow

    def size(self, full: int) -> int:
        """Return the size of the next batch, at most `full`."""
        return min(self._size, full)

    def took(self, seconds: float, cases: int) -> None:
        """Take the time of a batch."""
        self._size = max(1, cases // 4) if seconds > self._slow else 2 * cases


@dataclass(frozen=True, slots=True)
class NewCases:
    """Rounds of new cases."""

    families: Sequence[str]
    globs: Sequence[str]
    level: Level
    count: int
    """Number of cases in a round, of all shards."""
    seed: int
    """Seed of round 0."""
    shard: Shard

    def round(self, n: int) -> list[str]:
        """Return the ids of the n-th round in this shard; UsageError for an unknown family or glob."""
        if not self.count:
            return []
        return self.shard.share(fresh_ids(self.families, self.globs, self.level, self.count, (self.seed + n) % LARGEST))


@dataclass(frozen=True)
class Chosen:
    """The selection made on either command line; a field is an option's `dest` (`cli.options`)."""

    backends: Sequence[str] = ()
    """Names of the backends; empty for the default ones (`registry.defaults`)."""
    stage: str | None = None
    families: Sequence[str] = ()
    globs: Sequence[str] = ()
    level: Level | None = None
    seed: int | None = None
    """Seed of every generated case, instead of its own."""
    fresh: int = 0
    """Number of new cases."""
    fresh_seed: int | None = None
    """Seed of the new cases; None for `seed`, or a random one."""
    only_fresh: bool = False
    shard: Shard = WHOLE
    cases: Sequence[Case] = ()
    """Cases from files, for all backends."""
    files: Sequence[str] = ()
    """Paths of these files."""
    settings: Settings = field(default_factory=Settings)
    workers: Workers = field(default_factory=Workers)
    """Worker processes, with their limits."""
    jobs: int | None = None
    """Number of processes that run cases at a time (`campaign.lanes`); None for one per core."""
    json_path: Path | None = None
    """Path of the record."""
    save_failures: Path | None = None
    """Folder for failing cases; failing fresh cases are always saved."""
    waivers_path: Path | None = None
    """Waiver file of the only backend; None for the waivers of the settings."""
    only: Mapping[str, Sequence[str]] | None = None
    """Backend -> ids of the chosen cases to run, in this order; others run none.

    None for all."""
    exact: bool = False
    """True to also record the NMSE from values without declared rounding."""
    elsewhere: bool = False
    """True if other machines run the cases: named backends may be unavailable here."""
    against: str | None = None
    """Backend that runs the same cases, or path of an earlier record, for a comparison."""

    @classmethod
    def of(cls, settings: Settings, values: Mapping[str, Any]) -> Chosen:
        """Make a selection from option values by `dest`; limits of workers go into `workers`."""
        limits = {f.name for f in fields(Isolation)}
        own = {k: v for k, v in values.items() if k not in limits}
        workers = Workers(Isolation(**{k: v for k, v in values.items() if k in limits}))
        return cls(**own, settings=settings, workers=workers)

    @property
    def isolation(self) -> Isolation:
        """Limits of a worker process."""
        return self.workers.isolation

    @cached_property
    def specs(self) -> list[Spec]:
        """Selected backends that this machine has; UsageError for an unknown name, option or stage."""
        return self._chosen[0]

    @cached_property
    def lacking(self) -> dict[str, UnavailableError]:
        """Backend -> reason why this machine lacks it."""
        return {str(spec): why for spec, why in self._chosen[1].items()}

    @cached_property
    def _chosen(self) -> tuple[list[Spec], dict[Spec, UnavailableError]]:
        # the selection is checked before a backend opens
        if self.against is not None and not Path(self.against).is_file():
            expect_backend("--against", self.against)
        if self.waivers_path is not None:
            read_waivers(self.waivers_path)
        _ = self.level_ids, self.new.round(0)
        if self.elsewhere and self.backends:
            return self.asked, {}
        return choose(self.backends, self.stage, self.workers)

    @cached_property
    def asked(self) -> list[Spec]:
        """The backends that the user named, or the default ones; UsageError if one is not installed."""
        return parse_specs(self.backends)

    @cached_property
    def base(self) -> Spec | None:
        """The backend that `against` names; None if it names a record, or nothing.

        Raises:
            UsageError: the name is unknown, or one of the selected backends.
            UnavailableError: this machine lacks it.
        """
        if self.against is None or Path(self.against).is_file():
            return None
        expect_backend("--against", self.against)
        found, lacking = choose([self.against], self.stage, self.workers)
        for why in lacking.values():
            raise UnavailableError(f"--against {self.against}: not available: {why}")
        if found[0] in self.specs:
            raise UsageError(f"--against {self.against}: another backend, or a run's record, expected")
        return found[0]

    @property
    def saves(self) -> Path | None:
        """Folder for failing cases; None for none."""
        return self.save_failures or (Path(FOLDER) if self.fresh else None)

    @property
    def folder(self) -> Path:
        """Folder for the journals of runs that write no record, and for running cases."""
        return self.save_failures or default_folder()

    @cached_property
    def levels(self) -> dict[Spec, Level]:
        """The level of each backend."""
        return {spec: self.settings.level(spec, self.level) for spec in self.specs}

    @property
    def by_id(self) -> bool:
        """True if ids of a level run, not only cases of files and fresh ones."""
        return (not self.files or bool(self.families or self.globs)) and not self.only_fresh

    @property
    def is_whole_level(self) -> bool:
        """True if no option excludes cases of a level."""
        return self.by_id and not self.families and not self.globs and self.only is None

    @cached_property
    def level_ids(self) -> dict[Level, list[str]]:
        """Level -> its ids, of all shards, if a backend runs it; empty with files alone."""
        levels = (self.settings.level(spec, self.level) for spec in self.asked)
        used = {self.level or LEVELS[0], *levels} if self.by_id else set()
        return {n: self.at(n) for n in sorted(used, key=LEVELS.index)}

    def at(self, level: Level) -> list[str]:
        """Return the ids of a level, of all shards; UsageError: see `ids`."""
        return [reseeded(i, self.seed) for i in case_ids(self.families, self.globs, level)]

    @cached_property
    def new(self) -> NewCases:
        """The new cases, which no level lists."""
        seed = self.seed if self.fresh_seed is None else self.fresh_seed
        return NewCases(
            self.families,
            self.globs,
            self.level or LEVELS[0],
            self.fresh,
            new_seed() if seed is None else seed,
            self.shard,
        )

    @cached_property
    def ids(self) -> dict[Spec, list[str]]:
        """Backend -> ids of this shard, not of files; UsageError for an unknown family or glob."""
        return {s: list(dict.fromkeys([*self.shard.share(self.level_ids.get(n, ())), *self.new.round(0)]))
                for s, n in self.levels.items()}  # fmt: skip

    @cached_property
    def own_cases(self) -> list[Case]:
        """Cases of files that belong to this shard."""
        share = frozenset(self.shard.share(c.id for c in self.cases))
        return [c for c in self.cases if c.id in share]

    def cases_of(self, spec: Spec) -> list[Case | str]:
        """Return the cases that run on a backend: those of files, then ids."""
        every: list[Case | str] = [*self.own_cases, *self.ids.get(spec, ())]
        if self.only is None:
            return every
        turn = {i: n for n, i in enumerate(self.only.get(str(spec), ()))}
        return sorted((c for c in every if case_name(c) in turn), key=lambda c: turn[case_name(c)])

    def to_json(self) -> dict[str, JSON]:
        """Return the selection as in the record of a run."""
        only = sorted({i for ids in (self.only or {}).values() for i in ids})
        return record_of(
            self.levels, self.families, only or self.globs, self.seed, files=self.files, shard=str(self.shard)
        )

    def extra(self) -> dict[str, JSON]:
        """Return the record's `selection` and `shard`."""
        every = [*(c.id for c in self.cases), *(i for ids in self.level_ids.values() for i in ids)]
        shard = {} if self.shard == WHOLE else {"shard": self.shard.to_json(every)}
        against = {} if self.against is None else {"against": str(self.base or self.against)}
        return {"selection": {**self.to_json(), **against}, **shard}


class Against:
    """The other side of a comparison: a record, or a backend that runs the same cases."""

    def __init__(self, bases: Mapping[Spec, Spec], earlier: Iterable[Result] = ()) -> None:
        """Prepare a comparison.

        Args:
            bases: backend -> the one to compare with.
            earlier: results of a record.
        """
        self._bases = bases
        self._ran: dict[tuple[Spec, str], Result] = {}
        """Base and case -> its result."""
        self.before: dict[tuple[str, str], Result] = {(r.backend, r.case): r for r in earlier}
        """Backend and case -> the result to compare with."""

    @classmethod
    def of(cls, chosen: Chosen) -> Against | None:
        """Return the comparison that `chosen` asks for; UsageError for an unreadable record."""
        if chosen.against is None:
            return None
        if chosen.base is not None:
            return cls(dict.fromkeys(chosen.specs, chosen.base))
        own = {str(s) for s in chosen.specs}
        rows = (row.value for row in read_runs([Path(chosen.against)]).results)
        return cls({}, [r for r in rows if r.backend in own])

    @property
    def results(self) -> list[Result]:
        """Results of bases, each case once."""
        return list(self._ran.values())

    def base(self, spec: Spec) -> Spec | None:
        """Return the backend that runs the cases of `spec`, too; None with a record."""
        return self._bases.get(spec)

    def lacks(self, base: Spec, case_id: str) -> bool:
        """Return True if a base has not run a case."""
        return (base, case_id) not in self._ran

    def add(self, base: Spec, results: Iterable[Result]) -> None:
        """Take results of a base."""
        self._ran |= {(base, r.case): r for r in results}

    def match(self, spec: Spec, cases: Sequence[Case]) -> int:
        """Take what the base has of `cases`; return the number before the first it lacks."""
        found = [self._ran.get((self._bases[spec], c.id)) for c in cases]
        done = found.index(None) if None in found else len(found)
        self.before |= {(str(spec), c.id): r for c, r in zip(cases[:done], found, strict=False) if r is not None}
        return done

    def without_bases(self, found: Mapping[tuple[Spec, str], Result]) -> dict[tuple[Spec, str], Result]:
        """Take the results of bases, and return the others."""
        bases = frozenset(self._bases.values())
        self._ran |= {pair: r for pair, r in found.items() if pair[0] in bases}
        own = {pair: r for pair, r in found.items() if pair[0] not in bases}
        for spec, case_id in own:
            self.know(spec, self._ran.get((self._bases.get(spec, spec), case_id)))
        return own

    def know(self, spec: Spec, before: Result | None) -> None:
        """Compare the result of `spec` for a case with `before`, if the base has one."""
        if before is not None:
            self.before[str(spec), before.case] = before

    def pairs(self, results: Iterable[Result]) -> list[Sides]:
        """Return each result and the one to compare with; a waiver covers a base that fails alike."""
        found = []
        for r in results:
            before = self.before.get((r.backend, r.case))
            if self._bases and before is not None and r.verdict is Verdict.XFAIL and before.verdict is r.waived:
                before = replace(before, verdict=r.verdict, waived=r.waived)
            found.append(Sides.of(before, r))
        return found


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of `TestRun.play`: its limits, and the function that is told of the work."""

    runner: Runner
    deadline: Deadline
    stop: Callable[[], bool]
    at: Callable[[str], None]

    def is_over(self) -> bool:
        """Return True if no further group of cases starts."""
        return self.stop() or self._is_late(self.deadline)

    def case(self, case: Case | str) -> Case:
        """Return the case of an id."""
        self.at(f"making {case_name(case)}")
        return self.runner.case(case) if isinstance(case, str) else case

    def run(self, spec: Spec, group: Sequence[Case], deadline: Deadline) -> Sequence[Result]:
        """Run a group of cases; return the results before a time-out at the end of the run."""
        self.at(group[0].id if len(group) == 1 else f"{group[0].id} and {len(group) - 1} more")
        with self.runner.within(deadline):
            results = self.runner.run(spec, group)
        late = self._is_late(deadline)
        cut = (k for k, r in enumerate(results) if late and r.verdict is Verdict.TIMEOUT)
        return results[: next(cut, len(results))]

    def _is_late(self, deadline: Deadline) -> bool:
        return deadline.is_over() or self.runner.is_over()


class TestRun:
    """A run of a selection: requested cases, results and the record."""

    __test__ = False  # not a test class

    def __init__(
        self,
        chosen: Chosen,
        *,
        journal: Continued | None = None,
        waivers: WaiverBook | None = None,
        bases: Mapping[Spec, Spec] | None = None,
        clock: Callable[[], float] = time.monotonic,
        recovers: bool = True,
    ) -> None:
        """Prepare a run; no backend is opened.

        Args:
            chosen: the selection.
            journal: that of `--journal`, which has the results of earlier starts; None for a new one.
            waivers: known failures; None for those of the selection.
            bases: backend -> the one to compare with; None for that of `against`, for each.
            clock: seconds, for time limits.
            recovers: look for cases that an interrupted run left.
        """
        self.chosen, self.clock = chosen, clock
        settings = chosen.settings
        if waivers is None:
            waivers = WaiverBook(settings.waivers_of(chosen.specs, chosen.waivers_path), today())
            if not chosen.elsewhere:
                waivers.ask(lambda spec: probe(spec, chosen.workers).info)
        self.waivers, self.active_settings = waivers, active_settings(settings, waivers)
        new = Beside(chosen.json_path, chosen.folder) if chosen.json_path else Journal(chosen.folder)
        self.journal = journal or new
        self.left = self.recovered() if recovers else []
        """Sentences on cases that an interrupted run left."""
        self.runner = Runner(
            save_failures=chosen.saves,
            workers=chosen.workers,
            journal=self.journal,
            waivers=self.waivers,
            oracle=Oracle(exact=chosen.exact, disk=expected.here()),
        )
        self._starts = Starts(self.runner)
        self._paces: dict[Spec, Pace] = {}
        self.request = Request()
        self.fresh: set[str] = set(chosen.new.round(0))
        """Ids of new cases, whose failures do not fail the run."""
        self.results: list[Result] = []
        self.against = Against.of(chosen) if bases is None else Against(bases)
        """The other side of the comparison; None without one."""
        self.reasons: dict[tuple[str, str], str] = {}
        """Backend and case (or "" for all its cases) -> reason why there is no result."""
        self.missing: list[Missing] = []
        self.causes: list[Cause] | None = None
        """Causes of the failures; None if there was no search for them."""
        self.waiver_problems: tuple[list[str], list[str]] = [], []
        self.about: dict[str, JSON] = {}
        """Further entries of the record; its `environment` is merged into the record's."""
        self.faults: list[str] = []
        """Errors in writing the record."""
        self.gating = False
        """True if a backend without a PASS fails the run."""
        self._tested: dict[str, Identity] = {}
        """Backend -> the content of what it tests, when the run began."""

    @property
    def is_recorded(self) -> bool:
        """True if a record or a journal was requested."""
        return self.chosen.json_path is not None or isinstance(self.journal, Continued)

    def ask(self, request: Request, *, gating: bool) -> None:
        """Set the required results and begin the journal; raises as `Journal.begin`."""
        self.request, self.gating = request, gating
        if self.is_recorded:
            specs = map(Spec.parse, request.cases)
            self._tested = {str(s): identity(s, self.waivers.of(s)) for s in specs}
        self.journal.begin(request, self._tested)
        self.left += left_in(self.journal)

    def keep(self, results: Sequence[Result]) -> None:
        """Write new results to disk at once; undecided ones are measured again at the next start."""
        self.journal.add([r for r in results if not r.undecided])

    def take(self, backend: Spec, case_id: str) -> Result | None:
        """Return the result of an earlier start and remove it; None if there is none."""
        return self.journal.take(str(backend), case_id)

    def play(
        self,
        spec: Spec,
        cases: Sequence[Case | str],
        *,
        deadline: Deadline = FOREVER,
        stop: Callable[[], bool] = lambda: False,
        at: Callable[[str], None] = lambda _: None,
    ) -> Iterator[tuple[Case | None, Result]]:
        """Run cases on a backend and yield results in order.

        Each result is yielded once it is on disk and the base has run the case, too.

        Args:
            spec: the backend.
            cases: cases or their ids.
            deadline: no group of cases starts after it; a case cut off by it, or by `Isolation.until`, has no result.
            stop: called before each group of cases; True ends the run.
            at: called with a description of the current work.

        Yields:
            The case, None if the result is from the journal, and the result.

        Raises:
            BackendCrashError: the device does not start (`run.start`).
        """
        self._starts.check(spec)
        turn = Turn(self.runner, deadline, stop, at)
        # a live family opens its devices itself, also those that only llama.cpp knows
        full = MOST if cases and is_live(case_name(cases[0])) else self.runner.batch_size(spec)
        full = full if deadline.end == inf else min(full, MOST)
        # a time limit: each call may have another op that hangs
        start, pace = 0, self._paces.setdefault(spec, Pace()) if deadline.end == inf else Pace(SLOW)
        while batch := cases[start : start + min(pace.size(full), self._starts.left(spec))]:
            began, done = self.clock(), 0
            earlier = [self.take(spec, case_name(c)) for c in batch]
            new = self._new(spec, (turn.case(c) for c, k in zip(batch, earlier, strict=True) if k is None), turn)
            for case, known in zip(batch, earlier, strict=True):
                found = next(new, None) if known is None else (None, known)
                if found is None:  # stopped before this case
                    return
                if known is not None and not self._base(spec, [turn.case(case)], turn):
                    return
                result = replace(found[1], fresh=found[1].case in self.fresh)
                self.results.append(result)
                yield found[0], result
                done += 1
            self._starts.check(spec, self.results[len(self.results) - done :])
            start += done
            pace.took(self.clock() - began, done)

    def _new(self, spec: Spec, cases: Iterable[Case], turn: Turn) -> Iterator[tuple[Case, Result]]:
        for group in groups(cases):
            if turn.is_over():
                return
            results = [replace(r, fresh=r.case in self.fresh) for r in turn.run(spec, group, turn.deadline)]
            self.keep(results)
            done = self._base(spec, group[: len(results)], turn)
            yield from zip(group, results[:done], strict=False)

    def check_start(self, spec: Spec, results: Sequence[Result]) -> None:
        """Take results of other processes; BackendCrashError: the device does not start."""
        self._starts.check(spec, results)

    def _base(self, spec: Spec, cases: Sequence[Case], turn: Turn) -> int:
        """Run cases on the base, unless it has their results; return how many it has.

        Less than all if the time of the run is over.
        """
        against = self.against
        base = None if against is None else against.base(spec)
        if against is None or base is None:
            return len(cases)
        for case in cases:
            if against.lacks(base, case.id) and (known := self.take(base, case.id)) is not None:
                against.add(base, [known])
        for group in groups(c for c in cases if against.lacks(base, c.id)):
            results = turn.run(base, group, FOREVER.request(turn.deadline.each))
            self.keep(results)
            against.add(base, results)
        return against.match(spec, cases)

    def explain(self, causes: list[Cause]) -> None:
        """Store the causes of failures and assign them to results."""
        self.causes, self.results = causes, assigned(self.results, causes)

    def finish(self, why: str, cause: MissingCause) -> None:
        """Find missing results and write the record.

        Args:
            why: reason for a missing result if no other is known.
            cause: category of `why`.

        Raises:
            UsageError: the record cannot be written.
        """
        written = False
        asked = {(b, i) for b, ids in self.request.cases.items() for i in ids}
        for r in self.results:  # of later rounds of fresh cases those that ran are required
            if r.fresh and (r.backend, r.case) not in asked:
                self.request.cases.setdefault(r.backend, []).append(r.case)
        try:
            self.missing = self.request.missing(self._rows, why, self.reasons, cause)
            self.results = [r for r in self.results if not r.undecided]
            self.waiver_problems = self.waivers.problems(self.results)
            if (path := self.chosen.json_path) is not None:
                write_json(path, {**self._record(), **self.chosen.extra()})
            written = True
        finally:
            self.recorded(written=written)

    def recorded(self, *, written: bool) -> None:
        """End the journal: remove it if the record is `written`, else say where it is."""
        if message := self.journal.end(written=written):
            self.faults.append(message)

    @property
    def _rows(self) -> list[Result]:
        return [*self.results, *(self.against.results if self.against else ())]

    def _record(self) -> dict[str, JSON]:
        lacking = {name: str(why) for name, why in self.chosen.lacking.items()}
        document = record(
            self._rows, lacking, self.waiver_problems[0], asked=self.request, missing=self.missing,
            settings=self.active_settings, gating=self.gating,
        )  # fmt: skip
        causes = {} if self.causes is None else {"causes": [c.to_json() for c in self.causes]}
        tested = {"identity": {name: it.to_json() for name, it in self._tested.items()}}
        environment = {"environment": {**document["environment"], **tested, **self.about.get("environment", {})}}
        run = {"run": self.journal.run} if isinstance(self.journal, Continued) else {}
        return {**document, **self.about, **environment, **causes, **run}

    def scopes(self) -> list[Scope]:
        """Return the scope of the run on each backend that has results."""
        return scopes(convert(self.chosen.to_json(), Selection), self.results)

    def unproven(self) -> dict[str, str]:
        """Return backend -> a sentence, for each on which no case passed."""
        return self.request.unproven(self._rows, self.missing)

    def outcome(self) -> Outcome:
        """Return the outcome, which decides the exit code."""
        unproven = self.unproven() if self.gating else {}
        found = judge(
            self.results,
            self.missing,
            waivers=self.waiver_problems[0],
            unproven=unproven.values(),
            before=self.against.before if self.against else None,
        )
        absent = self.chosen.lacking.items()
        broken = [f"{name}: the adapter is broken: {why}" for name, why in absent if isinstance(why, BrokenError)]
        return found + Outcome.of(Why.BROKEN, [*self.faults, *broken])

    def notes(self) -> list[str]:
        """Return notes for the user: fresh failures, undeclared precision, waivers to edit."""
        filed = (r for r in self.results if r.fresh and r.verdict in FAILURES)
        lines = [f"saved, does not fail the run: {r.verdict} {r.case} on {r.backend}: {r.saved}" for r in filed]
        lines += map(advice, self.runner.undeclared)
        lines += [text for block in report(self.waiver_problems[1]) for text in block.split("\n")]
        if not self.gating:
            lines += self.unproven().values()
        return [printable(text) for text in lines]

    def close(self) -> None:
        """Close all backends; a journal beside a record stays open until that is written."""
        self.runner.close()
        if not isinstance(self.journal, Beside):
            self.journal.end(written=False)

    def recovered(self) -> list[str]:
        """Save the cases that a killed run of these backends left; return a sentence on each."""
        own = {*map(str, self.chosen.specs), str(self.chosen.against)}
        return [it.sentence() for it in recover(self.chosen.folder, own)]
