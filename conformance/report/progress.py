"""What a run is at, in one line of a terminal that stays up to date while a case takes its time."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PERIOD = 1.0
"""Seconds between two looks."""


class Progress:
    """A line on `stream` where that is a terminal; nothing at all where it is none."""

    def __init__(self, stream: TextIO | None = None, period: float = PERIOD) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._period = period
        self._lock = threading.Lock()
        self._shown = False
        self._say: Callable[[], str] = str
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def of(self, says: Callable[[], str]) -> Iterator[None]:
        """While this lasts, the line holds what `says` gives, looked up once a second."""
        if not self._stream.isatty():
            yield
            return
        self._say = says
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
        """Bring the line up to date now."""
        with self._lock:
            if self._thread is not None and not self._end.is_set():
                width = shutil.get_terminal_size().columns - 1
                self._write(f"\r\x1b[K{_plain(self._say())[:width]}")
                self._shown = True

    def clear(self) -> None:
        """Take the line away, for what is printed next."""
        with self._lock:
            if self._shown:
                self._write("\r\x1b[K")
                self._shown = False

    def _watch(self) -> None:
        while not self._end.wait(self._period):
            self.show()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that is gone ends no run
            self._end.set()


def since(what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[], str]:
    """Says `what`, and for how many seconds from now."""
    began = clock()
    return lambda: f"{what}: {clock() - began:.0f} s"


class Steps:
    """How far a backend is: its cases done, and the one that it is at since when."""

    def __init__(self, label: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._total, self._clock = label, total, clock
        self.done = 0
        self._case, self._since = "", clock()

    def at(self, case: str) -> None:
        """It begins with `case`."""
        self._case, self._since = case, self._clock()

    def __str__(self) -> str:
        at = f", {self._case}: {self._clock() - self._since:.0f} s" if self._case else ""
        return f"{self._label}: {self.done} of {self._total}{at}"


def _plain(text: str) -> str:
    """Text that moves no cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)
