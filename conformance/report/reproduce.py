"""What to type to see a result again."""

from __future__ import annotations

from conformance.ggml.text import shell
from conformance.judge.verdict import Result


def command(result: Result) -> str:
    """A line for a shell; an id or a path from a stranger's file stays one word of it."""
    if result.saved:
        return shell(["conform", "repro", result.saved, "--backend", result.backend])
    return shell(["conform", "run", "--case", result.case, "--backend", result.backend])
