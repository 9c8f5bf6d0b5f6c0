"""`conform report`: a page, and whatever else people and CI read, out of run files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import click

from conformance.ggml.errors import UsageError
from conformance.report.junit import junit
from conformance.report.markdown import markdown
from conformance.report.matrix import csv_ops
from conformance.report.page import page
from conformance.report.page.stored import read_history
from conformance.report.runs import read_runs
from conformance.run.session.select import case_ids
from conformance.suite.family import LEVELS, Level

from .options import ExistingFile


@click.command("report")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="RUN.json|DIR…")
@click.option("--history", "history_path", type=ExistingFile, metavar="FILE", help="Show the timings of its runs, too.")
@click.option("--level", type=click.Choice(LEVELS), help="Show which cases of this level no run has.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Made if new.",
)
def report(paths: Sequence[Path], history_path: Path | None, level: Level | None, output: Path) -> None:
    """Write DIR/index.html, one page that needs no network, and what it shows as summary.md, junit.xml and ops.csv."""
    runs = read_runs(paths)
    stored = read_history(history_path) if history_path else None
    planned: dict[str, list[str]] = {level: case_ids((), (), level)} if level else {}
    now = datetime.now(timezone.utc)
    texts = {
        "index.html": page(runs, now=now, planned=planned, stored=stored),
        "summary.md": markdown(runs, where="index.html"),
        "junit.xml": junit(runs),
        "ops.csv": csv_ops(runs.results),
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = output / name
            path.write_text(text, encoding="utf-8")
            click.echo(f"{path}: {len(text):,} bytes")
    except OSError as e:
        raise UsageError(f"-o {output}: a folder that can be written expected: {e.strerror}") from e
