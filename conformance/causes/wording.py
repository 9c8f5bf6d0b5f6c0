"""Describe a cause in words, from its typed fields; nothing parses the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from conformance.judge.cause import ANY_OF, Condition, Neighbour
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Verdict
from conformance.suite.relations import relation

from .features import AND, BEYOND, HOLDS, LAYOUT, OP, OPERANDS
from .rule import is_size, property_of

KINDS = {
    Fault.STALE: "stale state",
    Fault.EARLIER: "stale state or nondeterminism",
    Fault.GRAPH: "each node alone is right",
    Fault.HANDOVER: "copied between two devices",
    Fault.OUTPUT: "first wrong node unknown",
}
"""Kind of wrong results -> its text."""
CUT = "search stopped early, so there may be further conditions"
"""Text of a cause whose search did not finish."""
_OTHERS = {
    ("in place", "yes"): "it runs in place",
    ("in place", "no"): "it does not run in place",
    ("another node", "yes"): "the graph has another node",
    ("output", "read by another node"): "another node reads the output",
    ("output", "shown by a view"): "a view of the result is the output",
    ("step", "same sizes as before"): "the step before had the same sizes",
    ("step", "other sizes than before"): "the step before had other sizes",
}
"""Property of a node, with its value -> its clause."""


def sentence(
    conditions: Sequence[Condition],
    verdict: str,
    message: str,
    failed: int,
    passed: int | None,
    unsure: int = 0,
    *,
    shown: Mapping[Condition, Neighbour] = MappingProxyType({}),
    cut: bool = False,
) -> str:
    """Return a line such as `ADD, CONT: wrong results when src0 is broadcast (6 fail, 2 pass)`.

    Args: conditions: the rule. verdict: of the smallest case. message: kinds of wrong results, separated by commas;
    else the backend's message. failed: number of failing cases. passed: number of passing nodes that match the rule;
    None if there is no single failing node. unsure: number of cases assigned at the time limit. cut: the search did not
    finish.
    """
    kinds = ", ".join(KINDS.get(word, word) for word in message.split(", ") if word)  # type: ignore[call-overload]
    how = f"wrong results{f' ({kinds})' if kinds else ''}" if verdict == Verdict.FAIL else f"{verdict}: {message}"
    counts = [f"{failed} fail", *([] if passed is None else [f"{passed} pass"])]
    if unsure:
        counts.insert(1, f"{unsure} of them not confirmed (time limit)")
    return (
        f"{subject(conditions)}: {how}{when(conditions, shown=shown)} ({', '.join(counts)}){f'; {CUT}' if cut else ''}"
    )


def subject(conditions: Iterable[Condition]) -> str:
    """Return the ops of a rule, or another subject if it has no op."""
    for c in conditions:
        if c.key == OP:
            return c.value.replace(ANY_OF, ", ")
        if c.key == relation.KEY:
            return f"relation {c.value}"
    return "a whole graph"


def when(
    conditions: Sequence[Condition],
    most: int | None = None,
    *,
    shown: Mapping[Condition, Neighbour] = MappingProxyType({}),
) -> str:
    """Return ` when …` with the clauses of (at most `most`) conditions; empty without any.

    `shown`: condition -> what passes beside it, for a remark.
    """
    clauses = [f"{clause(c)}{shown.get(c, '')}" for c in telling(conditions)][:most]
    *first, last = clauses or [""]
    return f" when {', '.join(first)}{' and ' if first else ''}{last}" if last else ""


def telling(conditions: Sequence[Condition]) -> list[Condition]:
    """Return the conditions to show: no op, and no small sizes beside other properties."""
    rest = [c for c in conditions if c.key not in {OP, relation.KEY}]
    large = [c for c in rest if not is_size(c) or int(c.value.removeprefix("> ")) >= 31]  # a block
    return large if any(not is_size(c) for c in rest) else rest


def clause(c: Condition) -> str:
    """Return a condition as a clause: `src0 is transposed`, `max_bias != 0`."""
    name, values = property_of(c), c.value.split(ANY_OF)
    if name == c.key and not c.key.startswith("src["):
        return _OTHERS.get((c.key, c.value)) or (
            f"{c.key} {c.value}" if c.value[:1] in "<>=!" else f"{c.key} = {' or '.join(values)}"
        )
    if name == HOLDS:
        held = c.value.split(AND)
        implied = [v for v in BEYOND if v in held][:-1]
        values = [AND.join(v for v in held if v not in implied)]
    operand = c.key.removesuffix(f".{name}") if name != c.key else c.key
    who = {"any source": "a source", "any operand": "an operand", "result": "the result"}.get(operand)
    who = who or operand.replace("[", "").replace("]", "")
    if name == c.key:
        return f"{who} is given"
    if name == LAYOUT:
        values = [f"has {v}" if "rows" in v else f"is {v}" for v in values]
    return f"{who} {OPERANDS[name].format(' or '.join(values))}" if name in OPERANDS else f"{who}.{name} {c.value}"
