"""`python -m tests.trust`: what the suite notices of the list of faults, and of mutants."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

import click

from conformance.cli.output import Group, table
from conformance.suite import FAMILIES
from conformance.suite.family import LEVELS, Level
from conformance.suite.ops import ids

from . import choose as choice
from . import files as model_files
from .faults import FOLDER, Fault, read
from .hunt import Hunt, differences, fewest, hunt, matrix
from .inject import UNLOADABLE
from .kernels.command import kernels
from .mutants import AREAS, Mutant, draw
from .past.command import backtest
from .rate import Rate

Status = Literal["noticed", "survived", "equivalent", "invalid"]
STATUSES: tuple[Status, ...] = get_args(Status)
LEVEL = click.option("--level", type=click.Choice(get_args(Level)), default="smoke", show_default=True,
                     help="Cases to hunt with.")  # fmt: skip
SEED = click.option("--seed", default=0, show_default=True, help="Seed of the draw.")


@click.group(cls=Group)
def main() -> None:
    """Check that the suite notices bugs."""


@main.command()
@click.option("--fault", "globs", multiple=True, metavar="GLOB", help="Only these faults, repeatable.")
@click.option("--of", "adapters", multiple=True, metavar="ADAPTER", help="Only faults of this adapter, repeatable.")
@click.option(
    "--list",
    "lists",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    default=[FOLDER],
    help="TOML file, or folder of such, in place of the list, repeatable.",
)
@click.option("--once", is_flag=True, help="Until one family noticed the fault.")
@LEVEL
def faults(
    globs: Sequence[str], adapters: Sequence[str], lists: Sequence[Path], *, once: bool, level: Level
) -> None:  # fmt: skip
    """Inject the faults of the list, one at a time.

    A fault whose `level` is a higher one is left out. Exit code 1 where none of its families notices a fault, or a case
    fails on an adapter as it is.
    """
    chosen = [
        f
        for f in read(lists)
        if (not globs or any(fnmatchcase(f.name, g) for g in globs)) and (not adapters or f.of in adapters)
        if LEVELS.index(f.level) <= LEVELS.index(level)
    ]
    hunts = hunt(chosen, level, _say, once=once)
    sys.exit(show_hunts(chosen, hunts))


def _say(each: Hunt) -> None:
    click.echo(
        f"{each.fault}: {each.family}: {f'{each.verdict} {each.case}' if each.noticed else 'not noticed'}", err=True
    )


def show_hunts(faults: Sequence[Fault], hunts: Sequence[Hunt]) -> int:
    """Print the rate of each family, and what was missed; the exit code."""
    names = {f.name for f in faults}
    alarms = [h for h in hunts if h.fault not in names]
    noticed = {h.fault for h in hunts if h.noticed}
    rates = {n: [h.noticed for h in hunts if h.family == n and h.fault in names] for n in FAMILIES}
    rates["any of its families"] = [f.name in noticed for f in faults]
    rows = [(n, f"{sum(r)} of {len(r)}", f"{100 * sum(r) / len(r):.0f} %") for n, r in rates.items() if r]
    table(rows, ["family", "faults noticed", "rate"])
    missed = [f for f in faults if f.name not in noticed]
    for f in missed:
        click.echo(f"not noticed: {f.name} ({f.of}): {f.says}")
    for h in alarms:
        click.echo(f"false alarm: {h.case}: {h.verdict}: {h.detail}")
    return bool(missed or alarms)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    status: Status
    by: str
    """`noticed`: the case and its verdict. `survived`: a case whose answer differs by it. `invalid`: why it does not
    load."""


@main.command()
@click.option("--sample", default=100, show_default=True, help="How many mutants, as many of each area as can be.")
@SEED
@click.option("--area", "areas", multiple=True, metavar="AREA", help=f"Only these, repeatable: {', '.join(AREAS)}.")
@click.option("--path", "globs", multiple=True, metavar="GLOB", help="Only files whose path matches, repeatable.")
@LEVEL
def mutants(sample: int, seed: int, areas: Sequence[str], globs: Sequence[str], level: Level) -> None:
    """Change adapters at places that a seed draws, one at a time, and print the rate that the suite notices."""
    outcomes: list[Outcome] = []
    for area, own in groupby(draw(sample, seed, areas, globs), lambda m: m.area):
        outcomes += judge(area, list(own), level, seed)
    for o in outcomes:
        if o.status == "survived":
            click.echo(f"\n{o.mutant.area}: {o.mutant.id}, differs by {o.by}\n{o.mutant.diff}")
    click.echo()
    rows = [_row(a, [o.status for o in outcomes if o.mutant.area == a]) for a in AREAS]
    table([*(r for r in rows if r), _row("all", [o.status for o in outcomes])], ["area", "rate", *STATUSES])


def _row(name: str, statuses: Sequence[Status]) -> tuple[object, ...]:
    counts = Counter(statuses)
    return (name, str(Rate.of_mutants(statuses)), *(counts[s] for s in STATUSES)) if statuses else ()


def judge(area: str, mutants: Sequence[Mutant], level: Level, seed: int) -> list[Outcome]:
    """What becomes of the mutants of an area, on each of its adapters those that none before it noticed."""
    names = {m.fault.name: m for m in mutants}
    noticed: dict[str, Hunt] = {}
    differ: dict[str, str] = {}

    def say(each: Hunt) -> None:
        if each.fault in names and each.noticed:
            noticed[each.fault] = each
            click.echo(f"{names[each.fault].id}: {each.verdict} {each.case}", err=True)

    for of in AREAS[area].of:
        left = [replace(m.fault, of=of) for n, m in names.items() if n not in noticed]
        if left:
            hunt(left, level, say, once=True)
        unknown = [f for f in left if f.name not in noticed and f.name not in differ]
        if unknown:
            differ |= differences(unknown, seed, lambda f, c: click.echo(f"{names[f].id}: differs {c}", err=True))
    return [_outcome(m, noticed.get(n), differ.get(n)) for n, m in names.items()]


def _outcome(mutant: Mutant, hunt: Hunt | None, case: str | None) -> Outcome:
    if hunt and UNLOADABLE in hunt.detail:
        return Outcome(mutant, "invalid", hunt.detail)
    if hunt:
        return Outcome(mutant, "noticed", f"{hunt.case} {hunt.verdict}")
    return Outcome(mutant, "survived", case) if case else Outcome(mutant, "equivalent", "")


@main.command()
@click.option("--sample", default=320, show_default=True, help="Mutants.")
@SEED
@click.option("--area", default="cpu", show_default=True, help="Of which code.")
def sight(sample: int, seed: int, area: str) -> None:
    """Print which mutants only `standard` notices of `ops`, and the fewest cases that `smoke` lacks for them."""
    drawn = draw(sample, seed, [area])
    seen = {name: cases for name, cases in matrix([m.fault for m in drawn], "standard").items() if cases}
    smoke = ids("smoke")
    missed = [m for m in drawn if m.fault.name in seen and set(smoke).isdisjoint(seen[m.fault.name])]
    click.echo(f"{len(seen) - len(missed)} of {len(seen)} mutants that standard notices are noticed by smoke")
    click.echo(f"{len(fewest(seen))} of its cases would be enough for all of them; smoke has {len(smoke)}")
    for m in missed:
        click.echo(f"missed: {m.id}")
    for case in fewest(seen, smoke):
        click.echo(f"lacks: {case}")


@main.command()
def choose() -> None:
    """Choose `smoke` of `ops` and its order, and write them where the suite reads them."""
    chosen = choice.write()
    click.echo(f"{len(chosen)} cases in smoke.json; first {chosen[0]}")


@main.command()
@click.option("--sample", default=20, show_default=True, help="Damaged files, and as many healthy pairs.")
@SEED
def files(sample: int, seed: int) -> None:
    """Compare damaged and healthy files of models; exit code 1 if a healthy pair raises an alarm."""
    named, alone, alarms = [], [], 0
    with tempfile.TemporaryDirectory(prefix="conformance-files-") as name:
        folder = Path(name)
        for k in range(seed, seed + sample):
            damaged, healthy = model_files.damaged(k, folder), model_files.healthy(k + sample, folder)
            found = damaged.pair.findings(folder)
            named.append(damaged.named(found))
            alone.append({f.where for f in damaged.pair.alone(folder)} >= set(damaged.where))
            layer = healthy.layer(folder)
            wrong = [f for f in (*healthy.findings(folder), *([layer] if layer else [])) if f.wrong]
            alarms += bool(wrong)
            click.echo(f"{k}: {damaged.words}: {'named' if named[-1] else f'not named: {[*map(str, found[:3])]}'}")
            for f in wrong:
                click.echo(f"{k + sample}: {healthy.words}: false alarm: {f.sentence()}")
    rows = [("damaged files, compared", Rate(sum(named), sample)), ("damaged files, alone", Rate(sum(alone), sample)),
            ("healthy pairs with an alarm", Rate(alarms, sample))]  # fmt: skip
    table([(words, f"{r.noticed} of {r.of}", str(r)) for words, r in rows], ["files", "found", "rate"])
    sys.exit(bool(alarms))


main.add_command(kernels)
main.add_command(backtest)


if __name__ == "__main__":
    main()
