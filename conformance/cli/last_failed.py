"""Cases that failed when they last ran here, for `conform run --lf` and `--ff`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from conformance.builds.archive import cache
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result
from conformance.report.runfile import write_json

Failed = dict[str, list[str]]
"""Backend -> ids of its cases."""


def file() -> Path:
    """Return the working directory's file in the user's cache folder; OSError without one."""
    name = hashlib.sha256(os.fsencode(Path.cwd())).hexdigest()[:16]
    return cache().with_name("failed") / f"{name}.json"


def read() -> Failed:
    """Return the cases that failed when they last ran; none if the file is absent or damaged."""
    try:
        found = json.loads(file().read_text(encoding="utf-8"))["failed"]
        return {str(backend): [str(i) for i in ids] for backend, ids in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(results: Iterable[Result]) -> None:
    """Add new failures, remove passes, keep cases that did not run; delete an empty file."""
    known = {backend: dict.fromkeys(ids) for backend, ids in read().items()}
    for r in results:
        own = known.setdefault(r.backend, {})
        own.pop(r.case, None)
        if r.fails_run:
            own[r.case] = None
    failed = {backend: list(ids) for backend, ids in known.items() if ids}
    with suppress(OSError, UsageError):  # a run without this file is a run
        path = file()
        if failed:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"folder": str(Path.cwd()), "failed": failed})
        else:
            path.unlink(missing_ok=True)
