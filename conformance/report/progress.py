"""Progress: an updated line on a terminal, lines at growing intervals in a log."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PERIOD = 1.0
"""Seconds between updates."""
SPARSE = 10.0
"""Seconds before the first line of a log; each later one waits twice as long."""


class Progress:
    """A line on a terminal `stream`; else lines at growing intervals, if `logs`."""

    def __init__(self, stream: TextIO | None = None, period: float | None = None, *, logs: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live, self._logs = self._stream.isatty(), logs
        self._period = period or (PERIOD if self._live else SPARSE)
        self._next = time.monotonic() + self._period
        self._lock = threading.Lock()
        self._shown = False
        self._text: Callable[[], str] = str
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def of(self, text: Callable[[], str]) -> Iterator[None]:
        """Show `text()` at intervals inside the block."""
        if not self._live and not self._logs:
            yield
            return
        self._text = text
        self._end.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()
            self.clear()

    def show(self) -> None:
        """Update the line at once."""
        with self._lock:
            if self._thread is None or self._end.is_set():
                return
            if not self._live:
                self._write(f"{_plain(self._text())}\n")
            else:
                width = shutil.get_terminal_size().columns - 1
                self._write(f"\r\x1b[K{_plain(self._text())[:width]}")
                self._shown = True

    def clear(self) -> None:
        """Erase the line, so that something else can be printed."""
        with self._lock:
            if self._shown:
                self._write("\r\x1b[K")
                self._shown = False

    def _watch(self) -> None:
        while not self._end.wait(max(0.0, self._next - time.monotonic())):
            self.show()
            if not self._live:
                self._period *= 2
            self._next = time.monotonic() + self._period

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that is gone ends no run
            self._end.set()


def since(what: str) -> Callable[[], str]:
    """Return a function that returns `what` and the seconds since this call."""
    began = time.monotonic()
    return lambda: f"{what}: {time.monotonic() - began:.0f} s"


class Steps:
    """Progress of a backend: cases done, failures, the current case with its seconds."""

    def __init__(self, label: str, total: int, then: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._total, self._then, self._clock = label, total, then, clock
        self.done = self.failures = 0
        self._case, self._since = "", clock()

    def at(self, case: str) -> None:
        """Set the current case."""
        self._case, self._since = case, self._clock()

    def __str__(self) -> str:
        at = f", {self._case}: {self._clock() - self._since:.0f} s" if self._case else ""
        failed = f", {self.failures:,} failed" if self.failures else ""
        then = f", then {self._then}" if self._then else ""
        return f"{self._label}: {self.done:,} of {self._total:,}{failed}{then}{at}"


def _plain(text: str) -> str:
    """Replace characters that could move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)
