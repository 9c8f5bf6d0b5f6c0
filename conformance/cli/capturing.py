"""`conform import-capture`: trajectories of llama.cpp as case files."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.cases import captured
from conformance.cgraph import casefile

from .options import ExistingFile, File


@click.command("import-capture")
@click.argument("capture", type=ExistingFile)
@click.option("-o", "--output", required=True, type=File, metavar="FILE.gguf")
def import_capture(capture: Path, output: Path) -> None:
    """Turn a capture (JSON beside its .npz) into a case file with expected outputs."""
    case = captured.import_capture(capture)
    casefile.write(output, [case])
    click.echo(f"{output}: {case.id}, {len(case.steps)} steps, {output.stat().st_size:,} bytes")
