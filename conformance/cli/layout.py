"""`conform layout`: whether the builder's graphs are still llama.cpp's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from conformance.suite.decoder import layout as layouts

from .options import ExistingFile

SHOWN = 5
"""Differences of one setting that are written out."""


@click.command()
@click.option(
    "--arch", "archs", multiple=True, type=click.Choice(tuple(layouts.SETTINGS)), help="Repeatable; default: all."
)
@click.option("--lib", type=ExistingFile, metavar="FILE", help="The library that has llama.cpp; default: xllamacpp's.")
def layout(archs: Sequence[str], lib: Path | None) -> None:
    """Compare llama.cpp's graphs with the builder's, node for node; exit code 1 where something moved."""
    rows, differences = [], []
    for arch in archs or layouts.SETTINGS:
        for keys in layouts.SETTINGS[arch]:
            theirs, ours = layouts.pair(arch, keys, str(lib or ""))
            found = list(layouts.moved(theirs, ours))
            nodes = sum(len(step.graph) for step in theirs.steps)
            rows.append((arch, keys, len(theirs.steps), nodes, f"{len(found)} moved" if found else "equal"))
            if found:
                more = f"  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
                differences += [f"\n{arch}-{keys}", *(f"  {m}" for m in found[:SHOWN]), *([more] if more else [])]
    click.echo(tabulate(rows, ["architecture", "setting", "graphs", "nodes", "layout"]))
    for line in differences:
        click.echo(line)
    if differences:
        sys.exit(1)
