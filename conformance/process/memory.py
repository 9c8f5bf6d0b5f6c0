"""How much memory processes hold, and how much a machine has.

A limit counts resident memory: RLIMIT_AS counts what a JIT or a GPU driver maps and never touches, RLIMIT_DATA still
counts reserved heaps.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import psutil

from conformance.ggml.errors import UsageError

from .launcher.launch import descendants

MEMORY_SHARE = 0.75
"""Of the machine's memory, where no limit is given."""
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)


def resident(pid: int) -> int | None:
    """Bytes of physical memory of a process; None if it is gone, or the system forbids the question."""
    try:
        held: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None
    return held


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
    try:  # /proc has the children of a process as a list; psutil looks at every process of the machine
        pids = descendants(pid) or [p.pid for p in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return None
    held = sum(resident(p) or 0 for p in pids)
    return held if len(pids) == 1 or held <= enough else sum(_proportional(p) for p in pids)


def _proportional(pid: int) -> int:
    """Bytes that a process holds; on Linux a page that n processes share counts as an n-th."""
    try:
        held: int = getattr(psutil.Process(pid).memory_full_info(), "pss", 0)
    except psutil.Error:
        held = 0
    return held or resident(pid) or 0


def trim() -> None:
    """Give back to the system what was freed, where the C library can."""
    give_back = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


def physical() -> int:
    """Bytes of memory of this machine."""
    whole: int = psutil.virtual_memory().total
    return whole


def default_limit() -> int:
    """`MEMORY_SHARE` of the machine's memory in bytes."""
    return int(MEMORY_SHARE * physical())


def parse_size(text: str) -> int:
    """Bytes of `4G`, `512 MiB`, `1000000`, units powers of 1024; UsageError for another form, or 0."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1 << _UNITS[match[2].lower()])) if match else 0
    if size < 1:
        raise UsageError(f"memory limit: a size like 4G or 512M expected, {text!r} given")
    return size
