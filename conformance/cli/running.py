"""`conform run`, `conform repro`: cases on backends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from conformance.case.case import JSON
from conformance.report.journal import Journal
from conformance.run.isolation.isolate import Isolation
from conformance.run.session import failures
from conformance.run.session.select import FOLDER, case_ids, reseeded
from conformance.run.session.settings import Waiving, today
from conformance.run.session.shard import WHOLE, Shard
from conformance.run.stages import choose
from conformance.suite.family import Level

from .execution import Plan, Shown, execute
from .files import CasePath, read_cases
from .options import (
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
from .output import color_option


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
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first failure; what did not run is listed.")
@click.option("--maxfail", type=click.IntRange(min=1), metavar="N", help="Stop after N failures.")
@click.option("-v", "--verbose", is_flag=True, help="A line for each result, UNSUPPORTED with its reason.")
@click.option("-q", "--quiet", is_flag=True, help="Only what is wrong, and a line of totals for each backend.")
@click.option("--reasons", is_flag=True, help="Count the reasons for UNSUPPORTED; -v does so too.")
@color_option
@click.argument("files", nargs=-1, type=CasePath)
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
    exitfirst: bool,
    maxfail: int | None,
    verbose: bool,
    quiet: bool,
    reasons: bool,
    files: Sequence[Path],
) -> None:
    """Run cases, by family, glob and level or from FILES, on backends; print what is wrong and the totals.

    Every case that a backend was asked for has a result at the end, or the run fails and lists it. Exit codes: 0 fine,
    1 failures or cases without a result, 2 bad input, 3 nothing executed, or nothing passed on a backend that was named
    (or that is here, where a whole level runs), 130 interrupted.
    """
    read = [c for f in files for c in read_cases(f)]
    chosen, here = choose(backends, stage, isolation), settings_here()
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
    whole = some and not families and not globs and shard == WHOLE
    plan = Plan(
        chosen, ids, read, json_path, save, isolation, waiving,
        named=bool(backends), gating=(bool(backends) and not only_fresh and shard == WHOLE) or whole,
        settings=here, most=1 if exitfirst else maxfail, fresh=frozenset(new), journal=journal, more=more,
        shown=Shown(verbose=verbose, quiet=quiet, reasons=reasons or verbose),
    )  # fmt: skip
    sys.exit(execute(plan))


def _journal(path: Path | None, asked: dict[str, JSON]) -> Journal | None:
    if path is None:
        return None
    journal = Journal(path, asked)
    click.get_current_context().call_on_close(journal.close)
    return journal


@click.command()
@click.argument("file", type=CasePath)
@backend_option
@stage_option
@json_option
@isolation
@color_option
def repro(file: Path, backends: Sequence[str], stage: str | None, json_path: Path | None, isolation: Isolation) -> None:
    """Run the case(s) of FILE again, and say whether all is as it was when it was saved: verdict, numbers, first
    divergence. Without --backend: on the backend that it was saved for.
    """
    cases = read_cases(file)
    named = bool(backends)
    if not named:
        records = [r for r in map(failures.record_of, cases) if r]
        for r in records:
            failures.backend_of(r, "repro", file)  # a file may not choose any
        backends = list(dict.fromkeys(r["backend"] for r in records))
    bare = Waiving({}, today())  # as it was saved: no waiver stands between
    plan = Plan(choose(backends, stage, isolation), {}, cases, json_path, None, isolation, bare, named=named,
                settings=settings_here(), shown=Shown(verbose=True))  # fmt: skip
    sys.exit(execute(plan))
