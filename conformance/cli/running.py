"""`conform run`, `conform repro`: cases on backends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NoReturn

import click
from tabulate import tabulate

from conformance.backend.registry import Spec
from conformance.cases.family import Level
from conformance.cgraph import casefile
from conformance.cgraph.case import JSON, Case
from conformance.cgraph.errors import UnavailableError
from conformance.cgraph.text import printable
from conformance.check.verdict import FAILURES, Result, Totals
from conformance.report.journal import Journal
from conformance.report.record import record, write_json
from conformance.report.reproduce import command
from conformance.run import seen, writeahead
from conformance.run.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.seeds import FOLDER, reseeded
from conformance.run.select import build, case_ids
from conformance.run.shard import WHOLE, Shard
from conformance.run.stages import choose
from conformance.run.waiving import Waiving, report, today

from .options import (
    ExistingFile,
    File,
    backend_option,
    fresh_cases,
    isolation,
    json_option,
    level_given,
    save_option,
    selection,
    settings_here,
    shard_option,
    stage_option,
    waivers_option,
)

INTERRUPTED = 130
"""Exit code of a run that the user ended: as a shell has it for SIGINT."""


@click.command()
@backend_option
@stage_option
@selection
@click.option("--only-fresh", is_flag=True, help="Only what --fresh adds, nothing that a level lists.")
@shard_option
@json_option
@click.option(
    "--journal",
    "journal_path",
    type=File,
    metavar="FILE",
    help="Append each result to FILE as it comes; what is there from an earlier start does not run again.",
)
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
    only_fresh: bool,
    shard: Shard,
    json_path: Path | None,
    journal_path: Path | None,
    save_failures: Path | None,
    waivers_path: Path | None,
    isolation: Isolation,
    files: Sequence[Path],
) -> None:
    """Run cases, by family, glob and level or from FILES, on backends; print what is wrong and the totals."""
    read = [c for f in files for c in casefile.read(f)]
    chosen, here = choose(backends, stage), settings_here()
    levels = {spec: here.level(spec, level_given(level)) for spec in chosen[0]}
    asked = {
        "levels": {str(spec): n for spec, n in levels.items()},
        "families": list(families),
        "cases": list(globs),
        "seed": seed,
        "fresh": [fresh, only_fresh],
        "shard": str(shard),
        "files": list(map(str, files)),
        "waivers": str(waivers_path or ""),
    }
    journal = _journal(journal_path, asked)
    some = (not files or bool(families or globs)) and not only_fresh
    listed = {n: [reseeded(i, seed) for i in case_ids(families, globs, n)] for n in {level, *levels.values()} if some}
    new = fresh_cases(families, globs, level, journal.seed if journal and seed is None else seed, fresh)
    save = save_failures or (Path(FOLDER) if new else None)
    ids = {spec: [*shard.share(listed.get(n, ())), *shard.share(new)] for spec, n in levels.items()}
    waiving = Waiving(here.waivers_of(chosen[0], waivers_path), today())
    more: dict[str, JSON] = {} if journal is None else {"run": journal.run}
    if shard != WHOLE:
        everything = [*(c.id for c in read), *(i for n in listed.values() for i in n)]
        more["shard"] = shard.to_json(everything)
        mine = frozenset(shard.share(c.id for c in read))
        read = [c for c in read if c.id in mine]
    _run(chosen, ids, read, json_path, save, isolation, waiving,
         named=bool(backends), fresh=frozenset(new), journal=journal, more=more)  # fmt: skip


def _journal(path: Path | None, asked: dict[str, JSON]) -> Journal | None:
    if path is None:
        return None
    journal = Journal(path, asked)
    click.get_current_context().call_on_close(journal.close)
    return journal


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
        records = [r for r in map(seen.seen, cases) if r]
        for r in records:
            seen.backend_of(r, "repro", file)  # a file may not choose any
        backends = list(dict.fromkeys(r["backend"] for r in records))
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
    journal: Journal | None = None,
    more: Mapping[str, JSON] | None = None,
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
    interrupted = False
    try:
        for spec in specs:
            chosen: list[Case | str] = [*read, *ids.get(spec, ())]
            for result in _run_backend(runner, spec, chosen, journal, verbose=verbose):
                result.fresh = result.case in fresh
                results.append(result)
    except KeyboardInterrupt:
        interrupted = True
        click.echo("interrupted; what ran is recorded", err=True)
    finally:
        runner.close()
        sentences, edits = waiving.problems(results)
        if json_path:
            document = record(results, {str(s): why for s, why in lacking.items()}, sentences)
            write_json(json_path, {**document, **(more or {})})
    totals = Totals()
    for r in results:
        totals.add(r)
    _summary(results, {str(s): why for s, why in lacking.items()})
    for line in report(sentences, edits):
        click.echo(printable(line))
    sys.exit(INTERRUPTED if interrupted else totals.exit_code() or int(bool(sentences)))


def _run_backend(
    runner: Runner, spec: Spec, chosen: Sequence[Case | str], journal: Journal | None, *, verbose: bool
) -> Iterator[Result]:
    """The result of each of `chosen`, in order: from the journal, or run now and written there."""
    size = runner.batch_size(spec)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=len(chosen), label=str(spec), file=sys.stderr, hidden=hidden) as bar:
        for start in range(0, len(chosen), size):
            batch = chosen[start : start + size]
            kept = [journal.take(str(spec), c if isinstance(c, str) else c.id) if journal else None for c in batch]
            cases = [_case(runner, c) for c, k in zip(batch, kept, strict=True) if k is None]
            new = _run_cases(runner, spec, cases, journal, verbose=verbose)
            for k in kept:
                yield k or next(new)
            bar.update(len(batch))


def _case(runner: Runner, case: Case | str) -> Case:
    return runner.case(case) if isinstance(case, str) else case


def _run_cases(
    runner: Runner, spec: Spec, cases: Sequence[Case], journal: Journal | None, *, verbose: bool
) -> Iterator[Result]:
    for few in _few(cases):
        found = runner.run(spec, few)
        if journal:
            journal.add(found)
        for case, result in zip(few, found, strict=True):
            _tell(case, result, verbose=verbose)
            yield result


def _few(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """One-step cases, which may share a graph, together; each trajectory by itself: a kill costs no more than that."""
    for single, group in groupby(cases, key=lambda c: len(c.steps) == 1):
        few = list(group)
        yield from [few] if single else ([c] for c in few)


def _tell(case: Case, result: Result, *, verbose: bool) -> None:
    if verbose or result.verdict in FAILURES:
        click.echo(result.sentence())
    was = seen.seen(case)
    if verbose and was and was["backend"] == result.backend:
        differences = seen.differences(was, result)
        click.echo(f"  not as saved: {'; '.join(differences)}" if differences else "  as saved")
    elif result.saved:
        click.echo(f"  reproduce: {command(result)}")


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
        most = f"{max(used):.3g}" if used else "–"
        rows.append((printable(name), str(totals), most, f"{sum(r.seconds for r in found):.2f} s"))
    rows += [(printable(name), f"not available: {printable(why)}", "–", "–") for name, why in lacking.items()]
    click.echo(tabulate(rows, ["backend", "verdicts", "budget used, at most", "ran for"]))
    filed = [r for r in results if r.fresh and r.verdict in FAILURES]
    for r in filed:
        click.echo(printable(f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}"))
    if not results:
        click.echo("nothing was executed, so nothing is proven")
