"""Exceptions: every error that a user can meet derives from `ConformanceError`.

A message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConformanceError(Exception):
    """Base class; the command line prints it as one line and exits with 2."""


class GraphError(ConformanceError):
    """A tensor or graph that ggml would reject; the message names the assertion."""


class CaseFileError(ConformanceError):
    """A case file that cannot be read or trusted; the message names the field."""

    file: str = ""
    """Path of the file; empty if none was read or `message` names it."""
    others: tuple[CaseFileError, ...] = ()
    """Other errors in the same file."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.file}: {super().__str__()}" if self.file else super().__str__()


class UsageError(ConformanceError):
    """Invalid user input: an unknown backend, option, level or case."""


def unknown(what: str, name: str, names: Iterable[str]) -> UsageError:
    """Return the error for a `name` that is not among `names`, with the nearest of them and all."""
    known = list(names)
    return UsageError(f"{what} {name!r} is unknown;{nearest(name, known)} known: {', '.join(known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` did you mean X?`, or nothing if none of `known` is like `name`."""
    return "".join(f" did you mean {n}?" for n in get_close_matches(name, list(known), 1))


class UnavailableError(ConformanceError):
    """A backend, device or package missing on this machine; the message says how to get it."""


class BrokenError(UnavailableError):
    """An installed adapter or part that is wrong on every machine; the message names its error."""


class BackendError(ConformanceError):
    """Failure of a backend at work that it had accepted, such as a failed compilation."""

    step: int | None = None
    """Step of the case that failed, if the backend computed one."""
    side: str = ""
    """Run of a relation that failed, in words."""
    words: str = ""
    """Unmodified message of the library or adapter; empty if there is none."""
    died: str = ""
    """How the process ended, such as `SIGABRT`; empty if it did not."""

    def __init__(self, message: str = "", *, words: str | None = None, died: str = "") -> None:
        """Set the message for the user; it may name the request and the case."""
        super().__init__(message)
        if words is not None:
            self.words = words
        self.died = died


class BackendCrashError(BackendError):
    """Death of the process that ran a backend; the message contains the abort text."""


class BackendTimeoutError(BackendError):
    """Timeout of the process that ran a backend; it was killed."""


class NotIndependentError(BackendError):
    """A backend that loaded the reference or the golden values, so its results test nothing."""


BY_NAME: dict[str, type[ConformanceError]] = {
    c.__name__: c for c in list(vars().values()) if isinstance(c, type) and issubclass(c, ConformanceError)
}
"""Exception class by name."""
