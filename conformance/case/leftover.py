"""Temporary names for atomic writes, and the removal of files that killed processes left under such names."""

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
    """The prefix of temporary names in `folder`; it contains this process's id.

    The first call for a folder removes what dead processes left there.
    """
    _sweep(folder.absolute(), os.getpid())
    return f"{_PREFIX}{os.getpid()}-"


@cache
def _sweep(folder: Path, pid: int) -> None:
    del pid  # part of the cache key: a fork sweeps again
    with suppress(OSError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and not _lives(int(match[1])):
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
