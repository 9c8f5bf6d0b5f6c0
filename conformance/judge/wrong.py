"""Size of a failure's error, compared with the size of a known one.

Baselines and waivers use it: accepting an error of 1 % does not excuse zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal, cast, get_args

from .evidence import ErrorAmount

if TYPE_CHECKING:
    from conformance.case.case import JSON

Kind = Literal["numbers", "zeros", "not finite"]
"""Kind of error: wrong numbers; unexpected zeros; unexpected NaN or Inf."""
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds in order of severity."""
_WORDS = {"numbers": "numbers", "zeros": "zeros", "not finite": "NaN or Inf"}
MUCH = 10.0
"""A failure with more than this factor times the known NMSE counts as a different one."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Worst error of the tensors of a case."""

    kind: Kind
    nmse: ErrorAmount
    """Largest NMSE; Inf if NaN or Inf is out of place, or zeros are expected."""

    @classmethod
    def worst(cls, each: Iterable[Wrong]) -> Wrong | None:
        """Return the worst kind and the largest NMSE; None if there is none."""
        rows = list(each)
        if not rows:
            return None
        return cls(max((w.kind for w in rows), key=KINDS.index), max(w.nmse for w in rows))

    def to_json(self) -> dict[str, JSON]:
        """Encode as `{"kind", "nmse"}`; null is Inf."""
        return {"kind": self.kind, "nmse": self.nmse if isfinite(self.nmse) else None}

    @classmethod
    def from_json(cls, row: Mapping[str, JSON]) -> Wrong:
        """Decode `to_json` of a checked row (`is_wrong`)."""
        return cls(cast("Kind", row["kind"]), inf if row["nmse"] is None else float(row["nmse"]))


def is_wrong(value: JSON) -> bool:
    """Return True if `value` has the format of `Wrong.to_json`."""
    if not isinstance(value, dict) or set(value) != {"kind", "nmse"} or value["kind"] not in KINDS:
        return False
    nmse = value["nmse"]
    is_number = isinstance(nmse, (int, float)) and not isinstance(nmse, bool)
    return nmse is None or (is_number and isfinite(nmse) and nmse >= 0)


def worse(known: Wrong, found: Wrong) -> str:
    """Describe how `found` is much worse than `known` (in kind or `MUCH` times the NMSE), or ""."""
    if KINDS.index(found.kind) > KINDS.index(known.kind):
        return f"{_WORDS[found.kind]} instead of {_WORDS[known.kind]}"
    if found.kind == known.kind == "numbers" and found.nmse > MUCH * known.nmse:
        return f"NMSE {found.nmse:.2g}, {known.nmse:.2g} before"
    return ""
