"""The one exception family: every error a user can meet derives from `ConformanceError`.

A message says what was expected, what came, where, and what to do.
"""

from __future__ import annotations


class ConformanceError(Exception):
    """Anything this project reports on purpose; the command line prints it as one line and exits with 2."""


class GraphError(ConformanceError):
    """A tensor or graph that ggml would have refused; the message says which assertion it breaks."""


class CaseFileError(ConformanceError):
    """A case file that cannot be trusted or read; the message names the file's field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class UsageError(ConformanceError):
    """Wrong words from the user: an unknown backend, option, level, case."""


class UnavailableError(ConformanceError):
    """A backend, device or package that this machine does not have; the message says how to get it."""


class BackendError(ConformanceError):
    """A backend failed at work it had accepted (a status other than success, a refused compile)."""


class BackendCrashError(BackendError):
    """The process that ran a backend died; the message carries the abort text."""


class BackendTimeoutError(BackendError):
    """The process that ran a backend did not answer in time and was ended."""


class NotIndependentError(BackendError):
    """What answered had the answers already: it loaded the reference or the golden values, so nothing was tested."""
