"""`conform nightly`: runs a fixed list of commands, one after the other."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import click

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.waivers import Waivers
from conformance.nightly import Night, Options, held, share, steps, today, unfinished
from conformance.process.memory import cores
from conformance.run.session import settings
from conformance.run.session.select import family_named, parse_specs
from conformance.run.session.shard import Shard

from .options import BACKEND, BUDGET, FAMILY, JOBS, LEVEL, SEED, SHARD, Folder, duration
from .output import leave, line, table

FOLDER = Path("nightly")
"""Default folder of nightly runs; each has a subfolder."""
SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n))
"""Signals that end a nightly as Ctrl-C does; Windows has no SIGHUP."""
NAMES = [s.name for s in steps(Path(), Options(), 0, Path())]


@click.command(epilog=f"Parts: {', '.join(NAMES)}.")
@click.option("-o", "--output", "folder", type=Folder, metavar="DIR",
              help="Folder to start or continue in; default: nightly/DATE.")  # fmt: skip
@click.option("--part", "names", multiple=True, metavar="NAME", help="Run only this part, repeatable.")
@LEVEL.click(help="How many cases.", default="standard", show_default=True)
@BACKEND.click(metavar="NAME")
@FAMILY.click()
@SEED.click(help="Seed of generated cases; default: a new one.")
@SHARD.click()
@BUDGET.click(help="Time for fresh random cases: 90s, 30m, 2h.", default="15m", show_default=True)
@JOBS.click()
@click.option("--limit", type=duration, default="6h", show_default=True, metavar="TIME",
              help="End a part after this time; the next start continues it.")  # fmt: skip
@click.option("--against", metavar="NAME", help="Baseline backend of the performance gates.")
@click.option("--continue", "resumes", is_flag=True, help="Continue an unfinished nightly of an earlier day.")
def nightly(
    folder: Path | None,
    names: Sequence[str],
    level: str,
    backends: Sequence[str],
    families: Sequence[str],
    seed: int | None,
    shard: Shard,
    budget: float,
    jobs: int | None,
    limit: float,
    against: str | None,
    resumes: bool,
) -> None:
    """Run every case, the golden outputs, the audit and the speed gates; write a page.

    To continue an interrupted run, start it again with the same options on the same day, or with --continue.
    Exit codes: 1 failures or regressions, or a part could not run, 3 a part ran no cases, 5 a part was interrupted or
    left a gate undecided: see docs/exit-codes.md.
    """
    if unknown := [n for n in names if n not in NAMES]:
        raise UsageError(f"--part {unknown[0]}: one of {', '.join(NAMES)} expected")
    tested = _check(families, [*(backends or registry.defaults()), *([against] if against else [])])
    options = Options(level, tuple(backends), tuple(families), shard, budget, against, jobs or cores(), limit)
    asked = options.to_json(tested)
    where = folder or (unfinished(FOLDER, asked, seed) if resumes else None) or FOLDER / today()
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {where}: cannot be created: {e.strerror}") from e
    with held(where):
        night = Night.begin(where, asked, seed, resumes=resumes)
        line(f"{where}: --seed {night.seed}")
        every = steps(where, options, night.seed, where if folder else FOLDER)
        chosen = [s for s in share(every, shard) if not names or s.name in names]
        interrupted = Outcome()
        before = {n: signal.signal(n, signal.default_int_handler) for n in SIGNALS}
        try:
            night.run(chosen, line)
        except KeyboardInterrupt:
            interrupted = Outcome.of(Why.INTERRUPTED, [f"interrupted; the same command continues in {where}"])
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)
        found = interrupted + night.outcome(chosen)
        night.exit_code = None if interrupted.reasons else int(found.exit_code)
        night.save()
    done = [(s.name, night.done[s.name]) for s in chosen if s.name in night.done]
    rows = [(name, str(d), f"{d.seconds:.0f} s", where / f"{name}.log") for name, d in done]
    table(rows, ["part", "outcome", "took", "log"])
    leave(found if chosen else Outcome.of(Why.UNEXECUTED, ["no part was run"]))


def _check(families: Sequence[str], backends: Sequence[str]) -> dict[Spec, Waivers | None]:
    """Return each backend with its known failures.

    UsageError for an unknown family or backend or a malformed waiver file, instead of once per part.
    """
    found = settings.load(None)
    specs = parse_specs(backends)
    for f in families:
        family_named(f)
    waivers = found.waivers_of(specs, None)
    return {s: waivers.get(s) for s in specs}
