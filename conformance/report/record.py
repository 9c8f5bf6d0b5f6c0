"""The JSON record of a run: the only source of every report."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conformance.cgraph.case import JSON
from conformance.cgraph.errors import UsageError
from conformance.check.verdict import Result, Totals
from conformance.run.environment import environment

SCHEMA = 1


def record(
    results: Sequence[Result], unavailable: dict[str, str] | None = None, waivers: Sequence[str] = ()
) -> dict[str, JSON]:
    """`{"schema", "environment", "results", "totals"}`; backends that are not here stand in the environment.

    Where waivers fail the run, `waivers` says which and why.
    """
    totals = Totals()
    for r in results:
        totals.add(r)
    return {
        "schema": SCHEMA,
        "environment": {**environment(), "unavailable": unavailable or {}},
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
