"""One run of cases on backends: each pair that was asked for is told, or the run fails."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import click
from tabulate import tabulate

from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.ggml.errors import CaseFileError, ConformanceError, UnavailableError, UsageError
from conformance.ggml.text import printable_lines
from conformance.judge import asked as asking
from conformance.judge.asked import Asked, Missing
from conformance.judge.verdict import FAILURES, Result, Totals
from conformance.report.journal import Journal, Partial
from conformance.report.progress import Progress, Steps
from conformance.report.runfile import interrupts_wait, record, write_json
from conformance.report.runs import budget_used, command, refusals
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import failures, settings, writeahead
from conformance.run.session.select import build
from conformance.run.session.settings import Settings, Waiving

from .options import fail
from .output import end, fault, say, sentence

INTERRUPTED = 130
"""Exit code of a run that the user ended: as a shell has it for SIGINT."""
FAILED, NOTHING = 1, 3
ENDED = "the run ended before it"


@dataclass(frozen=True, slots=True)
class Shown:
    """What is printed."""

    verbose: bool = False
    """A line for each result, and how it compares with what was saved."""
    quiet: bool = False
    """Nothing but what is wrong, and a line of totals for each backend."""
    reasons: bool = False
    """The reasons for UNSUPPORTED, counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to do."""

    backends: tuple[list[Spec], dict[Spec, str]]
    """Those that are here, and why the others are not."""
    ids: Mapping[Spec, Sequence[str]]
    """Of the cases that ids make, for each backend."""
    read: Sequence[Case]
    """Cases from files, for all backends."""
    json_path: Path | None
    save: Path | None
    isolation: Isolation
    waiving: Waiving
    named: bool
    """Whether the user named the backends: one that is not here is an error then."""
    gating: bool = False
    """Whether a backend on which nothing passed fails the run."""
    settings: Settings = field(default_factory=Settings)
    most: int | None = None
    """Failures at which the run stops."""
    fresh: frozenset[str] = frozenset()
    journal: Journal | None = None
    more: Mapping[str, JSON] = field(default_factory=dict)
    """Of the document, beside the record."""
    shown: Shown = field(default_factory=Shown)

    @property
    def lacking(self) -> dict[str, str]:
        """Backends that are not here, by name."""
        return {str(s): why for s, why in self.backends[1].items()}


def execute(plan: Plan) -> int:
    """Run, print, write the record whatever happens; the exit code.

    Raises:
        UnavailableError: a backend that was named is not here.
    """
    if plan.lacking and plan.named:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in plan.lacking.items()))
    folder = plan.save or writeahead.default_folder()
    for left in writeahead.recover(folder, build):
        click.echo(left.sentence(), err=True)
    return Execution(plan, folder).run()


class Execution:
    """A run that is going on."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._asked = Asked({str(s): [*(c.id for c in plan.read), *plan.ids.get(s, ())] for s in plan.backends[0]})
        keeps = plan.json_path is not None and plan.journal is None
        self._partial = Partial(plan.json_path, self._asked) if plan.json_path and keeps else None
        if self._partial and self._partial.left:
            click.echo(self._partial.left, err=True)
        self._runner = Runner(
            save_failures=plan.save,
            isolation=plan.isolation,
            write_ahead=folder,
            waiving=plan.waiving,
            on_hang=self._hung,
        )
        self._results: list[Result] = []
        self._reasons: dict[tuple[str, str], str] = {}
        self._failures = 0
        self._missing: list[Missing] = []
        self._problems: tuple[list[str], list[str]] = [], []
        self._settings = settings.in_force(plan.settings, plan.waiving)
        self._progress = Progress()
        self._steps = Steps("", 0)

    def run(self) -> int:
        """All of it."""
        why, error = ENDED, None
        try:
            self._all()
            why = asking.STOPPED if self._plan.most == 1 else f"stopped after {self._failures} failures"
        except KeyboardInterrupt:
            why = asking.INTERRUPTED
            click.echo("interrupted; what ran is recorded", err=True)
        except ConformanceError as e:
            why, error = f"{ENDED}: {e}", e
        finally:
            with interrupts_wait():
                self._record(why)
        self._tell()
        if error is not None:
            fail(str(error))
        code = INTERRUPTED if why == asking.INTERRUPTED else self._code()
        if (broken := fault()) is not None:
            end(broken, f"; what ran is in {self._plan.json_path}" if self._plan.json_path else "")
        return code

    def _all(self) -> None:
        for spec in self._plan.backends[0]:
            try:
                self._backend(spec)
            except (KeyboardInterrupt, UsageError, CaseFileError, BrokenPipeError):
                raise
            except BaseException as e:  # noqa: BLE001  # an adapter may raise SystemExit: the next ones run all the same
                why = f"{ENDED}: {_place(e)}"
                self._reasons[str(spec), ""] = why
                click.echo(f"{spec}: {why}", err=True)

    def _backend(self, spec: Spec) -> None:
        """Each case of one backend, in order: from the journal, or run now and written down."""
        plan = self._plan
        chosen: list[Case | str] = [*plan.read, *plan.ids.get(spec, ())]
        if not chosen or self._is_full():
            return
        size = self._runner.batch_size(spec)
        self._steps = Steps(str(spec), len(chosen))
        with self._progress.of(lambda: str(self._steps)):
            for start in range(0, len(chosen), size):
                batch = chosen[start : start + size]
                kept = [plan.journal.take(str(spec), _id(c)) if plan.journal else None for c in batch]
                new = self._new(spec, [c for c, k in zip(batch, kept, strict=True) if k is None])
                for k in kept:
                    result = k or next(new, None)
                    if result is None:  # it stopped before this one
                        return
                    result.fresh = result.case in plan.fresh
                    self._results.append(result)
                    self._steps.done += 1

    def _new(self, spec: Spec, chosen: Sequence[Case | str]) -> Iterator[Result]:
        for few in _few([self._made(c) for c in chosen]):
            if self._is_full():
                return
            self._steps.at(few[0].id if len(few) == 1 else f"{few[0].id} and {len(few) - 1} more")
            found = self._runner.run(spec, few)
            for result in found:
                result.fresh = result.case in self._plan.fresh
            self._keep(found)
            for case, result in zip(few, found, strict=True):
                if not self._is_full():
                    self._say(case, result)
                self._failures += asking.gating([result])
                yield result

    def _made(self, case: Case | str) -> Case:
        self._steps.at(f"making {_id(case)}")
        return self._runner.case(case) if isinstance(case, str) else case

    def _keep(self, found: Sequence[Result]) -> None:
        if self._plan.journal:
            self._plan.journal.add(found)
        if self._partial:
            self._partial.add(found)

    def _is_full(self) -> bool:
        """Whether there are as many failures as the user wants to see."""
        return self._plan.most is not None and self._failures >= self._plan.most

    def _say(self, case: Case, result: Result) -> None:
        shown = self._plan.shown
        lines = [sentence(result)] if shown.verbose or result.verdict in FAILURES else []
        was = failures.record_of(case)
        if shown.verbose and was and was["backend"] == result.backend:
            differences = failures.differences(was, result)
            lines.append(f"  not as saved: {'; '.join(differences)}" if differences else "  as saved")
        elif result.saved and not shown.quiet:
            lines.append(f"  reproduce: {command(result)}")
        if lines:
            self._progress.clear()
            say("\n".join(lines))
        if isinstance(broken := fault(), BrokenPipeError) and not (self._plan.json_path or self._plan.journal):
            raise broken  # nobody reads what comes, and nobody asked for a record

    def _hung(self, spec: Spec, cases: Sequence[str], sentence: str) -> None:
        """The process is about to end because `spec` does not come back: write what the run has."""
        self._reasons |= {(str(spec), case): sentence for case in cases}
        self._write(f"{ENDED}: {sentence}")

    def _record(self, why: str) -> None:
        """Write the document, and only then end the backends: they may take their time, or fault."""
        try:
            self._write(why)
        finally:
            self._close()

    def _write(self, why: str) -> None:
        plan = self._plan
        written = False
        try:
            self._missing = self._asked.missing(self._results, why, self._reasons)
            self._problems = plan.waiving.problems(self._results)
            if plan.json_path:
                document = record(self._results, plan.lacking, self._problems[0], asked=self._asked,
                                  missing=self._missing, settings=self._settings)  # fmt: skip
                write_json(plan.json_path, {**document, **plan.more})
                written = True
        finally:
            if self._partial and (says := self._partial.close(written=written)):
                click.echo(says, err=True)

    def _close(self) -> None:
        try:
            self._runner.close()
        except BaseException as e:  # noqa: BLE001  # all is recorded: what an adapter does at its end changes nothing
            click.echo(f"ending the backends: {_place(e)}", err=True)

    def _code(self) -> int:
        totals = _totals(self._results)
        left_out = self._missing and not self._is_full()
        if totals.failed or left_out or self._problems[0]:
            return FAILED
        unproven = self._plan.gating and self._asked.unproven(self._results, self._missing)
        return NOTHING if unproven or not totals.executed else 0

    def _tell(self) -> None:
        """What is in force, the totals, and last what is wrong with the run as a whole."""
        plan, results = self._plan, self._results
        lines = [] if plan.shown.quiet else settings.lines_of(self._settings)
        lines.append(_lines_of_totals(results) if plan.shown.quiet else _table(results, plan.lacking))
        for r in results:
            if r.fresh and r.verdict in FAILURES:
                lines.append(f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}")
        if plan.shown.reasons:
            lines += _reasons(results)
        lines += settings.report(*self._problems)
        lines += asking.told(self._missing, sum(map(len, self._asked.cases.values())))
        lines += self._asked.unproven(results, self._missing).values()
        if not results:
            lines.append("nothing was executed, so nothing is proven")
        for line in lines:
            say(printable_lines(line))


