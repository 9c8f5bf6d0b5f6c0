"""`conform build`: builds of llama.cpp, each compared with another on all their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from conformance import shipped
from conformance.backend.registry import Spec, isa_of
from conformance.builds.build import probe
from conformance.case.case import JSON
from conformance.cli import options
from conformance.cli.making import build
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.outcome import Outcome, Why, unanswered
from conformance.llama.release import bisect as halving
from conformance.llama.release import state
from conformance.llama.release.cases import Cases
from conformance.llama.release.causes import SharedCause
from conformance.llama.release.counts import Counting
from conformance.llama.release.prepare import inspect, prepare
from conformance.llama.release.record import begin, causes_of, made, write, write_page
from conformance.llama.release.release import Release
from conformance.llama.release.target import Target
from conformance.perf.bench import Bench
from conformance.perf.count import check_callgrind
from conformance.perf.units import BY_ID, Unit, units
from conformance.process import Deadline
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.report.runs import placement_lines, read_runs
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.impact import described
from conformance.run.session.untrusted import backends_of
from conformance.suite.family import LEVELS, Level

REPORTING = 1 / 10
"""Share of the budget for the run file and the page, which take a minute on a busy machine."""
BUILDS = shipped.path().parent / "ci" / "builds.toml"
"""The default list of builds, in the checkout.

A file in the current directory must not choose packages to download and load."""


@build.command("test")
@click.argument("new", shell_complete=options.complete_build)
@click.option("--against", "old", metavar="OLD", shell_complete=options.complete_build, help="Build to compare with.")
@click.option("--device", "devices", multiple=True, metavar="NAME", help="Test only devices that begin with NAME.")
@options.ISA
@click.option("--unit", "names", multiple=True, metavar="GLOB", help="Count instructions of these units, repeatable.")
@options.BUDGET.click(default="30m", show_default=True)
@click.option("--level", type=click.Choice(LEVELS), default="standard", show_default=True, help="How many cases.")
@click.option("-o", "--output", type=options.Folder, metavar="DIR", help="Write the page and the run file to DIR.")
@options.JOBS.click()
@options.json_option
@options.isolation
def build_test(
    new: str,
    old: str | None,
    devices: Sequence[str],
    isa: str | None,
    names: Sequence[str],
    budget: float,
    level: Level,
    output: Path | None,
    jobs: int | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Test build NEW on each of its devices, compared with build OLD.

    --unit counts units of `conform perf run --list` on the CPU. Exit codes: 1 a cause is new (without --against: any
    cause), or NEW refuses cases that OLD passes or executes more instructions in a unit, 3 no case passed on a device,
    5 --budget ended before every case ran: see docs/exit-codes.md.
    """
    if names and isa:
        raise UsageError("--unit: units of this processor expected, found --isa; leave one of them out")
    counted = units("standard", names) if names else ()
    if counted:
        check_callgrind()
    paths = [made(output)] if output else []
    paths += [json_path] if json_path else []
    it = _tested((new, old), devices, budget, level, isolation, paths, counted=counted, isa=isa or "", jobs=jobs)
    for path in (*paths[:1], *write_page(output, paths[:1])) if output else ():
        line(f"{path}: written")
    leave(it.outcome())


def _tested(
    names: tuple[str, str | None],
    devices: Sequence[str],
    budget: float,
    level: Level,
    isolation: Isolation,
    paths: Sequence[Path],
    released: str = "",
    counted: Sequence[Unit] = (),
    isa: str = "",
    jobs: int | None = None,
) -> Release:
    """Test a build against another, or alone, and write its record."""
    new, old = names
    begun = since(f"conform build test {new}")
    deadline = Deadline.after((1 - REPORTING) * budget)
    for text in begin(paths):
        line(text, err=True)
    say = partial(line, err=True)
    builds = replace(inspect(new, say, isa), released=released), None if old is None else inspect(old, say, isa)
    isolation = replace(isolation, until=deadline)
    it = prepare(*builds, devices, budget, level, isolation, say, next(iter(paths), None), counted, jobs)
    with Progress().of(begun):
        it.seconds = max(0.0, deadline.left())
        it.run()
    _show(it)
    try:
        write(it, paths)
    finally:
        for text in it.it.faults:
            line(text, err=True)
    return it


@build.command("diff")
@click.argument("new", shell_complete=options.complete_build)
@click.argument("old", shell_complete=options.complete_build)
def build_diff(new: str, old: str) -> None:
    """Compare the machine code, shaders and interface of build NEW with those of build OLD.

    Nothing runs. Functions are listed with the cases of level standard that reach them; `conform build test NEW
    --against OLD` runs these first.
    """
    for text in described(new, old):
        line(text)


