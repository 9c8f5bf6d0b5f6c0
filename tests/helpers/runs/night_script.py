"""Starting, killing and reading small nights, for the tests of the nightly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

NIGHTLY = [sys.executable, "-m", "conformance.cli", "nightly"]
T = TypeVar("T")
POSIX = pytest.mark.skipif(os.name != "posix", reason="the nightly ends groups of processes, which are POSIX")
PATIENCE = 60.0
"""Seconds after which a test that waits for something gives up."""


def ended(command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def until(said: Callable[[], T]) -> T:
    """What `said` says as soon as it says something."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := said():
            return found
        time.sleep(0.005)
    pytest.fail("waited in vain")


def lives(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may go between opening the file and reading it
        return False
    return state != "Z"


def killed(command: Sequence[str], when: Callable[[], bool]) -> bool:
    """Start a command and SIGKILL it once `when` says so; return True if it was killed before its end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as popen:
        until(lambda: when() or popen.poll() is not None)
        popen.kill()
        return popen.wait() == -signal.SIGKILL


def results(folder: Path, *names: str) -> Counter[tuple[str, str, str]]:
    """How often each case stands in documents, by backend and verdict."""
    rows = [r for n in names for r in json.loads((folder / n).read_text())["results"]]
    return Counter((r["case"], r["backend"], r["verdict"]) for r in rows)
