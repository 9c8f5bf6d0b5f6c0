"""Typed evidence of a failure: where a case goes wrong, and how its backend failed.

Code that decides something reads these types; the text of `judge.text` is for people.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, ValidationError

if TYPE_CHECKING:
    from conformance.case.case import JSON

Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""Non-negative integer; JSON readers disagree on larger ones."""
Amount = Annotated[float, Meta(ge=0)]
Number = Annotated[float, Meta(extra_json_schema={"nullable": True})]
"""NaN or Inf is null in JSON."""
ErrorAmount = Annotated[float, Meta(ge=0, extra_json_schema={"nullable": True})]
"""A squared error; Inf is null in JSON."""


class Fault(str, enum.Enum):
    """Diagnosis of a failure."""

    NODE = "node"
    """The node is wrong, or fails, by itself."""
    GRAPH = "graph"
    """Each node by itself is right; together they are wrong, or fail."""
    STALE = "stale"
    """The step alone is right from the same caches: stale state of an earlier step."""
    EARLIER = "earlier"
    """The case is right on a fresh backend: stale state of earlier cases, or nondeterminism."""
    STATE = "state"
    """Only a step that starts from the backend's own caches is wrong; all else is right."""
    UNLOCATED = "unlocated"
    """The first wrong node has not been searched for yet."""
    OUTPUT = "output"
    """An output is wrong, and the backend fails if each node's value is requested."""
    HANDOVER = "handover"
    """A value changes between two devices of a scheduler."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Numbers:
    """Worst element of a wrong tensor, and its errors."""

    index: tuple[Count, ...]
    """Indices in `ne` order, fastest first."""
    expected: Number
    found: Number
    nmse: ErrorAmount
    """Inf if there is unexpected NaN or Inf, or if zeros are expected."""
    budget: Amount
    """Allowed NMSE; 0 if bit-exact is required."""
    special: Count = 0
    """Number of elements with unexpected or missing NaN or Inf."""
    profile: str = ""
    """Precision profile of the tolerance."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Device of a scheduler that computed or read a value."""

    step: Count
    device: str = ""
    split: Count | None = None
    """Index of the split in the graph of the step."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case goes wrong or its backend fails."""

    fault: Fault
    step: Count | None = None
    node: Count | None = None
    """Index in the graph of the step; None for a cache, or if no node is known."""
    op: str = ""
    """`NONE` for a cache, or for a weight or key of a file."""
    name: str = ""
    tensor: str = ""
    """Type and `ne` of the tensor; for a node that fails, those of its sources too."""
    numbers: Numbers | None = None
    """Worst element; None unless numbers are wrong."""
    source: Endpoint | None = None
    """Where the value of a HANDOVER was written."""
    target: Endpoint | None = None
    """Where it was read."""
    steps: Count = 1
    """Number of steps of the case."""


@dataclass(frozen=True, slots=True)
class Error:
    """Why a case has no numbers to judge: a refusal, a failure or something missing."""

    message: str
    """Message for people: what was requested of the backend, and the outcome."""
    words: str = ""
    """Unmodified message of the library or adapter, or the last lines of a dead process."""
    died: str = ""
    """How the process ended, such as `SIGABRT`; empty if it did not."""
    side: str = ""
    """Run of a relation that failed; empty for other cases."""


def to_json(evidence: Place | Error | Numbers | Endpoint) -> dict[str, JSON]:
    """Encode the fields that differ from their defaults as strict JSON."""
    return {f.name: _plain(v) for f in fields(evidence) if (v := getattr(evidence, f.name)) != f.default}


def _plain(value: Any) -> JSON:  # noqa: ANN401  # of any field
    if isinstance(value, (Numbers, Endpoint)):
        return to_json(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    return str(value) if isinstance(value, Fault) else value


def readable(evidence: Mapping[str, JSON], at: str = "$") -> dict[str, JSON]:
    """Prepare `where` and `error` of a row for msgspec, with NaN and Inf in place of null.

    msgspec.ValidationError for an unknown field.
    """
    read: dict[str, JSON] = {}
    for name, value in evidence.items():
        read[name] = value
        if name in _PARTS and isinstance(value, dict):
            kind = _PARTS[name]
            if extra := sorted(value.keys() - {f.name for f in fields(kind)}):
                raise ValidationError(f"fields of `{kind.__name__}` expected, {extra[0]!a} found - at `{at}.{name}`")
            lost = {k: v for k, v in _UNWRITTEN.items() if value.get(k) is None} if kind is Numbers else {}
            read[name] = {**readable(value, f"{at}.{name}"), **lost}
    return read


_PARTS: dict[str, type[Place | Error | Numbers | Endpoint]] = {
    "where": Place, "error": Error, "numbers": Numbers, "source": Endpoint, "target": Endpoint
}  # fmt: skip
_UNWRITTEN = {"expected": nan, "found": nan, "nmse": inf}
"""Fields of `Numbers` that may be null in JSON -> value read for null."""
