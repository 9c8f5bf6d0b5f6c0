"""`conform run` and `conform repro`: each requested pair gets a result, or the run fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from math import inf
from pathlib import Path

import click

from conformance.backend.registry import Spec
from conformance.campaign.executor import Executor, Pool
from conformance.campaign.lanes import Lanes, number, pairs_of, shares
from conformance.campaign.pool import connect
from conformance.case.case import Case
from conformance.ggml.errors import CaseFileError, ConformanceError, UnavailableError, UsageError
from conformance.ggml.text import placed, printable, shell
from conformance.judge.outcome import Outcome
from conformance.judge.verdict import FAILURES, MissingCause, Request, Result, Totals, Verdict, counted, elapsed
from conformance.process import Deadline, is_traced
from conformance.report.compare import DIFFERS
from conformance.report.compare import sentence as compared
from conformance.report.progress import Progress, Steps
from conformance.report.runfile import interrupts_wait
from conformance.report.runs import budget_used, command, placement_lines, refusal_lines
from conformance.run.isolation.isolate import Isolation, Workers, pids
from conformance.run.live import LIVE
from conformance.run.session import failures
from conformance.run.session.journal import Continued
from conformance.run.session.select import case_name
from conformance.run.session.settings import WaiverBook, exists, known_lines, settings_lines, today
from conformance.run.session.shard import WHOLE
from conformance.run.session.untrusted import backends_of, expect_installed
from conformance.testrun import ENDED, Chosen, TestRun

from . import last_failed, options
from .cases import CasePath, read_cases
from .changed import against_build, only_changed
from .options import chosen, missing_backends, say_seed
from .output import cause_lines, end, fail_by, grid, leave, line, silence

DIFFERENT = 20
"""Most lines on cases that differ from a base in the same way."""
COLOURS = {v: "red" if v in FAILURES else "green" if v is Verdict.PASS else "yellow" for v in Verdict}


@dataclass(frozen=True, slots=True)
class Shown:
    """Output and stop options of a run."""

    verbose: bool = False
    """Print each result, differences from the saved one, and reasons for UNSUPPORTED."""
    quiet: bool = False
    """Print only failures, and a line of totals for each backend."""
    maxfail: int | None = None
    """Number of failures at which the run stops."""
    budget: float = inf
    """Seconds after which no case starts."""
    workers: str = ""
    """Workers of the cases (`campaign.pool.connect`); empty for this machine."""
    minutes: float | None = None
    """Seconds per backend to group failures by cause; None: do not group them."""
    first: Mapping[str, Collection[str]] | None = None
    """Backend -> ids of the cases to run first."""


@click.command()
@chosen(*options.RUN, options.ONLY_FRESH, options.AGAINST)
@options.BUDGET.click(help="Start no case after this time (90s, 30m, 2h); with --fresh, new cases fill it.")
@click.option("--workers", default="", metavar="ADDRESS|slurm:N",
              help="Run on the workers of a Dask scheduler, or on N Slurm jobs.")  # fmt: skip
@click.option(
    "--journal",
    "journal_path",
    type=options.File,
    metavar="FILE",
    help="Append each result to FILE; a second start skips the cases in it.",
)
@click.option(
    "--causes",
    "minutes",
    type=click.FloatRange(min=0),
    metavar="MINUTES",
    help="Also group failures into causes, for MINUTES per backend (see conform triage).",
)
@click.option("--changed", is_flag=True,
              help="Run only cases that reach code which differs from the build of --against.")  # fmt: skip
@click.option("-x", "first", is_flag=True, help="Stop at the first failure.")
@click.option("--maxfail", type=click.IntRange(min=1), metavar="N", help="Stop after N failures.")
@click.option("--lf/--ff", "last", default=None,
              help="Run only, or first, the cases that failed when they last ran from this folder.")  # fmt: skip
@click.option("-v/-q", "--verbose/--quiet", "verbose", default=None,
              help="Print each result and reasons for UNSUPPORTED; or only failures and totals.")  # fmt: skip
@click.option("--test-file", "test_files", multiple=True, metavar="FILE[@BUILD]",
              help="Also run the ops of a file of test-backend-ops, repeatable.")  # fmt: skip
@click.argument("files", nargs=-1, type=CasePath)
def run(
    chosen: Chosen,
    budget: float | None,
    workers: str,
    journal_path: Path | None,
    minutes: float | None,
    changed: bool,
    first: bool,
    maxfail: int | None,
    last: bool | None,
    verbose: bool | None,
    test_files: Sequence[str],
    files: Sequence[Path],
) -> None:
    """Run cases on backends; select them by family, glob and level, or name FILES.

    Exit codes: 0 success, 1 failures or cases without a result, 2 bad input, 3 no cases ran, or none passed on a
    backend that was named or ran a whole level, 5 stopped by --budget or Ctrl-C: see docs/exit-codes.md.
    """
    cases = [c for f in files for c in read_cases(f)] + _ops(test_files)
    chosen = replace(chosen, cases=cases, files=[*map(str, files), *test_files], elsewhere=bool(workers))
    chosen = against_build(chosen)
    if changed:
        if workers or journal_path or last is not None or chosen.files:
            raise UsageError(
                "--changed: cannot be combined with --workers, --journal, --lf, --ff, --test-file or FILES"
            )
        chosen = only_changed(chosen)
    if workers and (chosen.files or chosen.stage or (chosen.against and chosen.base)):
        raise UsageError("--workers: cannot be combined with FILES, --test-file, --stage or --against NAME")
    if workers and chosen.jobs is not None:
        raise UsageError("--workers: cannot be combined with --jobs, which runs cases on this machine")
    request = {
        **chosen.to_json(), "fresh": [chosen.fresh, chosen.only_fresh], "waivers": str(chosen.waivers_path or ""),
        **({"lf": True} if last else {}),
        **({} if chosen.against is None else {"against": chosen.against}),
    }  # fmt: skip
    failed = None if last is None else last_failed.read()
    if last:
        chosen = _only_failed(chosen, failed or {})
    journal = None
    if journal_path:
        journal = Continued(journal_path, chosen.folder, request)
        click.get_current_context().call_on_close(partial(journal.end, written=False))
        chosen = replace(chosen, fresh_seed=journal.seed if chosen.seed is None else None)
    say_seed(chosen)
    gating = chosen.shard == WHOLE and (chosen.is_whole_level or (bool(chosen.backends) and not chosen.only_fresh))
    shown = Shown(verbose is True, verbose is False, 1 if first else maxfail, budget or inf, workers, minutes, failed)
    with _lanes(chosen, shown) as lanes:
        it = TestRun(chosen, journal=journal)
        try:
            outcome = Execution(it, shown, gating=gating, lanes=lanes).run()
        finally:
            last_failed.write(it.results)
    leave(outcome)


@click.command()
@click.argument("file", type=CasePath)
@chosen(
    replace(options.BACKEND, help="Backend, repeatable; default: the one for which each case was saved."),
    options.CONFIG, options.STAGE, options.JSON, *options.LIMITS,
)  # fmt: skip
@click.option("--debug", is_flag=True,
              help="Print the backend's process id, and wait for a debugger or Enter; limits are off.")  # fmt: skip
def repro(file: Path, chosen: Chosen, debug: bool) -> None:
    """Run the cases of FILE again, and compare the results with the saved ones."""
    cases = read_cases(file)
    chosen = replace(chosen, cases=cases, files=[str(file)])
    if not chosen.backends:
        texts = [r["backend"] for r in map(failures.record_of, cases) if r]
        found = backends_of(file, texts, ["conform", "repro", str(file)])
        expect_installed(file, found.values())
        chosen = replace(chosen, backends=list(found))
    bare = WaiverBook({}, today())  # as it was saved: no waiver stands between
    if debug:
        chosen = replace(chosen, workers=Workers(Isolation(inf, sys.maxsize)))
    it = TestRun(chosen, waivers=bare)
    execution = Execution(it, Shown(verbose=True), gating=False)
    if debug:
        it.runner.locates = False
        for spec in chosen.specs:
            _wait_for_debugger(spec, pids(it.runner.backend(spec)))
    leave(execution.run())


@contextmanager
def _lanes(chosen: Chosen, shown: Shown) -> Iterator[Lanes | None]:
    """Start the lanes of a run, before any backend opens; None if it needs none.

    Raises as `Chosen.level_ids`.
    """
    endless = chosen.fresh and shown.budget < inf
    n = 1 if shown.workers else number(chosen.jobs, sys.maxsize if endless else pairs_of(chosen))
    if n == 1:
        yield None
    else:
        with closing(Lanes(n)) as lanes:
            yield lanes


def _only_failed(chosen: Chosen, failed: Mapping[str, Sequence[str]]) -> Chosen:
    """Restrict a run to failed cases; without a selection, also those outside all levels."""
    found = replace(chosen, only=failed)
    if chosen.is_whole_level:
        own = dict.fromkeys(i for s in chosen.specs for i in failed.get(str(s), ()) if exists(i))
        found = replace(found, globs=list(own))
    if any(map(found.cases_of, chosen.specs)):
        return found
    line("--lf: no known failures among these cases; running all of them", err=True)
    return chosen


def _wait_for_debugger(spec: Spec, processes: Sequence[int]) -> None:
    """Wait until a debugger has attached to one of the processes, or Enter was pressed."""
    named = " or ".join(f"gdb -p {pid}" for pid in processes)
    line(f"{spec}: waiting for a debugger ({named}) or Enter", err=True)
    pressed = threading.Event()

    def read() -> None:
        if os.read(sys.stdin.fileno(), 1):
            pressed.set()

    threading.Thread(target=read, daemon=True).start()
    while not pressed.wait(0.1) and not any(map(is_traced, processes)):
        pass


def _ops(files: Sequence[str]) -> list[Case]:
    """Read the cases of files of test-backend-ops."""
    if not files:
        return []
    from .testfile import read  # noqa: PLC0415  # loads a library

    return read(files)


class Execution:
    """Runs cases backend by backend, and prints results."""

    def __init__(self, it: TestRun, shown: Shown, *, gating: bool, lanes: Lanes | None = None) -> None:
        """Register the requested cases; `lanes` run them.

        UnavailableError if a named backend is not available.
        """
        if it.chosen.lacking and it.chosen.backends:
            raise UnavailableError(missing_backends(it.chosen.lacking))
        self._run, self._shown, self._lanes = it, shown, lanes
        first = shown.first or {}
        self._chosen: dict[Spec, list[Case | str]] = {
            s: _first(it.chosen.cases_of(s), frozenset(first.get(str(s), ()))) for s in it.chosen.specs
        }
        asked = {str(s): list(map(case_name, of)) for s, of in self._chosen.items()}
        if it.chosen.base is not None:
            asked[str(it.chosen.base)] = list(dict.fromkeys(i for ids in asked.values() for i in ids))
        it.ask(Request(asked), gating=gating)
        for text in it.left:
            line(text, err=True)
        it.left.clear()
        self._began = time.monotonic()
        self._deadline = Deadline.after(shown.budget)
        self._failures = 0
        self._progress = Progress(logs=not shown.quiet)
        self._fault: OSError | None = None
        """The error that made stdout unwritable; the run continues without output."""

    def run(self) -> Outcome:
        """Run, print, and always write the record."""
        why, cause, error = ENDED, MissingCause.LOST, None
        try:
            self._all()
            self._group()
            if self._is_full():
                why, cause = f"stopped after {counted(self._failures, 'failure')}", MissingCause.STOPPED
            elif self._deadline.is_over():
                why, cause = "time limit (--budget)", MissingCause.TIME_LIMIT
        except KeyboardInterrupt:
            why, cause = "interrupted", MissingCause.INTERRUPTED
            line("interrupted; finished results are recorded", err=True)
        except ConformanceError as e:
            why, error = f"{ENDED}: {e}", e
        finally:
            with interrupts_wait():
                self._record(why, cause)
        self._summarise()
        if error is not None:
            fail_by(error)
        if self._fault is not None:
            end(self._fault, f"; what ran is in {path}" if (path := self._run.chosen.json_path) else "")
        return self._run.outcome()

    def _all(self) -> None:
        with self._pool() as pool:
            for asked in self._rounds():
                here = {s: [c for c in cases if not _goes_to(pool, c)] for s, cases in asked.items()}
                self._here(here, tell=asked is self._chosen)  # rounds of fresh cases are many
                if pool is not None:
                    self._on(
                        pool, {s: [case_name(c) for c in cases if _goes_to(pool, c)] for s, cases in asked.items()}
                    )

    def _pool(self) -> AbstractContextManager[Pool | None]:
        """Return the workers or lanes of the run; None if this process runs all of its cases."""
        chosen = self._run.chosen
        if self._shown.workers:
            return connect(self._shown.workers)
        if self._lanes is None:
            return nullcontext()
        chosen.workers.close()  # of the processes that were opened to see which backends this machine has
        self._lanes.share_devices([*chosen.specs, *filter(None, [chosen.base])])
        return closing(self._lanes)

    def _rounds(self) -> Iterator[Mapping[Spec, Sequence[Case | str]]]:
        """Yield the requested cases, then rounds of fresh ones until the budget is used."""
        yield self._chosen
        chosen = self._run.chosen
        for n in count(1):
            if not chosen.fresh or self._shown.budget == inf or self._stops():
                return
            new = [i for i in chosen.new.round(n) if i not in self._run.fresh]
            if not new:
                return
            self._run.fresh.update(new)
            yield dict.fromkeys(self._chosen, new)

    def _on(self, pool: Pool, ids: Mapping[Spec, Sequence[str]]) -> None:
        """Run ids on workers or lanes, also on the backend to compare with."""
        if (base := self._run.chosen.base) is not None:
            ids = {**ids, base: list(dict.fromkeys(i for own in ids.values() for i in own))}
        tell = partial(line, err=True)
        work = Executor(pool, self._run, ids, tell=tell, stop=self._stops)
        with self._progress.of(work.__str__), closing(work.play()) as results:
            for result in results:
                self._take(result)

    def _here(self, asked: Mapping[Spec, Sequence[Case | str]], *, tell: bool) -> None:
        """Run cases in this process; with `tell`, say how each backend ended."""
        names = [*(str(s) for s, cases in asked.items() if cases), ""]
        tell = tell and len(asked) > 1 and not self._shown.quiet
        for spec, cases in asked.items():
            then = names[names.index(str(spec)) + 1] if cases else ""
            try:
                self._backend(spec, cases, then, tell=tell)
            except (KeyboardInterrupt, UsageError, CaseFileError, BrokenPipeError):
                raise
            except BaseException as e:  # noqa: BLE001  # an adapter may raise SystemExit: the next ones run all the same
                why = str(e) if isinstance(e, ConformanceError) else f"{ENDED}: {placed(e)}"
                self._run.reasons[str(spec), ""] = why
                line(f"{spec}: {why}", err=True)

    def _group(self) -> None:
        """Group the failures by cause, if requested."""
        if self._shown.minutes is not None:
            from conformance.causes.analyse import analyse  # noqa: PLC0415  # most runs group nothing

            self._progress.clear()
            it, say = self._run, partial(line, err=True)
            specs = {str(s): s for s in self._chosen}
            seconds = 60 * self._shown.minutes
            isolation, jobs = it.chosen.isolation, it.chosen.jobs
            it.explain(analyse(it.results, specs, isolation=isolation, seconds=seconds, jobs=jobs, progress=say))

    def _backend(self, spec: Spec, cases: Sequence[Case | str], then: str, *, tell: bool) -> None:
        """Run the cases of a backend in order; return how it ended.

        A journal may already have results.
        """
        if not cases or self._is_full():
            return
        began, totals, steps = time.monotonic(), Totals(), Steps(str(spec), len(cases), then)
        with self._progress.of(lambda: str(steps)):
            for case, result in self._run.play(spec, cases, deadline=self._deadline, stop=self._is_full, at=steps.at):
                steps.done += 1
                if result.undecided:  # among the missing ones at the end
                    continue
                steps.failures += result.fails_run
                totals.add(result)
                if case is not None:  # the journal had the others
                    self._take(result, case)
        if tell:
            following = f"; next: {then}" if then else ""
            line(f"{spec}: {_total(totals, len(cases) - steps.done, began)}{following}", err=True)

    def _take(self, result: Result, case: Case | None = None) -> None:
        """Print and count a new result, also of a worker that had not ended when the run stopped."""
        self._show(case, result)
        self._failures += result.fails_run

    def _stops(self) -> bool:
        return self._is_full() or self._deadline.is_over()

    def _is_full(self) -> bool:
        """Return True if the number of failures has reached the limit."""
        return self._shown.maxfail is not None and self._failures >= self._shown.maxfail

    def _show(self, case: Case | None, result: Result) -> None:
        shown = self._shown
        lines = [sentence(result)] if shown.verbose or result.verdict in FAILURES else []
        lines += [] if case is None or shown.quiet else failures.source_lines(case, result)
        was = None if case is None else failures.record_of(case)
        if shown.verbose and self._run.runner.locates and was and was["backend"] == result.backend:
            differences = failures.differences(was, result)
            lines.append(printable(f"  not as saved: {'; '.join(differences)}" if differences else "  as saved"))
        elif not shown.quiet and (result.saved or _fails_by_id(result, self._run.chosen.cases)):
            lines.append(f"  reproduce: {command(result)}")
        if lines:
            self._progress.clear()
            self._print(lines)
        if isinstance(self._fault, BrokenPipeError) and not self._run.is_recorded:
            raise self._fault  # nobody reads what comes, and no record was asked for

    def _print(self, lines: Sequence[str]) -> None:
        """Print on stdout; after a write error the run continues without output."""
        if self._fault is None:
            try:
                click.echo("\n".join(lines))
            except OSError as e:
                self._fault = e
                silence()

    def _record(self, why: str, cause: MissingCause) -> None:
        """Write the record, and only then close the backends, which may be slow or crash."""
        try:
            self._run.finish(why, cause)
        finally:
            for text in self._run.faults:
                line(text, err=True)
            try:
                self._run.close()
            except BaseException as e:  # noqa: BLE001  # all is recorded: what an adapter does at its end changes nothing
                line(f"while the backends were closed: {placed(e)}", err=True)

    def _summarise(self) -> None:
        """Print the active settings, the totals, and finally the problems of the whole run."""
        it, shown = self._run, self._shown
        lines = [] if shown.quiet else settings_lines(it.active_settings)
        groups: dict[str, list[Result]] = {}
        for r in it.results:
            groups.setdefault(r.backend, []).append(r)
        if shown.quiet:
            lines += [f"{name}: {Totals.of(group)}" for name, group in groups.items()]
        else:
            lines += table_of(groups, it.chosen.lacking).split("\n")
        if not shown.quiet:
            left = sum(m.count for m in it.missing if m.backend != str(it.chosen.base))
            lines.append(f"total: {_total(Totals.of(it.results), left, self._began)}")
            lines += map(str, it.scopes())
            lines += placement_lines(it.results)
            lines += _measured(it.results)
        lines += refusal_lines(it.results) if shown.verbose else []
        lines += _compared(it, quiet=shown.quiet)
        lines += cause_lines(it.causes or ())
        lines += [] if shown.quiet else known_lines(it.results, it.waivers)
        self._print([*map(printable, lines), *it.notes(), *([] if shown.quiet else _next(it))])


def _next(run: TestRun) -> list[str]:
    """Return the line that says how to group failures into causes, if there are several."""
    failed = {r.backend: None for r in run.results if r.fails_run}
    if run.causes is not None or sum(r.fails_run for r in run.results) < 2:
        return []
    path = run.chosen.json_path
    backends = [word for name in failed if "?" in name for word in ("--backend", name)]
    triage = shell(["conform", "triage", "RUN.json" if path is None else str(path), *backends])
    return [f"next: {triage}  # groups the failures into causes{'; add --json RUN.json to this run' * (path is None)}"]


def _fails_by_id(r: Result, of_files: Sequence[Case]) -> bool:
    """Return True for a failure that its id reproduces: the case is not one of a file."""
    return r.verdict in FAILURES - {Verdict.XPASS} and all(c.id != r.case for c in of_files)


def sentence(r: Result) -> str:
    """Return `Result.sentence` with its verdict in colour."""
    word = str(r.verdict)
    return click.style(word, fg=COLOURS[r.verdict], bold=True) + r.sentence()[len(word) :]


def table_of(groups: Mapping[str, Sequence[Result]], lacking: Mapping[str, object]) -> str:
    """Return the table of each backend's totals, and why others are not available."""
    rows = [
        (name, str(Totals.of(group)), budget_used(group), f"{sum(r.seconds for r in group):.2f} s")
        for name, group in groups.items()
    ]
    rows += [(name, f"not available: {why}", "–", "–") for name, why in lacking.items()]
    return grid(rows, ["backend", "verdicts", "max error (% of tolerance)", "ran for"], disable_numparse=True)


