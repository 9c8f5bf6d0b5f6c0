"""`conform run` and `conform repro`: cases on backends; each pair asked for has a result, or the run fails."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path

import click

from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.causes.cause import Cause
from conformance.ggml.errors import CaseFileError, ConformanceError, UnavailableError, UsageError
from conformance.ggml.text import printable
from conformance.judge.outcome import Outcome, judge
from conformance.judge.verdict import FAILURES, Missing, MissingCause, Request, Result, Totals, Verdict, counted
from conformance.report.journal import Journal, Partial
from conformance.report.progress import Progress, Steps
from conformance.report.runfile import interrupts_wait, record, write_json
from conformance.report.runs import budget_used, command, refusals
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import expected, failures, writeahead
from conformance.run.session.precision import advice
from conformance.run.session.select import FOLDER, build, case_ids, choose, record_of, reseeded
from conformance.run.session.settings import Settings, Waiving, in_force, lines_of, report, today
from conformance.run.session.shard import WHOLE, Shard
from conformance.run.session.untrusted import backends_of
from conformance.suite.batch import groups
from conformance.suite.family import LEVELS

from . import options
from .cases import CasePath, read_cases
from .options import Selection, backend_option, isolation, json_option, missing_backends, selection, settings_here
from .output import cause_lines, end, fail_by, grid, leave, line, silence

ENDED = "the run ended before it"
FEW = 8
"""Cases at a time where the minutes are counted: what has begun is finished."""
COLOURS = {v: "red" if v in FAILURES else "green" if v is Verdict.PASS else "yellow" for v in Verdict}


def _color(ctx: click.Context, _param: click.Parameter, when: str) -> None:
    auto = False if os.environ.get("NO_COLOR") else None  # None: where stdout is a terminal
    ctx.color = {"auto": auto, "yes": True, "no": False}[when]


color_option = click.option(
    "--color",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    callback=_color,
    expose_value=False,
    is_eager=True,
    help="Colour verdicts; auto: on a terminal, unless NO_COLOR is set.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does."""

    backends: tuple[list[Spec], dict[Spec, str]]
    """Those that are here, and why the others are not."""
    ids: Mapping[Spec, Sequence[str]]
    """Cases of each backend, by id."""
    cases: Sequence[Case]
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
    maxfail: int | None = None
    """Failures at which the run stops."""
    fresh: frozenset[str] = frozenset()
    journal: Journal | None = None
    extra: Mapping[str, JSON] = field(default_factory=dict)
    """Of the document, beside the record."""
    allowed: float = inf
    """Minutes after which no case starts."""
    verbose: bool = False
    """Print a line for each result, and how it compares with what was saved."""
    quiet: bool = False
    """Print only what is wrong, and a line of totals for each backend."""
    reasons: bool = False
    """Print the reasons for UNSUPPORTED, counted."""

    exact: bool = False
    """Record how far results are from values without any declared rounding."""

    kept: bool | None = None
    """Whether expected values are kept on disk; None: by default."""

    minutes: float | None = None
    """To group failures by cause; None: they are not."""

    @property
    def lacking(self) -> dict[str, str]:
        """Backends that are not here, by name."""
        return {str(s): why for s, why in self.backends[1].items()}


@click.command()
@backend_option
@options.STAGE.click()
@selection
@click.option("--only-fresh", is_flag=True, help="Only what --fresh adds, nothing that a level lists.")
@options.SHARD.click()
@json_option
@click.option(
    "--journal",
    "journal_path",
    type=options.File,
    metavar="FILE",
    help="Append each result to FILE as it comes; what is there from an earlier start does not run again.",
)
@options.SAVE.click()
@options.WAIVERS.click()
@isolation
@options.KEPT.click()
@click.option(
    "--causes",
    "minutes",
    type=click.FloatRange(min=0),
    metavar="MINUTES",
    help="Group failures by cause, for so long per backend at most; conform causes does it later.",
)
@click.option(
    "--minutes",
    "allowed",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Start no case later; what did not run is listed, and with --journal the next start goes on there.",
)
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first failure; what did not run is listed.")
@click.option("--maxfail", type=click.IntRange(min=1), metavar="N", help="Stop after N failures.")
@click.option("-v", "--verbose", is_flag=True, help="A line for each result, UNSUPPORTED with its reason.")
@click.option("-q", "--quiet", is_flag=True, help="Only what is wrong, and a line of totals for each backend.")
@click.option("--reasons", is_flag=True, help="Count the reasons for UNSUPPORTED; -v does so too.")
@click.option("--exact", is_flag=True,
              help="Also record the NMSE from values without the rounding that a backend declares.")  # fmt: skip
