"""What a run was asked for, pair by pair, and which pairs have no answer at its end: those fail it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from conformance.case.case import JSON

from .verdict import FAILURES, Result, Totals, Verdict

INTERRUPTED = "interrupted"
STOPPED = "stopped at the first failure"
SHOWN = 20
"""Missing pairs that a terminal shows; a record holds them all."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A case that a backend was asked for and that has no result."""

    backend: str
    case: str
    reason: str

    def to_json(self) -> dict[str, JSON]:
        """`{"backend", "case", "reason"}`."""
        return asdict(self)


class Asked:
    """The cases that each backend of a run was asked for, in order; a case may be asked for twice."""

    def __init__(self, cases: Mapping[str, Iterable[str]] | None = None) -> None:
        self.cases: dict[str, list[str]] = {backend: list(ids) for backend, ids in (cases or {}).items()}

    def to_json(self) -> dict[str, JSON]:
        """Backend -> how many cases it was asked for."""
        return {backend: len(ids) for backend, ids in self.cases.items()}

    def missing(
        self, results: Iterable[Result], reason: str, reasons: Mapping[tuple[str, str], str] | None = None
    ) -> list[Missing]:
        """What has no result.

        Args:
            results: of the run.
            reason: why a pair may have none.
            reasons: backend and case, or backend and "" -> why it has none, where that is known.
        """
        known = reasons or {}
        found = Counter((r.backend, r.case) for r in results)
        lacking = []
        for backend, ids in self.cases.items():
            for case in ids:
                if found[backend, case]:
                    found[backend, case] -= 1
                else:
                    said = known.get((backend, case)) or known.get((backend, "")) or reason
                    lacking.append(Missing(backend, case, said))
        return lacking

    def unproven(self, results: Sequence[Result], missing: Sequence[Missing] = ()) -> dict[str, str]:
        """Backend -> a sentence, for each of which all is told and nothing passed, though nothing failed either."""
        totals = {backend: Totals() for backend, ids in self.cases.items() if ids}
        for r in results:
            if r.backend in totals:
                totals[r.backend].add(r)
        for m in missing:
            totals.pop(m.backend, None)
        return {
            backend: f"{backend}: nothing passed of {_cases(len(self.cases[backend]))} asked: {t}, "
            "so nothing is proven of it"
            for backend, t in totals.items()
            if not t.counts[Verdict.PASS] and not t.failed
        }


def told(missing: Sequence[Missing], asked: int, shown: int = SHOWN) -> Iterator[str]:
    """What is missing, in lines for a terminal: how many and why, the first of them, and that there are more."""
    if not missing:
        return
    yield f"{len(missing)} of {asked} cases asked have no result, so this run fails:"
    for (backend, why), rows in groupby(missing, key=lambda m: (m.backend, m.reason)):
        cases = [m.case for m in rows]
        yield f"  {len(cases)} on {backend}: {why}"
        yield from (f"    {case}" for case in cases[: max(0, shown)])
        shown -= len(cases)
        if shown < 0:
            break
    if shown < 0:
        yield "    … and more; --json FILE lists them all"


def _cases(n: int) -> str:
    return "1 case" if n == 1 else f"{n} cases"


def gating(results: Iterable[Result]) -> int:
    """How many results fail a run."""
    return sum(r.verdict in FAILURES and not r.fresh for r in results)
