"""Figures and reasons in words, the same on a terminal and in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from math import inf

from conformance.judge.verdict import Result, Verdict

MUCH = 1000
"""Times its budget: beyond, no digit says more."""
_NODE = re.compile(r"^(?:step \d+: )?[A-Z0-9_]+ [^:]*: (?=.)")
"""The node that a reason begins with: reasons are counted whatever node they are of."""


def budget_used(results: Iterable[Result], unchecked: str = "–") -> str:
    """The largest share of a budget that any of them used."""
    used = [u for r in results if (u := _used(r)) is not None]
    if not used:
        return unchecked
    return share(max(used))


def share(used: float) -> str:
    """Of an error budget: beyond a thousand times its size no figure says more."""
    if used == inf:
        return "no budget allows it"
    if used > MUCH:
        return f"> {MUCH}×"
    return f"{used:.3g}×" if used > 1 else f"{100 * used:.3g} %"


def refusals(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """Backend -> its reasons for UNSUPPORTED, and how many cases it gave each for, whatever node they are of."""
    found: dict[str, Counter[str]] = {}
    for r in results:
        if r.verdict is Verdict.UNSUPPORTED:
            found.setdefault(r.backend, Counter())[_NODE.sub("", r.detail, count=1)] += 1
    return found


def _used(r: Result) -> float | None:
    """JSON has no infinity: of a FAIL with a first divergence, null is one."""
    if r.budget_used is None and r.verdict is Verdict.FAIL and r.first_divergence:
        return inf
    return r.budget_used
