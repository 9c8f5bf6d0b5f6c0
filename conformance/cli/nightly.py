"""`conform nightly` and, in a checkout, `ci/nightly`: options, signals, the exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.case.leftover import write_whole
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.text import printable_lines
from conformance.judge.outcome import Exit, Outcome, Why
from conformance.nightly import summary
from conformance.nightly.night import Night, outcome
from conformance.nightly.parts import PARTS, Options, Part
from conformance.nightly.state import FILE as STATE
from conformance.nightly.state import State, begin, hold, read, unfinished
from conformance.report.markdown import cut
from conformance.run.session import settings
from conformance.run.session.environment import environment
from conformance.run.session.select import family_named
from conformance.run.session.shard import Shard, missing

from .options import BACKEND, FAMILY, LEVEL, SEED, SHARD, ExistingFolder, File, Folder
from .output import line

FOLDER = Path("nightly")
"""Where nights are kept unless told otherwise, one folder each."""
SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))
"""What ends a night cleanly; Windows has no SIGHUP."""
SHOWN = 8000
"""Bytes of the summary on the terminal."""
EXIT_CODES = """Exit codes: 0 fine; 1 failures or regressions, a part could not run, or cases or a shard are missing; 2
wrong words; 3 nothing executed, or nothing passed on a backend; 5 a part timed out or decided nothing, or a signal
interrupted it: start it again to go on. See docs/exit-codes.md."""


class Interrupted(BaseException):
    """A signal asked for the end; its argument is the signal's number."""


@click.command(epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-o", "folder", type=Folder, metavar="DIR",
              help="Where everything goes; what was begun there goes on. Default: in nightly/ the unfinished night, or "
              "today's.")  # fmt: skip
@LEVEL.click(help="How many cases.", default="standard", show_default=True)
@BACKEND.click(metavar="NAME")
@FAMILY.click()
@SEED.click(help="What this night's generated cases are drawn from, to repeat a night; default: a new one, "
            "which is printed.")  # fmt: skip
@click.option("--parts", metavar="NAME,…", help="Only these; default: all. --list shows them.")
@click.option("--time-budget", "budget", type=click.FloatRange(min=0), default=900.0, show_default=True,
              metavar="SECONDS", help="For fresh random cases.")  # fmt: skip
@click.option("--gate-budget", type=click.FloatRange(min=1), default=90.0, show_default=True, metavar="SECONDS",
              help="Of measuring, for each performance gate.")  # fmt: skip
@click.option("--base", type=ExistingFolder, metavar="VENV",
              help="The build that performance gates compare with; without it those gates are not run.")  # fmt: skip
@click.option("--release", metavar="BUILD", default="", help="A build of llama.cpp to test, too, on all its devices.")
@click.option("--release-base", metavar="BUILD", default="", help="The build before it.")
@SHARD.click(help="The I-th of N machines that share the night.")
@click.option("--store", type=File, metavar="FILE", help="The history; default: history.sqlite beside DIR.")
@click.option("--label", metavar="TEXT", help="Of this kind of machine, in the summary; default: its system.")
@click.option("--merge", "merged", multiple=True, type=ExistingFolder, metavar="DIR",
              help="Run nothing: one history, page and summary of the nights in DIR; repeatable.")  # fmt: skip
@click.option("--expect", type=click.IntRange(min=1), metavar="N",
              help="With --merge: how many nights there must be in all DIR.")  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="Print the parts and what they run, and end.")
@click.pass_context
def nightly(
    ctx: click.Context,
    folder: Path | None,
    level: str,
    backends: Sequence[str],
    families: Sequence[str],
    seed: int | None,
    parts: str | None,
    budget: float,
    gate_budget: float,
    base: Path | None,
    release: str,
    release_base: str,
    shard: Shard,
    store: Path | None,
    label: str | None,
    merged: Sequence[Path],
    expect: int | None,
    listing: bool,
) -> None:
    """Run the suite, the audit, speed and its gates in one night; --list prints the parts.

    Not included: live families other than audit, and check-model. Gates against an older build need --base. An
    interrupted night resumes when it is started again with the same options.
    """
    table: tuple[Part, ...] = ctx.obj or PARTS
    _check(families, backends)
    chosen = _chosen(table, parts, merged)
    if listing:
        click.echo("\n".join(f"{p.name}: {p.says}; at most {p.limit / 3600:g} h" for p in chosen))
        return
    request: dict[str, JSON] = {
        "level": level,
        "backends": list(backends),
        "families": list(families),
        "shard": str(shard),
        "merged": [str(m) for m in merged],
    }
    where = folder or _folder(request, seed)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {where}: cannot be made: {e.strerror}") from e
    lock = hold(where)
    others = [read(f.parent) for m in merged for f in sorted(m.rglob(STATE)) if f.parent.resolve() != where.resolve()]
    if merged and not others:
        raise UsageError(f"--merge {merged[0]}: no night is there")
    if others:
        request["level"] = level = str(others[0].asked["level"])
    state = begin(where, label or str(environment()["system"]), request, seed)
    if not merged:
        _say(f"seed of this night: {state.seed}; repeat it with `conform nightly --seed {state.seed}`")
    history = store or where.parent / "history.sqlite"
    options = Options(
        where, level, tuple(backends), tuple(families), shard, budget, gate_budget, history, state.seed, base,
        release, release_base,
    )  # fmt: skip
    try:
        night = Night(options, state, chosen, table, lock, others, _say)
        _run(night, [p.name for p in table], *_gaps(others, expect or len(others)))
    finally:
        os.close(lock)


