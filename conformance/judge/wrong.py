"""How wrong a failing case is, and whether it became much worse than what is known of it.

Baselines and waivers know failures by this: what was accepted as 1 % too much is no excuse for zeros.
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
"""Wrong numbers; an output of zeros where others are expected; NaN or Inf where finite numbers are expected."""
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The lesser evil first."""
_WORDS = {"numbers": "numbers", "zeros": "zeros", "not finite": "NaN or Inf"}
MUCH = 10.0
"""Times the known NMSE, beyond which a failure is another one."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """The worst of the wrong tensors of a case."""

    kind: Kind
    nmse: ErrorAmount
    """The largest; Inf where NaN or Inf stands out of place, or zeros are expected."""

    @classmethod
    def worst(cls, each: Iterable[Wrong]) -> Wrong | None:
        """The worst kind and the largest NMSE among several; None of none."""
        rows = list(each)
        if not rows:
            return None
        return cls(max((w.kind for w in rows), key=KINDS.index), max(w.nmse for w in rows))

    def to_json(self) -> dict[str, JSON]:
        """`{"kind", "nmse"}`; null is Inf."""
        return {"kind": self.kind, "nmse": self.nmse if isfinite(self.nmse) else None}

    @classmethod
    def from_json(cls, row: Mapping[str, JSON]) -> Wrong:
        """`to_json`, read; the row is checked (`is_wrong`)."""
        return cls(cast("Kind", row["kind"]), inf if row["nmse"] is None else float(row["nmse"]))


def is_wrong(value: JSON) -> bool:
    """True if `value` is what `Wrong.to_json` gives."""
    if not isinstance(value, dict) or set(value) != {"kind", "nmse"} or value["kind"] not in KINDS:
        return False
    nmse = value["nmse"]
    is_number = isinstance(nmse, (int, float)) and not isinstance(nmse, bool)
    return nmse is None or (is_number and isfinite(nmse) and nmse >= 0)


def worse(known: Wrong, found: Wrong) -> str:
    """Say how `found` is much worse than what is `known`: a worse kind, or `MUCH` times the NMSE; else empty."""
    if KINDS.index(found.kind) > KINDS.index(known.kind):
        return f"{_WORDS[found.kind]} where there were {_WORDS[known.kind]}"
    if found.kind == known.kind == "numbers" and found.nmse > MUCH * known.nmse:
        return f"NMSE {found.nmse:.2g}, {known.nmse:.2g} before"
    return ""
