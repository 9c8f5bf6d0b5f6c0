"""`python -m tests.trust kernels`: build the mutants, judge them, print the page, repeat one row."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from conformance.run.session.select import case_ids

from ..weights import half, write  # noqa: TID252  # this package is `trust` in pytest and `tests.trust` as a command
from .curve import SHOWN, share, svg
from .page import diff, page
from .sanitize import SANITIZERS, reports
from .score import SUITES, Score, Scores, Suite, sample
from .tree import AREAS, Mutant, Tree, build, sanitized

_FOLDER = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
_SAMPLE = click.option("--sample", "n", default=0, help="Only so many, drawn by --seed; 0 for all.")
_SEED = click.option("--seed", default=0, show_default=True, help="Seed of the sample.")


def _drawn(scores: Scores, side: int, n: int, seed: int) -> list[Mutant]:
    """Return `n` mutants that cases of `ops` reach, of one half of the functions (`half`); all of them if `n` is 0."""
    reached = list(scores.reaching([m for m in scores.tree.mutants if half(m) == side]))
    return sample(reached, n or len(reached), seed)


@click.group()
def kernels() -> None:
    """Mutate ggml's own kernels; judge them by this suite and test-backend-ops."""


@kernels.command("build")
@click.argument("package", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_FOLDER
@click.option("--sample", "n", default=600, show_default=True, help="How many mutants, as many of each area as can be.")
@click.option("--seed", default=0, show_default=True, help="Seed of the draw.")
@click.option("--area", "areas", multiple=True, metavar="AREA", help=f"Only these, repeatable: {', '.join(AREAS)}.")
def build_command(package: Path, folder: Path, n: int, seed: int, areas: Sequence[str]) -> None:
    """Build PACKAGE in FOLDER, clean and with mutants.

    PACKAGE is a source package of llama-cpp-python:

    `pip download --no-deps --no-binary :all: llama-cpp-python`. The default is every area except openvino.
    """
    chosen = areas or [a for a in AREAS if a != "openvino"]
    tree = build(package, folder, n, seed, chosen, os.cpu_count() or 1)
    click.echo(f"{len(tree.mutants)} mutants in {tree.library}; {tree.dropped} did not compile")


@kernels.command()
@_FOLDER
@_SAMPLE
@_SEED
@click.option("--suite", "suites", multiple=True, type=click.Choice(SUITES), help="Only by this; default: both.")
def run(folder: Path, n: int, seed: int, suites: Sequence[Suite]) -> None:
    """Judge the mutants of FOLDER; continue an earlier run."""
    scores = Scores(Tree.read(folder))
    mutants = scores.tree.mutants
    scores.run(sample(mutants, n or len(mutants), seed), suites or SUITES, click.echo)


@kernels.command()
@_FOLDER
def alone(folder: Path) -> None:
    """Print the cases of `smoke` that alone notice a mutant."""
    for found in Scores(Tree.read(folder)).alone(lambda line: click.echo(line, err=True)):
        if len(found.cases) == 1:
            click.echo(f"{found.cases[0]}: mutant {found.number}")


@kernels.command("curve")
@_FOLDER
@_SAMPLE
@_SEED
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the plot (SVG).")
def curve_command(folder: Path, n: int, seed: int, output: Path | None) -> None:
    """Print how many mutants that nothing was learned from both suites notice in how many seconds.

    Ours is `ops`, `smoke` before `standard`. Seconds are of a processor. Mutants that nothing notices are left out.
    """
    scores = Scores(Tree.read(folder))
    curves = scores.curves(_drawn(scores, 0, n, seed), lambda line: click.echo(line, err=True))
    for name, times in curves.items():
        shares = ", ".join(f"{s:g} s: {share(times, s):.0%}" for s in SHOWN)
        click.echo(f"{name}: {shares} of {len(times)}")
    if output:
        output.write_text(svg(curves), encoding="utf-8", newline="\n")


@kernels.command()
@_FOLDER
@_SAMPLE
@_SEED
def learn(folder: Path, n: int, seed: int) -> None:
    """Run drawn cases on mutants of half of the functions, and write what `choose` weighs pairs with."""
    scores = Scores(Tree.read(folder))
    mutants = _drawn(scores, 1, n, seed)
    scores.sample(mutants, lambda line: click.echo(line, err=True))
    for kind, explained in write(scores.tree, mutants).items():
        click.echo(f"{kind}: {explained:.0%}")


@kernels.command("page")
@click.argument("folders", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path))
def page_command(folders: Sequence[Path]) -> None:
    """Print the page of all FOLDERS in Markdown."""
    scores = [Scores(Tree.read(f)) for f in folders]
    click.echo(page([(s.tree, s.read()) for s in scores]), nl=False)


@kernels.command()
@click.argument("package", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_FOLDER
@click.option("--with", "sanitizer", type=click.Choice(list(SANITIZERS)), default="address", show_default=True)
@click.option("--case", "globs", multiple=True, metavar="GLOB", help="Only cases that match, repeatable.")
@click.option("--options", default="", help="Options of the adapter, such as `threads=4` or `mode=sched`.")
def sanitize(package: Path, folder: Path, sanitizer: str, globs: Sequence[str], options: str) -> None:
    """Run `smoke` on PACKAGE built with a sanitizer; print reports."""
    library = sanitized(package, folder, sanitizer, os.cpu_count() or 1)
    found = 0
    for report in reports(library, sanitizer, case_ids((), globs, "smoke"), options):
        found += 1
        click.echo(f"{report.case}: {report.summary}\n{report.text}")
    click.echo(f"{found} reports")


@kernels.command()
@_FOLDER
@click.argument("number", type=int)
def repeat(folder: Path, number: int) -> None:
    """Judge one mutant again; print its row beside the stored one."""
    scores = Scores(Tree.read(folder))
    mutant = next((m for m in scores.tree.mutants if m.number == number), None)
    if mutant is None:
        raise click.UsageError(f"mutant {number} is unknown; known: 1 to {len(scores.tree.mutants)}")
    click.echo(f"{mutant.place}, {mutant.edit.function}: {mutant.edit.kind}\n{diff(mutant)}")
    now = Score(scores.judge(mutant, "ours"), scores.judge(mutant, "theirs"))
    click.echo(f"stored: {scores.read().get(number)}\nnow:    {now}")
