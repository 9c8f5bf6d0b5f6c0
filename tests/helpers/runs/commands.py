"""`conform` as a test calls it: each command by what it does, under the name that the command line has for it today.

Tests of a property (an exit code, a refusal) import `conform` from here, so that renaming a command changes `NAMES` and
no test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as Ended

from conformance.backend.registry import define, defined

NAMES: dict[str, tuple[str, ...]] = {
    "backends": ("list", "backends"),
    "bisect": ("build", "bisect"),
    "builds": ("list", "builds"),
    "cases": ("list", "cases"),
    "check-model": ("check-model",),
    "gate": ("perf", "gate"),
    "golden-update": ("golden", "update"),
    "golden-verify": ("golden", "verify"),
    "devices": ("build", "devices"),
    "make": ("build", "make"),
    "nightly": ("nightly",),
    "release": ("build", "test"),
    "report": ("report",),
    "repro": ("repro",),
    "run": ("run",),
    "show": ("show",),
    "shrink": ("shrink",),
    "triage": ("triage",),
}
"""What a command does -> the words that call it."""


def conform(
    command: str, *args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command: in this process, which has loaded all that it needs, or with `env` in a process of its own.

    Args:
        command: a key of `NAMES`.
        args: what follows its name.
        cwd: the current directory; that of the test by default.
        env: variables added to the environment of the test; a process may read them as it starts.

    Returns:
        its exit code, and what it printed as text.
    """
    if env is not None:
        words = [sys.executable, "-m", "conformance.cli", *NAMES[command], *map(str, args)]
        return subprocess.run(
            words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, encoding="utf-8", check=False
        )
    names = defined()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd or Path.cwd())
        done = conform_here(command, *args)
    define(names)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(list(map(str, args)), done.exit_code, done.stdout, done.stderr)


def conform_here(command: str, *args: str | Path) -> Ended:
    """The same in the process of the test: what a test patches holds there, and nothing has to start."""
    from conformance.cli import main  # noqa: PLC0415  # loads the command line

    return CliRunner().invoke(main, [*NAMES[command], *map(str, args)])
