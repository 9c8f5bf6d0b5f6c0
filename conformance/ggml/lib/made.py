"""Notes beside the libraries of a build that `conform build make` compiled."""

from __future__ import annotations

import json
from pathlib import Path

NOTES = "made.json"
"""Name of the file: an object of strings."""
_LONGEST = 1 << 14
"""Maximum bytes that are read of it."""


def notes(folder: Path) -> dict[str, str]:
    """Return what a build is made from and what was changed in it; empty for any other build."""
    try:
        with (folder / NOTES).open("rb") as file:
            read = json.loads(file.read(_LONGEST))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in read.items()} if isinstance(read, dict) else {}
