"""`conform triage`, `conform shrink` and `conform show`: from failures to bugs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.causes import baseline as known_failures
from conformance.causes import difference
from conformance.causes.analyse import analyse, failing_backends
from conformance.causes.cause import assigned
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.text import shell
from conformance.judge.cause import Cause
from conformance.judge.outcome import Outcome, Why, without_pass
from conformance.judge.verdict import Result, counted
from conformance.process import Deadline
from conformance.report import graphview
from conformance.report.runfile import write_json, write_text
from conformance.report.runs import Runs, read_runs
from conformance.report.snippet import cpp, python
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.runner import Runner
from conformance.run.scheduler.backend import NAME as SCHED
from conformance.run.scheduler.backend import SchedBackend
from conformance.run.scheduler.plan import HEADER
from conformance.run.scheduler.plan import rows as split_rows
from conformance.run.session import failures, settings
from conformance.run.session.select import build
from conformance.run.session.untrusted import backends_of, expect_installed
from conformance.run.shrink import shrink as smallest
from conformance.run.shrink import size

from .cases import CasePath, read_cases, read_with
from .options import (
    BUDGET,
    JOBS,
    ExistingFile,
    File,
    Folder,
    complete_case,
    config_option,
    isolation,
    json_option,
    repeated_option,
    settings_here,
)
from .output import cause_lines, leave, line, table
from .reports import missing_in, outcome_of


@click.command()
@click.argument("path", type=ExistingFile, metavar="RUN.json")
@repeated_option
@config_option
@click.option("--baseline", "known", type=ExistingFile, metavar="FILE", help="Fail only for differences from FILE.")
@click.option("--write-baseline", "new", type=File, metavar="FILE", help="Write known causes; keep existing reasons.")
@click.option("-o", "--output", "folder", type=Folder, metavar="DIR", help="Write a bug report for each cause.")
@BUDGET.click(default="30m", show_default=True, help="Maximum time per backend.")
@JOBS.click(help="Run experiments in N processes at a time; default: 2, or 1 on one core.")
@click.option("--no-confirm", is_flag=True, help="Skip reproducing each failure in a fresh process.")
@json_option
@isolation
def triage(
    path: Path,
    backends: Sequence[str],
    known: Path | None,
    new: Path | None,
    folder: Path | None,
    budget: float,
    jobs: int | None,
    no_confirm: bool,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Group the failures of RUN.json into causes, by experiment.

    Failing cases run on the backends that RUN.json names. One with a library, a path or a name from your settings runs
    only if you repeat it as --backend. Ctrl-C ends the search; the remaining failures are grouped with known causes.
    --json writes RUN.json again, with its causes.

    Exit codes: 1 failures, or cases without a result; with --baseline or --write-baseline only what differs: a new
    cause, one that is gone, a known one with more cases or larger errors, a failure without a cause, or a case that
    passed and no longer runs; 3 no cases ran or none passed; 5 a run that was stopped, or that did not include cases of
    the baseline. See docs/exit-codes.md.
    """
    runs = read_runs([path])
    document = runs.documents[0]
    against = known_failures.read(known) if known else None
    if new:
        known_failures.before(new)  # another file there is refused before the search
    if new and (n := runs.lacking()):
        raise UsageError(f"--write-baseline: {path} has no result for {counted(n, 'case')}; finish the run first")
    results = [r.value for r in runs.results]
    specs = backends_of(path, sorted(failing_backends(results)), ["conform", "triage", str(path)], backends)
    say = partial(line, err=True)
    found = analyse(
        results, specs, isolation=isolation, seconds=budget, jobs=jobs, again=not no_confirm, folder=folder,
        progress=say,
    )  # fmt: skip
    results = assigned(results, found)
    for text in cause_lines(found):
        line(text)
    if json_path:
        rows = [r.to_json() for r in results]
        write_json(json_path, {**document.body, "results": rows, "causes": [c.to_json() for c in found]})
    if new:
        ran = known_failures.ran(results, found, document.body.get("selection") or {})
        written = known_failures.write(new, found, "--write-baseline", ran)
        line(f"{new}: {counted(len(found), 'known cause')}; keep {new}.cases beside it")
        against = against or written
    outcome = outcome_of(runs)
    if against is None:
        leave(outcome)
    leave(outcome.without(Why.FAILED) + _difference(against, found, results, runs, path))


def _difference(
    against: known_failures.Baseline, found: Sequence[Cause], results: Sequence[Result], runs: Runs, path: Path
) -> Outcome:
    """Return how a run differs from a baseline."""
    for sentence in (*against.unfilled(), *against.unseeing()):
        line(sentence)
    selected = runs.documents[0].body.get("selection")
    differs = difference.compare(against, found, results, missing=missing_in(runs), selected=selected)
    absent = f"{path}: no results, although {against.path} has {counted(len(against.entries), 'known cause')}"
    none = Outcome.of(Why.MISSING, [absent] if against.entries and not results else [])
    return differs.outcome() + none + without_pass(results)


