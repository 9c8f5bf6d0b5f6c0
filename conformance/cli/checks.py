"""`conform learn`, `card` and `golden`: checks of what backends claim, of rounding and of pinned values."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from conformance.backend.card import Card, read
from conformance.backend.registry import build_of
from conformance.ggml.arithmetic import EXACT
from conformance.judge.outcome import Outcome, Why, judge
from conformance.judge.verdict import FAILURES, Result, Totals, counted
from conformance.report.runfile import record, write_json, write_text
from conformance.run import golden as corpus
from conformance.run import learn as learning
from conformance.run.isolation.isolate import Isolation
from conformance.run.learn.kept import beside, resume
from conformance.run.learn.plain import plain
from conformance.run.runner import Runner
from conformance.run.session.settings import Waiving, today
from conformance.suite.family import Level

from .options import (
    ExistingFile,
    File,
    backend_option,
    config_option,
    isolation,
    json_option,
    settings_here,
    smoke_option,
    specs_here,
)
from .output import Group, leave, line, table


@click.command()
@click.argument("backend", metavar="BACKEND")
@config_option
@smoke_option
@click.option("-o", "--output", type=File, metavar="CARD",
              help="Write the card; until it is whole, CARD.partial, with which the next start goes on.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True),
              help="Begin no key after that; the next start with the same -o goes on.")  # fmt: skip
@click.option("--against", type=ExistingFile, metavar="CARD", help="An earlier card: who became less exact fails.")
@isolation
def learn(
    backend: str, level: Level, output: Path | None, minutes: float | None, against: Path | None, isolation: Isolation
) -> None:
    """Measure how a device rounds that declares nothing, and write its card, which the option card=FILE of the adapter
    ggml takes.

    Exit code 1 where an error looks like a fault and not like rounding, or is larger than --against allows; 3 where
    nothing could be measured; 5 where keys are left by --minutes or Ctrl-C: see docs/exit-codes.md.
    """
    before = None if against is None else read(against)
    (spec,), _ = specs_here([backend], isolation)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    keys = plain(level)
    runner = Runner(isolation=isolation)
    made = learning.begin(runner.backend(spec), build_of(spec))
    made = made if output is None else resume(beside(output), made)
    if known := len(keys) - len(learning.left(made, keys)):
        line(f"{known} of {len(keys)} keys are known from an earlier start", err=True)
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
    made = made if left else _whole(output, made)
    show_card(made)
    worse = [] if before is None or against is None else learning.worse(before, made, str(against))
    for text in worse:
        line(text)
    findings = sum(bool(e.finding) for e in made.entries.values())
    where = f"; {beside(output)} is a card that the next start goes on with" if output else ""
    word = "interrupted" if interrupted else "time limit (--minutes)"
    why = f"{word}: {left} of {len(keys)} keys are not measured{where}"
    leave(
        Outcome.of(Why.FAILED, [counted(findings, "finding")] if findings else [])
        + Outcome.of(Why.FAILED, [f"{counted(len(worse), 'key')} less exact than {against}"] if worse else [])
        + Outcome.of(Why.INTERRUPTED if interrupted else Why.TIME_LIMIT, [why] if left else [])
        + Outcome.of(Why.UNEXECUTED, [] if made.entries else ["no key was measured"])
    )


def _whole(output: Path | None, made: Card) -> Card:
    """A card on which all keys stand, so that no other is allowed anything; written to where it goes."""
    made = replace(made, others=False)
    if output is not None:
        write_text(output, made.to_toml(), "-o")
        beside(output).unlink(missing_ok=True)
    return made


def _keep(output: Path | None, made: Card, key: str) -> None:
    """Write a card that has `key` since now beside where it goes to, and print what that became."""
    if output is not None:
        write_text(beside(output), made.to_toml(), "-o")
    if (entry := made.entries.get(key)) is not None:
        line(f"{key}: {entry.rounding}, residual {entry.residual:.2g} {entry.finding}", err=True)


@click.command()
@click.argument("file", metavar="CARD", type=ExistingFile)
def card(file: Path) -> None:
    """Print a card that `conform learn` wrote: how the device rounds, what is allowed, and what that would hide."""
    show_card(read(file))


def show_card(card: Card) -> None:
    """Print a card: a line for each key that float32 rounding does not explain, and the number of the others."""
    line(f"{card.device}: {card.description}, {', '.join(f'{k} {v}' for k, v in card.versions.items())}")
    rows, exact = [], 0
    for key, e in card.entries.items():
        exact += e.rounding == EXACT.name and not e.bound and not e.finding
        if e.rounding != EXACT.name or e.bound or e.finding:
            op, _, types = key.partition("-")
            rows.append((op, types, e.rounding, f"{e.residual:.1e}", f"{e.bound:.1e}" if e.bound else "–", e.blind))
    table(rows, ["op", "types", "rounding", "residual", "bound", "blind to"], disable_numparse=True)
    line(f"{exact} more keys are exact up to float32 rounding")
    for key, e in card.entries.items():
        if e.finding:
            line(f"no rounding: {key}: {e.finding}")


@click.group(cls=Group)
def golden() -> None:
    """Golden outputs: the pinned corpus of expected values."""


_corpus = click.option("--corpus", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False),
                       metavar="DIR", help="Golden outputs to take; default: those that come along.")  # fmt: skip


@golden.command()
@backend_option
@_corpus
@json_option
@isolation
def verify(backends: Sequence[str], folder: Path | None, json_path: Path | None, isolation: Isolation) -> None:
    """Compute every golden value again on the reference and on the real ggml; with --backend, judge backends by them.

    Exit code 1 where a value differs, 2 where a file is damaged.
    """
    if not backends:
        _golden(corpus.verify(folder), json_path)
    specs, _ = specs_here(backends, isolation)
    waiving = Waiving(settings_here().waivers_of(specs, None), today())
    _golden(list(corpus.judge(specs, folder, isolation, waiving)), json_path)


@golden.command()
@_corpus
@click.option("--add", multiple=True, metavar="GLOB", help="Take these cases of any level, too; repeatable.")
@click.option("--remove", multiple=True, metavar="GLOB", help="Give up these cases; repeatable.")
@json_option
def update(folder: Path | None, add: Sequence[str], remove: Sequence[str], json_path: Path | None) -> None:
    """Compute the golden values again; one is accepted only where the reference and the real ggml agree within budget.

    The file is the list of its cases. One whose values are the same keeps its bytes.
    """
    line(f"golden: what is accepted goes to {corpus.writable(folder)}", err=True)
    _golden(corpus.update(folder, add=add, remove=remove), json_path)


def _golden(results: list[Result], json_path: Path | None) -> NoReturn:
    backends: dict[str, list[Result]] = {}
    for r in results:
        backends.setdefault(r.backend, []).append(r)
        if r.verdict in FAILURES:
            line(r.sentence())
    if json_path:
        write_json(json_path, record(results))
    for name, own in backends.items():
        line(f"{name}: {Totals.of(own)}")
    leave(judge(results))
