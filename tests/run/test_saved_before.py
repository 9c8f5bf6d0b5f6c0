"""Case files that commits before typed evidence saved: they replay as they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import conform

SAVED = sorted((Path(__file__).parents[1] / "frozen" / "saved").glob("*.gguf"))


@pytest.mark.parametrize("path", SAVED, ids=lambda p: p.stem)
def test_a_case_saved_before_replays_as_saved(path: Path) -> None:
    """Faults of the real ggml, on its CPU device: the same verdict, numbers and first wrong element; exit code 1."""
    done = conform("repro", str(path))
    assert done.returncode == 1, done.stdout
    assert "  as saved\n" in done.stdout, done.stdout
    assert "not as saved" not in done.stdout
