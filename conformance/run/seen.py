"""What was seen when a failure was saved: it stands in the case file, so that `conform repro` can say "the same"."""

from __future__ import annotations

from dataclasses import replace

from conformance.cgraph.case import JSON, Case
from conformance.check.verdict import Result

from .environment import environment

SEEN = "seen"
"""Its place in a case's provenance."""
NUMBERS = ("budget_used", "nmse", "nmse_exact")
CLOSE = 1e-6
"""Relative difference of two numbers that are called the same: an accelerator's may differ in the last bits from run to
run. What is equal to the bit is said to be."""


def kept(case: Case, result: Result) -> Case:
    """`case` with what `result` says of it, and where."""
    said = result.to_json()
    fields = ("backend", "verdict", *NUMBERS, "first_divergence", "detail")
    record = {k: said[k] for k in fields} | {"environment": environment()}
    return replace(case, provenance={**case.provenance, SEEN: record})


def seen(case: Case) -> dict[str, JSON] | None:
    """The record in a saved case; None where there is none."""
    record = case.provenance.get(SEEN)
    return record if isinstance(record, dict) and isinstance(record.get("backend"), str) else None


def differences(record: dict[str, JSON], result: Result) -> list[str]:
    """What is not as it was when the case was saved, in words: verdict, numbers and the place of first divergence."""
    now = result.to_json()
    found = [_differs("verdict", record.get("verdict"), now["verdict"])]
    found += [_differs(k, record.get(k), now[k]) for k in NUMBERS if not _close(record.get(k), now[k])]
    was, here = (_place(r.get("first_divergence")) for r in (record, now))
    found.append(_differs("first divergence", was, here))
    return [f for f in found if f]


def _differs(what: str, was: JSON, here: JSON) -> str:
    return "" if was == here else f"{what} was {was}, is {here}"


def _close(was: JSON, here: JSON) -> bool:
    if isinstance(was, float) and isinstance(here, float):
        return abs(was - here) <= CLOSE * max(abs(was), abs(here))
    return bool(was == here)


def _place(first: JSON) -> str:
    if not isinstance(first, dict):
        return "nowhere"
    return f"step {first.get('step')}, node {first.get('node')} {first.get('op')}, element {first.get('index')}"
