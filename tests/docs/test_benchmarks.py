"""A benchmark starts with the command that its docstring states."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"(?:PYTHONPATH=(\S+) )?python (tests/benchmarks/\S+\.py)")
STATED = [m for p in sorted((ROOT / "tests/benchmarks").rglob("*.py")) if (m := COMMAND.search(p.read_text("utf-8")))]


@pytest.mark.parametrize("command", STATED, ids=lambda m: Path(m[2]).stem)
def test_it_finds_what_it_imports(command: re.Match[str]) -> None:
    """Nothing of pytest's own path, which holds the helpers of all tests."""
    path = ROOT / command[2]
    code = f"import sys; sys.path.insert(0, {str(path.parent)!r}); import {path.stem}"
    env = {**os.environ, "PYTHONPATH": command[1] or ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
