"""`conform release`, `bisect` and `backtest`: builds that somebody ships, each against another."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.builds.build import Build, probe
from conformance.case.case import JSON
from conformance.cli.options import (
    ExistingFile,
    File,
    Folder,
    complete_build,
    isolation,
    json_option,
    repeated_option,
)
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.release import backtest as past
from conformance.release import bisect as halving
from conformance.release.backtest import Answer
from conformance.release.cards import LEARNING, LEARNING_BESIDE, Cards, folder
from conformance.release.cases import Cases
from conformance.release.causes import Found
from conformance.release.record import RECORD, load, results, write
from conformance.release.release import Release, plan
from conformance.release.target import Target, targets
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation
from conformance.run.session.environment import header
from conformance.run.session.untrusted import backends_of
from conformance.suite.family import LEVELS, Level

PATIENCE = 1 / 20
"""Of the time: more than that no request may take, or a few that hang would use it up."""
LEAST = 20.0
"""Seconds that a request may take however little time there is."""
VULKAN = {"GGML_VK_VISIBLE_DEVICES": "0"}
"""ggml-vulkan leaves out drivers that run on the CPU unless a device is named."""
FAULTS = shipped.path().parent / "ci" / "backtest.toml"
"""Of the checkout: a file of the current directory must not choose packages to download and load."""
_device_option = click.option("--device", "devices", multiple=True, metavar="NAME",
                              help="Only targets whose names begin so, repeatable.")  # fmt: skip
_minutes_option = click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=30.0,
                               show_default=True, help="For all of it, causes included.")  # fmt: skip


@click.command()
@click.argument("build", shell_complete=complete_build)
@click.option("--base", metavar="BUILD", shell_complete=complete_build,
              help="The build before: say what is new, fixed, and still there.")  # fmt: skip
@_device_option
@_minutes_option
@click.option("--level", type=click.Choice(LEVELS), default="standard", show_default=True, help="How many cases.")
@click.option("--zoo/--no-zoo", "with_zoo", default=True, help="Let its llama.cpp run whole models, too.")
@click.option("-o", "--output", type=Folder, metavar="DIR", help="Write the page and both builds' results to DIR.")
@click.option("--results", "results_path", type=File, metavar="FILE", help="Write both builds' results to FILE.")
@json_option
@isolation
def release(
    build: str,
    base: str | None,
    devices: Sequence[str],
    minutes: float,
    level: Level,
    with_zoo: bool,
    output: Path | None,
    results_path: Path | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Test BUILD of llama.cpp on each of its devices, against the build before.

    BUILD is a folder, an archive, a wheel, a library, pypi:NAME==VERSION or npm:NAME@VERSION. Exit codes: 1 a cause is
    new (without --base: there is one), or the build refuses cases that the base has right, 3 nothing passed on a
    device, 5 --minutes left cases out: see docs/exit-codes.md.
    """
    begun = since(f"conform release {build}")
    here, before = _probe(build), None if base is None else _probe(base)
    it = _release(here, before, devices, 60 * minutes, level, isolation, with_zoo=with_zoo)
    with Progress().of(begun):
        it.run()
    _show(it)
    document = {**header("release"), **it.to_json()}
    if json_path:
        write_json(json_path, document)
    if results_path:
        write_json(results_path, results(it))
    if output:
        for path in write(output, document, it):
            line(f"{path}: written")
    leave(it.outcome())


def _probe(text: str) -> Build:
    """The build, with a software driver of Vulkan among its devices where there is one."""
    line(f"looking at {text}", err=True)
    found = probe(text)
    if not any(d.name.startswith("Vulkan") for d in found.devices):
        again = probe(text, VULKAN)
        if len(again.devices) > len(found.devices):
            os.environ.update(VULKAN)
            line(f"{text}: {' '.join(f'{k}={v}' for k, v in VULKAN.items())} shows its Vulkan device", err=True)
            found = again
    return found


def _release(
    build: Build,
    base: Build | None,
    devices: Sequence[str],
    seconds: float,
    level: Level,
    isolation: Isolation,
    *,
    with_zoo: bool = True,
) -> Release:
    say = partial(line, err=True)
    isolation = replace(isolation, time_limit=min(isolation.time_limit, max(LEAST, seconds * PATIENCE)))
    begun = time.monotonic()
    cards = Cards(folder(), isolation, progress=say)
    learning = seconds * (LEARNING if base is None else LEARNING_BESIDE)
    chosen = list(cards.give(targets(build, base, devices), build, base, learning))
    seconds -= time.monotonic() - begun
    drives = with_zoo and build.llama and (base is None or base.llama)
    work = plan(chosen, level, models=drives)
    return Release(build, base, chosen, work, seconds, isolation, Cases(isolation, say), say)


def _show(it: Release) -> None:
    totals = it.totals()
    rows = [(t.name, str(totals[t.name]), _note(it, t)) for t in it.targets]
    table(rows, ["device", "verdicts", ""])
    for state in dict.fromkeys(f.state for f in it.found):
        own = [f for f in it.found if f.state is state]
        line("")
        line(f"{state}: {len(own)}" if it.base else f"causes: {len(own)}")
        for n, f in enumerate(own, 1):
            seen = f", {f.cause.seen}" if f.cause.seen else ""
            line(f"{n:3}. {f.cause.id} on {', '.join(f.devices)}{seen}: {f.cause.sentence}")
            line(f"     {'; '.join(filter(None, (f.cause.smallest, f.note, _doubt(it, f))))}")
    if it.base is not None and not it.found:
        line("no cause: neither new, nor fixed, nor still there")
    for row in it.not_run():
        where = f"{row['device']}: " if row["device"] else ""
        line(f"not run: {where}{row['what']}{_cases(row)}: {row['why']}")