def _few(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """One-step cases, which may share a graph, together; each trajectory by itself: a kill costs no more than that."""
    for single, group in groupby(cases, key=lambda c: len(c.steps) == 1):
        few = list(group)
        yield from [few] if single else ([c] for c in few)


def _id(case: Case | str) -> str:
    return case if isinstance(case, str) else case.id


def _totals(results: Sequence[Result]) -> Totals:
    totals = Totals()
    for r in results:
        totals.add(r)
    return totals


def _per_backend(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for r in results:
        found.setdefault(r.backend, []).append(r)
    return found


def _table(results: Sequence[Result], lacking: Mapping[str, str]) -> str:
    rows = [
        (name, str(_totals(found)), budget_used(found), f"{sum(r.seconds for r in found):.2f} s")
        for name, found in _per_backend(results).items()
    ]
    rows += [(name, f"not available: {why}", "–", "–") for name, why in lacking.items()]
    return tabulate(rows, ["backend", "verdicts", "budget used, at most", "ran for"], disable_numparse=True)


def _lines_of_totals(results: Sequence[Result]) -> str:
    return "\n".join(f"{name}: {_totals(found)}" for name, found in _per_backend(results).items())


def _reasons(results: Sequence[Result]) -> list[str]:
    lines = []
    for backend, reasons in refusals(results).items():
        lines.append(f"{backend} takes {sum(reasons.values())} cases not (UNSUPPORTED), by its reason:")
        lines += [f"  {n:6,}  {why or 'no reason given'}" for why, n in reasons.most_common()]
    return lines


def _place(e: BaseException) -> str:
    """An exception in a line, with where it was raised."""
    last = traceback.extract_tb(e.__traceback__)[-1:]
    with suppress(Exception):  # its own text may raise
        where = "".join(f" ({os.path.basename(f.filename)}:{f.lineno})" for f in last)  # noqa: PTH119  # no file is meant
        return f"{type(e).__name__}: {e}{where}" if str(e) else f"{type(e).__name__}{where}"
    return type(e).__name__
