"""How much memory processes hold, and how much a machine has.

A limit counts resident memory: RLIMIT_AS counts what a JIT or a GPU driver maps and never touches, RLIMIT_DATA still
counts reserved heaps.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

from conformance.ggml.errors import UsageError

from .launcher.launch import descendants

MEMORY_SHARE = 0.75
"""Of the machine's memory, where no limit is given."""
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)


def resident(pid: int) -> int | None:
    """Bytes of physical memory of a process, from /proc or else `ps`; None where neither says."""
    if sys.platform == "win32":
        return None
    try:
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, AttributeError):
        pass
    try:
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, timeout=5, check=True)  # noqa: S603  # a number of ours
        return int(done.stdout) << 10
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def mappings() -> int | None:
    """Mappings of memory that this process has, of the 65,530 that Linux lets it have; None on other systems."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return None


def held_below(pid: int, enough: int) -> int | None:
    """Bytes that all processes below `pid`, the keeper of a child, hold; None where the system does not say.

    Above `enough`, pages that several of them share count once. The system takes longer to say that, so it is not asked
    below.
    """
    pids = descendants(pid)
    if not pids:
        return _held_by_ps(pid)
    held = sum(resident(p) or 0 for p in pids)
    return held if len(pids) == 1 or held <= enough else sum(_proportional(p) for p in pids)


def _proportional(pid: int) -> int:
    """Bytes that a process holds; a page that n processes share counts as an n-th."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return resident(pid) or 0


def _held_by_ps(pid: int) -> int | None:
    """As `held_below`, for a system without /proc."""
    if Path("/proc/self/statm").exists():
        return None
    try:
        done = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, timeout=5, check=True)  # noqa: S607  # the system's own
        rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    below, held = {pid}, 0
    for process, parent, size in sorted(rows):
        if parent in below:
            below.add(process)
            held += size << 10
    return held


def trim() -> None:
    """Give back to the system what was freed, where the C library can."""
    give_back = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


def physical() -> int | None:
    """Bytes of memory of this machine; None where the system does not say."""
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def default_limit() -> int | None:
    """`MEMORY_SHARE` of the machine's memory in bytes; None where the system does not say."""
    whole = physical()
    return None if whole is None else int(MEMORY_SHARE * whole)


def parse_size(text: str) -> int:
    """Bytes of `4G`, `512 MiB`, `1000000`, units powers of 1024; UsageError for another form, or 0."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1 << _UNITS[match[2].lower()])) if match else 0
    if size < 1:
        raise UsageError(f"memory limit: a size like 4G or 512M expected, {text!r} given")
    return size
