"""`conform report`: the page and other reports of runs, and the database of results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import click

from conformance.case.case import JSON
from conformance.causes.same import same
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.outcome import Outcome, Why, coverage, judge, lost_coverage
from conformance.judge.verdict import Missing, Verdict, counted
from conformance.perf import history
from conformance.perf.history import FEWEST, Change, History
from conformance.report.compare import Comparison, compare, compare_builds
from conformance.report.junit import junit
from conformance.report.markdown import markdown
from conformance.report.matrix import csv_ops
from conformance.report.page import page
from conformance.report.page.tables import read_history
from conformance.report.runfile import write_json
from conformance.report.runs import Runs, read_runs, unproven
from conformance.run.session.select import case_ids
from conformance.run.session.shard import missing as missing_shards
from conformance.suite.family import LEVELS, Level

from .options import File, Folder, json_option
from .output import leave, line, table

_Runs = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=_Runs, metavar="RUN…")
@click.option("--against", "bases", multiple=True, type=_Runs, metavar="RUN",
              help="Earlier run to compare with, repeatable.")  # fmt: skip
@click.option("--store", type=File, metavar="DB", help="Add the runs to this database, and show its trends.")
@click.option("--nightly", is_flag=True, help="Include the times of these runs in trends.")
@click.option("--level", type=click.Choice(LEVELS), help="List cases of this level that are in no run.")
@click.option("-o", "--output", type=Folder, metavar="DIR", help="Write the page, Markdown, JUnit and CSV to DIR.")
@json_option
def report(
    paths: Sequence[Path],
    bases: Sequence[Path],
    store: Path | None,
    nightly: bool,
    level: Level | None,
    output: Path | None,
    json_path: Path | None,
) -> None:
    """Report on runs: RUN is a record that --json wrote, or a folder of records.

    -o writes index.html (a single page), summary.md, junit.xml and ops.csv. --store adds the runs to a SQLite database
    and prints when each cause was first seen, where rates changed, and the last good run. --json writes the same as
    JSON.

    Exit codes with -o are those of the runs: 1 failures, cases without a result, a missing shard, or with --against
    cases that passed and are no longer executed, 3 no cases ran or none passed on a backend, 5 a run that was
    stopped: see docs/exit-codes.md. Without -o failures in the runs do not change the exit code.
    """
    if output is None and store is None:
        raise UsageError("-o DIR, for the reports, or --store DB expected")
    runs = read_runs(paths)
    base = read_runs(bases) if bases else None
    against = _against(runs, base) if base else compare_builds(runs)
    if store:
        _store(store, runs, nightly=nightly, json_path=json_path)
    if output is None:
        return
    stored = read_history(store) if store else None
    planned: dict[str, list[str]] = {level: case_ids((), (), level)} if level else {}
    now = datetime.now(timezone.utc)
    texts = {
        "index.html": page(runs, now=now, planned=planned, stored=stored, against=against),
        "summary.md": markdown(runs, where="index.html", against=against),
        "junit.xml": junit(runs),
        "ops.csv": csv_ops(runs.results),
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = output / name
            path.write_text(text, encoding="utf-8")
            line(f"{path}: {len(text):,} bytes")
    except OSError as e:
        raise UsageError(f"-o {output}: a folder that can be written expected: {e.strerror}") from e
    if against:
        line(against.sentence())
    leave(outcome_of(runs) + _shards(runs) + (_lost(runs, base) if base else Outcome()))


def _store(store: Path, runs: Runs, *, nightly: bool, json_path: Path | None) -> None:
    """Add runs to the database, and print its causes, good runs and changes."""
    with closing(History(store, create=True)) as h:
        for document in runs.documents:
            added = h.add(document.body, nightly=nightly)
            known = f", {added.known} were there" if added.known else ""
            line(f"{document.path}: {document.run[:8]}: {added.new} new rows{known}")
        for path in runs.passed_over:
            line(f"{path}: ignored, not a run file", err=True)
        causes, good, every = history.causes(h), history.last_good(h), history.series(h)
        stored = history.runs(h) if json_path else []
    if causes:
        head = ["first seen", "last seen", "runs", "passed since", "cause", "backend", "cases", "what"]
        rows = [
            (k.first, k.last, k.runs, k.passed, k.cause, k.backend, k.cases, f"{k.verdict} {k.sentence}")
            for k in causes
        ]
        table(rows, head, disable_numparse=True)
        line(f"{counted(len(causes), 'cause')}, {sum(not k.passed for k in causes)} still open")
    for backend, written in good.items():
        line(f"last good run on {backend}: {written or 'none'}")
    judged = [s for s in every if len(s.points) >= FEWEST]
    changes: list[Change] = []
    try:
        changes = history.changes(judged)
    except UnavailableError as e:
        line(str(e), err=True)
    if changes:
        head = ["between", "and", "case", "backend", "machine", "before", "after", "change", "p"]
        table([_change(c) for c in changes], head, disable_numparse=True)
    if every:
        line(f"{counted(len(changes), 'change point')} in {len(judged)} nightly series; "
             f"{len(every) - len(judged)} others have fewer than {FEWEST} runs")  # fmt: skip
    if json_path:
        told = {"causes": list(map(asdict, causes)), "runs": list(map(asdict, stored)), "last_good": good}
        write_json(json_path, {"schema": 1, **told, "changes": list(map(asdict, changes))})


def _change(c: Change) -> Sequence[str]:
    s = c.series
    rates = (f"{rate:.4g} {s.of}/s" for rate in (c.before, c.after))
    words = (c.since.written, c.at.written, s.case, s.backend, s.machine, *rates)
    return (*words, f"{100 * c.ratio - 100:+.1f} %", f"{c.p:.1g}")


def outcome_of(runs: Runs) -> Outcome:
    """Return the outcome of `runs`."""
    current = {r.document for r in runs.results} | {r.document for r in runs.missing}
    old = {r.document for r in runs.superseded} - current
    waivers = [text for d in runs.documents if d not in old for text in d.body.get("waivers") or ()]
    unlisted = [
        f"no result for {counted(n, 'case')} on {backend}: {d.path} does not list the requested cases"
        for d, backend, n in runs.unlisted()
    ]
    bases = {t.against: t.backend for t in runs.setups() if t.against}
    results = [r.value for r in runs.results if r.value.backend not in bases]
    before = {(bases[r.value.backend], r.value.case): r.value for r in runs.results if r.value.backend in bases}
    judged = judge(
        results, missing_in(runs), waivers=waivers, unproven=_unproven(runs), before=before if bases else None
    )
    return judged + Outcome.of(Why.MISSING, unlisted)


def missing_in(runs: Runs) -> list[Missing]:
    """Return the cases of `runs` without a result."""
    return [m.value for m in runs.missing]


def _shards(runs: Runs) -> Outcome:
    """Return a failure for each shard of a run that is missing, on any of its backends."""
    shards: dict[str, list[JSON]] = {}
    for d in runs.documents:
        for backend in d.body.get("asked", ()) if d.body.get("shard") else ():
            shards.setdefault(backend, []).append(d.body["shard"])
    return Outcome.of(Why.SHARD, [f"{b}: {sentence}" for b, own in shards.items() for sentence in missing_shards(own)])


def _lost(runs: Runs, base: Runs) -> Outcome:
    """Return a failure if cases passed in the base and are no longer executed."""
    passed: dict[str, dict[str, None]] = {}
    for r in base.results:
        if r.value.verdict is Verdict.PASS and not r.value.fresh:
            passed.setdefault(r.value.backend, {})[r.value.case] = None
    return coverage(lost_coverage(passed, (r.value for r in runs.results), missing_in(runs)), passed)


def _against(runs: Runs, base: Runs) -> Comparison:
    """Compare two runs; the same cause may have another id in each."""
    before, after = ([c.value for c in of.causes] for of in (base, runs))
    return compare(runs, base, {known: found for found, known in same(before, after).items()})


def _unproven(runs: Runs) -> list[str]:
    """Return why shards prove nothing about a backend, unless it has a newer PASS."""
    passed = {(r.document.machine, r.value.backend) for r in runs.results if r.value.verdict is Verdict.PASS}
    machines = {d.machine: [x.body for x in runs.documents if x.machine == d.machine] for d in runs.documents}
    sentences = [(m, b, sentence) for m, bodies in machines.items() for b, sentence in unproven(bodies).items()]
    return [sentence for m, b, sentence in sentences if (m, b) not in passed]
