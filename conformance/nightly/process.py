"""One command of the nightly: its log, its time limit, and that nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from conformance.process import Tail, interrupt, spawn_command

GRACE = 5.0
"""Seconds that a command has after SIGINT to write down what it has."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; 128 + the signal that ended it."""
    seconds: float
    timed_out: bool
    tail: str
    """The end of what it printed."""

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        return next((line.strip() for line in reversed(self.tail.splitlines()) if line.strip()), "")


def run(command: Sequence[str], log: Path, limit: float, lock: int) -> Ended:
    """Run `command` to its end, or for `limit` seconds; what it prints goes to the end of `log`.

    Any exception that comes meanwhile, an interrupt above all, ends the command with everything it started.

    Args:
        command: a program and its arguments.
        log: where its output goes, standard error included; a disk that is full does not stop the command.
        limit: seconds.
        lock: a descriptor that it and its keeper hold too, as long as anything of it lives.
    """
    began = time.monotonic()
    popen = spawn_command(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        pass_fds=(lock,),
    )
    stream = cast("BinaryIO", popen.stdout)
    tail = Tail(stream, partial(_append, log))
    timed_out = False
    try:
        popen.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        interrupt(popen, GRACE)  # first as a user would, so that it can write down what it has
        tail.join(GRACE)
        stream.close()
    code = popen.returncode
    return Ended(code if code >= 0 else 128 - code, time.monotonic() - began, timed_out, tail.text)


def _append(log: Path, data: bytes) -> None:
    with suppress(OSError), log.open("ab") as f:
        f.write(data)
