"""`conform run`, `conform repro`: cases on backends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click
from tabulate import tabulate

from conformance.backend.registry import Spec
from conformance.cases.family import Level
from conformance.cgraph import casefile
from conformance.cgraph.case import Case
from conformance.cgraph.errors import UnavailableError
from conformance.check.verdict import FAILURES, Result, Totals
from conformance.report.record import record, write_json
from conformance.run.runner import Runner
from conformance.run.select import case_ids
from conformance.run.stages import choose

from .options import ExistingFile, backend_option, json_option, save_option, selection, stage_option


@click.command()
@backend_option
@stage_option
@selection
@json_option
@save_option
@click.argument("files", nargs=-1, type=ExistingFile)
def run(  # click shows the options' help
    backends: Sequence[str],
    stage: str | None,
    families: Sequence[str],
    globs: Sequence[str],
    level: Level,
    json_path: Path | None,
    save_failures: Path | None,
    files: Sequence[Path],
) -> None:
    """Run cases, by family, glob and level or from FILES, on backends; print what is wrong and the totals."""
    read = [c for f in files for c in casefile.read(f)]
    ids = case_ids(families, globs, level) if not files or families or globs else []
    _run(choose(backends, stage), ids, read, json_path, save_failures, named=bool(backends))


@click.command()
@click.argument("file", type=ExistingFile)
@backend_option
@stage_option
@json_option
def repro(file: Path, backends: Sequence[str], stage: str | None, json_path: Path | None) -> None:
    """Run the case(s) of FILE again; the same verdict, numbers and first divergence as when it was saved."""
    _run(choose(backends, stage), [], casefile.read(file), json_path, None, named=bool(backends), verbose=True)


def _run(
    backends: tuple[list[Spec], dict[Spec, str]],
    ids: Sequence[str],
    read: Sequence[Case],
    json_path: Path | None,
    save: Path | None,
    *,
    named: bool,
    verbose: bool = False,
) -> NoReturn:
    specs, lacking = backends
    if lacking and named:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    runner = Runner(save_failures=save)
    results: list[Result] = []
    try:
        for spec in specs:
            results += _run_backend(runner, spec, ids, read, verbose=verbose)
    except KeyboardInterrupt:
        click.echo("interrupted; what ran is recorded", err=True)
    finally:
        runner.close()
        if json_path:
            write_json(json_path, record(results, {str(s): why for s, why in lacking.items()}))
    totals = Totals()
    for r in results:
        totals.add(r)
    _summary(results, {str(s): why for s, why in lacking.items()})
    sys.exit(totals.exit_code())


def _run_backend(
    runner: Runner, spec: Spec, ids: Sequence[str], read: Sequence[Case], *, verbose: bool
) -> list[Result]:
    results: list[Result] = []
    chosen: list[Case | str] = [*read, *ids]
    size = runner.batch_size(spec)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=len(chosen), label=str(spec), file=sys.stderr, hidden=hidden) as bar:
        for start in range(0, len(chosen), size):
            batch = chosen[start : start + size]
            cases = [c if isinstance(c, Case) else runner.case(c) for c in batch]
            for result in runner.run(spec, cases):
                results.append(result)
                if verbose or result.verdict in FAILURES:
                    click.echo(result.sentence())
                if result.saved:
                    click.echo(f"  reproduce: conform repro {result.saved} --backend '{spec}'")
            bar.update(len(batch))
    return results


def _summary(results: Sequence[Result], lacking: dict[str, str]) -> None:
    per_backend: dict[str, list[Result]] = {}
    for r in results:
        per_backend.setdefault(r.backend, []).append(r)
    rows = []
    for name, found in per_backend.items():
        totals = Totals()
        for r in found:
            totals.add(r)
        used = [r.budget_used for r in found if r.budget_used is not None]
        rows.append((name, str(totals), f"{max(used):.3g}" if used else "–", f"{sum(r.seconds for r in found):.2f} s"))
    rows += [(name, f"not available: {why}", "–", "–") for name, why in lacking.items()]
    click.echo(tabulate(rows, ["backend", "verdicts", "budget used, at most", "ran for"]))
    if not results:
        click.echo("nothing was executed, so nothing is proven")
