"""Compare a run with a baseline: causes, cases of known causes, and coverage.

Causes are matched by `same.py`, cases by their ids. A rule such as `op = ADD` also matches passing nodes. So a known
cause does not excuse a case that was not in the baseline; only the case's own verdict and error count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from conformance.judge.cause import Cause
from conformance.judge.outcome import Outcome, Why, first
from conformance.judge.verdict import EXECUTED, FAILURES, Missing, Result, Verdict, counted, pattern
from conformance.judge.worse import Seen as Compared
from conformance.judge.worse import worse

from .baseline import Baseline, Known, Ran, Seen, Selection
from .same import same


@dataclass(frozen=True, slots=True)
class Wider:
    """A failing case that the baseline does not excuse."""

    backend: str
    case: str
    why: str
    """Reason, such as `CRASH where it was FAIL` or `zeros instead of numbers`."""
    cause: str = ""
    """Id of the known cause with which it is grouped; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A baseline case that was refused or no longer has a result."""

    backend: str
    case: str
    why: str
    """Reason, such as `passed, UNSUPPORTED now`."""


@dataclass(frozen=True, slots=True)
class Unasked:
    """Baseline cases that a run with another selection did not include."""

    backend: str
    cases: tuple[str, ...]
    of: int
    """Number of cases in the baseline."""
    known: Selection | None
    here: Selection | None
    """Selection of this run; None if it did not use the backend."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How a run differs from a baseline."""

    new: tuple[Cause, ...]
    """New causes, in the order of the run."""
    gone: tuple[Known, ...]
    """Causes of the baseline that no longer occur, in its order."""
    known: tuple[Cause, ...]
    wider: tuple[Wider, ...] = ()
    """Cases that are worse than in the baseline, sorted by backend and cause."""
    lost: tuple[Lost, ...] = ()
    """Lost coverage, sorted by backend and reason."""
    unasked: tuple[Unasked, ...] = ()
    """Cases that the run did not request, at most one entry per backend."""

    def outcome(self) -> Outcome:
        """Return one reason per finding, with equal cases combined; no reasons if nothing differs."""
        new = (f"new: {_named(c)} (smallest case of {len(c.cases):,}: {c.smallest})" for c in self.new)
        gone = (f"gone: {_named(e.cause)}{f' ({e.reason})' if e.reason else ''}" for e in self.gone)
        found = {Why.NEW: new, Why.GONE: gone, Why.WIDER: self._wider(), Why.COVERAGE: self._lost(),
                 Why.UNASKED: map(_unasked, self.unasked)}  # fmt: skip
        return sum((Outcome.of(why, texts) for why, texts in found.items()), Outcome())

    def _wider(self) -> Iterator[str]:
        for (backend, cause, why), rows in groupby(self.wider, attrgetter("backend", "cause", "why")):
            what = f"wider: {cause}" if cause else "unexplained"
            yield f"{what} on {backend}: {why}: {_listed([w.case for w in rows])}"

    def _lost(self) -> Iterator[str]:
        for (backend, why), rows in groupby(self.lost, attrgetter("backend", "why")):
            yield f"coverage lost on {backend}: {why}: {_listed([x.case for x in rows])}"


def _named(cause: Cause) -> str:
    return f"{cause.id} on {cause.backend}, {cause.verdict}: {cause.sentence}"


def _listed(cases: Sequence[str]) -> str:
    return f"{counted(len(cases), 'case')}: {first(cases)}"


