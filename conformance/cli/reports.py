"""`conform report`, a page of runs, and `conform history`, many runs in one file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from conformance.case.case import JSON
from conformance.causes.same import same
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why, coverage, judge, lost_coverage
from conformance.judge.verdict import Missing, Verdict, counted
from conformance.perf import history as stored_runs
from conformance.perf.history import FEWEST, Change, History, Run, changes, runs, series
from conformance.report.compare import Comparison, compare
from conformance.report.junit import junit
from conformance.report.markdown import markdown
from conformance.report.matrix import csv_ops
from conformance.report.page import page
from conformance.report.page.tables import read_history
from conformance.report.runfile import write_json
from conformance.report.runs import Runs, read_runs, unproven
from conformance.run.session.select import case_ids
from conformance.run.session.shard import missing as missing_shards
from conformance.suite.family import LEVELS, Level

from .options import ExistingFile, File, Folder, json_option
from .output import Group, leave, line, table


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="RUN.json|DIR…")
@click.option(
    "--base",
    "bases",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="RUN.json|DIR",
    help="Show what is new, fixed or changed since this run, by cause; repeatable.",
)
@click.option("--history", "history_path", type=ExistingFile, metavar="FILE", help="Show the timings of its runs, too.")
@click.option("--level", type=click.Choice(LEVELS), help="Show which cases of this level no run has.")
@click.option("-o", "--output", type=Folder, required=True, metavar="DIR", help="Made if new.")
def report(
    paths: Sequence[Path], bases: Sequence[Path], history_path: Path | None, level: Level | None, output: Path
) -> None:
    """Write DIR/index.html, one page that needs no network, and what it shows as summary.md, junit.xml and ops.csv.

    Exit codes are those of the runs: 1 failures, cases without a result, a missing shard, or with --base cases that
    passed and are no longer executed, 3 nothing executed or nothing passed on a backend, 5 a run that was stopped: see
    docs/exit-codes.md.
    """
    runs = read_runs(paths)
    base = read_runs(bases) if bases else None
    against = _against(runs, base) if base else None
    stored = read_history(history_path) if history_path else None
    planned: dict[str, list[str]] = {level: case_ids((), (), level)} if level else {}
    now = datetime.now(timezone.utc)
    texts = {
        "index.html": page(runs, now=now, planned=planned, stored=stored, against=against),
        "summary.md": markdown(runs, where="index.html", against=against),
        "junit.xml": junit(runs),
        "ops.csv": csv_ops(runs.results),
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = output / name
            path.write_text(text, encoding="utf-8")
            line(f"{path}: {len(text):,} bytes")
    except OSError as e:
        raise UsageError(f"-o {output}: a folder that can be written expected: {e.strerror}") from e
    if against:
        line(against.sentence())
    leave(outcome_of(runs) + _shards(runs) + (_lost(runs, base) if base else Outcome()))


def outcome_of(runs: Runs) -> Outcome:
    """Return the outcome of the conformance runs in `runs`."""
    if not runs.of("conformance"):
        return Outcome()
    current = {r.document for r in runs.results} | {r.document for r in runs.missing}
    old = {r.document for r in runs.superseded} - current
    waivers = [text for d in runs.of("conformance") if d not in old for text in d.body.get("waivers") or ()]
    unlisted = [
        f"no result for {counted(n, 'case')} on {backend}: {d.path} does not list what it was asked for"
        for d, backend, n in runs.unlisted()
    ]
    results = [r.value for r in runs.results]
    judged = judge(results, missing_in(runs), waivers=waivers, unproven=_unproven(runs))
    return judged + Outcome.of(Why.MISSING, unlisted)


def missing_in(runs: Runs) -> list[Missing]:
    """Return the cases of `runs` without a result."""
    return [m.value for m in runs.missing]


def _shards(runs: Runs) -> Outcome:
    """Fail for each shard of a run that is not here, on any of its backends."""
    shards: dict[str, list[JSON]] = {}
    for d in runs.of("conformance"):
        for backend in d.body.get("asked", ()) if d.body.get("shard") else ():
            shards.setdefault(backend, []).append(d.body["shard"])
    return Outcome.of(Why.SHARD, [f"{b}: {sentence}" for b, own in shards.items() for sentence in missing_shards(own)])


def _lost(runs: Runs, base: Runs) -> Outcome:
    """Fail where cases passed in the base and are no longer executed."""
    passed: dict[str, dict[str, None]] = {}
    for r in base.results:
        if r.value.verdict is Verdict.PASS and not r.value.fresh:
            passed.setdefault(r.value.backend, {})[r.value.case] = None
    return coverage(lost_coverage(passed, (r.value for r in runs.results), missing_in(runs)), passed)


def _against(runs: Runs, base: Runs) -> Comparison:
    """Both held against each other; a cause of both may have another id in each."""
    before, after = ([c.value for c in of.causes] for of in (base, runs))
    return compare(runs, base, {known: found for found, known in same(before, after).items()})


def _unproven(runs: Runs) -> list[str]:
    """Backends of which the shards of a run together prove nothing, unless a newer result on that machine is a PASS."""
    passed = {(r.document.machine, r.value.backend) for r in runs.results if r.value.verdict is Verdict.PASS}
    machines = {d.machine: [x.body for x in runs.documents if x.machine == d.machine] for d in runs.documents}
    sentences = [(m, b, sentence) for m, bodies in machines.items() for b, sentence in unproven(bodies).items()]
    return [sentence for m, b, sentence in sentences if (m, b) not in passed]


_store = click.option("--store", type=File, required=True, metavar="FILE", help="The history, one SQLite file.")


@click.group(cls=Group)
def history() -> None:
    """Runs of many nights and machines in one file."""


@history.command("import")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="RUN.json|DIR…")
@_store
@click.option("--nightly", is_flag=True, help="Their timings belong to the series in which change points are sought.")
def import_(paths: Sequence[Path], store: Path, nightly: bool) -> None:
    """Add run files to the history; what is there already is not added twice. The history is made where it is not."""
    imported = read_runs(paths)  # all of them are checked before any is stored
    with closing(History(store, create=True)) as h:
        for document in imported.documents:
            added = h.add(document.body, nightly=nightly)
            known = f", {added.known} were there" if added.known else ""
            line(f"{document.path}: {document.kind} {document.run[:8]}: {added.new} new rows{known}")
    for path in imported.passed_over:
        line(f"{path}: passed over, no run file", err=True)


@history.command("list")
@_store
@json_option
def list_(store: Path, json_path: Path | None) -> None:
    """The runs of a history, oldest first."""
    with closing(History(store)) as h:
        stored = runs(h)
    rows = [_run(r) for r in stored]
    table(rows, ["written", "run", "kind", "nightly", "machine", "rows", "what"], disable_numparse=True)
    if json_path:
        write_json(json_path, {"schema": 1, "runs": [asdict(r) for r in stored]})


@history.command("causes")
@_store
@click.option("--backend", "backends", multiple=True, metavar="GLOB", help="Only these backends, repeatable.")
@json_option
def causes_(store: Path, backends: Sequence[str], json_path: Path | None) -> None:
    """Print since when each cause is known, when it was seen last, and whether its smallest case passed since."""
    with closing(History(store)) as h:
        known = [k for k in stored_runs.causes(h) if not backends or any(fnmatchcase(k.backend, g) for g in backends)]
    head = ["first seen", "last seen", "runs", "passed since", "cause", "backend", "cases", "what"]
    rows = [
        (k.first, k.last, k.runs, k.passed, k.cause, k.backend, k.cases, f"{k.verdict} {k.sentence}") for k in known
    ]
    table(rows, head, disable_numparse=True)
    line(f"{len(known)} causes, {sum(not k.passed for k in known)} of which nothing says that they are gone")
    if json_path:
        write_json(json_path, {"schema": 1, "causes": [asdict(k) for k in known]})


@history.command("changes")
@_store
@click.option("--unit", "units", multiple=True, metavar="GLOB", help="Only these work units, repeatable.")
@click.option("--backend", "backends", multiple=True, metavar="GLOB", help="Only these backends, repeatable.")
@click.option(
    "--least",
    type=click.FloatRange(min=0, max=100),
    default=0.0,
    metavar="PERCENT",
    help="Print no smaller changes than this.",
)
@json_option
def changes_(store: Path, units: Sequence[str], backends: Sequence[str], least: float, json_path: Path | None) -> None:
    """Print where the rates of nightly runs changed, by Apache Otava. Nothing fails by it: see `conform perf`."""
    with closing(History(store)) as h:
        chosen = [
            s
            for s in series(h)
            if (not units or any(fnmatchcase(s.unit, g) for g in units))
            and (not backends or any(fnmatchcase(s.backend, g) for g in backends))
        ]
    judged = [s for s in chosen if len(s.points) >= FEWEST]
    shifts = changes(judged, least / 100)
    if shifts:
        head = ["between", "and", "unit", "backend", "machine", "before", "after", "change", "p"]
        table([_change(c) for c in shifts], head, disable_numparse=True)
    line(
        f"{len(shifts)} change points in {len(judged)} nightly series; "
        f"{len(chosen) - len(judged)} others have fewer than {FEWEST} runs"
    )
    if json_path:
        write_json(json_path, {"schema": 1, "series": len(judged), "changes": [_json(c) for c in shifts]})


def _run(r: Run) -> Sequence[str]:
    what = ", ".join(f"{n} {word}" for word, n in r.verdicts.items())
    machine = f"{r.machine} ({r.cpu})"
    return (r.written, r.run[:8], r.kind, "yes" if r.nightly else "", machine, str(r.rows), what)


def _change(c: Change) -> Sequence[str]:
    s = c.series
    rates = (f"{rate:.4g} {s.of}/s" for rate in (c.before, c.after))
    unit = f"{s.unit} {s.model}".strip()
    words = (c.since.written, c.at.written, unit, s.backend, s.machine, *rates)
    return (*words, f"{100 * c.ratio - 100:+.1f} %", f"{c.p:.1g}")


def _json(c: Change) -> dict[str, Any]:
    series_ = {name: getattr(c.series, name) for name in ("unit", "model", "backend", "machine", "of")}
    runs_ = {"since": c.since.run, "at": c.at.run, "since_written": c.since.written, "at_written": c.at.written}
    packages = {k: [c.since.packages.get(k), v] for k, v in c.at.packages.items() if c.since.packages.get(k) != v}
    return {**series_, **runs_, "before": c.before, "after": c.after, "p": c.p, "packages_changed": packages}
