"""The run file of a tested build, and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from conformance.case.case import JSON
from conformance.causes.cause import assigned
from conformance.ggml.errors import UsageError
from conformance.judge.cause import Cause
from conformance.report.compare import compare_builds
from conformance.report.markdown import markdown
from conformance.report.page import page
from conformance.report.runfile import Conformance, read_document, record, write_json, write_text
from conformance.report.runs import read_runs
from conformance.run.session.interrupted import begin_beside
from conformance.run.session.select import record_of

from .causes import SharedCause
from .release import Release

RESULTS, PAGE, SUMMARY = "run.json", "index.html", "summary.md"


def made(folder: Path) -> Path:
    """Make the folder of -o and return the path of its run file; UsageError if impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {folder}: a folder that can be written expected: {e.strerror}") from e
    return folder / RESULTS


def begin(paths: Sequence[Path]) -> list[str]:
    """Start the results beside the first run file, so that a kill leaves a record even earlier.

    Returns sentences about the results that an earlier run left. UsageError if a run is writing the file.
    """
    return [text for path in paths[:1] for text in begin_beside(path)]


def write(release: Release, paths: Sequence[Path]) -> None:
    """Write the run file and remove the results beside it; UsageError if impossible."""
    written = False
    try:
        body = document(release)
        for path in paths:
            write_json(path, body)
        written = True
    finally:
        release.it.recorded(written=written)


def write_page(folder: Path, paths: Sequence[Path]) -> Iterator[Path]:
    """Write page and summary of run files; yield each path. UsageError if impossible."""
    runs = read_runs(paths)
    against = compare_builds(runs)
    for name, text in (
        (PAGE, page(runs, now=datetime.now(timezone.utc), against=against)),
        (SUMMARY, markdown(runs, where=PAGE, against=against)),
    ):
        write_text(folder / name, text, "-o")
        yield folder / name


def document(release: Release) -> dict[str, JSON]:
    """Return the run file: both builds' results, causes, and cases that did not run."""
    rows = [r for t in release.targets for side in release.results(t) for r in side]
    rows += release.counted.results
    causes, missing = list(_causes(release.found)), release.missing()
    asked = Counter(r.backend for r in rows)
    for m in missing:
        asked[m.backend] += m.count
    return {
        **record(assigned(rows, causes), missing=missing),
        "asked": dict(asked),
        "selection": record_of({t.build: release.level for t in release.targets}, (), (), None),
        "causes": [c.to_json() for c in causes],
        "builds": release.to_json(),
    }


def _causes(found: Sequence[SharedCause]) -> Iterator[Cause]:
    """Yield each cause once per backend, with its state."""
    for of in found:
        for backend, cases in of.cases.items():
            first = (of.cause.smallest,) if of.cause.smallest in cases else ()
            own = tuple(dict.fromkeys((*first, *cases)))
            yield replace(of.cause, backend=backend, cases=own, state=str(of.state))


def causes_of(path: Path) -> list[Cause]:
    """Return the causes of a run file; UsageError for another kind of file."""
    found = read_document(path)
    if found is None or not isinstance(found.record, Conformance):
        raise UsageError(f"{path}: a run file with causes expected, as `conform build test --json` writes it")
    return [Cause.from_json(row) for row in found.body.get("causes", ())]
