"""The JSON record of a run: the only source of every report."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from conformance.cgraph.case import JSON
from conformance.cgraph.errors import UsageError
from conformance.check.verdict import Result, Totals
from conformance.run.checkout import source
from conformance.run.environment import environment

SCHEMA = 1


def header(kind: str) -> dict[str, JSON]:
    """How every document of a run begins: `{"schema", "kind", "run", "written", "environment"}`.

    `run` is a random name of 32 hex digits, by which a document is known wherever it is merged; `written` is when, in
    UTC.

    Args:
        kind: `conformance`, `perf`, `planted`, `audit`, `phases` or `zoo`.
    """
    written = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    where = {**environment(), **source()}
    return {"schema": SCHEMA, "kind": kind, "run": uuid.uuid4().hex, "written": written, "environment": where}


def record(
    results: Sequence[Result], unavailable: dict[str, str] | None = None, waivers: Sequence[str] = ()
) -> dict[str, JSON]:
    """`header`, `results` and `totals`; backends that are not here stand in the environment as `unavailable`.

    Where waivers fail the run, `waivers` says which and why.
    """
    totals = Totals()
    for r in results:
        totals.add(r)
    begun = header("conformance")
    return {
        **begun,
        "environment": {**begun["environment"], "unavailable": unavailable or {}},
        "results": [r.to_json() for r in results],
        "totals": totals.to_json(),
        **({"waivers": list(waivers)} if waivers else {}),
    }


def check_writable(path: Path) -> None:
    """Refuse before anything runs what could not be written after all of it ran.

    Raises:
        UsageError: the folder is not there or takes no files.
    """
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--json {path}: a file in a folder that exists and can be written expected")


def write_json(path: Path, document: JSON) -> None:
    """Write `document` whole or not at all.

    Raises:
        UsageError: the file cannot be written there.
    """
    try:
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            json.dump(document, f, indent=1, allow_nan=False)
            f.write("\n")
        Path(temporary).replace(path)
    except OSError as e:
        raise UsageError(f"--json {path}: cannot be written: {e.strerror}") from e