@click.option("--test-file", "test_files", multiple=True, type=options.ExistingFile, metavar="FILE",
              help="Also the ops of a file of test-backend-ops; repeatable.")  # fmt: skip
@click.option("--test-file-of", "numbers", default="", metavar="BUILD",
              help="Whose numbers of ops that has; default: the wheel's.")  # fmt: skip
@color_option
@click.argument("files", nargs=-1, type=CasePath)
def run(
    backends: Sequence[str],
    stage: str | None,
    selection: Selection,
    only_fresh: bool,
    shard: Shard,
    json_path: Path | None,
    journal_path: Path | None,
    save_failures: Path | None,
    waivers_path: Path | None,
    isolation: Isolation,
    kept: bool | None,
    minutes: float | None,
    allowed: float | None,
    exitfirst: bool,
    maxfail: int | None,
    verbose: bool,
    quiet: bool,
    reasons: bool,
    exact: bool,
    test_files: Sequence[Path],
    numbers: str,
    files: Sequence[Path],
) -> None:
    """Run cases, by family, glob and level or from FILES, on backends; print what is wrong and the totals.

    Exit codes: 0 fine, 1 failures or cases without a result, 2 bad input, 3 nothing executed, or nothing passed on a
    backend that was named (or that is here, where a whole level runs), 5 stopped by --minutes or Ctrl-C: see
    docs/exit-codes.md.
    """
    cases = [c for f in files for c in read_cases(f)] + _imported(test_files, numbers)
    chosen, settings = choose(backends, stage, isolation), settings_here()
    families, globs, seed = selection.families, selection.globs, selection.seed
    levels = {spec: settings.level(spec, selection.level) for spec in chosen[0]}
    paths = [*map(str, files), *map(str, test_files)]
    selected = record_of(levels, families, globs, seed, files=paths, shard=str(shard))
    request = {**selected, "fresh": [selection.fresh, only_fresh], "waivers": str(waivers_path or "")}
    journal = Journal(journal_path, request) if journal_path else None
    if journal:
        click.get_current_context().call_on_close(journal.close)
    by_id = (not (files or test_files) or bool(families or globs)) and not only_fresh
    used = {selection.level or LEVELS[0], *levels.values()} if by_id else set()
    ids = {n: [reseeded(i, seed) for i in case_ids(families, globs, n)] for n in used}
    fresh = selection.fresh_ids(journal.seed if journal and seed is None else seed)
    save = save_failures or (Path(FOLDER) if fresh else None)
    extra: dict[str, JSON] = {"selection": selected} | ({} if journal is None else {"run": journal.run})
    if shard != WHOLE:
        extra["shard"] = shard.to_json([*(c.id for c in cases), *(i for n in ids.values() for i in n)])
        share = frozenset(shard.share(c.id for c in cases))
        cases = [c for c in cases if c.id in share]
    whole_level = by_id and not families and not globs
    plan = Plan(
        chosen,
        {spec: [*shard.share(ids.get(n, ())), *shard.share(fresh)] for spec, n in levels.items()},
        cases,
        json_path,
        save,
        isolation,
        Waiving(settings.waivers_of(chosen[0], waivers_path), today()),
        named=bool(backends),
        gating=shard == WHOLE and (whole_level or (bool(backends) and not only_fresh)),
        settings=settings,
        maxfail=1 if exitfirst else maxfail,
        fresh=frozenset(fresh),
        journal=journal,
        extra=extra,
        verbose=verbose,
        quiet=quiet,
        reasons=reasons or verbose,
        exact=exact,
        kept=kept,
        minutes=minutes,
        allowed=inf if allowed is None else allowed,
    )
    leave(_Execution(plan).run())