def _note(it: Release, target: Target) -> str:
    alone = "" if target.base or not it.base else "not in the base"
    notes = ("a software driver" if target.software else "", alone, target.note)
    return ", ".join(filter(None, notes))


def _doubt(it: Release, found: Found) -> str:
    return "" if it.at(found) == "library" else f"in the {it.at(found)}"


def _cases(row: dict[str, JSON]) -> str:
    return f", {row['cases']} cases" if row["cases"] else ""


@click.command()
@click.argument("cause")
@click.option("--builds", "first", multiple=True, metavar="BUILD…", shell_complete=complete_build,
              help="In order, the oldest first.")  # fmt: skip
@click.argument("others", nargs=-1, metavar="", shell_complete=complete_build)
@click.option("--in", "path", type=ExistingFile, default=Path(RECORD), show_default=True, metavar="FILE",
              help="The record of the release that has the cause.")  # fmt: skip
@repeated_option
@json_option
@isolation
def bisect(
    cause: str,
    first: Sequence[str],
    others: Sequence[str],
    path: Path,
    backends: Sequence[str],
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Find the first of --builds that has CAUSE, an id in the record of `conform release --json`.

    Exit code 3 where all of them have it, or none.
    """
    names = [*first, *others]
    if len(names) < 2:
        raise UsageError("bisect: --builds BUILD BUILD… expected, two at least, the oldest first")
    row = next((c for c in load(path)["causes"] if c["id"] == cause), None)
    if row is None:
        raise UsageError(
            f"{path}: no cause {cause}; it has {', '.join(c['id'] for c in load(path)['causes']) or 'none'}"
        )
    command = ["conform", "bisect", cause, "--in", str(path), "--builds", *names]
    named = str(halving.without_library(Spec.parse(row["backend"])))
    (spec,) = backends_of(path, [named], command, backends).values()
    kind = Cases(isolation)
    found = halving.bisect(row["smallest"], spec, [probe(n) for n in names], kind, _tried)
    line(found.sentence())
    if json_path:
        rows = [{"build": t.build.name, **t.result.to_json()} for t in found.tried]
        write_json(json_path, {**header("bisect"), "cause": cause, "answer": found.sentence(), "tried": rows})
    leave(Outcome.of(Why.UNPROVEN, [] if found.found else ["the builds do not differ: no first one is found"]))


def _tried(tried: halving.Tried) -> None:
    line(f"{tried.build.name}: {tried.result.sentence()}", err=True)


@click.command()
@click.option("--file", "path", type=ExistingFile, default=FAULTS, metavar="TOML", help="Default: the checkout's own.")
@click.option("--link", "globs", multiple=True, metavar="TEXT", help="Only faults whose link has this, repeatable.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="At most, for each fault.")
@click.option("--zoo/--no-zoo", "with_zoo", default=True, help="Let each llama.cpp run whole models, too.")
@json_option
@isolation
def backtest(
    path: Path,
    globs: Sequence[str],
    minutes: float | None,
    with_zoo: bool,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Is each fault of the past found in the build that has it, and gone from the one that has not?

    Exit codes: 1 one is missed, 3 no build could be tested, 5 interrupted: see docs/exit-codes.md.
    """
    faults = [f for f in past.read(path) if not globs or any(g in f.link for g in globs)]
    if not faults:
        raise UsageError(f"{path}: no fault is left by --link {', '.join(globs)}")

    def prepare(bad: str, good: str, name: str, seconds: float) -> Release:
        seconds = seconds if minutes is None else min(seconds, 60 * minutes)
        return _release(_probe(bad), _probe(good), [name], seconds, "standard", isolation, with_zoo=with_zoo)

    answers: list[Answer] = []
    interrupted = Outcome()
    try:
        for answer in past.attempt(faults, prepare):
            answers.append(answer)
            line(answer.sentence())
    except KeyboardInterrupt:
        interrupted = Outcome.of(Why.INTERRUPTED, ["interrupted; what was tried is recorded"])
    tried = [a for a in answers if not a.error]
    found = [a for a in tried if a.found and not a.after]
    line(f"{len(found)} of {len(tried)} found before and gone after; {len(answers) - len(tried)} could not be tried")
    if json_path:
        rows: list[JSON] = [a.to_json() for a in answers]
        write_json(json_path, {**header("backtest"), "faults": rows, "found": len(found), "tried": len(tried)})
    missed = [f"not found: {a.fault.link}" for a in tried if a not in found]
    absent = [f"could not be tried: {a.fault.link}: {a.error}" for a in answers if a.error]
    leave(
        Outcome.of(Why.FAILED, missed)
        + Outcome.of(Why.MISSING if tried else Why.UNEXECUTED, absent)
        + interrupted
        + Outcome.of(Why.UNEXECUTED, [] if answers else ["no build was tried"])
    )
