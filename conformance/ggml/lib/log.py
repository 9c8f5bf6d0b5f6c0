"""The last log lines of a library, and those that report errors or rejected devices."""

from __future__ import annotations

import re
from collections import deque

from .echo import ECHO
from .layout import LOG_CALLBACK

_REFUSAL = re.compile(
    r"ncompatible|ailed to (?:load|init)|nsupported (?:GPU|device)|not support|is required|not available|"
    r"(?:\b[Nn]o|find any)(?: \S+)? devices?\b"
)
"""Pattern for a log line that explains why there is no device."""
_COMPLAINT = re.compile(r"xception|rror|[Ff]ail|ASSERT|nsupported|Check '")


class Log:
    """The last lines that a library logs through `callback`."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=64)
        self.callback = LOG_CALLBACK(self._line)
        """The function for the library's `log_set`."""

    def _line(self, level: int, text: bytes | None, _data: int | None) -> None:
        ECHO.line(level, text or b"")
        self.lines.append((text or b"").decode(errors="replace").rstrip())

    def refusals(self) -> list[str]:
        """Return the library's messages on devices or libraries it rejected since it was loaded.

        Only the last log lines are kept, so call this before anything runs.
        """
        return list(dict.fromkeys(text for line in self.lines if _REFUSAL.search(text := line.strip())))

    def complaints(self) -> list[str]:
        """Return the last log lines that report an error, or else the last lines."""
        lines = [" ".join(text.split()) for text in self.lines if text.strip()]
        return [text for text in lines if _COMPLAINT.search(text)][-2:] or lines[-3:]
