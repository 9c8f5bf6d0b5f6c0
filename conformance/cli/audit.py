"""`conform audit`: what a backend says of each weight in each buffer type, held against a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from tabulate import tabulate

from conformance.backend.registry import Spec
from conformance.ggml.errors import UnavailableError
from conformance.ggml.text import printable, shell
from conformance.judge.waivers import Waivers
from conformance.report.runfile import write_json
from conformance.run import audit as auditing
from conformance.run.audit import FAILING, Cell, Finding
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.environment import header
from conformance.run.session.select import available, build, case_ids, parse_specs
from conformance.run.session.settings import Waiving, today
from conformance.suite.family import Level

from .options import (
    backend_option,
    case_option,
    family_option,
    isolation,
    json_option,
    level_option,
    save_option,
    settings_here,
    waivers_option,
)


@click.command()
@backend_option
@family_option
@case_option
@level_option
@json_option
@save_option
@waivers_option
@isolation
def audit(
    backends: Sequence[str],
    families: Sequence[str],
    globs: Sequence[str],
    level: Level,
    json_path: Path | None,
    save_failures: Path | None,
    waivers_path: Path | None,
    isolation: Isolation,
) -> None:
    """Ask a backend about every use of every weight in every buffer type, run it there, change every op_param once, and
    print where word and work differ. Without --case and --family: a small set of decoders. Every backend runs in a
    process of its own.
    """
    if isolation.isolate is None:
        isolation = replace(isolation, isolate=True)
    specs, lacking = available(parse_specs(backends), isolation)
    if lacking and backends:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    ids = case_ids(families, globs, level) if families or globs else auditing.CASES
    found: dict[str, list[Cell]] = {}
    waivers = settings_here().waivers_of(specs, waivers_path)
    for given in specs:
        known: dict[Spec, Waivers] = {}
        runner = Runner(isolation=isolation, waiving=Waiving(known, today()))
        spec = auditing.strict(runner, given)
        if given in waivers:
            known[spec] = waivers[given]
        cells = found[str(spec)] = []
        try:
            cells.extend(auditing.audit(runner, spec, [build(i) for i in ids], save_failures))
        finally:
            runner.close()
            _show(str(spec), cells)
    if json_path:
        begun = header("audit")
        begun["environment"]["unavailable"] = {str(s): why for s, why in lacking.items()}
        write_json(json_path, {**begun, "backends": {n: [c.to_json() for c in cells] for n, cells in found.items()}})
    every = [c for cells in found.values() for c in cells]
    sys.exit(1 if any(c.finding in FAILING for c in every) else 0 if any(c.ran for c in every) else 3)


def _show(name: str, cells: Sequence[Cell]) -> None:
    for case_id in dict.fromkeys(c.case for c in cells):
        here = [c for c in cells if c.case == case_id]
        click.echo(f"{case_id} on {name}")
        click.echo(_weights([c for c in here if c.subject != "op_param"]))
        params = [c for c in here if c.subject == "op_param"]
        if params:
            click.echo("op_params changed: " + ", ".join(f"{c.name} {_said(c)}" for c in params))
        for c in here:
            if c.finding is not Finding.AGREED:
                where = c.name if c.subject == "op_param" else f"{c.name or 'the trajectory'} in {c.buffer}"
                click.echo(printable(f"{c.finding} {where}: {c.detail}"))
                if c.saved:
                    click.echo(f"  reproduce: {shell(['conform', 'repro', c.saved, '--backend', name])}")
        click.echo("")
    totals = {f: sum(c.finding is f for c in cells) for f in Finding}
    ran = sum(bool(c.ran) for c in cells)
    counted = ", ".join(f"{n} {f}" for f, n in totals.items() if n) or "nothing audited"
    click.echo(f"{name}: {counted}; {ran} of {len(cells)} ran, the others were refused or are UNRUN")


def _weights(cells: Sequence[Cell]) -> str:
    buffers = list(dict.fromkeys(c.buffer for c in cells))
    rows: dict[str, list[str]] = {}
    for c in cells:
        row = rows.setdefault(c.name, [c.name or "(nothing placed)", c.type, _shape(c.ne), *[""] * len(buffers)])
        row[3 + buffers.index(c.buffer)] = _said(c)
    return tabulate(list(rows.values()), ["weight", "type", "ne", *buffers], disable_numparse=True)


def _shape(ne: Sequence[int]) -> str:
    return "×".join(map(str, ne[: max((i + 1 for i, n in enumerate(ne) if n > 1), default=1)])) if ne else ""


def _said(cell: Cell) -> str:
    word = "yes" if cell.taken == cell.uses else "no" if not cell.taken else f"{cell.taken} of {cell.uses}"
    return f"{cell.finding} ({word})"
