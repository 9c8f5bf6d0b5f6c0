"""Convert older records, with results and audit cells in text only, to typed evidence.

No other module parses our own text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from .evidence import Amount, Count, Endpoint, Error, Fault, to_json

if TYPE_CHECKING:
    from conformance.case.case import JSON

_DIED = re.compile(r"its process died \(([^)]*)\)+(?:: (.*))?$", re.DOTALL)
_NO_ANSWER = re.compile(r"\bno answer within [-+.0-9e]+ s\b")
_QUOTED = re.compile(r"(?<!\S)\S[^\s/]*/\S+@[0-9]+(?:#[0-9]+)?")
_ASKED = re.compile(r"^.*?computing steps\[[0-9]+\](?: of case\S*)?: ")
_RAISED = re.compile(r"^.*?its kernel failed on src .*?: (?=\w+: )|^(?:\S+: )?the adapter raised (?=\w+\b)")
_FILE = re.compile(r" \(\S+:[0-9]+\)$")
_REFUSED = re.compile(r"^(?:step [0-9]+: )?[A-Z0-9_]+ [^:]*: (?=.)")
_WAIVED = re.compile(r"^(?:waived until [-0-9]+ \(.*?; \S+\)|it passes, and [^;]*)(?:; |$)")
_WHERE = re.compile(
    r"; where: (?:step [0-9]+: )?(?:(?P<tensor>[^;]*?) fails (?:by itself|behind the nodes before it))?[^;]*"
)
_THREW = re.compile(r"; it threw in (?P<side>[^;]*), step [0-9]+")
_TENSOR = re.compile(r"\w+\[[0-9, ]+\]$")
_WORST = re.compile(
    r"\(NMSE [^,)]*(?:, (?P<special>[0-9]+) NaN/Inf out of place)?\), (?:budget \S+|must be equal to the bit)"
    r"(?: by (?P<profile>.+))?$"
)
_OWN_CACHES = "started from its own caches"
_NUMBERS = ("index", "expected", "found", "nmse", "budget")
_STALE = "kept"
"""Former kind of STALE and EARLIER."""
STALE = {
    Fault.STALE: "right alone, right fresh, wrong after the steps before it: something kept (a compiled graph or its "
    "key, a cache, a log) is at fault, and no kernel",
    Fault.EARLIER: "right on a backend opened anew: something kept from the cases before it, or chance, is at fault",
}
"""Former text of STALE and EARLIER."""


def error_of(detail: str) -> Error:
    """Convert an error of which only the text is known: how a process died, or the message."""
    if (died := _DIED.search(detail)) is not None:
        return Error(detail, "\n".join((died[2] or "").split(" / ")), died[1])
    if _NO_ANSWER.search(detail):
        return Error(detail, "no answer")
    asked = _ASKED.sub("", _QUOTED.sub("case", detail))
    words = _RAISED.sub("", asked)
    return Error(detail, words if words == asked else _FILE.sub("", words))


class _Node(msgspec.Struct):
    """`first_divergence` and `place`."""

    kind: str = ""
    op: str = ""
    name: str = ""
    side: str = ""
    step: Count = 0
    node: Count | None = None
    alone: bool = True
    index: list[Count] | None = None
    expected: float | None = None
    found: float | None = None
    nmse: Amount | None = None
    budget: Amount | None = None
    source: Endpoint | None = None
    target: Endpoint | None = None


class _Row(msgspec.Struct):
    """Fields read from a result."""

    verdict: str
    detail: str
    waived: str | None = None
    steps: Count = 0
    first_divergence: _Node | None = None
    place: _Node | None = None


def renewed(row: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Convert `first_divergence`, `place`, `detail` of a row to `where`, `error` and `notes`.

    msgspec.ValidationError for a field of another type.
    """
    if "notes" in row or "detail" not in row:
        return _with_profile(row)
    msgspec.convert(row, _Row)
    rest = {k: v for k, v in row.items() if k not in {"first_divergence", "place", "detail"}}
    waived = _WAIVED.match(row["detail"])
    detail = row["detail"] if waived is None else row["detail"][waived.end() :]
    notes = [] if waived is None else [waived[0].removesuffix("; ")]
    first, place = row.get("first_divergence"), row.get("place")
    verdict = (row.get("waived") or row["verdict"]) if row["verdict"] in {"XFAIL", "XPASS"} else row["verdict"]
    if verdict in {"PASS", "FAIL"}:
        parts = detail.split("; ") if detail else []
        where = _divergence(first, detail) if first else _place(place) if place else _unlocated(verdict, parts)
        told = _notes(parts, where)
        return {**rest, "where": _of_steps(where, row), "error": None, "notes": [*told, *notes]}
    where = _place(place) if place else _divergence(first, detail) if first else None
    error = _error(verdict, detail, where) if detail else {}
    more = error.pop("notes", [])
    return {**rest, "where": _of_steps(where, row), "error": error or None, "notes": [*more, *notes]}


