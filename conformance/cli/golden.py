"""`conform golden`: the pinned corpus of expected values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

from conformance.judge.verdict import FAILURES, Result, Totals
from conformance.report.runfile import record, write_json
from conformance.run import golden

from .options import Group, json_option


@click.group("golden", cls=Group)
def golden_group() -> None:
    """Golden outputs: the pinned corpus of expected values."""


@golden_group.command()
@json_option
def verify(json_path: Path | None) -> None:
    """Compute every golden value again, on the reference and on the real ggml, and compare."""
    _golden(golden.verify(), json_path)


@golden_group.command()
@json_option
def update(json_path: Path | None) -> None:
    """Make the golden values anew; one is accepted only where the reference and the real ggml agree within budget."""
    click.echo(f"golden: what is accepted goes to {golden.writable()}", err=True)
    _golden(golden.update(), json_path)


def _golden(results: list[Result], json_path: Path | None) -> NoReturn:
    totals = Totals()
    for r in results:
        totals.add(r)
        if r.verdict in FAILURES:
            click.echo(r.sentence())
    if json_path:
        write_json(json_path, record(results))
    click.echo(f"golden: {totals}")
    sys.exit(totals.exit_code())