@click.command()
@click.argument("file", type=CasePath)
@backend_option
@options.STAGE.click()
@json_option
@isolation
@color_option
def repro(file: Path, backends: Sequence[str], stage: str | None, json_path: Path | None, isolation: Isolation) -> None:
    """Run the cases of FILE again, and print whether verdict, numbers and first divergence are as they were saved.
    Without --backend: on the backend that each was saved for.
    """
    cases = read_cases(file)
    named = bool(backends)
    if not named:
        texts = [r["backend"] for r in map(failures.record_of, cases) if r]
        backends = list(backends_of(file, texts, ["conform", "repro", str(file)]))
    bare = Waiving({}, today())  # as it was saved: no waiver stands between
    plan = Plan(choose(backends, stage, isolation), {}, cases, json_path, None, isolation, bare, named=named,
                settings=settings_here(), verbose=True)  # fmt: skip
    leave(_Execution(plan).run())


def _imported(paths: Sequence[Path], numbers: str) -> list[Case]:
    """The cases of test files; a line that no case can say is left out, and said."""
    if not paths:
        return []
    from conformance.cli.exchange import read_test_file  # noqa: PLC0415  # loads a library
    from conformance.suite.exchange.build import case_of  # noqa: PLC0415  # as above

    cases: dict[str, Case] = {}
    for path in paths:
        for found in read_test_file(path, numbers):
            try:
                case = case_of(found)
            except UsageError as e:
                line(f"{path}: left out: {e}", err=True)
            else:
                cases.setdefault(case.id, case)
    return list(cases.values())