@build.command("state")
@click.argument("path", metavar="[TOML]", required=False, type=options.ExistingFile)
@click.option("--device", "devices", multiple=True, metavar="NAME", help="Test only devices that begin with NAME.")
@options.BUDGET.click(default="30m", show_default=True, help="Maximum time per build: 90s, 30m, 2h.")
@click.option("--level", type=click.Choice(LEVELS), default="standard", show_default=True, help="How many cases.")
@click.option(
    "-o", "--output", type=options.Folder, metavar="DIR", required=True, help="Write the page and the records to DIR."
)
@options.JOBS.click()
@options.isolation
def build_state(
    path: Path | None,
    devices: Sequence[str],
    budget: float,
    level: Level,
    output: Path,
    jobs: int | None,
    isolation: Isolation,
) -> None:
    """Test each build that TOML lists, and write one page of all.

    TOML is described in docs/builds.md; default: ci/builds.toml of the checkout. A build with a record in DIR is not
    tested again. Exit codes: 1 a build could not be tested, 5 some cases did not run: see docs/exit-codes.md.
    """
    if path is None and not BUILDS.is_file():
        raise UsageError("build state: a TOML that lists builds expected (docs/builds.md); only a checkout has one")
    listed = state.read(path or BUILDS)
    if listed.units:
        check_callgrind()
    done, failed, interrupted = [], [], Outcome()
    for name, day in listed.released.items():
        record = made(output / state.folder(name))
        try:
            if not record.exists():
                it = _tested((name, None), devices, budget, level, isolation, [record], day, listed.units, jobs=jobs)
                interrupted = Outcome.of(
                    Why.INTERRUPTED, [f"{name}: remove {record.parent} to test it again"] if it.interrupted else []
                )
            done.append(record)
        except UnavailableError as e:
            failed.append(f"could not be tested: {e}")
        if interrupted.exit_code:
            break
    for written in write_page(output, done) if done else ():
        line(f"{written}: written")
    left = unanswered(m.value for m in read_runs(done).missing) if done else Outcome()
    leave(Outcome.of(Why.MISSING, failed) + left + interrupted)


def _show(it: Release) -> None:
    for text in (*(changed := it.changes()), *([""] if changed else ())):
        line(text)
    table([(t.name, str(it.results(t).totals), _note(it, t)) for t in it.targets], ["device", "verdicts", "note"])
    for text in placement_lines(r for t in it.targets for r in it.results(t).build):
        line(text)
    for of in dict.fromkeys(f.state for f in it.found):
        own = [f for f in it.found if f.state is of]
        line("")
        line(f"{of}: {len(own)}" if it.base else f"causes: {len(own)}")
        for n, f in enumerate(own, 1):
            seen = f", {f.cause.seen}" if f.cause.seen else ""
            line(f"{n:3}. {f.cause.id} on {', '.join(f.devices)}{seen}: {f.cause.sentence}")
            line(f"     {'; '.join(filter(None, (f.cause.smallest, f.note, _doubt(it, f))))}")
    if not it.found:
        line(it.without_causes())
    if it.counted.results:
        line("")
        table(list(_counts(it)), ["unit", "instructions", "× OLD", "verdict"])
    for text in it.not_run():
        line(f"not run: {text}")


def _counts(it: Release) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each counted unit of the build."""
    builds = {str(t.build) for t in it.targets}
    for r in it.counted.results:
        if r.backend in builds:
            number, ratio = r.metrics.get("instructions"), r.metrics.get("ratio.instructions")
            cells = f"{number:,.0f}" if number else "", f"{ratio:.4f}" if ratio else ""
            yield r.case, *cells, str(r.verdict)


def _note(it: Release, target: Target) -> str:
    alone = "" if target.base or not it.base else "not in the other build"
    notes = ("a software driver" if target.software else "", alone, it.notes.get(target.name, ""))
    return ", ".join(filter(None, notes))


def _doubt(it: Release, found: SharedCause) -> str:
    at = found.at(it.targets)
    return "" if at == "library" else f"in the {at}"


@build.command("bisect")
@click.argument("path", metavar="RUN", type=options.ExistingFile)
@click.argument("cause")
@click.argument("names", nargs=-1, required=True, metavar="BUILD…", shell_complete=options.complete_build)
@options.repeated_option
@options.json_option
@options.isolation
def build_bisect(
    path: Path,
    cause: str,
    names: Sequence[str],
    backends: Sequence[str],
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Find the first BUILD with CAUSE of the run file RUN; list builds from old to new.

    CAUSE may be a unit of `conform perf run --count`: find the first build that executes more instructions than the
    first one listed. Exit code 3: the cause is in all builds, or in none.
    """
    if len(names) < 2:
        raise UsageError("build bisect: at least two builds expected, from old to new")
    case_id, backend = _sought(path, cause)
    command = ["conform", "build", "bisect", str(path), cause, *names]
    named = str(halving.without_library(Spec.parse(backend)))
    (spec,) = backends_of(path, [named], command, backends).values()
    with closing(Runner(isolation=isolation)) as runner:
        run: halving.RunCase = Cases(isolation).again
        if case_id in BY_ID:
            check_callgrind()
            run = Counting(Bench(runner, isolation), BY_ID[case_id]).run
        tried = halving.bisect(case_id, spec, [probe(n, isa=isa_of(spec)) for n in names], run, _tried)
    line(tried.sentence())
    if json_path:
        rows: list[JSON] = [{"build": t.build.name, **t.result.to_json()} for t in tried.tried]
        write_json(json_path, rows)
    leave(Outcome.of(Why.UNPROVEN, [] if tried.found else ["the builds do not differ, so there is no first one"]))


def _sought(path: Path, cause: str) -> tuple[str, str]:
    """Return case and backend of a cause, or of a unit by id or name; UsageError if not one."""
    known = {c.id: (c.smallest, c.backend) for c in causes_of(path)}
    if cause in known:
        return known[cause]
    counted = [r.value for r in read_runs([path]).results if r.value.case in BY_ID]
    found = [r for r in counted if cause in (r.case, BY_ID[r.case].name)]
    units = dict.fromkeys(r.case for r in found)
    if len(units) == 1:
        return found[0].case, found[0].backend
    had = ", ".join(units or dict.fromkeys([*known, *(BY_ID[r.case].name for r in counted)])) or "none"
    raise UsageError(f"{path}: {'several units' if units else 'no cause or unit'} {cause}; it has {had}")


def _tried(tried: halving.Tried) -> None:
    line(f"{tried.build.name}: {tried.result.sentence()}", err=True)
