"""A line on a terminal that says what is at work and for how long; nothing where standard error is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

CLEAR = "\r\x1b[K"


@contextmanager
def waiting(what: str, stream: TextIO | None = None, every: float = 1.0) -> Iterator[None]:
    """Show `what` and the seconds since, as long as the block runs.

    Args:
        what: one short line.
        stream: a terminal; standard error by default.
        every: seconds between two looks at the clock.
    """
    out = stream or sys.stderr
    if not out.isatty():
        yield
        return
    end, began = threading.Event(), time.monotonic()

    def show() -> None:
        while True:
            with suppress(OSError, ValueError):  # a terminal that is gone ends nothing
                out.write(f"{CLEAR}{what}: {time.monotonic() - began:.0f} s")
                out.flush()
            if end.wait(every):
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        with suppress(OSError, ValueError):
            out.write(CLEAR)
            out.flush()