class _Execution:
    """A run in progress. UnavailableError if a backend that was named is not here."""

    def __init__(self, plan: Plan) -> None:
        if plan.lacking and plan.named:
            raise UnavailableError(missing_backends(plan.lacking))
        folder = plan.save or writeahead.default_folder()
        for left in writeahead.recover(folder, build):
            line(left.sentence(), err=True)
        self._plan = plan
        self._request = Request({str(s): [*(c.id for c in plan.cases), *plan.ids.get(s, ())] for s in plan.backends[0]})
        self._partial = Partial(plan.json_path, self._request) if plan.json_path and not plan.journal else None
        if self._partial and self._partial.left:
            line(self._partial.left, err=True)
        self._runner = Runner(
            save_failures=plan.save,
            isolation=plan.isolation,
            write_ahead=folder,
            waiving=plan.waiving,
            on_hang=self._hung,
            exact=plan.exact,
            kept=expected.here(plan.kept),
        )
        self._ends = time.monotonic() + 60 * plan.allowed
        self._results: list[Result] = []
        self._causes: list[Cause] | None = None
        self._reasons: dict[tuple[str, str], str] = {}
        self._failures = 0
        self._missing: list[Missing] = []
        self._waiver_problems: tuple[list[str], list[str]] = [], []
        self._settings = in_force(plan.settings, plan.waiving)
        self._progress = Progress()
        self._steps = Steps("", 0)
        self._fault: OSError | None = None
        """Why stdout cannot be written any more; the run goes on in silence."""

    def run(self) -> Outcome:
        """Run, print, and write the record whatever happens."""
        why, cause, error = ENDED, MissingCause.LOST, None
        try:
            self._all()
            self._group()
            if self._is_full():
                why, cause = f"stopped after {counted(self._failures, 'failure')}", MissingCause.STOPPED
            elif time.monotonic() > self._ends:
                why, cause = f"time limit (--minutes {self._plan.allowed:g})", MissingCause.TIME_LIMIT
        except KeyboardInterrupt:
            why, cause = "interrupted", MissingCause.INTERRUPTED
            line("interrupted; what ran is recorded", err=True)
        except ConformanceError as e:
            why, error = f"{ENDED}: {e}", e
        finally:
            with interrupts_wait():
                self._record(why, cause)
        self._summarise()
        if error is not None:
            fail_by(error)
        if self._fault is not None:
            end(self._fault, f"; what ran is in {self._plan.json_path}" if self._plan.json_path else "")
        return self._outcome()

    def _all(self) -> None:
        for spec in self._plan.backends[0]:
            try:
                self._backend(spec)
            except (KeyboardInterrupt, UsageError, CaseFileError, BrokenPipeError):
                raise
            except BaseException as e:  # noqa: BLE001  # an adapter may raise SystemExit: the next ones run all the same
                why = f"{ENDED}: {_place(e)}"
                self._reasons[str(spec), ""] = why
                line(f"{spec}: {why}", err=True)

    def _group(self) -> None:
        """Find the causes of what failed, if the user wants them."""
        if self._plan.minutes is not None:
            from conformance.causes.analyse import analyse  # noqa: PLC0415  # most runs group nothing
            from conformance.causes.cause import assigned  # noqa: PLC0415  # as above

            self._progress.clear()
            say, limits = partial(line, err=True), self._plan.isolation
            specs = {str(s): s for s in self._plan.backends[0]}
            seconds = 60 * self._plan.minutes
            self._causes = analyse(self._results, specs, isolation=limits, seconds=seconds, progress=say)
            self._results = assigned(self._results, self._causes)

    def _backend(self, spec: Spec) -> None:
        """Each case of one backend, in order: from the journal, or run now and written down."""
        plan = self._plan
        chosen: list[Case | str] = [*plan.cases, *plan.ids.get(spec, ())]
        if not chosen or self._is_full():
            return
        size = self._runner.batch_size(spec) if self._plan.allowed == inf else FEW
        self._steps = Steps(str(spec), len(chosen))
        with self._progress.of(lambda: str(self._steps)):
            for start in range(0, len(chosen), size):
                batch = chosen[start : start + size]
                earlier = [plan.journal.take(str(spec), _id(c)) if plan.journal else None for c in batch]
                new = self._new(spec, [c for c, k in zip(batch, earlier, strict=True) if k is None])
                for k in earlier:
                    result = k or next(new, None)
                    if result is None:  # it stopped before this one
                        return
                    self._results.append(replace(result, fresh=result.case in plan.fresh))
                    self._steps.done += 1

    def _new(self, spec: Spec, chosen: Sequence[Case | str]) -> Iterator[Result]:
        for cases in groups(map(self._case, chosen)):
            left = self._ends - time.monotonic()
            if self._is_full() or left <= 0:
                return
            self._steps.at(cases[0].id if len(cases) == 1 else f"{cases[0].id} and {len(cases) - 1} more")
            with self._runner.within(left, here=False):
                results = self._runner.run(spec, cases)
            if time.monotonic() > self._ends:  # whoever had no time to answer has not failed
                cut = (k for k, r in enumerate(results) if r.verdict is Verdict.TIMEOUT)
                results = results[: next(cut, len(results))]
            results = [replace(r, fresh=r.case in self._plan.fresh) for r in results]
            for kept in (self._plan.journal, self._partial):
                if kept:
                    kept.add(results)
            for case, result in zip(cases, results, strict=False):
                if not self._is_full():
                    self._show(case, result)
                self._failures += result.fails_run
                yield result

    def _case(self, case: Case | str) -> Case:
        self._steps.at(f"making {_id(case)}")
        return self._runner.case(case) if isinstance(case, str) else case

    def _is_full(self) -> bool:
        """Whether there are as many failures as the user wants to see."""
        return self._plan.maxfail is not None and self._failures >= self._plan.maxfail

    def _show(self, case: Case, result: Result) -> None:
        plan = self._plan
        lines = [sentence(result)] if plan.verbose or result.verdict in FAILURES else []
        was = failures.record_of(case)
        if plan.verbose and was and was["backend"] == result.backend:
            differences = failures.differences(was, result)
            lines.append(printable(f"  not as saved: {'; '.join(differences)}" if differences else "  as saved"))
        elif result.saved and not plan.quiet:
            lines.append(f"  reproduce: {command(result)}")
        if lines:
            self._progress.clear()
            self._print(lines)
        if isinstance(self._fault, BrokenPipeError) and not (plan.json_path or plan.journal):
            raise self._fault  # nobody reads what comes, and no record was asked for

    def _print(self, lines: Sequence[str]) -> None:
        """Print on stdout; once that fails, nothing more is printed, and the run goes on."""
        if self._fault is None:
            try:
                click.echo("\n".join(lines))
            except OSError as e:
                self._fault = e
                silence()

    def _hung(self, spec: Spec, cases: Sequence[str], sentence: str) -> None:
        """Write what the run has: the process is about to end because `spec` does not come back."""
        self._reasons |= {(str(spec), case): sentence for case in cases}
        self._write(f"{ENDED}: {sentence}", MissingCause.LOST)

    def _record(self, why: str, cause: MissingCause) -> None:
        """Write the document, and only then end the backends: they may take their time, or fault."""
        try:
            self._write(why, cause)
        finally:
            try:
                self._runner.close()
            except BaseException as e:  # noqa: BLE001  # all is recorded: what an adapter does at its end changes nothing
                line(f"ending the backends: {_place(e)}", err=True)

    def _write(self, why: str, cause: MissingCause) -> None:
        plan = self._plan
        written = False
        try:
            self._missing = self._request.missing(self._results, why, self._reasons, cause)
            self._waiver_problems = plan.waiving.problems(self._results)
            if plan.json_path:
                document = record(self._results, plan.lacking, self._waiver_problems[0], asked=self._request,
                                  missing=self._missing, settings=self._settings, gating=plan.gating)  # fmt: skip
                causes = {} if self._causes is None else {"causes": [c.to_json() for c in self._causes]}
                write_json(plan.json_path, {**document, **causes, **plan.extra})
                written = True
        finally:
            if self._partial and (message := self._partial.close(written=written)):
                line(message, err=True)

    def _outcome(self) -> Outcome:
        unproven = self._request.unproven(self._results, self._missing) if self._plan.gating else {}
        return judge(self._results, self._missing, waivers=self._waiver_problems[0], unproven=unproven.values())

    def _summarise(self) -> None:
        """Print the settings in force, the totals, and last what is wrong with the run as a whole."""
        plan, results = self._plan, self._results
        lines = [] if plan.quiet else lines_of(self._settings)
        groups: dict[str, list[Result]] = {}
        for r in results:
            groups.setdefault(r.backend, []).append(r)
        if plan.quiet:
            lines += [f"{name}: {Totals.of(group)}" for name, group in groups.items()]
        else:
            lines += table_of(groups, plan.lacking).split("\n")
        for r in results:
            if r.fresh and r.verdict in FAILURES:
                lines.append(f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}")
        if plan.reasons:
            lines += _refusals(results)
        lines += map(advice, self._runner.undeclared)
        lines += cause_lines(self._causes or ())
        lines += [text for block in report(self._waiver_problems[1]) for text in block.split("\n")]
        if not plan.gating:
            lines += self._request.unproven(results, self._missing).values()
        self._print(list(map(printable, lines)))


def sentence(r: Result) -> str:
    """`Result.sentence` with its verdict in colour."""
    word = str(r.verdict)
    return click.style(word, fg=COLOURS[r.verdict], bold=True) + r.sentence()[len(word) :]


def _id(case: Case | str) -> str:
    return case if isinstance(case, str) else case.id


def table_of(groups: Mapping[str, Sequence[Result]], lacking: Mapping[str, str]) -> str:
    """The totals of each backend's results, and why others are not here."""
    rows = [
        (name, str(Totals.of(group)), budget_used(group), f"{sum(r.seconds for r in group):.2f} s")
        for name, group in groups.items()
    ]
    rows += [(name, f"not available: {why}", "–", "–") for name, why in lacking.items()]
    return grid(rows, ["backend", "verdicts", "budget used, at most", "ran for"], disable_numparse=True)


def _refusals(results: Sequence[Result]) -> list[str]:
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
