"""Rows as columns: what 20,000 results take in a page is mostly words that come again, so each word is there once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from conformance.case.case import JSON

NOTHING = -1
"""In `at`: no value."""


def words(values: Iterable[str | None]) -> dict[str, JSON]:
    """A column of texts: `{"words": [each once, in order of appearance], "at": [index or NOTHING per row]}`."""
    known: dict[str, int] = {}
    at = [NOTHING if v is None else known.setdefault(v, len(known)) for v in values]
    return {"words": list(known), "at": at}


def numbers(values: Iterable[float | None]) -> dict[str, JSON]:
    """A column of numbers, exactly as they came: `{"numbers": [number or null per row]}`."""
    return {"numbers": list(values)}


def objects(values: Iterable[Mapping[str, JSON] | Sequence[JSON] | None]) -> dict[str, JSON]:
    """A column of JSON objects or lists: `{"objects": [each once], "at": [index or NOTHING per row]}`."""
    known: dict[str, int] = {}
    kept: list[JSON] = []
    at: list[int] = []
    for v in values:
        if v is None:
            at.append(NOTHING)
            continue
        text = json.dumps(v, sort_keys=True)
        if text not in known:
            known[text] = len(kept)
            kept.append(v)
        at.append(known[text])
    return {"objects": kept, "at": at}


def embedded(document: JSON) -> str:
    """JSON that can stand in a `<script type="application/json">`: ASCII, and without a `<` that could end it."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
