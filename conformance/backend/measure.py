"""Time and memory of this process, from the operating system."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Resets the high-water mark of resident memory: Linux, Documentation/filesystems/proc.rst."""


Clock = Callable[[], float]
"""Returns seconds."""


def clock_of(threads: int | None) -> Clock:
    """Return the clock that times a backend with so many `threads`.

    A single thread is timed in processor time of the process: unlike the time that passes, it does not grow while
    another process has the processor. Several threads may wait for each other, and processor time shows that as work or
    not at all, depending on how they wait.
    """
    return time.process_time if threads == 1 else time.perf_counter


def resident() -> int | None:
    """Return resident memory of this process in bytes: `VmRSS` of /proc/self/status."""
    return _read("VmRSS")


def held() -> int | None:
    """Return bytes of this process's own memory, without file pages and freed memory."""
    trim()
    anonymous, shared = _read("RssAnon"), _read("RssShmem")
    return None if anonymous is None or shared is None else anonymous + shared


def trim() -> None:
    """Return freed memory to the system, if the C library supports it."""
    give_back = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(ctypes.c_size_t(0))


@dataclass(frozen=True, slots=True)
class Rise:
    """Memory growth of a process in bytes; None if the system does not report it."""

    held: int | None
    """Growth of its own memory, from start to end."""
    peak: int | None
    """Peak growth of its resident memory."""


@final
class Peak:
    """Peak rise of the process's resident memory, of all threads, during a `with` block.

    Blocks may be nested. If the high-water mark cannot be reset, a block below an earlier peak has no result. The reset
    also affects `getrusage`.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        """Bytes after the block; None if there is no result."""
        self._start: int | None = None
        self._mark = 0
        self._top = 0

    def __enter__(self) -> Peak:
        top = _read("VmHWM") or 0
        for outer in _blocks:  # the reset would lose their peak
            outer._top = max(outer._top, top)  # noqa: SLF001  # its own class
        self._mark = 0 if _reset() else top
        _blocks.append(self)
        self._start = resident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _blocks.remove(self)
        top = _read("VmHWM")
        if top is not None:
            top = max(top, self._top)
        if top is not None and self._start is not None and top > self._mark:
            self.bytes = max(top - self._start, 0)


_blocks: list[Peak] = []
"""Active blocks, outermost first."""


def _reset() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _read(field: str) -> int | None:
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024  # always in kB
    return None
