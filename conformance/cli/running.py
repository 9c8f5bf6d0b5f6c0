"""`conform run`, `conform repro`: cases on backends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
from conformance.run import seen, writeahead
from conformance.run.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.seeds import FOLDER, reseeded
from conformance.run.select import build, case_ids
from conformance.run.stages import choose
from conformance.run.waiving import Waiving, report, today

from .options import (
    ExistingFile,
    backend_option,
    fresh_cases,
    isolation,
    json_option,
    level_given,
    save_option,
    selection,
    settings_here,
    stage_option,
    waivers_option,
)


@click.command()
@backend_option
@stage_option
@selection
@json_option
@save_option
@waivers_option
@isolation
@click.argument("files", nargs=-1, type=ExistingFile)
def run(  # click shows the options' help
    backends: Sequence[str],
    stage: str | None,
    families: Sequence[str],
    globs: Sequence[str],
    level: Level,
    seed: int | None,
    fresh: int,
    json_path: Path | None,
    save_failures: Path | None,
    waivers_path: Path | None,
    isolation: Isolation,
    files: Sequence[Path],
) -> None:
    """Run cases, by family, glob and level or from FILES, on backends; print what is wrong and the totals."""
    read = [c for f in files for c in casefile.read(f)]
    chosen, here = choose(backends, stage), settings_here()
    levels = {spec: here.level(spec, level_given(level)) for spec in chosen[0]}
    some = not files or bool(families or globs)
    listed = {n: [reseeded(i, seed) for i in case_ids(families, globs, n)] for n in {level, *levels.values()} if some}
    new = fresh_cases(families, globs, level, seed, fresh)
    save = save_failures or (Path(FOLDER) if new else None)
    ids = {spec: [*listed.get(n, ()), *new] for spec, n in levels.items()}
    waiving = Waiving(here.waivers_of(chosen[0], waivers_path), today())
    _run(chosen, ids, read, json_path, save, isolation, waiving, named=bool(backends), fresh=frozenset(new))


@click.command()
@click.argument("file", type=ExistingFile)
@backend_option
@stage_option
@json_option
@isolation
def repro(file: Path, backends: Sequence[str], stage: str | None, json_path: Path | None, isolation: Isolation) -> None:
    """Run the case(s) of FILE again, and say whether all is as it was when it was saved: verdict, numbers, first
    divergence. Without --backend: on the backend that it was saved for.
    """
    cases = casefile.read(file)
    named = bool(backends)
    if not named:
        backends = list(dict.fromkeys(r["backend"] for r in map(seen.seen, cases) if r))
    bare = Waiving({}, today())  # as it was saved: no waiver stands between
    _run(choose(backends, stage), {}, cases, json_path, None, isolation, bare, named=named, verbose=True)


def _run(
    backends: tuple[list[Spec], dict[Spec, str]],
    ids: Mapping[Spec, Sequence[str]],
    read: Sequence[Case],
    json_path: Path | None,
    save: Path | None,
    isolation: Isolation,
    waiving: Waiving,
    *,
    named: bool,
    verbose: bool = False,
    fresh: frozenset[str] = frozenset(),
) -> NoReturn:
    specs, lacking = backends
    if lacking and named:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    folder = save or writeahead.default_folder()
    for left in writeahead.recover(folder, build):
        click.echo(left.sentence(), err=True)
    runner = Runner(save_failures=save, isolation=isolation, write_ahead=folder, waiving=waiving)
    results: list[Result] = []
    sentences: list[str] = []
    try:
        for spec in specs:
            results += _run_backend(runner, spec, ids.get(spec, ()), read, fresh, verbose=verbose)
    except KeyboardInterrupt:
        click.echo("interrupted; what ran is recorded", err=True)
    finally:
        runner.close()
        sentences, edits = waiving.problems(results)
        if json_path:
            write_json(json_path, record(results, {str(s): why for s, why in lacking.items()}, sentences))
    totals = Totals()
    for r in results:
        totals.add(r)
    _summary(results, {str(s): why for s, why in lacking.items()})
    for line in report(sentences, edits):
        click.echo(line)
    sys.exit(totals.exit_code() or int(bool(sentences)))


def _run_backend(
    runner: Runner, spec: Spec, ids: Sequence[str], read: Sequence[Case], fresh: frozenset[str], *, verbose: bool
) -> list[Result]:
    results: list[Result] = []
    chosen: list[Case | str] = [*read, *ids]
    size = runner.batch_size(spec)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=len(chosen), label=str(spec), file=sys.stderr, hidden=hidden) as bar:
        for start in range(0, len(chosen), size):
            batch = chosen[start : start + size]
            cases = [c if isinstance(c, Case) else runner.case(c) for c in batch]
            for case, result in zip(cases, runner.run(spec, cases), strict=True):
                result.fresh = result.case in fresh
                results.append(result)
                if verbose or result.verdict in FAILURES:
                    click.echo(result.sentence())
                was = seen.seen(case)
                if verbose and was and was["backend"] == result.backend:
                    differences = seen.differences(was, result)
                    click.echo(f"  not as saved: {'; '.join(differences)}" if differences else "  as saved")
                elif result.saved:
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
    filed = [r for r in results if r.fresh and r.verdict in FAILURES]
    for r in filed:
        click.echo(f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}")
    if not results:
        click.echo("nothing was executed, so nothing is proven")
