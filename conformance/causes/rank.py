"""Whom a cause hurts: the architectures of which some block holds a node that its conditions match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from conformance.run.session.select import build
from conformance.suite import FAMILIES

from .cause import Cause
from .features import OP, Features, features, nodes_of
from .form import Form

BLOCKS = "blocks"
"""Family whose cases are a sublayer of one architecture each, `blocks/ARCHITECTURE-…`."""


@cache
def _architectures() -> Mapping[str, Sequence[Features]]:
    """Architecture -> the different nodes of its blocks."""
    found: dict[str, dict[frozenset[tuple[str, str]], Features]] = {}
    for case_id in FAMILIES[BLOCKS].ids("full"):
        case = build(case_id)
        name = case_id.removeprefix(f"{BLOCKS}/").partition(",")[0].rpartition("-")[0]
        rows = (features(case, k, node) for k, _, node in nodes_of(case))
        found.setdefault(name, {}).update((frozenset(f.items()), f) for f in rows)
    return {name: list(rows.values()) for name, rows in found.items()}


def rank(cause: Cause) -> Cause:
    """`cause` with the number of `architectures` that hold such a node; as it is where no single node is at fault."""
    form = Form(cause.conditions)
    if not any(c.key == OP for c in cause.conditions):
        return cause
    hit = sum(any(form.holds(f) for f in rows) for rows in _architectures().values())
    return replace(cause, rank={**cause.rank, "architectures": hit})
