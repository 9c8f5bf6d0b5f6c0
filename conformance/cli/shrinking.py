"""`conform shrink`: the smallest case that fails as a saved one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.ggml.errors import UsageError
from conformance.ggml.text import printable
from conformance.report.runfile import write_text
from conformance.report.snippet import python
from conformance.report.snippet_cpp import cpp
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session import failures, settings
from conformance.run.shrink import shrink as smallest
from conformance.run.shrink import size

from .files import CasePath, read_case
from .options import File, config_option, isolation, settings_here


@click.command()
@click.argument("file", type=CasePath)
@click.option("--backend", metavar="NAME[?KEY=VALUE]", help="Default: the one that the case was saved for.")
@config_option
@click.option("--case", "case_id", metavar="ID", help="Which case of a bundle.")
@click.option("-o", "--output", type=File, metavar="OUT.gguf", help="Default: FILE with -small before its suffix.")
@click.option("--time-budget", type=float, default=120.0, show_default=True, metavar="SECONDS")
@isolation
def shrink(
    file: Path, backend: str | None, case_id: str | None, output: Path | None, time_budget: float, isolation: Isolation
) -> None:
    """Cut the case of FILE down to what still fails in the same way on a backend.

    Writes a case file, and beside it a Python program that builds the case (.py) and a test_case for ggml's own
    tests/test-backend-ops.cpp (.cpp).
    """
    case = read_case(file, case_id)
    for line in settings.lines_of(settings.in_force(settings_here())):
        click.echo(line)
    was = failures.record_of(case)
    if backend is None and was is None:
        raise UsageError(f"{file}: was saved for no backend; name one with --backend")
    spec = failures.backend_of(was, "shrink", file) if backend is None and was else Spec.parse(str(backend))
    output = output or file.with_name(f"{file.stem}-small.gguf")
    alone = isolation.isolate is not False  # a fault that kills ends a worker, not the search
    runner = Runner(isolation=replace(isolation, isolate=alone))
    try:
        found = smallest(
            runner, spec, case, time_budget=time_budget, progress=lambda line: click.echo(printable(line), err=True)
        )
    finally:
        runner.close()
    casefile.write(output, [failures.with_result(found.case, found.result)])
    write_text(output.with_suffix(".py"), python(found.case), "-o")
    write_text(output.with_suffix(".cpp"), cpp(found.case), "-o")
    if not found.finished:
        click.echo(printable(f"stopped after {time_budget:g} s; shrink {output} again to go on"), err=True)
    click.echo(f"{found.result.sentence()}")
    click.echo(f"{size(found.case)}, after {found.tried} runs in {found.seconds:.1f} s")
    click.echo(f"written: {output}, {output.with_suffix('.py').name}, {output.with_suffix('.cpp').name}")
