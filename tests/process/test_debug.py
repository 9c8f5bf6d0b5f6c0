"""`conform repro FILE --debug` waits in front of the process in which the backend computes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from errno import EPERM
from pathlib import Path

import pytest

from conformance.case import casefile
from conformance.run.session.select import build

CASE = "ops/ADD-f16+f16-a=32x4,special=edge@838"
SEIZE = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), None, None):  # PTRACE_SEIZE
    sys.exit(f"errno {ctypes.get_errno()}")
sys.stdin.read()
"""
"""Attaches to a process as a debugger does, until its stdin is closed."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a debugger")
@pytest.mark.parametrize("by", ["debugger", "enter"])
def test_it_waits_for_a_debugger_or_enter(tmp_path: Path, by: str) -> None:
    """The process named is the worker; nothing runs before, and the case passes once somebody is there."""
    path = tmp_path / "case.gguf"
    casefile.write(path, [build(CASE)])
    command = [sys.executable, "-m", "conformance.cli", "repro", str(path), "--backend", "ggml", "--debug"]
    pipe = subprocess.PIPE
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env) as run:
        assert run.stdin is not None
        assert run.stderr is not None
        said = run.stderr.readline()
        pid = re.search(r"gdb -p (\d+)\) or Enter", said)
        assert pid is not None, said
        assert "isolation.worker\0ggml" in Path(f"/proc/{pid[1]}/cmdline").read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(0.5)
        if by == "enter":
            run.stdin.write("\n")
            run.stdin.flush()
            output, errors = run.communicate(timeout=100)
        else:
            with subprocess.Popen(
                [sys.executable, "-c", SEIZE, pid[1]], stdin=pipe, stderr=pipe, text=True
            ) as debugger:
                try:
                    debugger.wait(3)
                except subprocess.TimeoutExpired:
                    output, errors = run.communicate(timeout=100)
                else:
                    run.kill()
                    assert debugger.stderr is not None
                    assert debugger.stderr.read().strip() == f"errno {EPERM}"
                    pytest.skip("the kernel lets no process attach to another (ptrace_scope)")
        assert run.wait(100) == 0, errors
    assert f"PASS {CASE} on ggml" in output
