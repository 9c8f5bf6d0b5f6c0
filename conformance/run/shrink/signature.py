"""What makes two failures the same failure: verdict, op, and the kind of error. Numbers and names do not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.divergence import GRAPH, NODE

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
_QUOTED = re.compile(r"\S+/\S+@[0-9]+(?:#[0-9]+)?")
_TELLING = re.compile(r"assert|abort|fatal|error|terminate|what\(\)|memory", re.IGNORECASE)
_KEPT = 160


@dataclass(frozen=True, slots=True)
class Signature:
    """The part of a result that stays while everything around the fault goes."""

    verdict: Verdict
    op: str = ""
    """Of the first wrong node; empty where no single node is wrong by itself, or nothing ran to the end."""
    kind: str = ""
    """`node` or `graph`, with `not finite` where a number became none; of a crash how it died and its last words, of
    other failures the reason: without numbers, names of cases and what else changes as a case gets smaller."""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.verdict.value, self.op, self.kind)))


def signature_of(result: Result) -> Signature | None:
    """The signature of a failure; None where `result` is no failure."""
    if result.verdict not in FAILURES:
        return None
    first = result.first_divergence
    if result.verdict is not Verdict.FAIL:
        return Signature(result.verdict, kind=_essence(result.detail))
    if first is None:  # every node and the free run are right; a step from the backend's own caches is not
        return Signature(Verdict.FAIL, kind="state")
    broken = first["found"] is not None and first["found"] != first["found"]  # NaN
    broken = broken or first["found"] in (float("inf"), float("-inf"))
    kind = str(first.get("kind", NODE)) + (", not finite" if broken else "")
    return Signature(Verdict.FAIL, first["op"] if first.get("kind") != GRAPH else "", kind)


def _essence(detail: str) -> str:
    """The telling part of a reason: how a process died and the assertion among its last words, or all of it."""
    text = _QUOTED.sub("case", detail)
    head, _, words = text.partition("): ")
    if "its process died (" in head:
        lines = [line for line in words.split(" / ") if _TELLING.search(line)] or words.split(" / ")[-1:]
        text = f"{head[head.index('its process died') :]}): {lines[0]}"
    return _NUMBER.sub("#", text)[:_KEPT]