def _unasked(u: Unasked) -> str:
    here = f"this run has {u.here}" if u.here else "this run did not use it"
    return (
        f"not compared: on {u.backend}: {len(u.cases):,} of {u.of:,} cases of the baseline were not requested: "
        f"the baseline has {u.known or 'an unknown level'}, {here}"
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """The results of one backend in the run under comparison."""

    results: Mapping[str, Result]
    missing: frozenset[str]
    """Selected cases without a result, or their patterns; `outcome.judge` reports them."""
    selection: Selection | None
    is_asked: bool


def compare(
    baseline: Baseline,
    causes: Sequence[Cause],
    results: Iterable[Result] = (),
    *,
    missing: Iterable[Missing] = (),
    selected: Mapping[str, object] | None = None,
) -> Difference:
    """Compare a run with a baseline.

    Args:
        baseline: the known causes and cases.
        causes: causes of the run.
        results: all results of the run; failures name their cause.
        missing: selected cases without a result; they are reported separately and are not lost coverage.
        selected: the `selection` of the run's document; if None, every baseline case without a result is lost.
    """
    rows, absent = list(results), list(missing)
    known = same([e.cause for e in baseline.entries], causes)
    there = set(known.values())
    new = {(c.id, c.backend) for c in causes} - known.keys()
    backends = dict.fromkeys((*(r.backend for r in rows), *(r.backend for r in baseline.runs)))
    runs = {b: _run(b, rows, absent, selected) for b in backends}
    wider = [w for b in backends for w in _wider(b, baseline, runs[b], known, new)]
    lost, unasked = [], []  # type: tuple[list[Lost], list[Unasked]]
    for ran in baseline.runs:
        left, not_asked = _lost(ran, runs[ran.backend])
        lost += left
        unasked += [not_asked] if not_asked else []
    uncompared = {(u.backend, case) for u in unasked for case in u.cases}
    executed_on = {r.backend for r in rows if r.verdict in EXECUTED}
    gone = (
        e
        for e in baseline.entries
        if e.key not in there and (not rows or e.cause.backend in executed_on) and not _hits(baseline, e) & uncompared
    )
    return Difference(
        tuple(c for c in causes if (c.id, c.backend) in new),
        tuple(gone),
        tuple(c for c in causes if (c.id, c.backend) in known),
        tuple(sorted(wider, key=attrgetter("backend", "cause", "why"))),
        tuple(sorted(lost, key=attrgetter("backend", "why"))),
        tuple(unasked),
    )


def _run(
    backend: str, rows: Sequence[Result], absent: Sequence[Missing], selected: Mapping[str, object] | None
) -> _Run:
    own = [r for r in rows if r.backend == backend and not r.fresh]
    worst = sorted(own, key=lambda r: r.verdict in FAILURES)  # a case may also have run from a file
    selection = Selection.of(selected, backend) if selected else None
    return _Run(
        {r.case: r for r in worst},
        frozenset(m.case for m in absent if m.backend == backend),
        selection,
        selected is None or selection is not None,
    )


def _hits(baseline: Baseline, entry: Known) -> set[tuple[str, str]]:
    ran, name = baseline.run_of(entry.cause.backend), entry.cause.id
    return set() if ran is None else {(ran.backend, case) for case, s in ran.failed.items() if name in s.causes}


def _wider(
    backend: str,
    baseline: Baseline,
    run: _Run,
    known: Mapping[tuple[str, str], tuple[str, str]],
    new: Collection[tuple[str, str]],
) -> Iterator[Wider]:
    """Yield failures that neither belong to a new cause nor match the baseline."""
    ran, entries = baseline.run_of(backend), {e.key: e.cause for e in baseline.entries}
    for case, r in run.results.items():
        key = (r.cause or "", backend)
        if r.verdict not in FAILURES or key in new:
            continue
        entry = entries.get(known.get(key, ("", "")))
        unknown = "" if entry else str(r.verdict)
        why = unknown if ran is None else _why(ran, ran.failed.get(case), r, entry, entries)
        if why:
            yield Wider(backend, case, why, entry.id if entry else "")


def _why(ran: Ran, was: Seen | None, r: Result, entry: Cause | None, entries: Mapping[tuple[str, str], Cause]) -> str:
    """Return how a failing case differs from the baseline; empty if it does not."""
    if was is None:
        return f"{r.verdict} where it passed" if r.case in ran.passed else f"{r.verdict}, not known to fail"
    before = [entries[c, r.backend].message for c in was.causes if (c, r.backend) in entries]
    message = entry.message if entry and entry.id not in was.causes and entry.message not in before else ""
    known = Compared(was.verdict, before[0] if message and before else "", wrong=was.wrong)
    found = worse(known, Compared(r.verdict, message, wrong=r.wrong))
    return str(found or "")


def _lost(ran: Ran, run: _Run) -> tuple[list[Lost], Unasked | None]:
    """Return passes that are refused or missing now, and cases outside this run's selection."""
    lost, unasked = [], []  # type: tuple[list[Lost], list[str]]
    comparable = run.is_asked and (run.selection is None or ran.selection is None or run.selection == ran.selection)
    for case in sorted((*ran.passed, *ran.failed)):
        was = "passed" if case in ran.passed else "failed"
        now = run.results.get(case)
        if now is not None:
            if was == "passed" and now.verdict is Verdict.UNSUPPORTED:
                lost.append(Lost(ran.backend, case, "passed, UNSUPPORTED now"))
        elif not run.missing.isdisjoint((case, pattern(case))):
            continue
        elif comparable:
            lost.append(Lost(ran.backend, case, f"{was}, not in this run"))
        else:
            unasked.append(case)
    of = len(ran.passed) + len(ran.failed)
    return lost, Unasked(ran.backend, tuple(unasked), of, ran.selection, run.selection) if unasked else None
