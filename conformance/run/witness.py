"""Judge a witness by its counts, not by the words of an adapter.

A witness that claims something (`state` is `fused`) needs a count of what the claim means (an attention layer ran), or
it contradicts itself: `CLAIMS`. The demands of a case (`case.demands`) compare counts with limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import eq, ge, le
from typing import Any

from conformance.backend.interface import Witness, describe
from conformance.case.case import JSON
from conformance.case.demands import COMPARISON, PROGRAMS, Demand, parse

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": le, ">=": ge, "==": eq}
_MOST_NAMES = 12
"""Names of counts in a message."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A word in a witness, and the count that it needs."""

    field: str
    says: str
    """A word of the field's text."""
    count: str
    """The field that counts."""
    of: str = ""
    """Pattern of the names of its counts, for a field of counts by name."""
    meant: str = ""
    """These counts, for people."""


CLAIMS = (
    Claim("state", "fused", "kernels", r"(?i)attention|attn|sdpa", "attention layer"),
    Claim("path", "cached", "cache_hits"),
    Claim("path", "split", "splits"),
)
"""Words with their evidence, at least one of the named counts."""
EVIDENCE: Mapping[str, str] = {"compiles": "cache_hits"}
"""Counted field -> the field that counts instead if nothing new was needed."""


def contradiction(witness: Witness) -> str:
    """Return how a witness contradicts itself, in words; empty if it does not."""
    said = describe(witness)
    for claim in CLAIMS:
        words = str(said[claim.field])
        if claim.says not in words.split(", "):
            continue
        counted = said[claim.count]
        if not claim.of and not counted:
            return f"the witness contradicts itself: {claim.field}={words}, but {claim.count} is {counted}"
        if claim.of and not sum(n for name, n in counted.items() if re.search(claim.of, name)):
            return (
                f"the witness contradicts itself: {claim.field}={words}, but its {claim.count} hold no {claim.meant}: "
                f"{_names(counted)}"
            )
    return ""


def unmet(demands: Mapping[str, JSON], names: Collection[str], witness: Witness) -> str:
    """Return the first unmet demand on a backend called one of `names`; empty if none.

    GraphError if a demand is malformed.
    """
    said = describe(witness)
    for demand in parse(demands):
        if not any(fnmatchcase(t, demand.backends) for t in (*names, *witness.promises)):
            continue
        have = said[demand.field]
        if demand.entry is not None:
            have = sum(n for name, n in have.items() if fnmatchcase(name, demand.entry))
        if not _meets(have, demand.what, witness):
            of = "" if demand.backends == "*" else f" (a demand on {demand.backends})"
            return f"the case demands {demand}; the witness has {_shown(have, demand, witness)}{of}"
        if demand.backends in witness.promises and _unproven(have, demand, said):
            return f"the case demands {demand} of a backend that declares {demand.backends}; the witness counts none"
    return ""


def _unproven(have: Any, demand: Demand, said: Mapping[str, Any]) -> bool:  # noqa: ANN401  # JSON
    """Return True for a limit from above that only holds because nothing was counted."""
    m = COMPARISON.fullmatch(str(demand.what))
    return (
        m is not None and m[1] == "<=" and int(m[2]) > 0 and have == 0 and not said.get(EVIDENCE.get(demand.field, ""))
    )


def _meets(have: Any, what: Any, witness: Witness) -> bool:  # noqa: ANN401  # JSON
    if isinstance(what, list):
        return all(any(fnmatchcase(line, glob) for line in have) for glob in what)
    if have is None:
        return False
    if isinstance(have, str):
        return fnmatchcase(have, what)
    m = COMPARISON.fullmatch(str(what))
    if m is None:
        return bool(have == what)
    times = witness.counters.get(PROGRAMS, 0) if m[3] else 1
    return times > 0 and _COMPARE[m[1]](have, int(m[2]) * times)


def _shown(have: Any, demand: Demand, witness: Witness) -> str:  # noqa: ANN401  # JSON
    if have in (None, ""):
        return "no answer"
    m = COMPARISON.fullmatch(str(demand.what))
    if m is None or not m[3]:
        return str(have)
    programs = witness.counters.get(PROGRAMS, 0)
    return f"{have} in {programs} program{'' if programs == 1 else 's'}"


def _names(counts: Mapping[str, int]) -> str:
    names = [name for name, n in sorted(counts.items()) if n]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "it counts none"
