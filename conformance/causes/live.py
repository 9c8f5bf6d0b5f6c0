"""Causes of failures of live families, which have no graph to experiment with: those that fail alike have one cause.

Two failures are alike where family, verdict and the innermost message are the same, without numbers and names of cases;
where numbers are wrong, family and place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from conformance.judge.evidence import Fault
from conformance.judge.verdict import FAILURES, Result, Verdict, counted
from conformance.run.signature import innermost, signature_of

from .cause import Cause, digest

_WRONG = FAILURES - {Verdict.XPASS}


def of_live(results: Sequence[Result]) -> list[Cause]:
    """A cause for each way in which cases of live families fail on a backend, those of most cases first."""
    groups: dict[tuple[str, str, Verdict, str], list[str]] = {}
    for r in results:
        if r.verdict in _WRONG:
            family = r.case.partition("/")[0]
            groups.setdefault((r.backend, family, r.verdict, _message(r)), []).append(r.case)
    causes = []
    for (backend, family, verdict, message), cases in groups.items():
        name = f"{family}-{digest(verdict, message)}"
        sentence = f"{family}: {verdict}: {message} ({counted(len(cases), 'case')})"
        rank = {"failed": len(cases)}
        causes.append(Cause(name, sentence, backend, verdict, "", message, (), tuple(cases), rank=rank))
    return sorted(causes, key=lambda c: (-len(c.cases), c.id))


def _message(result: Result) -> str:
    if result.error is not None:
        return innermost(result.error)
    where, signature = result.where, signature_of(result)
    if where is None or signature is None:
        return "wrong numbers"
    finite = "" if result.nmse is None or isfinite(result.nmse) else ", not finite"
    if where.fault is Fault.OUTPUT:
        since = f"in {where.name}" if where.name else f"from {'a later' if where.step else 'the first'} step on"
        return f"wrong numbers {since}{finite}"
    return f"wrong numbers: {signature.op}, {signature.kind}"
