"""`conform precision` and `golden`: rounding of devices, and stored golden outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from conformance.backend.profile import Profile, read
from conformance.backend.registry import build_of
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why, judge
from conformance.judge.verdict import FAILURES, Result, Totals, counted
from conformance.report.runfile import record, write_json, write_text
from conformance.run import golden as corpus
from conformance.run import learn as learning
from conformance.run.isolation.isolate import Isolation
from conformance.run.learn import partial_path, plain, resume
from conformance.run.runner import Runner
from conformance.run.session.settings import WaiverBook, today
from conformance.suite.family import Level

from .options import (
    BUDGET,
    ExistingFile,
    ExistingFolder,
    File,
    backend_option,
    config_option,
    isolation,
    json_option,
    settings_here,
    smoke_option,
    specs_here,
)
from .output import leave, line, table


@click.command()
@click.argument("backend", metavar="BACKEND|FILE")
@config_option
@smoke_option
@click.option("-o", "--output", type=File, metavar="FILE", help="Write the profile to FILE; a second start continues.")
@BUDGET.click()
@click.option(
    "--against", type=ExistingFile, metavar="FILE", help="Fail if a result is less exact than in this profile."
)
@isolation
def precision(
    backend: str, level: Level, output: Path | None, budget: float | None, against: Path | None, isolation: Isolation
) -> None:
    """Measure and print the precision profile of BACKEND, or print the profile in FILE.

    Use a profile to judge a device that declares no rounding: --backend 'ggml?profile=FILE'.

    Exit codes: 1 an error looks like a bug and not like rounding, or is larger than --against allows, 3 nothing was
    measured, 5 --budget or Ctrl-C ended the measurement: see docs/exit-codes.md.
    """
    before = None if against is None else read(against)
    if Path(backend).is_file():
        made, left = read(Path(backend)), Outcome()
    else:
        made, left = _learned(backend, level, output, budget, isolation)
    _show(made)
    worse = [] if before is None or against is None else learning.worse(before, made, str(against))
    for text in worse:
        line(text)
    findings = 0 if Path(backend).is_file() else sum(bool(e.finding) for e in made.entries.values())
    leave(
        Outcome.of(Why.FAILED, [counted(findings, "finding")] if findings else [])
        + Outcome.of(Why.FAILED, [f"{counted(len(worse), 'key')} less exact than {against}"] if worse else [])
        + left
        + Outcome.of(Why.UNEXECUTED, [] if made.entries else ["no key was measured"])
    )


def _learned(
    backend: str, level: Level, output: Path | None, budget: float | None, isolation: Isolation
) -> tuple[Profile, Outcome]:
    """Measure the keys that no earlier start measured; the outcome states how many are left."""
    (spec,), _ = specs_here([backend], isolation)
    end = math.inf if budget is None else time.monotonic() + budget
    keys = plain(level)
    runner = Runner(isolation=isolation)
    made = learning.begin(runner.backend(spec), build_of(spec))
    made = made if output is None else resume(partial_path(output), made)
    if known := len(keys) - len(learning.left(made, keys)):
        line(f"{known} of {len(keys)} keys were measured by an earlier start", err=True)
    interrupted = False
    try:
        for key, ids in learning.left(made, keys).items():
            if time.monotonic() >= end:
                break
            made = learning.learn(made, runner.backend(spec), runner.oracle, key, ids)
            _keep(output, made, key)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        runner.close()
    left = len(learning.left(made, keys))
    where = f"; the next start continues with {partial_path(output)}" if output else ""
    word = "interrupted" if interrupted else "time limit (--budget)"
    why = f"{word}: {left} of {len(keys)} keys are not measured{where}"
    outcome = Outcome.of(Why.INTERRUPTED if interrupted else Why.TIME_LIMIT, [why] if left else [])
    return (made if left else _whole(output, made)), outcome


def _whole(output: Path | None, made: Profile) -> Profile:
    """Mark a profile as complete, so that other keys get no allowance, and write it to its file."""
    made = replace(made, others=False)
    if output is not None:
        write_text(output, made.to_toml(), "-o")
        partial_path(output).unlink(missing_ok=True)
    return made


def _keep(output: Path | None, made: Profile, key: str) -> None:
    """Write an unfinished profile beside its file, and print the result of `key`."""
    if output is not None:
        write_text(partial_path(output), made.to_toml(), "-o")
    if (entry := made.entries.get(key)) is not None:
        line(f"{key}: {entry.rounding}, residual {entry.residual:.2g} {entry.finding}", err=True)


def _show(made: Profile) -> None:
    """Print a profile: a line for each key beyond float32 rounding, and the number of others."""
    line(f"{made.device}: {made.description}, {', '.join(f'{k} {v}' for k, v in made.versions.items())}")
    rows, exact = [], 0
    for key, e in made.entries.items():
        exact += e.rounding == EXACT.name and not e.bound and not e.finding
        if e.rounding != EXACT.name or e.bound or e.finding:
            op, _, types = key.partition("-")
            rows.append((op, types, e.rounding, f"{e.residual:.1e}", f"{e.bound:.1e}" if e.bound else "–", e.blind))
    table(rows, ["op", "types", "rounding", "residual", "bound", "blind to"], disable_numparse=True)
    line(f"{exact} more keys are exact up to float32 rounding")
    for key, e in made.entries.items():
        if e.finding:
            line(f"not a rounding error: {key}: {e.finding}")


@click.command()
@click.argument("do", type=click.Choice(["verify", "update"]), metavar="verify|update")
@backend_option
@click.option("--corpus", "folder", type=ExistingFolder, metavar="DIR", help="Golden outputs; default: the package's.")
@click.option("--add", multiple=True, metavar="GLOB", help="With update: add these cases of any level, repeatable.")
@click.option("--remove", multiple=True, metavar="GLOB", help="With update: remove these cases, repeatable.")
@json_option
def golden(
    do: str, backends: Sequence[str], folder: Path | None, add: Sequence[str], remove: Sequence[str],
    json_path: Path | None,
) -> None:  # fmt: skip
    """Verify or update the golden outputs, the stored expected values.

    verify: recompute them with the reference and the real ggml, or compare each --backend with them. Exit code 1 if a
    value differs, 2 if a file is damaged. update: accept values where the reference and the real ggml agree within
    budget; a file whose values are the same keeps its bytes.
    """
    if do == "update":
        if backends:
            raise UsageError("golden update: --backend: only with verify")
        line(f"golden: accepted values are written to {corpus.writable(folder)}", err=True)
        results = corpus.update(folder, add=add, remove=remove)
    elif add or remove:
        raise UsageError("golden verify: --add, --remove: only with update")
    elif backends:
        specs, _ = specs_here(backends)
        waivers = WaiverBook(settings_here().waivers_of(specs, None), today())
        results = list(corpus.judge(specs, folder, None, waivers))
    else:
        results = corpus.verify(folder)
    by_backend: dict[str, list[Result]] = {}
    for r in results:
        by_backend.setdefault(r.backend, []).append(r)
        if r.verdict in FAILURES:
            line(r.sentence())
    if json_path:
        write_json(json_path, record(results))
    for name, own in by_backend.items():
        line(f"{name}: {Totals.of(own)}")
    leave(judge(results))
