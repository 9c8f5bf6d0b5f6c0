"""Temporary names beside a file that is written whole or not at all, and what killed processes left under them."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

_PREFIX = ".conformance-"
_NAME = re.compile(re.escape(_PREFIX) + r"([0-9]{1,9})-.*")


def prefix(folder: Path) -> str:
    """How a temporary name in `folder` begins: with this process's number, so that a later one knows whose it was.

    The first time that a process asks for a folder, what dead processes left there is removed.
    """
    _sweep(folder.absolute(), os.getpid())
    return f"{_PREFIX}{os.getpid()}-"


@cache
def _sweep(folder: Path, pid: int) -> None:
    del pid  # a fork asks for itself
    with suppress(OSError):
        for path in folder.iterdir():
            found = _NAME.fullmatch(path.name)
            if found and not _lives(int(found[1])):
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _lives(pid: int) -> bool:
    if os.name != "posix":  # signal 0 would end it there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
