"""Measure the memory and processor time of processes, and the memory of the machine.

Limits apply to resident memory: RLIMIT_AS counts memory that a JIT or a GPU driver maps and never touches, RLIMIT_DATA
still counts reserved heaps.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil

from conformance.ggml.errors import UsageError

from .launcher.launch import descendants

MEMORY_SHARE = 0.75
"""Share of the machine's memory that is the default limit."""
LISTED = 0.25
"""Seconds between two lists of processes: listing takes four times as long as measuring."""
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)


def resident(pid: int) -> int | None:
    """Return the resident bytes of a process; None if it is gone or access is denied."""
    try:
        held: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None
    return held


def virtual() -> int | None:
    """Return the bytes of this process's address space; None if unknown."""
    try:
        size: int = psutil.Process().memory_info().vms
    except psutil.Error:
        return None
    return size


def mappings() -> int | None:
    """Return this process's number of memory mappings (Linux allows 65,530); None elsewhere."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return None


class Below:
    """The processes below a supervisor, which are listed again after `LISTED` seconds."""

    def __init__(self, pid: int) -> None:
        """Watch the descendants of `pid`, which may have none yet."""
        self._pid = pid
        self._pids: list[int] = []
        self._until = 0.0

    def held(self, enough: int) -> int | None:
        """Return the resident bytes of all, None if unknown.

        Above `enough` bytes, pages shared by several of them count once; that takes longer to measure, so it is skipped
        below.
        """
        now = time.monotonic()
        if now >= self._until or not self._pids:
            try:
                self._pids, self._until = _below(self._pid), now + LISTED
            except psutil.Error:
                return None
        held = sum(resident(p) or 0 for p in self._pids)
        return held if len(self._pids) == 1 or held <= enough else sum(_proportional(p) for p in self._pids)


def used_below(pid: int) -> dict[tuple[int, int], float]:
    """Return the processor seconds of each thread of `pid` and of all processes below it."""
    used: dict[tuple[int, int], float] = {}
    with suppress(psutil.Error):
        for p in (pid, *_below(pid)):
            with suppress(psutil.Error):
                used |= {(p, t.id): t.user_time + t.system_time for t in psutil.Process(p).threads()}
    return used


def cores() -> int:
    """Return the number of processors that this process may use, at least 1.

    On Linux that is the smaller of its affinity and of the quota of its container.
    """
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max 100000" without a quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split())
        mine = min(mine, quota // period)
    return max(1, mine)


def idle() -> float:
    """Return the seconds that the processors on which this process may run were idle.

    Others do not help its children: a container or `taskset` may give it few of them.
    """
    each = psutil.cpu_times(percpu=True)
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(each))
    return float(sum(t.idle + getattr(t, "iowait", 0.0) for i, t in enumerate(each) if i in mine))


def _below(pid: int) -> list[int]:
    # /proc lists the children of a process; psutil scans every process of the machine
    return descendants(pid) or [p.pid for p in psutil.Process(pid).children(recursive=True)]


def _proportional(pid: int) -> int:
    """Return the bytes of a process; on Linux a page shared by n processes counts 1/n."""
    try:
        held: int = getattr(psutil.Process(pid).memory_full_info(), "pss", 0)
    except psutil.Error:
        held = 0
    return held or resident(pid) or 0


def physical() -> int:
    """Return the bytes of memory of this machine."""
    whole: int = psutil.virtual_memory().total
    return whole


def default_limit() -> int:
    """Return `MEMORY_SHARE` of the machine's memory in bytes."""
    return int(MEMORY_SHARE * physical())


def parse_size(text: str) -> int:
    """Parse `4G`, `512 MiB` or `1000000` to bytes, in powers of 1024; UsageError if malformed."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1 << _UNITS[match[2].lower()])) if match else 0
    if size < 1:
        raise UsageError(f"memory limit: a size like 4G or 512M expected, {text!r} given")
    return size
