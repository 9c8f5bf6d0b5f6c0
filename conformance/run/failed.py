"""Results of cases that have no numbers: a backend that failed, or nothing to judge it by."""

from __future__ import annotations

from conformance.ggml.errors import (
    BackendCrashError,
    BackendError,
    BackendTimeoutError,
    ConformanceError,
    NotIndependentError,
)
from conformance.ggml.text import error_text
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import Pair, Result, Verdict

from .signature import error_of

_VERDICT_OF: tuple[tuple[type[ConformanceError], Verdict], ...] = (
    (NotIndependentError, Verdict.VACUOUS),
    (BackendTimeoutError, Verdict.TIMEOUT),
    (BackendCrashError, Verdict.CRASH),
)
"""Other errors are an OVERCLAIM."""


def result_of_error(pair: Pair, error: ConformanceError) -> Result:
    """Return the result of a case whose backend failed."""
    verdict = next((v for kind, v in _VERDICT_OF if isinstance(error, kind)), Verdict.OVERCLAIM)
    where = None
    if isinstance(error, BackendError) and error.step is not None:
        where = Place(Fault.UNLOCATED, error.step)
    return Result(*pair, verdict, where=where, error=error_of(error))


def unsupported(pair: Pair, error: Error) -> Result:
    """Return UNSUPPORTED, with the reason."""
    return Result(*pair, Verdict.UNSUPPORTED, error=error)


def uncheckable(pair: Pair, why: str) -> Result:
    """Return VACUOUS: nothing independent could compute the expected values."""
    return Result(*pair, Verdict.VACUOUS, error=Error(f"no reference: {why}"))


def unjudged(pair: Pair, error: Exception) -> Result:
    """Return VACUOUS for a bug of the suite; errors of adapters are a `ConformanceError`."""
    return Result(*pair, Verdict.VACUOUS, error=Error(f"the suite itself could not judge it: {error_text(error)}"))
