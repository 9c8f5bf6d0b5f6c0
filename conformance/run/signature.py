"""The signature of a failure: what stays the same while a case gets smaller, and in another case that fails alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from conformance.backend.strict import clip
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.judge.evidence import Error, Fault
from conformance.judge.verdict import FAILURES, Result, Verdict

NORMAL = 2.0**-126
"""The least float32 that is not subnormal."""
FLUSHED = "subnormal numbers are zero"
"""How wrong numbers are if the processor, or one kernel, flushes what is subnormal."""
NOT_FINITE = "not finite"
"""How they are if a number became none."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
# A backend chooses what they are applied to, so none of them may look at a letter more often than a few times.
_TELLING = re.compile(r"assert|abort|fatal|error|terminate|what\(\)|memory", re.IGNORECASE)
_PASSED_ON = re.compile(r"^.*?[eE]xception: (?=.)(?:Check '.*' failed at \S+: FrontEnd API failed with \w+: )?")
_WRAPPER = re.compile(
    r"Exception from \S+?:[0-9]+:\s*|(?<=Check ')([^']*)' failed at \S+:\s*|(?<!\S)\S*/(?=[\w.-]+:[0-9]+)"
)
"""What OpenVINO and ggml put around a message: who passed it on, and where the source was built."""
_VALIDATED = re.compile(r"While validating node '(\S+) [^']*' with friendly_name '[^']*'")
_NAMED = re.compile(r"with name '(?:[A-Z]\w{0,80}?_[0-9]{1,12}_?)?([^'(]{0,200}?)-?[0-9]{0,12}(?: \([^']*)?'")
_TYPED = re.compile(r"Node \S+(?: \([^:']*?)? of type (\w+)")
_TENSOR = re.compile(
    r"(?<=pre-allocated tensor) \(.{0,300}\)(?= in a buffer)|(?<=cannot run the operation) \([A-Z_0-9]+\)"
)
"""The parts of a message that name a node: its op stays, and of its own name what is no count and no view."""
_DAMAGED = re.compile(
    r"(?:malloc|free|realloc|munmap_chunk|malloc_consolidate)\(\): |corrupted|double free|stack smashing"
)
"""What the C library says of a heap that somebody damaged, which goes by chance."""
_SHAPE = re.compile(r"[\[({][-?.#,x;:\s]*[\])}]")
_KEPT = 240
DIED, DAMAGED = "its process died", "the heap is damaged"
_DIED = re.compile(rf"{DIED} \([^)]*\)(?:: {DAMAGED})?")


@dataclass(frozen=True, slots=True)
class Signature:
    """The part of a failure that must stay the same while the case gets smaller."""

    verdict: Verdict
    op: str = ""
    """Of the node at fault; empty where no single node is, or nothing says which."""
    kind: str = ""
    """`node`, `graph`, `kept`, `output` or `state`, with `not finite` where a number became none, or `FLUSHED`; of a
    crash how it died and its last words, of other failures the innermost message: without numbers, shapes, names of
    cases, and what wraps it.
    """

    def covers(self, other: Signature | None) -> bool:
        """Whether `other` is the same failure: at the same op, or, where none is at fault here, at any. Wrong numbers
        of which nobody knows the first wrong node may be any.
        """
        if self.kind == Fault.OUTPUT:
            return other is not None and other.verdict is self.verdict
        same = other is not None and (self.verdict, self.kind) == (other.verdict, other.kind)
        return same and other is not None and self.op in {"", other.op}

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.verdict.value, self.op, self.kind)))


def by_damage(kind: str) -> bool:
    """Whether a crash of this kind says no more than that memory is damaged, which shows by chance."""
    return _DIED.fullmatch(kind) is not None


def signature_of(result: Result) -> Signature | None:
    """The signature of a failure; None where `result` is no failure."""
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
    """In what way one number is wrong, where that tells."""
    if not isfinite(found):
        return NOT_FINITE
    return FLUSHED if 0 < abs(expected) <= NORMAL and found == 0 else ""


def error_of(error: ConformanceError) -> Error:
    """An exception as the evidence of a result."""
    if isinstance(error, BackendError):
        return Error(clip(str(error)), clip(str(error.words)), str(error.died), str(error.side))
    return Error(clip(str(error)))


def innermost(error: Error) -> str:
    """Return `said`, with `#` for numbers and shapes: equal for failures that differ in nothing else."""
    return " ".join(_SHAPE.sub("#", _NUMBER.sub("#", _innermost(error))).split())[:_KEPT]


def said(error: Error) -> str:
    """Return the innermost message of a failure: how a process died and its assertion, or the text without wrappers."""
    return " ".join(_innermost(error).split())[:_KEPT]


def _innermost(error: Error) -> str:
    text = _PASSED_ON.sub("", error.words or error.message)
    if error.died:
        lines = error.words.split("\n")
        telling = [line for line in lines if _TELLING.search(line)] or lines[-1:]
        said = DAMAGED if _DAMAGED.search(telling[0]) else _TENSOR.sub("", telling[0])
        text = f"{DIED} ({error.died}): {said}" if said else f"{DIED} ({error.died})"
    text = _WRAPPER.sub(lambda m: f"{m[1]}': " if m[1] is not None else "", text)
    return _NAMED.sub(lambda m: f"'{m[1]}'" if m[1] else "", _TYPED.sub(r"\1", _VALIDATED.sub(r"\1", text)))
