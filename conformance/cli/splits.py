"""`conform splits`: which device of a scheduler computes which node of a case."""

from __future__ import annotations

from collections.abc import Sequence

import click
from tabulate import tabulate

from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable
from conformance.run.isolation.isolate import open_backend
from conformance.run.scheduler import SchedBackend
from conformance.run.scheduler.plan import HEADER, rows
from conformance.run.session.select import build, parse_specs

from .options import backend_option


@click.command()
@click.argument("case_id", metavar="CASE")
@backend_option
@click.option("--step", type=int, default=0, show_default=True, help="Which graph of the case.")
def splits(case_id: str, backends: Sequence[str], step: int) -> None:
    """Show how a scheduler (--backend 'sched?devices=xdna2,cpu') shares out a graph: splits, nodes, copies."""
    case = build(case_id)
    if not 0 <= step < len(case.steps):
        raise UsageError(f"--step {step}: {case.id} has steps 0 to {len(case.steps) - 1}")
    for spec in parse_specs(backends or ["sched"]):
        backend = open_backend(spec)
        try:
            if not isinstance(backend, SchedBackend):
                raise UsageError(f"splits: a scheduler such as 'sched?devices=xdna2,cpu' expected, {spec} found")
            shared = backend.plan(case).graphs[case.steps[step].graph]
            found = rows(case.steps[step].graph, shared, backend.labels)
        finally:
            backend.close()
        click.echo(printable(f"{case.id} step {step} on {spec}: {len(shared.assignment.splits)} splits"))
        click.echo(tabulate(found, HEADER))
