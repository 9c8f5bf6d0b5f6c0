"""The files of a release: its record, both builds' results, and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from conformance.case.case import JSON
from conformance.case.strict import Memory, expect, parse_json, read_text
from conformance.causes.cause import Cause, assigned
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.report.markdown import markdown
from conformance.report.page import page
from conformance.report.runfile import record, write_json
from conformance.report.runs import read_runs

from .causes import Found
from .release import Release

RECORD, RESULTS, PAGE, SUMMARY = "release.json", "run.json", "index.html", "summary.md"
MAX_MEMORY = 1 << 30
"""Bytes that reading a record may take."""


def write(folder: Path, document: Mapping[str, JSON], release: Release) -> Iterator[Path]:
    """Write all of it; each path once it is there. UsageError if the folder takes no files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {folder}: a folder that can be written expected: {e.strerror}") from e
    write_json(folder / RECORD, dict(document))
    yield folder / RECORD
    write_json(folder / RESULTS, results(release))
    yield folder / RESULTS
    runs = read_runs([folder / RESULTS])
    for name, text in (
        (PAGE, page(runs, now=datetime.now(timezone.utc))),
        (SUMMARY, markdown(runs, where=PAGE)),
    ):
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as e:
            raise UsageError(f"-o {folder}: {name} cannot be written: {e.strerror}") from e
        yield folder / name


def results(release: Release) -> dict[str, JSON]:
    """A run file of both builds."""
    rows = [r for t in release.targets for side in release.results(t) for r in side]
    causes = list(_causes(release.found))
    return {**record(assigned(rows, causes)), "causes": [c.to_json() for c in causes]}


def _causes(found: Sequence[Found]) -> Iterator[Cause]:
    """The causes as a run file has them, of one backend each; the sentence says first what it is of the two builds."""
    for of in found:
        sentence = f"{of.state}: {of.cause.sentence}"
        for backend, cases in of.cases.items():
            yield replace(of.cause, backend=backend, cases=tuple(cases), sentence=sentence)


def load(path: Path) -> dict[str, Any]:
    """The record of a release; UsageError if the file is none."""
    text = read_text(path)
    try:
        document = parse_json(memoryview(text.encode()), Memory(MAX_MEMORY, 0), "record")
    except CaseFileError as e:
        raise UsageError(f"{path}: {e}") from None
    ok = isinstance(document, dict) and isinstance(document.get("causes"), list)
    expect(ok, str(path), "the record of `conform release --json`", document)
    assert isinstance(document, dict)
    for i, row in enumerate(document["causes"]):
        fields = ("id", "smallest", "backend")
        good = isinstance(row, dict) and all(isinstance(row.get(k), str) for k in fields)
        expect(good, f"{path}: causes[{i}]", f"an object with {', '.join(fields)}", row)
    return document