def main(table: Sequence[Part] = PARTS) -> NoReturn:
    """Run with the words of the command line."""
    try:
        nightly(obj=tuple(table), prog_name="conform nightly")
    except ConformanceError as e:
        line(f"conform nightly: {' '.join(str(e).split())}", err=True)
        sys.exit(Exit.USAGE)
    sys.exit()


def _check(families: Sequence[str], backends: Sequence[str]) -> None:
    """Refuse at once what every part would refuse: UsageError for an unknown family or backend."""
    settings.load(None)
    for b in backends:
        if not registry.is_taken(registry.resolve(Spec.parse(b)).name):
            raise UsageError(f"--backend {b}: is not installed; known: {', '.join(registry.names())}")
    for f in families:
        family_named(f)


def _folder(request: dict[str, JSON], seed: int | None) -> Path:
    """Where a night goes that was given no folder: to today's, or on with one that a restart past midnight left."""
    today = FOLDER / datetime.now(timezone.utc).strftime("%Y-%m-%d")
    if (today / STATE).exists() or request["merged"]:
        return today
    earlier = unfinished(FOLDER, request, seed)
    if earlier is not None:
        _say(f"{earlier}: going on with the night there, which did not come to its end; -o DIR begins another")
    return earlier or today


def _chosen(table: Sequence[Part], names: str | None, merged: Sequence[Path]) -> list[Part]:
    if names is None:
        return [p for p in table if p.last or not merged]
    wanted = [n.strip() for n in names.split(",")]
    known = [p.name for p in table]
    for n in wanted:
        if n not in known:
            raise UsageError(f"--parts {names}: part {n!r} is unknown; known: {', '.join(known)}")
    chosen = [p for p in table if p.name in wanted and (p.last or not merged)]
    if not chosen:
        only = ", ".join(p.name for p in table if p.last)
        raise UsageError(f"--parts {names}: --merge runs nothing again, so one of {only} is expected")
    return chosen


def _run(night: Night, names: Sequence[str], lacking: Sequence[str], unproven: Sequence[str]) -> NoReturn:
    before = {n: signal.getsignal(n) for n in SIGNALS}
    for n in SIGNALS:
        if before[n] is not signal.SIG_IGN:  # as under nohup
            signal.signal(n, _interrupt)
    states = [*night.others, night.state]
    try:
        interrupted = Outcome()
        try:
            night.run()
        except Interrupted as e:
            interrupted = Outcome.of(Why.INTERRUPTED, [f"interrupted by {signal.Signals(e.args[0]).name}"])
        found = interrupted + outcome(states, names, lacking, unproven)
        night.state.exit_code = None if interrupted.reasons else int(found.exit_code)
        night.state.save()
        _sum_up(night, states, names, [*lacking, *unproven], found)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    sys.exit(found.exit_code)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


def _gaps(states: Sequence[State], expected: int) -> tuple[list[str], list[str]]:
    """Nights, by their number, and shards that are not here; and backends on which nothing passed in all shards."""
    groups: dict[str, list[dict[str, JSON]]] = {}
    for s in states:
        groups.setdefault(s.label, []).extend(summary.documents(s))
    lacking = [f"{expected} nights were expected, {len(states)} are here"] if expected != len(states) else []
    unproven = []
    for label, documents in groups.items():
        lacking += [f"{label}: {why}" for why in missing([d["shard"] for d in documents if "shard" in d])]
        unproven += [f"{label}: {why}" for why in summary.unproven(documents).values()]
    return lacking, unproven


def _sum_up(
    night: Night, states: Sequence[State], names: Sequence[str], lacking: Sequence[str], found: Outcome
) -> None:
    folder = night.options.folder
    failing = summary.failures(states, folder)
    text = summary.summary(states, names, failing, lacking, found)
    _written(folder / summary.FILE, text)
    _written(folder / summary.REPRODUCE, summary.reproduce(failing))
    if step := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(step).open("a", encoding="utf-8") as f:
                f.write(text)
        except OSError as e:
            _say(f"{step} cannot be written: {e.strerror}")
    _say(cut(text, SHOWN, summary.REST))
    for reason in found.lines():
        _say(reason)
    _say(f"{folder / summary.FILE}: {summary.words(found)}; exit code {found.exit_code}")


def _written(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as e:
        _say(f"{path} cannot be written: {e.strerror}")


def _say(text: str) -> None:
    """Print; a terminal or a pipe that is gone does not end the night."""
    try:
        click.echo(printable_lines(text))
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