def _with_profile(row: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Rename `where.numbers.card` to `profile`."""
    match row.get("where"):
        case {"numbers": {"card": card, **numbers}, **where}:
            return {**row, "where": {**where, "numbers": {**numbers, "profile": card}}}
    return row


def _of_steps(where: dict[str, JSON] | None, row: Mapping[str, JSON]) -> dict[str, JSON] | None:
    steps = row.get("steps", 0)
    return {**where, "steps": steps} if where is not None and steps > 1 else where


def _error(verdict: str, detail: str, where: dict[str, JSON] | None) -> dict[str, JSON]:
    """Return the error, and as `notes` the text after the place."""
    if verdict == "UNSUPPORTED":
        return {"message": detail, "words": _REFUSED.sub("", detail)}
    side, at = _THREW.search(detail), _WHERE.search(detail)
    ends = [m for m in (side, at) if m is not None and where is not None]
    message = detail[: min((m.start() for m in ends), default=len(detail))]
    behind = detail[max((m.end() for m in ends), default=len(detail)) :].removeprefix("; ")
    if where is not None and at is not None:
        where |= {"tensor": at["tensor"]} if at["tensor"] else {}
        where["fault"] = _stale_fault(at[0]) if where["fault"] == Fault.STALE else where["fault"]
    error = to_json(error_of(message))
    return {**error, **({"side": side["side"]} if side else {}), **({"notes": [behind]} if behind else {})}


def _stale_fault(detail: str) -> str:
    return str(Fault.EARLIER if STALE[Fault.EARLIER] in detail else Fault.STALE)


def _divergence(first: Mapping[str, JSON], detail: str) -> dict[str, JSON]:
    kind = first.get("kind", str(Fault.NODE))
    ends = {k: first[k] for k in ("source", "target") if k in first}
    where = {"fault": _stale_fault(detail) if kind == _STALE else kind, **_named(first), **ends}
    if kind != Fault.HANDOVER and first.get("index") is not None and first.get("budget") is not None:
        where["numbers"] = {k: first.get(k) for k in _NUMBERS}
    return where


def _place(place: Mapping[str, JSON]) -> dict[str, JSON]:
    if place.get("kind") == _STALE:
        return {"fault": str(Fault.STALE), **_named(place)}
    known = Fault.NODE if place.get("alone", True) else Fault.GRAPH
    return {"fault": str(known if place.get("op") else Fault.UNLOCATED), **_named(place)}


def _unlocated(verdict: str, parts: Sequence[str]) -> dict[str, JSON] | None:
    """Return the place of a FAIL recorded without one; its numbers stay in the text, as a note."""
    if verdict != "FAIL" or not any(" diverges at [" in p for p in parts[:1]):
        return None
    return None if parts[0].startswith("stored value") else {
        "fault": str(Fault.STATE if _OWN_CACHES in parts else Fault.UNLOCATED)
    }  # fmt: skip


def _notes(parts: Sequence[str], where: dict[str, JSON] | None) -> list[str]:
    """Return the parts of the text that `where` lacks as notes; fill missing fields of `where`."""
    if where is None:
        return list(parts)
    notes: list[str] = []
    numbers, told = where.get("numbers"), False
    at = None if numbers is None else f" diverges at {numbers['index']}: "
    for part in parts:
        said = part
        for words in STALE.values():
            said = said.removesuffix(words).removesuffix(": ")
        if " left by " in part and where["fault"] == Fault.HANDOVER:
            name = part.partition(" left by ")[0]
            said = ""
        elif at is not None and at in part and not told:
            head, _, worst = part.partition(at)
            *before, name = head.split(": ")
            told = name.startswith((where.get("op", ""), "cache"))
            said = ": ".join(b for b in before if not b.startswith("step ")) if told else part
            if told and numbers is not None and (more := _WORST.search(worst)) is not None:
                numbers |= {"special": int(more["special"] or 0), "profile": more["profile"] or ""}
        else:
            name = ""
        if (tensor := _TENSOR.search(name)) is not None:
            where["tensor"] = tensor[0]
        notes += [said] if said else []
    return notes


def _named(place: Mapping[str, JSON]) -> dict[str, JSON]:
    return {k: place[k] for k in ("step", "node", "op", "name") if k in place}
