"""Lock files against other processes; a lock ends with the process that has it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conformance.ggml.errors import UnavailableError


def lock(descriptor: int, patience: float = 0.0) -> bool:
    """Lock a file for all owners of its descriptor; False after `patience` seconds."""
    try:
        import fcntl  # noqa: PLC0415  # POSIX only; elsewhere two runs with one file are the user's to avoid
    except ImportError:
        return True
    if sys.platform == "win32":
        return True
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


@contextmanager
def alone(folder: Path, patience: float) -> Iterator[None]:
    """Create `folder`, and let other processes that use it so wait.

    Raises:
        UnavailableError: it cannot be written, or another process stays for `patience` seconds.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as e:
        raise UnavailableError(f"{folder}: cannot be written: {e.strerror}") from None
    free = True
    try:
        with suppress(OSError):  # a file system without locks
            free = lock(descriptor, patience)
        if not free:
            raise UnavailableError(f"{folder}: another process has used it for {patience:.0f} s; wait for its end")
        yield
    finally:
        os.close(descriptor)
