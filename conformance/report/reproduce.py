"""What to type to see a result again."""

from __future__ import annotations

import shlex

from conformance.check.verdict import Result


def command(result: Result) -> str:
    """A line for a shell; an id or a path from a stranger's file stays one word of it."""
    if result.saved:
        return shlex.join(["conform", "repro", result.saved, "--backend", result.backend])
    return shlex.join(["conform", "run", "--case", result.case, "--backend", result.backend])
