"""`conform history`: what many runs on many machines found, in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from conformance.ggml.text import printable
from conformance.perf.history.series import FEWEST, Change, Kills, Run, changes, kills, runs, series
from conformance.perf.history.store import History
from conformance.report.runfile import write_json
from conformance.report.runs import read_runs

from .options import File, Group, json_option


def _store(f: Callable[..., None]) -> Callable[..., None]:
    return click.option("--store", type=File, required=True, metavar="FILE", help="The history, one SQLite file.")(f)


@click.group(cls=Group)
def history() -> None:
    """Runs of many nights and machines in one file."""


@history.command("import")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="RUN.json|DIR…")
@_store
@click.option("--nightly", is_flag=True, help="Their timings belong to the series in which change points are sought.")
def import_(paths: Sequence[Path], store: Path, nightly: bool) -> None:
    """Add run files to the history; what is there already is not added twice. The history is made where it is not."""
    found = read_runs(paths)  # all of them are checked before any is stored
    with closing(History(store, create=True)) as h:
        for document in found.documents:
            added = h.add(document.body, nightly=nightly)
            known = f", {added.known} were there" if added.known else ""
            click.echo(f"{printable(str(document.path))}: {added.kind} {added.run[:8]}: {added.new} new rows{known}")
    for path in found.passed_over:
        click.echo(f"{path}: passed over, no run file", err=True)


@history.command("list")
@_store
@json_option
def list_(store: Path, json_path: Path | None) -> None:
    """The runs of a history, oldest first, and the kill rate of planted faults."""
    with closing(History(store)) as h:
        found, killed = runs(h), kills(h)
    rows = [_run(r) for r in found]
    click.echo(tabulate(rows, ["written", "run", "kind", "nightly", "machine", "rows", "what"], disable_numparse=True))
    if killed:
        click.echo("")
        head = ["written", "run", "level", "adapter", "planted faults noticed", "kill rate"]
        click.echo(tabulate([_kills(k) for k in killed], head, disable_numparse=True))
    if json_path:
        document = {"schema": 1, "runs": [_fields(r) for r in found], "kills": [_fields(k) for k in killed]}
        write_json(json_path, document)


@history.command("changes")
@_store
@click.option("--unit", "units", multiple=True, metavar="GLOB", help="Only these work units, repeatable.")
@click.option("--backend", "backends", multiple=True, metavar="GLOB", help="Only these backends, repeatable.")
@click.option(
    "--least",
    type=click.FloatRange(min=0, max=100),
    default=0.0,
    metavar="PERCENT",
    help="Do not tell smaller changes than this.",
)
@json_option
def changes_(store: Path, units: Sequence[str], backends: Sequence[str], least: float, json_path: Path | None) -> None:
    """Where the rates of nightly runs changed, by Apache Otava. It is told and never fails anything: see `conform perf`
    for gates.
    """
    with closing(History(store)) as h:
        found = [
            s
            for s in series(h)
            if (not units or any(fnmatchcase(s.unit, g) for g in units))
            and (not backends or any(fnmatchcase(s.backend, g) for g in backends))
        ]
    asked = [s for s in found if len(s.points) >= FEWEST]
    told = changes(asked, least / 100)
    if told:
        head = ["between", "and", "unit", "backend", "machine", "before", "after", "change", "p"]
        click.echo(tabulate([_change(c) for c in told], head, disable_numparse=True))
    click.echo(
        f"{len(told)} change points in {len(asked)} nightly series; "
        f"{len(found) - len(asked)} others have fewer than {FEWEST} runs"
    )
    if json_path:
        write_json(json_path, {"schema": 1, "series": len(asked), "changes": [_json(c) for c in told]})


def _run(r: Run) -> Sequence[str]:
    what = ", ".join(f"{n} {word}" for word, n in r.verdicts.items())
    machine = printable(f"{r.machine} ({r.cpu})")
    return (r.written, r.run[:8], r.kind, "yes" if r.nightly else "", machine, str(r.rows), what)


def _kills(k: Kills) -> Sequence[str]:
    rate = f"{100 * k.noticed / k.faults:.0f} %"
    return (k.written, k.run[:8], printable(k.level), printable(k.of), f"{k.noticed} of {k.faults}", rate)


def _change(c: Change) -> Sequence[str]:
    s = c.series
    rates = (f"{rate:.4g} {s.of}/s" for rate in (c.before, c.after))
    unit = f"{s.unit} {s.model}".strip()
    words = (c.since.written, c.at.written, unit, s.backend, s.machine, *rates)
    return (*map(printable, words), f"{100 * c.ratio - 100:+.1f} %", f"{c.p:.1g}")


def _fields(value: Run | Kills) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def _json(c: Change) -> dict[str, Any]:
    series_ = {name: getattr(c.series, name) for name in ("unit", "model", "backend", "machine", "of")}
    runs_ = {"since": c.since.run, "at": c.at.run, "since_written": c.since.written, "at_written": c.at.written}
    packages = {k: [c.since.packages.get(k), v] for k, v in c.at.packages.items() if c.since.packages.get(k) != v}
    return {**series_, **runs_, "before": c.before, "after": c.after, "p": c.p, "packages_changed": packages}
