"""From a failing run to a few nodes by the command line: run, repro, shrink, and what shrink writes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.case import casefile

ADAPTER = '''
import numpy as np
from backends.cpu import CpuBackend

class Late(CpuBackend):
    """Writes cache rows one late."""
    def kernels(self):
        right = super().kernels()
        def late(node, dst, src):
            b, index, a = src
            right["SET_ROWS"](node, dst, [b, (index + 1) % node.ne[1], a])
        return {**right, "SET_ROWS": late}
'''
CASE = "kv_growth/llama-l=2,embd=32,heads=4,kv=2,ff=32,vocab=32,seqs=4,run=p3.d4@1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds an adapter called `late`, which is made of the reference."""
    (tmp_path / "late_adapter.py").write_text(ADAPTER)
    return tmp_path


def _conform(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    code = (
        "from conformance.backend import registry; from conformance.cli import main; from late_adapter import Late;"
        "registry.provide('late', Late); main(prog_name='conform')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_from_a_failing_run_to_one_node(folder: Path) -> None:
    """The saved failure repeats as saved; shrunk it is one SET_ROWS, as a file, a program and a test_case."""
    run = _conform(folder, "run", "--backend", "late", "--case", CASE, "--save-failures", "kept")
    assert run.returncode == 1, run.stdout + run.stderr
    (saved,) = (folder / "kept").glob("*.gguf")
    again = _conform(folder, "repro", str(saved))
    assert again.returncode == 1
    assert "  as saved" in again.stdout.splitlines()
    other = _conform(folder, "repro", str(saved), "--backend", "cpu")
    assert other.returncode == 0
    assert "as saved" not in other.stdout
    shrunk = _conform(folder, "shrink", str(saved), "-o", "small.gguf")
    assert shrunk.returncode == 0, shrunk.stderr
    assert "FAIL, SET_ROWS, node: 5 steps" in shrunk.stderr
    case = casefile.read_one(folder / "small.gguf")
    assert [n.op for s in case.steps for n in s.graph] == ["SET_ROWS"]
    made = runpy.run_path(str(folder / "small.py"))["case"]
    assert (made.id, len(made.steps), made.params) == (case.id, 1, {"of": CASE})
    assert "ggml_set_rows(ctx, " in (folder / "small.cpp").read_text()
    once_more = _conform(folder, "repro", "small.gguf")
    assert "  as saved" in once_more.stdout.splitlines()


def test_nothing_to_shrink_is_one_line(folder: Path) -> None:
    """A case that passes, or that was saved for no backend, is refused with exit code 2."""
    small = folder / "fine.gguf"
    run = _conform(folder, "run", "--backend", "late", "--case", CASE, "--save-failures", "kept")
    assert run.returncode == 1
    (saved,) = (folder / "kept").glob("*.gguf")
    fine = _conform(folder, "shrink", str(saved), "--backend", "cpu", "-o", str(small))
    assert (fine.returncode, small.exists()) == (2, False)
    assert "there is nothing to shrink" in fine.stderr
    assert len(fine.stderr.strip().splitlines()) == 1
