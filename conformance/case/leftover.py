"""Write files atomically through temporary files; remove those of killed processes."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

_PREFIX = ".conformance-"
_NAME = re.compile(re.escape(_PREFIX) + r"([0-9]{1,9})-.*")


def prefix(folder: Path) -> str:
    """Return the prefix of temporary names in `folder`, which has our process id.

    The first call of a process for a folder removes the files that dead processes left in it.
    """
    _sweep(folder.absolute(), os.getpid())
    return f"{_PREFIX}{os.getpid()}-"


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its parts, as UTF-8, atomically: after a crash `path` has all or none.

    A device or pipe is written directly. OSError if `path` cannot be written; the temporary file is removed.
    """
    parts = [text] if isinstance(text, str) else text
    if path.exists() and not path.is_file():
        path.write_text("".join(parts), encoding="utf-8")
        return
    temporary = path.with_name(f"{prefix(path.parent)}{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as f:
            f.writelines(parts)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:  # also after Ctrl-C
        temporary.unlink(missing_ok=True)
        raise


@cache
def _sweep(folder: Path, pid: int) -> None:
    del pid  # part of the cache's key: a forked child sweeps for itself
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
