"""The one exception family: every error a user can meet derives from `ConformanceError`.

A message says what was expected, what came, where, and what to do.
"""

from __future__ import annotations


class ConformanceError(Exception):
    """Base class; the command line prints it as one line and exits with 2."""


class GraphError(ConformanceError):
    """A tensor or graph that ggml would refuse; the message names the assertion."""


class CaseFileError(ConformanceError):
    """A case file that cannot be read or trusted; the message names the file, where there is one, and the field."""

    file: str = ""
    """The file; empty where none was read, or `message` names it."""
    others: tuple[CaseFileError, ...] = ()
    """What else is wrong with the file."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.file}: {super().__str__()}" if self.file else super().__str__()


class UsageError(ConformanceError):
    """Wrong input of the user: an unknown backend, option, level or case."""


class UnavailableError(ConformanceError):
    """A backend, device or package that this machine lacks; the message says how to get it."""


class BackendError(ConformanceError):
    """A backend failed at work that it had accepted (an error status, a failed compilation)."""

    step: int | None = None
    """Of the case, where it computed one."""
    side: str = ""
    """Of a relation: the run that failed, in words."""
    words: str = ""
    """The unmodified message of the library or adapter; empty if the error has no other than its own."""
    died: str = ""
    """How the process ended, such as `SIGABRT`; empty where it did not."""

    def __init__(self, message: str = "", *, words: str | None = None, died: str = "") -> None:
        """`message` is for a person: it may say what the backend was asked for, and of which case."""
        super().__init__(message)
        if words is not None:
            self.words = words
        self.died = died


class BackendCrashError(BackendError):
    """The process that ran a backend died; the message carries the abort text."""


class BackendTimeoutError(BackendError):
    """The process that ran a backend did not answer in time and was killed."""


class NotIndependentError(BackendError):
    """The backend loaded the reference or the golden values, so its answers test nothing."""
