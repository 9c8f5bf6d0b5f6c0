"""`conform perf`: how fast backends are, measured in turns in one run; `run` measures, others judge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from conformance.ggml.errors import UnavailableError
from conformance.ggml.text import printable
from conformance.perf.bench import COLUMNS, Bench, Row, document, exit_code, table
from conformance.perf.measure import Rounds
from conformance.perf.units import ROUNDS, units
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.stages import choose
from conformance.suite.family import Level

from .options import Group, backend_option, isolation, json_option, level_option

unit_option = click.option(
    "--unit", "globs", multiple=True, metavar="GLOB", help="Work units, repeatable; default: all."
)


@click.group("perf", cls=Group)
def perf() -> None:
    """How fast backends are. A case is timed only once it has passed."""


@perf.command("run")
@backend_option
@level_option
@unit_option
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measurements of each, warm-up apart; default: the level's.",
)
@json_option
@isolation
def perf_run(
    backends: Sequence[str],
    level: Level,
    globs: Sequence[str],
    rounds: int | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Measure work units on backends that take turns: each measures once per round, another begins each round.

    ggml computes with one thread unless told otherwise (`ggml?threads=2`), OpenVINO with as many as there are cores.
    Exit codes are `conform run`'s, of the cases behind the units; 1 also where one that passed failed when measured.
    """
    chosen = units(level, globs)
    specs, lacking = choose(backends, None, isolation)
    if lacking and backends:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    specs = list(dict.fromkeys(specs))
    unavailable = {str(s): why for s, why in lacking.items()}
    rows: list[Row] = []
    runner = Runner(isolation=isolation)
    bench = Bench(runner, isolation)

    def buy(r: Rounds) -> None:
        r.more(rounds or ROUNDS[level])

    hidden = not sys.stderr.isatty()
    try:
        with click.progressbar(chosen, label="units", file=sys.stderr, hidden=hidden) as bar:
            for unit in bar:
                rows += bench.rows(unit, specs, buy)
    except KeyboardInterrupt:
        click.echo("interrupted; what was measured is recorded", err=True)
    finally:
        runner.close()
        if json_path:
            write_json(json_path, document(rows, level, unavailable))
    click.echo(tabulate(table(rows), COLUMNS, disable_numparse=True, maxcolwidths=[None] * 10 + [50]))
    for name, why in unavailable.items():
        click.echo(printable(f"{name}: not available: {why}"))
    if not rows:
        click.echo("nothing was executed, so nothing is proven")
    sys.exit(exit_code(rows))


@perf.command("units")
@level_option
@unit_option
def perf_units(level: Level, globs: Sequence[str]) -> None:
    """List the work units of a level, and the case behind each."""
    for u in units(level, globs):
        click.echo(f"{u.name}\t{u.work} {u.of}\t{u.case_id}")
