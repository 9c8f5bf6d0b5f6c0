"""The journal of cases that failed when they last ran from this folder (`--lf`, `--ff`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import ValidationError

from conformance.builds.archive import cache
from conformance.case.strict import read_bytes
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.verdict import Result
from conformance.report.runfile import write_text
from conformance.run.session.environment import MAX_BYTES
from conformance.run.session.journal import Contents, whole

Failed = dict[str, list[str]]
"""Backend -> ids of its cases."""


def file() -> Path:
    """Return the working directory's journal in the user's cache folder; OSError without one."""
    name = hashlib.sha256(os.fsencode(Path.cwd())).hexdigest()[:16]
    return cache().with_name("failed") / f"{name}.jsonl"


def read() -> Failed:
    """Return the cases that failed when they last ran; none if the file is absent or damaged."""
    failed: Failed = {}
    for r in _results():
        failed.setdefault(r.backend, []).append(r.case)
    return failed


def write(results: Iterable[Result]) -> None:
    """Add new failures, remove passes, keep cases that did not run; delete an empty file."""
    known = {(r.backend, r.case): r for r in _results()}
    for r in results:
        known.pop((r.backend, r.case), None)
        if r.fails_run:
            known[r.backend, r.case] = r
    with suppress(OSError, UsageError):  # a run without this file is a run
        path = file()
        if known:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, whole(list(known.values())))
        else:
            path.unlink(missing_ok=True)


def _results() -> list[Result]:
    try:
        found = Contents.parse(read_bytes(file(), MAX_BYTES))
        return [Result.from_json(row) for _, row in found.results]
    except (OSError, ConformanceError, ValidationError, OverflowError):
        return []
