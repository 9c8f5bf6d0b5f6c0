"""`conform backends`, `conform cases`, `conform show`: what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from conformance.backend import registry
from conformance.backend.interface import describe
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.text import printable
from conformance.report import graphview
from conformance.report.runfile import write_json, write_text
from conformance.run.session.select import build, case_ids, parse_specs, probe, reseeded
from conformance.suite.family import Level

from .files import read_cases
from .options import File, backend_option, cases_begun, fresh_cases, json_option, selection, settings_here


@click.command()
@backend_option
@json_option
def backends(backends: Sequence[str], json_path: Path | None) -> None:
    """List the backends: what executes, its versions and buffer types, or why it is not available."""
    rows, document = [], {}
    for spec in parse_specs(backends):
        try:
            found = probe(spec)
        except UnavailableError as e:
            rows.append((printable(str(spec)), "not available", printable(str(e)), ""))
            document[str(spec)] = {"available": False, "reason": str(e)}
            continue
        info, buffers = found.info, found.buffer_types
        versions = ", ".join(f"{k} {v}" for k, v in info.versions.items())
        what, kinds = f"{info.description} ({versions})", ", ".join(b.name for b in buffers)
        rows.append((printable(str(spec)), printable(info.device), printable(what), printable(kinds)))
        document[str(spec)] = {
            "available": True,
            **describe(info),
            "buffer_types": [describe(b) for b in buffers],
        }
    for name, named in ({} if backends else registry.defined()).items():
        says = f"{named.adapter}, by {settings_here().path}; opened where it is named with --backend"
        rows.append((name, "not opened", says, ""))
        document[name] = {"opened": False, "adapter": named.adapter}
    click.echo(tabulate(rows, ["backend", "device", "what executes", "buffer types"], maxcolwidths=[None, 24, 60, 40]))
    if json_path:
        write_json(json_path, {"schema": 1, "backends": document})


@click.command()
@selection
def cases(families: Sequence[str], globs: Sequence[str], level: Level, seed: int | None, fresh: int) -> None:
    """List case ids, smallest first within a family."""
    new = fresh_cases(families, globs, level, seed, fresh)
    for i in [*(reseeded(i, seed) for i in case_ids(families, globs, level)), *new]:
        click.echo(printable(i))


@click.command()
@click.argument("what", metavar="CASE|FILE", shell_complete=cases_begun)
@click.option("--step", type=int, default=None, help="Only this step.")
@click.option("--svg", "svg_path", type=File, metavar="FILE", help="Draw the graph (of --step, default the first).")
def show(what: str, step: int | None, svg_path: Path | None) -> None:
    """Print the graphs of a case, by id or from a file, as a table like ggml's own dump."""
    for case in _cases_of(what):
        if step is not None and not 0 <= step < len(case.steps):
            raise UsageError(f"--step {step}: {case.id} has steps 0 to {len(case.steps) - 1}")
        chosen = range(len(case.steps)) if step is None else [step]
        click.echo(f"{printable(case.id)}: {len(case.steps)} step(s), {len(case.persistent)} persistent tensor(s)")
        for k in chosen:
            click.echo(f"\nstep {k}")
            click.echo(graphview.table(case.steps[k].graph))
        if svg_path:
            write_text(svg_path, graphview.svg(case.steps[chosen[0]].graph), "--svg")
            click.echo(f"\ndrawn: {svg_path}")
            break


def _cases_of(what: str) -> list[Case]:
    path = Path(what)
    if path.exists():
        return read_cases(path)
    if path.suffix == ".gguf":
        raise UsageError(f"{what}: no such file")
    return [build(what)]
