"""`conform nightly`: runs a list of commands, one after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.waivers import Waivers
from conformance.nightly import PARTS, Night, content, hold, read_parts, share, today, unfinished
from conformance.run.session import settings
from conformance.run.session.select import family_named
from conformance.run.session.shard import Shard

from .options import BACKEND, BUDGET, FAMILY, LEVEL, SEED, SHARD, ExistingFile, Folder
from .output import leave, line, table

FOLDER = Path("nightly")
"""Default folder of nightly runs; each has a subfolder."""
SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n))
"""Signals that end a nightly as Ctrl-C does; Windows has no SIGHUP."""


@click.command(epilog=f"Parts: {', '.join(p.name for p in PARTS)}.")
@click.argument("file", required=False, type=ExistingFile)
@click.option("-o", "--output", "folder", type=Folder, metavar="DIR",
              help="Folder to start or continue in; default: nightly/DATE.")  # fmt: skip
@click.option("--part", "names", multiple=True, metavar="NAME", help="Run only this part, repeatable.")
@LEVEL.click(help="How many cases.", default="standard", show_default=True)
@BACKEND.click(metavar="NAME")
@FAMILY.click()
@SEED.click(help="Seed of generated cases; default: a new one.")
@SHARD.click()
@BUDGET.click(help="Time for fresh random cases: 90s, 30m, 2h.", default="15m", show_default=True)
@click.option("--against", metavar="NAME", help="Baseline backend of the performance gates.")
@click.option("--continue", "resumes", is_flag=True, help="Continue an unfinished nightly of an earlier day.")
def nightly(
    file: Path | None,
    folder: Path | None,
    names: Sequence[str],
    level: str,
    backends: Sequence[str],
    families: Sequence[str],
    seed: int | None,
    shard: Shard,
    budget: float,
    against: str | None,
    resumes: bool,
) -> None:
    """Run every case, the golden outputs, the audit and the speed gates, and write a page.

    FILE lists other parts to run (docs/ci.md). To continue an interrupted run, start it again with the same options
    on the same day, or with --continue.
    Exit codes: 1 failures or regressions, or a part could not run, 3 a part ran no cases, 5 a part timed out, was
    interrupted or left a gate undecided: see docs/exit-codes.md.
    """
    parts = PARTS if file is None else read_parts(file)
    known = [p.name for p in parts]
    if unknown := [n for n in names if n not in known]:
        raise UsageError(f"--part {unknown[0]}: one of {', '.join(known)} expected")
    tested = _check(families, [*(backends or registry.defaults()), *([against] if against else [])])
    chosen = [p for p in share(parts, shard) if not names or p.name in names]
    asked = {
        "level": level, "backends": list(backends), "families": list(families), "shard": str(shard), "budget": budget,
        "against": against, **content(parts, tested),
    }  # fmt: skip
    where = folder or (unfinished(FOLDER, asked, seed) if resumes else None) or FOLDER / today()
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {where}: cannot be created: {e.strerror}") from e
    held = hold(where)
    try:
        night = Night.begin(where, asked, seed, resumes=resumes)
        line(f"{where}: --seed {night.seed}")
        store = where.parent / "history.sqlite"
        values: dict[str, Sequence[object]] = {
            "level": [level],
            "backends": [word for b in backends for word in ("--backend", b)],
            "families": [word for f in families for word in ("--family", f)],
            "shard": [shard],
            "seed": [night.seed],
            "budget": [f"{budget:f}s"],
            "against": ["--against", against] if against else [],
            "store": [store],
            "history": ["--store", store] if store.is_file() else [],
        }
        interrupted = Outcome()
        before = {n: signal.signal(n, signal.default_int_handler) for n in SIGNALS}
        try:
            night.run(chosen, values, line, held)
        except KeyboardInterrupt:
            interrupted = Outcome.of(Why.INTERRUPTED, [f"interrupted; the same command continues in {where}"])
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)
        found = interrupted + night.outcome(chosen)
        night.exit_code = None if interrupted.reasons else int(found.exit_code)
        night.save()
    finally:
        os.close(held)
    done = [(p, night.parts[p.name]) for p in chosen if p.name in night.parts]
    rows = [(p.name, d.why or "fine", f"{d.seconds:.0f} s", where / f"{p.name}.log") for p, d in done]
    table(rows, ["part", "outcome", "took", "log"])
    leave(found if chosen else Outcome.of(Why.UNEXECUTED, ["no part was run"]))


def _check(families: Sequence[str], backends: Sequence[str]) -> dict[Spec, Waivers | None]:
    """Return each backend with its known failures.

    UsageError for an unknown family or backend or a malformed waiver file, instead of once per part.
    """
    found = settings.load(None)
    specs = [Spec.parse(b) for b in dict.fromkeys(backends)]
    for spec in specs:
        if not registry.is_taken(registry.resolve(spec).name):
            raise UsageError(f"--backend {spec}: is not installed; known: {', '.join(registry.names())}")
    for f in families:
        family_named(f)
    waivers = found.waivers_of(specs, None)
    return {s: waivers.get(s) for s in specs}
