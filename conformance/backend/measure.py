"""What a piece of work costs in memory, as the operating system tells it; None where it does not tell."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import final

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What resets the high-water mark of resident memory: Linux, Documentation/filesystems/proc.rst."""


def resident() -> int | None:
    """Resident memory of this process in bytes: `VmRSS` of /proc/self/status."""
    return _read("VmRSS")


@final
class Peak:
    """By how much the resident memory of the process rose at most during a `with` block.

    It counts every thread of the process. Blocks may stand in one another. Where the high-water mark cannot be reset, a
    block that stays under an earlier peak is not told. The reset reaches `getrusage` too.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        """The answer, after the block."""
        self._start: int | None = None
        self._mark = 0
        self._top = 0

    def __enter__(self) -> Peak:
        top = _read("VmHWM") or 0
        for outer in _blocks:  # which the reset would make forget it
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
"""Those that are being measured, outermost first."""


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
