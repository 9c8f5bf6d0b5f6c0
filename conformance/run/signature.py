"""Signature of a failure: the part that is equal in cases that fail alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from conformance.backend.strict import clip
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.judge.evidence import Error, Fault
from conformance.judge.verdict import FAILURES, Result, Verdict

NORMAL = 2.0**-126
"""Smallest normal float32."""
FLUSHED = "subnormal numbers are zero"
"""Kind of wrong numbers if a kernel, or the processor, flushes subnormals."""
NOT_FINITE = "not finite"
"""Kind of wrong numbers if a finite number became NaN or Inf."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
# They are applied to untrusted text, so each must run in linear time.
_TELLING = re.compile(r"assert|abort|fatal|error|terminate|what\(\)|memory", re.IGNORECASE)
_PASSED_ON = re.compile(r"^.*?[eE]xception: (?=.)(?:Check '.*' failed at \S+: FrontEnd API failed with \w+: )?")
_WRAPPER = re.compile(
    r"Exception from \S+?:[0-9]+:\s*|(?<=Check ')([^']*)' failed at \S+:\s*|(?<!\S)\S*/(?=[\w.-]+:[0-9]+)"
)
"""Text that OpenVINO and ggml add to a message: callers, and paths of sources."""
_VALIDATED = re.compile(r"While validating node '(\S+) [^']*' with friendly_name '[^']*'")
_NAMED = re.compile(r"with name '(?:[A-Z]\w{0,80}?_[0-9]{1,12}_?)?([^'(]{0,200}?)-?[0-9]{0,12}(?: \([^']*)?'")
_TYPED = re.compile(r"Node \S+(?: \([^:']*?)? of type (\w+)")
_TENSOR = re.compile(
    r"(?<=pre-allocated tensor) \(.{0,300}\)(?= in a buffer)|(?<=cannot run the operation) \([A-Z_0-9]+\)"
)
"""Parts of a message that name a node; its op and plain name stay."""
_DAMAGED = re.compile(
    r"(?:malloc|free|realloc|munmap_chunk|malloc_consolidate)\(\): |corrupted|double free|stack smashing"
)
"""Messages of the C library about a damaged heap, which vary at random."""
_TEXTLESS = re.compile(r": [\w.-]{1,100}:[0-9]{1,9}: fatal error$")
"""ggml's `GGML_ABORT("fatal error")`."""
_SHAPE = re.compile(r"[\[({][-?.#,x;:\s]*[\])}]")
_LONGEST = 240
DIED, DAMAGED = "its process died", "the heap is damaged"
_DIED = re.compile(rf"{DIED} \([^)]*\)(?:: {DAMAGED})?")


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


def by_damage(kind: str) -> bool:
    """Return True if a crash of this kind may be damaged memory, which varies at random."""
    return _DIED.fullmatch(kind) is not None


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


def innermost(error: Error) -> str:
    """Return the innermost message with `#` for numbers and shapes, to compare failures.

    A message without text of its own keeps its line of the source: other lines are other errors.
    """
    text = _innermost(error)
    if not _TEXTLESS.search(text):
        text = _SHAPE.sub("#", _NUMBER.sub("#", text))
    return " ".join(text.split())[:_LONGEST]


def said(error: Error) -> str:
    """Return the innermost message of a failure, or how the process died and its assertion."""
    return " ".join(_innermost(error).split())[:_LONGEST]


def _innermost(error: Error) -> str:
    text = _PASSED_ON.sub("", error.words or error.message)
    if error.died:
        lines = error.words.split("\n")
        telling = [line for line in lines if _TELLING.search(line)] or lines[-1:]
        said = DAMAGED if _DAMAGED.search(telling[0]) else _TENSOR.sub("", telling[0])
        text = f"{DIED} ({error.died}): {said}" if said else f"{DIED} ({error.died})"
    text = _WRAPPER.sub(lambda m: f"{m[1]}': " if m[1] is not None else "", text)
    return _NAMED.sub(lambda m: f"'{m[1]}'" if m[1] else "", _TYPED.sub(r"\1", _VALIDATED.sub(r"\1", text)))
