"""Typed evidence of a failure: where a case goes wrong, and how its backend failed.

Whoever decides something reads these; their text, of `judge.text`, is for people.
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
"""Beyond, JSON readers disagree on integers."""
Amount = Annotated[float, Meta(ge=0)]
Number = Annotated[float, Meta(extra_json_schema={"nullable": True})]
"""NaN or Inf is null in JSON."""
ErrorAmount = Annotated[float, Meta(ge=0, extra_json_schema={"nullable": True})]
"""A squared error; Inf is null in JSON."""


class Fault(str, enum.Enum):
    """How a failure at a place was diagnosed."""

    NODE = "node"
    """The node is wrong, or fails, by itself."""
    GRAPH = "graph"
    """Each node by itself is right; together they are wrong, or fail."""
    STALE = "stale"
    """The step is right by itself from the same caches: what the backend kept from an earlier step is at fault."""
    EARLIER = "earlier"
    """The case is right on a backend opened anew: what it kept from earlier cases is at fault, or chance."""
    STATE = "state"
    """Every node and the free run are right; a step that starts from the backend's own caches is not."""
    UNLOCATED = "unlocated"
    """Nobody looked for the first wrong node yet."""
    OUTPUT = "output"
    """An output is wrong, and the backend fails where each node is asked for."""
    HANDOVER = "handover"
    """A value goes wrong between two devices of a scheduler."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Numbers:
    """The worst element of a wrong tensor, and its errors."""

    index: tuple[Count, ...]
    """By `ne`, fastest first."""
    expected: Number
    found: Number
    nmse: ErrorAmount
    """Inf where NaN or Inf is out of place, or zeros are expected."""
    budget: Amount
    """The NMSE that is allowed; 0: equal to the bit."""
    special: Count = 0
    """Elements where NaN or Inf is out of place."""
    card: str = ""
    """The card that the budget comes from."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The device of a scheduler that computed a value, or that read it."""

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
    """Index in the graph of the step; None for a cache, and where no node is known."""
    op: str = ""
    """`NONE` of a cache."""
    name: str = ""
    tensor: str = ""
    """Type and `ne` of the tensor; of a node that fails, those of its sources too."""
    numbers: Numbers | None = None
    """The worst element; None unless numbers are wrong."""
    source: Endpoint | None = None
    """Where the value of a HANDOVER was written."""
    target: Endpoint | None = None
    """Where it was read."""
    steps: Count = 1
    """Number of steps of the case."""


@dataclass(frozen=True, slots=True)
class Error:
    """Why a case has no numbers to judge: how its backend refused it or failed, or what is lacking."""

    message: str
    """For a person: what the backend was asked for, and what came of it."""
    words: str = ""
    """The unmodified message of the library or adapter; for a dead process, the last lines of its stderr."""
    died: str = ""
    """How the process ended, such as `SIGABRT`; empty where it did not."""
    side: str = ""
    """The run of a relation that failed; empty for other cases."""


def to_json(evidence: Place | Error | Numbers | Endpoint) -> dict[str, JSON]:
    """The fields that differ from their defaults, as strict JSON."""
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
    """`where` and `error` of a row as msgspec reads them, NaN and Inf in place of null.

    msgspec.ValidationError for a field that no evidence has.
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
"""Fields of `Numbers` that may be null in JSON."""
