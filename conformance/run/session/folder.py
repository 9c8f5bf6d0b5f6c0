"""The folder of running cases: the user's own, although others can write beside it."""

from __future__ import annotations

import atexit
import getpass
import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from conformance.ggml.text import printable

LEFT = "interrupted"
"""Name of the folder with the case files."""


def default_folder() -> Path:
    """Return the default parent folder of runs: the user's own in the system's temporary folder.

    Others can create files there too. If a folder of that name belongs to another user, is a link or is writable to
    others, this process makes a new one and says so.
    """
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # no such user in a container
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"conformance-{user}"
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    return folder if is_own(folder) else _instead_of(folder)


def is_own(folder: Path) -> bool:
    """Return True if `folder` is this user's, not a link, and not writable by others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & 0o022)


@cache
def _instead_of(folder: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix="conformance-"))
    atexit.register(partial(_removed_if_empty, made))
    says = f"{folder} is writable by other users, so it is not used; cases of interrupted runs are saved in {made}"
    sys.stderr.write(f"{printable(says)}\n")
    return made


def _removed_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def case_folder(folder: Path) -> Path:
    """Return the folder of case files, another one if it is a link or writable by others.

    OSError if it cannot be made.
    """
    to = folder / LEFT
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        to.mkdir(mode=0o700)
    return to if is_own(to) else Path(tempfile.mkdtemp(prefix=f"{LEFT}-", dir=folder))
