"""What the fields of a run document hold: a rule for each that anything reads.

A document may come from another machine or from a stranger; the one error names file, place and field, what was
expected and what was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Verdict

from .record import SCHEMA

KINDS = ("conformance", "perf", "planted", "audit", "phases", "zoo")
WRITTEN = "%Y-%m-%dT%H:%M:%SZ"
_COUNT = 2**53
"""Beyond, JSON readers disagree on integers."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field may hold, in words and as a test."""

    what: str
    ok: Callable[[JSON], bool]
    required: bool = True

    def optional(self) -> Rule:
        """The same, or null, or left out."""
        return Rule(f"{self.what} or null", lambda v: v is None or self.ok(v), required=False)

    def nullable(self) -> Rule:
        """The same, or null; never left out."""
        return Rule(f"{self.what} or null", lambda v: v is None or self.ok(v))


def _number(v: JSON) -> bool:
    if isinstance(v, int):
        return not isinstance(v, bool) and abs(v) < _COUNT
    return isinstance(v, float) and isfinite(v)


def _whole(v: JSON) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < _COUNT


def _countable(v: JSON) -> bool:
    if isinstance(v, dict):
        return all(map(_countable, v.values()))
    return v is None or isinstance(v, (str, bool)) or _number(v)


def one_of(*words: str) -> Rule:
    """One of these words."""
    return Rule(f"one of {', '.join(words)}", lambda v: isinstance(v, str) and v in words)


def _written(v: JSON) -> bool:
    try:
        return bool(datetime.strptime(v, WRITTEN))  # noqa: DTZ007  # Z is part of the format
    except (TypeError, ValueError):
        return False


TEXT = Rule("text", lambda v: isinstance(v, str))
FLAG = Rule("true or false", lambda v: isinstance(v, bool))
NUMBER = Rule("a finite number", _number)
AMOUNT = Rule("a finite number from 0", lambda v: _number(v) and v >= 0)
COUNT = Rule("a whole number from 0", _whole)
OBJECT = Rule("an object", lambda v: isinstance(v, dict))
COUNTERS = Rule("an object of numbers", lambda v: isinstance(v, dict) and _countable(v))
LIST = Rule("a list", lambda v: isinstance(v, list))
TEXTS = Rule("an object of texts", lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values()))
AMOUNTS = Rule("a list of finite numbers from 0", lambda v: isinstance(v, list) and all(map(AMOUNT.ok, v)))
MEMORY = Rule(
    "an object of whole numbers or null",
    lambda v: isinstance(v, dict) and all(x is None or _whole(x) for x in v.values()),
)
VERDICT = one_of(*map(str, Verdict))

HEADER: dict[str, Rule] = {
    "schema": Rule(f"{SCHEMA} (a newer version of this program wrote a newer one)", lambda v: v == SCHEMA),
    "kind": one_of(*KINDS),
    "run": Rule("32 hex digits", lambda v: isinstance(v, str) and bool(re.fullmatch("[0-9a-f]{32}", v, re.ASCII))),
    "written": Rule("a time like 2026-01-31T12:00:00Z", _written),
    "environment": OBJECT,
}
BODY: dict[str, Rule] = {
    "totals": OBJECT.optional(),
    "waivers": Rule("a list of texts", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v)).optional(),
}
"""What any document may hold beside its rows."""
ENVIRONMENT: dict[str, Rule] = {
    "machine": TEXT,
    "system": TEXT.optional(),
    "cpu": TEXT.optional(),
    "python": TEXT.optional(),
    "cores": COUNT.optional(),
    "packages": OBJECT.optional(),
    "unavailable": TEXTS.optional(),
    "settings": OBJECT.optional(),
    "commit": TEXT.optional(),
    "branch": TEXT.optional(),
    "ci": TEXT.optional(),
}
RESULT: dict[str, Rule] = {
    "case": TEXT,
    "backend": TEXT,
    "verdict": VERDICT,
    "budget_used": AMOUNT.optional(),
    "nmse": AMOUNT.optional(),
    "nmse_exact": AMOUNT.optional(),
    "seconds": AMOUNT,
    "steps": COUNT,
    "witness": OBJECT.optional(),
    "first_divergence": OBJECT.optional(),
    "saved": TEXT.optional(),
    "fresh": FLAG,
    "waived": VERDICT.optional(),
    "detail": TEXT,
}
ROWS: dict[str, dict[str, dict[str, Rule]]] = {
    "conformance": {"results": RESULT, "missing": {"backend": TEXT, "case": TEXT, "reason": TEXT}},
    "perf": {
        "units": {
            "unit": TEXT,
            "model": TEXT,
            "case": TEXT,
            "backend": TEXT,
            "verdict": VERDICT,
            "work": AMOUNT,
            "of": TEXT,
            "seconds": AMOUNTS,
            "rounds": COUNT,
            "rate": AMOUNT.nullable(),
            "counters": COUNTERS,
            "memory": MEMORY,
            "reason": TEXT,
        },
        "gates": {
            "gate": TEXT,
            "kind": one_of("counter", "ratio", "absolute"),
            "unit": TEXT,
            "backend": TEXT,
            "against": TEXT.optional(),
            "limit": NUMBER.optional(),
            "answer": one_of("fine", "regressed", "undecided", "not run"),
            "estimate": NUMBER.optional(),
            "low": NUMBER.optional(),
            "high": NUMBER.optional(),
            "rounds": COUNT.optional(),
            "detectable": NUMBER.optional(),
            "seconds": AMOUNT.optional(),
            "reason": TEXT.optional(),
        },
    },
    "planted": {
        "faults": {"name": TEXT, "says": TEXT, "of": TEXT},
        "hunts": {
            "fault": TEXT,
            "family": TEXT,
            "noticed": FLAG,
            "case": TEXT,
            "verdict": TEXT,
            "detail": TEXT,
        },
    },
}
"""Kind -> list in its document -> what each of its rows holds. A field beyond these is kept as it is."""
OPTIONAL_LISTS = frozenset({"gates", "missing"})
OPTIONAL: dict[str, Rule] = {"asked": Rule(
    "an object of whole numbers", lambda v: isinstance(v, dict) and all(map(_whole, v.values())), required=False
)}  # fmt: skip
"""Of conformance runs: how many cases each backend was asked for."""


def check(path: Path, place: str, found: Mapping[str, JSON], rules: Mapping[str, Rule]) -> None:
    """Hold the fields of one object against their rules.

    Raises:
        UsageError: names file, place and field, what was expected and what came.
    """
    for name, rule in rules.items():
        if name not in found:
            if rule.required:
                raise UsageError(f"{path}: {place}{place and '.'}{name}: {rule.what} expected, the field is missing")
        elif not rule.ok(found[name]):
            raise UsageError(f"{path}: {place}{place and '.'}{name}: {rule.what} expected, {shown(found[name])} found")


def shown(value: JSON) -> str:
    """A value in a message: short, and on one line."""
    text = ascii(value) if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else f"{text[:60]}…"
