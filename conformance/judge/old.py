"""Reads results of records from before their evidence was typed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .evidence import Fault

if TYPE_CHECKING:
    from conformance.case.case import JSON

_DIED = re.compile(r"its process died \((.*?)\)+(?:: (.*))?$", re.DOTALL)
_FAULTS = {"kept": Fault.STALE}
_NUMBERS = ("index", "expected", "found", "nmse", "budget")


def renewed(row: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """A row with `where`, `error` and `notes` in place of `first_divergence`, `place` and `detail`."""
    if "notes" in row or "detail" not in row:
        return row
    rest = {k: v for k, v in row.items() if k not in {"first_divergence", "place", "detail"}}
    verdict, detail = row.get("waived") or row["verdict"], row["detail"]
    first, place = row.get("first_divergence"), row.get("place")
    where = _divergence(first) if first else _place(place) if place else None
    if verdict in {"PASS", "FAIL"}:
        notes = detail.split("; ")[1 if where and "numbers" in where else 0 :] if detail else []
        return {**rest, "where": where, "error": None, "notes": notes}
    found = _DIED.search(detail)
    died = {} if found is None else {"died": found[1], "words": "\n".join((found[2] or "").split(" / "))}
    return {**rest, "where": where, "error": {"message": detail, **died} if detail else None, "notes": []}


def _divergence(first: Mapping[str, JSON]) -> dict[str, JSON]:
    kind = first.get("kind", "node")
    ends = {k: first[k] for k in ("source", "target") if k in first}
    where: dict[str, JSON] = {"fault": _FAULTS.get(kind, kind), **_named(first), **ends}
    if first.get("index") is not None and "budget" in first:
        where["numbers"] = {k: first.get(k) for k in _NUMBERS}
    return where


def _place(place: Mapping[str, JSON]) -> dict[str, JSON]:
    if place.get("kind") == "kept":
        return {"fault": Fault.STALE, **_named(place)}
    if place.get("node") is None:
        return {"fault": Fault.UNLOCATED, **_named(place)}
    return {"fault": Fault.NODE if place.get("alone", True) else Fault.GRAPH, **_named(place)}


def _named(place: Mapping[str, JSON]) -> dict[str, JSON]:
    return {k: place[k] for k in ("step", "node", "op", "name") if k in place}
