"""Other systems: what POSIX alone has is taken away, and the suite still runs; names of files are legal on Windows.

mypy knows which calls a system lacks: `systems.yml` has it check the packages for Windows and for macOS.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.run.session.failures import file_name
from conformance.run.session.select import case_ids

WITHOUT = """
import importlib.abc, os, select, signal, sys
import numpy, click, click.shell_completion, subprocess, hypothesis, hypothesis.strategies, pytest, tabulate, tempfile
import asyncio, multiprocessing.connection, gguf, psutil  # all of these know the system that they are on

LACKING = {
    signal: ("SIGKILL", "SIGALRM", "SIGHUP", "SIGCHLD", "SIGQUIT", "SIGPIPE", "SIGXFSZ", "pthread_kill",
             "pthread_sigmask", "setitimer", "alarm"),
    select: ("poll", "epoll"),
    os: ("fork", "killpg", "setsid", "setpgid", "getuid", "geteuid", "sysconf", "mkfifo", "sched_getaffinity",
         "sched_setaffinity", "set_blocking", "RTLD_NOLOAD", "RTLD_LAZY", "O_NONBLOCK", "O_NOFOLLOW", "WNOHANG"),
}
for module, names in LACKING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "termios", "pwd", "grp", "pty"}:
            raise ImportError(name)

for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
if sys.argv[1] == "windows":
    sys.platform = "win32"
from conformance.backend import registry
from conformance.cli import main
registry.provide("here", registry.adapter("xdna2"))
main(sys.argv[2:])
"""
"""A program that runs `conform` in a Python without them, and as on Windows once the libraries are imported."""
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@pytest.mark.parametrize("system", ["other", "windows"])
def test_the_suite_runs_without_what_posix_alone_has(tmp_path: Path, system: str) -> None:
    """Without signals, fork, polls, locks, limits and users cases run and pass.

    A record and a page are written, and what needs a process of its own is one line, no traceback.
    """
    run = _without(tmp_path, system, "run", "--backend", "here", "--case", "ops/ADD-f32+f32-a=1x1x1@325",
                   "--case", "ops/MUL_MAT-q4_0*", "--json", "run.json", "--save-failures", "kept")  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    page = _without(tmp_path, system, "report", "run.json", "-o", "out")
    assert page.returncode == 0, page.stderr
    assert (tmp_path / "out" / "index.html").is_file()


def test_what_needs_a_process_says_so(tmp_path: Path) -> None:
    """Where a system has neither fork nor job objects, isolation is refused with the reason."""
    run = _without(tmp_path, "other", "run", "--backend", "xdna2", "--case", "ops/ADD-f32+f32-a=1x1x1@325")
    assert run.returncode != 0
    assert "neither fork nor job objects" in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


def _without(folder: Path, system: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, system, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=120, check=False)


@given(st.text(max_size=300))
@example("nul")
@example("COM1.x")
@example("a. ")
@example("..")
@example('a<b>:"c/d\\e|f?g*')
def test_any_name_is_a_legal_file_everywhere(stem: str) -> None:
    """Whatever a case is called, its file has no character, device name, end or length that a system forbids."""
    name = file_name(stem)
    assert re.fullmatch(r"[A-Za-z0-9_.=@-]{1,104}", name)
    assert not RESERVED.fullmatch(name)
    assert name.endswith(".gguf")


def test_cases_have_files_of_their_own() -> None:
    """No two cases of the suite have one file, also where a file system takes capitals for small letters."""
    ids = case_ids((), (), "full")
    assert len({file_name(i).lower() for i in ids}) == len(ids)
