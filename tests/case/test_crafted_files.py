"""Well-formed files made to harm: no traceback, no hang, no file beside them, no memory beyond the limit."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from crafted_files import LIMITS, Harness

COUNT = int(os.environ.get("CONFORMANCE_CRAFTED_FILES", "100"))
"""How many; `tests/benchmarks/bench_crafted_files.py` runs 20,000 and prints what became of them."""


def test_crafted_files_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read, shown, run on the reference and by `repro`: it ends in a verdict or one line, within the limits."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "files"
    folder.mkdir()
    harness = Harness(folder, isolated=None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(COUNT):
        harness.run(seed)
    harness.close()
    assert harness.wrong == []
    assert harness.found["cpu PASS"] or harness.found["cpu VACUOUS"]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 2 * (LIMITS.memory_limit or 0)
    assert [p.name for p in tmp_path.iterdir()] == ["files"]
