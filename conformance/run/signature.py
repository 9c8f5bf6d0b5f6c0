"""Signature of a failure: the part that is equal in cases that fail alike."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from conformance.ggml.errors import BackendError, ConformanceError
from conformance.ggml.text import clip
from conformance.judge.evidence import Error, Fault
from conformance.judge.message import innermost
from conformance.judge.verdict import FAILURES, Result, Verdict

NORMAL = 2.0**-126
"""Smallest normal float32."""
FLUSHED = "subnormal numbers are zero"
"""Kind of wrong numbers if a kernel, or the processor, flushes subnormals."""
NOT_FINITE = "not finite"
"""Kind of wrong numbers if a finite number became NaN or Inf."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The part of a failure that must stay the same while its case shrinks."""

    verdict: Verdict
    op: str = ""
    """Op of the wrong or failing node; empty if unknown or not a single node."""
    kind: str = ""
    """The fault of wrong numbers (with `NOT_FINITE` or `FLUSHED`), or the error.

    The error is how the process died, or the innermost message without numbers, shapes, names of cases and wrappers."""

    def covers(self, other: Signature | None) -> bool:
        """Return True if `other` is the same failure, at the same op, or at any if `op` is empty.

        Wrong numbers with an unknown first wrong node match any failure with the same verdict.
        """
        if self.kind == Fault.OUTPUT:
            return other is not None and other.verdict is self.verdict
        same = other is not None and (self.verdict, self.kind) == (other.verdict, other.kind)
        return same and other is not None and self.op in {"", other.op}

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.verdict.value, self.op, self.kind)))


def signature_of(result: Result) -> Signature | None:
    """Return the signature of a failure; None if `result` is not a failure."""
    if result.verdict not in FAILURES:
        return None
    where, error = result.where, result.error
    op = where.op if where is not None and where.fault is Fault.NODE else ""
    if result.verdict is not Verdict.FAIL:
        return Signature(result.verdict, op, innermost(error) if error is not None else "")
    if where is None:
        return Signature(Verdict.FAIL, "", Fault.STATE)
    if where.fault is Fault.OUTPUT:
        return Signature(Verdict.FAIL, "", Fault.OUTPUT)
    how = "" if where.numbers is None else _how(where.numbers.expected, where.numbers.found)
    return Signature(Verdict.FAIL, op, ", ".join(filter(None, (where.fault, how))))


def _how(expected: float, found: float) -> str:
    """Return the kind of error of a number, if it has a name."""
    if not isfinite(found):
        return NOT_FINITE
    return FLUSHED if 0 < abs(expected) <= NORMAL and found == 0 else ""


def error_of(error: ConformanceError) -> Error:
    """Convert an exception to the evidence of a result."""
    if isinstance(error, BackendError):
        return Error(clip(str(error)), clip(str(error.words)), str(error.died), str(error.side))
    return Error(clip(str(error)))
