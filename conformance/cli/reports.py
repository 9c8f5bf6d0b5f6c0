"""`conform report`: the page and other reports of runs, and trends of many runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import click

from conformance.case.case import JSON
from conformance.causes.same import same
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why, coverage, judge, lost_coverage
from conformance.judge.verdict import Missing, Verdict, counted
from conformance.report.compare import Comparison, compare, compare_builds
from conformance.report.junit import junit
from conformance.report.markdown import markdown
from conformance.report.matrix import csv_ops
from conformance.report.page import page
from conformance.report.page.tables import changed
from conformance.report.runfile import write_json
from conformance.report.runs import Runs, read_runs, unproven
from conformance.report.trend import FEWEST, Change, Trend, changes, pairs_of, read_trend
from conformance.run.session.select import case_ids
from conformance.run.session.shard import missing as missing_shards
from conformance.suite.family import LEVELS, Level

from .options import ExistingFolder, Folder, json_option
from .output import leave, line, table

_Runs = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=_Runs, metavar="RUN…")
@click.option("--against", "bases", multiple=True, type=_Runs, metavar="RUN",
              help="Earlier run to compare with, repeatable.")  # fmt: skip
@click.option(
    "--trend", "folder", type=ExistingFolder, metavar="DIR", help="Show trends of the runs in DIR and of these."
)
@click.option("--level", type=click.Choice(LEVELS), help="List cases of this level that are in no run.")
@click.option("-o", "--output", type=Folder, metavar="DIR", help="Write the page, Markdown, JUnit and CSV to DIR.")
@json_option
def report(
    paths: Sequence[Path],
    bases: Sequence[Path],
    folder: Path | None,
    level: Level | None,
    output: Path | None,
    json_path: Path | None,
) -> None:
    """Report on runs: RUN is a record that --json wrote, or a folder of records.

    -o writes index.html (a single page), summary.md, junit.xml and ops.csv. --trend reads the records of DIR, too, and
    prints when each cause was first seen, where rates changed, and the last good run. --json writes the same as JSON.

    Exit codes with -o are those of the runs: 1 failures, cases without a result, a missing shard, or with --against
    cases that passed and are no longer executed, 3 no cases ran or none passed on a backend, 5 a run that was
    stopped: see docs/exit-codes.md. Without -o failures in the runs do not change the exit code.
    """
    if output is None and folder is None:
        raise UsageError("-o DIR, for the reports, or --trend DIR expected")
    runs = read_runs(paths)
    base = read_runs(bases) if bases else None
    against = _against(runs, base) if base else compare_builds(runs)
    trend = read_trend([*paths, folder], pairs_of(r.value for r in runs.causes)) if folder else None
    if trend:
        for path in runs.passed_over:
            line(f"{path}: ignored, not a run file", err=True)
        _tell(trend, json_path)
    if output is None:
        return
    planned: dict[str, list[str]] = {level: case_ids((), (), level)} if level else {}
    now = datetime.now(timezone.utc)
    texts = {
        "index.html": page(runs, now=now, planned=planned, trend=trend, against=against),
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


def _tell(trend: Trend, json_path: Path | None) -> None:
    """Print the causes, good runs and changes of rates of a folder."""
    causes, every = trend.causes(), trend.series()
    if causes:
        head = ["first seen", "last seen", "runs", "passed since", "cause", "backend", "cases", "what"]
        rows = [
            (k.first, k.last, k.runs, k.passed or "", k.cause.id, k.cause.backend, len(k.cause.cases),
             f"{k.cause.verdict} {k.cause.sentence}")
            for k in causes
        ]  # fmt: skip
        table(rows, head, disable_numparse=True)
        line(f"{counted(len(causes), 'cause')}, {sum(k.passed is None for k in causes)} still open")
    for backend, written in sorted(trend.good.items()):
        line(f"last good run on {backend}: {written or 'none'}")
    found = changes(every)
    if found:
        head = ["between", "and", "case", "backend", "machine", "before", "after", "change", "p"]
        table([_change(c) for c in found], head, disable_numparse=True)
    if every:
        few = sum(len(s.points) < FEWEST for s in every)
        line(f"{counted(len(found), 'change')} in {counted(len(every), 'rate')}; {few} have fewer than {FEWEST} runs")
    if json_path:
        told = [{**k.cause.to_json(), "first": k.first, "last": k.last, "runs": k.runs, "passed": k.passed}
                for k in causes]  # fmt: skip
        write_json(json_path, {"schema": 1, "causes": told, "last_good": trend.good, "changes": changed(found)})


def _change(c: Change) -> Sequence[str]:
    s = c.series
    rates = (f"{rate:.4g} {s.of}/s" for rate in (c.before, c.after))
    words = (c.since.document.written, c.at.document.written, s.case, s.backend, s.machine, *rates)
    return (*words, f"{100 * c.after / c.before - 100:+.1f} %", f"{c.p:.1g}")


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