def _goes_to(pool: Pool | None, case: Case | str) -> bool:
    """Return True if the pool runs a case; lanes run none that must be alone on this machine."""
    return pool is not None and (not pool.is_local or shares(case))


def _first(cases: Sequence[Case | str], ids: Collection[str]) -> list[Case | str]:
    return sorted(cases, key=lambda c: case_name(c) not in ids)


def _total(totals: Totals, missing: int, began: float) -> str:
    """Return the counts of verdicts and of cases that did not run, and the time since `began`."""
    words = [totals.verdicts, f"{missing:,} not run" if missing else ""]
    return f"{', '.join(filter(None, words)) or 'no cases ran'} in {elapsed(time.monotonic() - began)}"


def _measured(results: Sequence[Result]) -> list[str]:
    """Return a table for each family whose metrics are shown."""
    lines: list[str] = []
    for name in LIVE:
        own = [r for r in results if r.metrics and r.case.partition("/")[0] == name]
        globs = LIVE[name].columns if own else ()
        known = dict.fromkeys(m for glob in globs for r in own for m in r.metrics if fnmatchcase(m, glob))
        if known:
            rows = [(r.case, r.backend, *(_figure(r.metrics.get(m)) for m in known)) for r in own]
            lines += grid(
                rows, ["case", "backend", *(printable(m.replace("_", " ")) for m in known)], disable_numparse=True
            ).split("\n")
    return lines


def _figure(x: float | None) -> str:
    return "" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"  # four digits


def _compared(it: TestRun, *, quiet: bool) -> list[str]:
    """Return a line for each case that differs from the base, at most `DIFFERENT` of a state."""
    if it.against is None:
        return []
    pairs = it.against.pairs(it.results)
    changed = [p for p in pairs if p.state in DIFFERS] if not quiet else []
    lines: list[str] = []
    for state in DIFFERS:
        own = [p for p in changed if p.state is state]
        lines += [
            f"{p.state}: {p.after.verdict} {p.case} on {p.backend}, was {p.before.verdict}"
            + (f": {p.worse}" if p.worse and p.before.verdict == p.after.verdict else "")
            for p in own[:DIFFERENT]
        ]
        lines += [f"{state}: {len(own) - DIFFERENT:,} more; --json FILE has all"] if len(own) > DIFFERENT else []
    return [*lines, compared([str(it.chosen.base or it.chosen.against)], pairs)]
