"""Whether a witness says what a case demands; the grammar is `case.demands`."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from conformance.backend.interface import Witness, describe
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.case.demands import COMPARISON, Demand, parse

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
}


def unmet(case: Case, spec: Spec, witness: Witness) -> str:
    """The first demand on `spec` that the witness does not meet, in words; empty where all are met.

    Raises:
        GraphError: the case's demands are malformed.
    """
    said = describe(witness)
    for demand in parse(case.demands):
        if not _asked(demand, spec):
            continue
        have = said[demand.field]
        if demand.entry is not None:
            have = have.get(demand.entry, 0)
        if not _meets(have, demand.what):
            return f"the case demands {demand}; the witness has {'no answer' if have in (None, '') else have}"
    return ""


def _asked(demand: Demand, spec: Spec) -> bool:
    return any(fnmatchcase(t, demand.backends) for s in (spec, resolve(spec)) for t in (s.name, str(s)))


def _meets(have: Any, what: Any) -> bool:  # noqa: ANN401  # JSON
    if isinstance(what, list):
        return all(any(fnmatchcase(line, glob) for line in have) for glob in what)
    if have is None:
        return False
    if isinstance(have, str):
        return fnmatchcase(have, what)
    m = COMPARISON.fullmatch(str(what))
    return COMPARE[m[1]](have, int(m[2])) if m else bool(have == what)