@click.command()
@click.argument("file", type=CasePath)
@click.argument("case_id", metavar="[CASE]", required=False)
@click.option("--backend", metavar="NAME[?KEY=VALUE]", help="Backend; default: the one in the case file.")
@config_option
@click.option("-o", "--output", type=File, metavar="OUT.gguf", help="Output file; default: FILE with -small added.")
@BUDGET.click(default="2m", show_default=True)
@isolation
def shrink(
    file: Path, case_id: str | None, backend: str | None, output: Path | None, budget: float, isolation: Isolation
) -> None:
    """Minimise a failing case; the result still fails in the same way.

    CASE names one case of a file with several. Writes a case file, and beside it a Python program that builds the case
    (.py) and a test_case for ggml's own tests/test-backend-ops.cpp (.cpp).
    """
    case = read_with(file, lambda: casefile.read_one(file, case_id))
    was = failures.record_of(case)
    if backend is None and was is None:
        raise UsageError(f"{file}: was saved for no backend; name one with --backend")
    if backend is None and was:
        (spec,) = backends_of(file, [was["backend"]], ["conform", "shrink", str(file)]).values()
        expect_installed(file, [spec])
    else:
        spec = Spec.parse(str(backend))
    for text in settings.settings_lines(settings.active_settings(settings_here())):
        line(text)
    output = output or file.with_name(f"{file.stem}-small.gguf")
    with closing(Runner(isolation=isolation)) as runner:
        small = smallest(
            runner, spec, case, deadline=Deadline.after(budget), progress=lambda text: line(text, err=True)
        )
    casefile.write(output, [failures.with_result(small.case, small.result)])
    write_text(output.with_suffix(".py"), python(small.case), "-o")
    write_text(output.with_suffix(".cpp"), cpp(small.case), "-o")
    if not small.finished:
        line(f"stopped after {budget:g} s; to continue, shrink {output} again", err=True)
    line(small.result.sentence())
    line(f"{size(small.case)}, after {small.tried} runs in {small.seconds:.1f} s")
    line(f"written: {output}, {output.with_suffix('.py').name}, {output.with_suffix('.cpp').name}")


@click.command()
@click.argument("what", metavar="CASE|FILE", shell_complete=complete_case)
@click.option("--step", type=int, default=None, help="Show only this step.")
@click.option("-o", "--output", "svg", type=File, metavar="FILE.svg", help="Draw the first step, or --step, to FILE.")
@click.option("--scheduler", metavar="SPEC", help="Show splits of a scheduler, as 'sched?devices=xdna2,cpu'.")
@config_option
def show(what: str, step: int | None, svg: Path | None, scheduler: str | None) -> None:
    """Print the graphs of a case, by id or from a file, as a table like ggml's own dump.

    With --scheduler, or if the file was saved for a scheduler, also print how it splits each graph.
    """
    if svg and svg.exists() and Path(what).exists() and svg.samefile(what):
        raise UsageError(f"-o {svg}: this is the case file; name another file for the drawing")
    for case in _cases_of(what):
        if not case.steps:
            raise UsageError(f"{case.id}: a live case has no graphs (docs/live.md)")
        if step is not None and not 0 <= step < len(case.steps):
            raise UsageError(f"--step {step}: {case.id} has steps 0 to {len(case.steps) - 1}")
        chosen = range(len(case.steps)) if step is None else [step]
        line(f"{case.id}: {counted(len(case.steps), 'step')}, {counted(len(case.persistent), 'persistent tensor')}")
        for k in chosen:
            click.echo(f"\nstep {k}")
            click.echo(graphview.table(case.steps[k].graph))
        _show_splits(case, chosen, what, scheduler)
        if svg:
            write_text(svg, graphview.svg(case.steps[chosen[0]].graph), "-o")
            click.echo("")
            line(f"drawn: {svg}")
            break


def _cases_of(what: str) -> list[Case]:
    path = Path(what)
    if path.exists():
        return read_cases(path)
    if path.suffix == ".gguf" or "/" not in what:
        raise UsageError(f"{what}: no such file, and not a case id (FAMILY/…@SEED)")
    return [build(what)]


def _show_splits(case: Case, steps: Sequence[int], what: str, scheduler: str | None) -> None:
    """Print the splits of the given scheduler, else of the saved one if it may run here."""
    if scheduler:
        _print_splits(case, steps, Spec.parse(scheduler))
        return
    was = failures.record_of(case)
    if was is None or was["backend"].partition("?")[0] != SCHED:
        return
    try:
        _print_splits(case, steps, *backends_of(Path(what), [was["backend"]], []).values())
    except (UsageError, UnavailableError):
        line(f"its splits: {shell(['conform', 'show', what, '--scheduler', was['backend']])}")


def _print_splits(case: Case, steps: Sequence[int], spec: Spec) -> None:
    with closing(open_backend(spec)) as backend:
        if not isinstance(backend, SchedBackend):
            raise UsageError(f"--scheduler {spec}: a scheduler such as 'sched?devices=xdna2,cpu' expected")
        plans = backend.plan(case).graphs
        for k in steps:
            graph = case.steps[k].graph
            click.echo("")
            line(f"step {k} on {spec}: {counted(len(plans[graph].assignment.splits), 'split')}")
            table(split_rows(graph, plans[graph], backend.labels), HEADER)
