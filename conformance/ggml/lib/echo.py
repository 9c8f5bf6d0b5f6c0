"""Copies errors that ggml logs to stderr, in processes whose parent reads it when they die.

The binding takes all log lines, to quote them in its own errors. A library that logs an error and then calls `exit`
would take them along; text of an abort goes to stderr anyway.
"""

from __future__ import annotations

import os
from contextlib import suppress

_ERROR, _CONTINUED = 4, 5
"""`enum ggml_log_level`."""
_STDERR = 2


class Echo:
    """The copy of one process, off until its worker turns it on."""

    def __init__(self) -> None:
        self.on = False
        self._was_error = False

    def line(self, level: int, text: bytes) -> None:
        """Write an error, or the rest of one, immediately."""
        if level != _CONTINUED:
            self._was_error = level == _ERROR
        if self.on and self._was_error:
            with suppress(OSError):
                os.write(_STDERR, text)


ECHO = Echo()
