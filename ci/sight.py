"""What `smoke` notices of all that `standard` does, and the cases that it lacks.

`python ci/sight.py --sample 320 --seed 5` plants mutants of the reference, one at a time, runs all cases of `ops` at
`standard` that reach each of them, and prints how many of those that any case notices a case of `smoke` does, how few
cases would notice all of them, and the fewest that `smoke` lacks: rows for `smoke` of their tables.
"""

from __future__ import annotations

import click

from conformance.planted.matrix import fewest, matrix
from conformance.planted.mutants import draw
from conformance.suite.ops import ids

TOGETHER = 40
"""Mutants that share a worker, and the expected values of its cases."""


@click.command()
@click.option("--sample", default=320, show_default=True, help="Mutants.")
@click.option("--seed", default=0, show_default=True, help="Draws them.")
@click.option("--area", default="cpu", show_default=True, help="Of which code.")
def main(sample: int, seed: int, area: str) -> None:
    """Draw, plant, count."""
    mutants = draw(sample, seed, [area])
    noticed: dict[str, list[str]] = {}
    for at in range(0, len(mutants), TOGETHER):
        noticed |= matrix([m.fault for m in mutants[at : at + TOGETHER]], "standard", limit=60.0)
        click.echo(f"{len(noticed)} of {len(mutants)} mutants", err=True)
    seen = {name: cases for name, cases in noticed.items() if cases}
    smoke = set(ids("smoke"))
    missed = [m for m in mutants if m.fault.name in seen and smoke.isdisjoint(seen[m.fault.name])]
    lacking = fewest(seen, smoke)
    click.echo(f"{len(seen) - len(missed)} of {len(seen)} mutants that standard notices are noticed by smoke")
    click.echo(f"{len(fewest(seen))} of its cases would be enough for all of them; smoke has {len(smoke)}")
    for m in missed:
        click.echo(f"missed: {m.id}")
    for case in lacking:
        click.echo(f"lacks: {case}")


if __name__ == "__main__":
    main()
