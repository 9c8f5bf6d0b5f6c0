"""`python -m tests.trust backtest`: check that known bugs are found in old builds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from conformance.cli.options import BUDGET, ExistingFile, isolation, json_option
from conformance.cli.output import leave, line, table
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.llama.release.prepare import inspect, prepare
from conformance.llama.release.release import Release
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation

from . import backtest as past
from .backtest import Answer, Attempt

FAULTS = Path(__file__).with_name("backtest.toml")
"""The default list. A file in the current directory must not choose packages to download and load."""


@click.command()
@click.argument("path", metavar="[TOML]", required=False, type=ExistingFile, default=FAULTS)
@click.option("--link", "links", multiple=True, metavar="TEXT", help="Test only faults whose link contains TEXT.")
@BUDGET.click(help="Maximum time per fault: 90s, 30m, 2h.")
@json_option
@isolation
def backtest(
    path: Path, links: Sequence[str], budget: float | None, json_path: Path | None, isolation: Isolation
) -> None:
    """Check that known bugs are found in old builds, and not in builds with the fix.

    TOML lists the faults (docs/trust.md); default: tests/trust/past/backtest.toml. Exit codes: 1 a fault is missed, or
    some builds could not be tested, 3 no build could be tested, 5 interrupted.
    """
    faults = [f for f in past.read(path) if not links or any(g in f.link for g in links)]
    if not faults:
        raise UsageError(f"{path}: no fault matches --link {', '.join(links)}")

    say = partial(line, err=True)

    def release(bad: str, good: str, name: str, seconds: float) -> Release:
        builds = inspect(bad, say), inspect(good, say)
        return prepare(*builds, [name], min(seconds, budget or seconds), "standard", isolation, say)

    rows: list[Attempt] = []
    interrupted = Outcome()
    try:
        for row in past.attempt(faults, release):
            rows.append(row)
            line(row.sentence())
    except KeyboardInterrupt:
        interrupted = Outcome.of(Why.INTERRUPTED, ["interrupted; finished attempts are recorded"])
    tried = [a for a in rows if not a.error]
    _show_counts(rows)
    if json_path:
        write_json(json_path, [a.to_json() for a in rows])
    missed = [f"{a.answer}: {a.fault.link}" for a in tried if a.answer is not Answer.FOUND]
    absent = [f"could not be tested: {a.fault.link}: {a.error}" for a in rows if a.error]
    leave(
        Outcome.of(Why.FAILED, missed)
        + Outcome.of(Why.MISSING if tried else Why.UNEXECUTED, absent)
        + interrupted
        + Outcome.of(Why.UNEXECUTED, [] if rows else ["no build was tested"])
    )


def _show_counts(rows: Sequence[Attempt]) -> None:
    tried = [a for a in rows if not a.error]
    for known, words in ((False, "not known before"), (True, "known before")):
        if own := [a.answer for a in tried if a.fault.known is known]:
            line(f"{words}: {own.count(Answer.FOUND)} of {len(own)} found")
    if shares := past.rates(rows):
        table([(group, f"{found} of {of}") for group, found, of in shares], ["class", "found"])
    only = sum(a.answer is Answer.OTHER for a in tried)
    line(f"{only} with other findings only; {len(rows) - len(tried)} could not be tested")
