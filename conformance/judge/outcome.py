"""Outcome of a command: the reasons why it did not succeed, and the resulting exit code.

Every command that judges collects its reasons in an `Outcome` and exits with its code; docs/exit-codes.md has the
table. No other module computes an exit code.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from conformance.ggml.text import printable

from .verdict import EXECUTED, Missing, MissingCause, Result, Verdict, counted, pattern
from .worse import Seen, worse

SHOWN = 3
"""Maximum number of case ids in a reason."""


class Exit(enum.IntEnum):
    """Exit codes of every command that judges."""

    OK = 0
    FAILURES = 1
    """There are failures, or a requested result is missing."""
    USAGE = 2
    """Bad input or usage."""
    NOTHING = 3
    """No cases ran, or none passed."""
    INCOMPLETE = 5
    """The command stopped early, at a limit or by Ctrl-C, without a failure so far."""


class Why(str, enum.Enum):
    """Why a command did not succeed; the list is closed."""

    FAILED = "failed"
    """Failed cases or audit cells, or an exceeded limit."""
    NEW = "new"
    """A failure group or failed case that the compared run lacks."""
    WIDER = "wider"
    """A failed case that the baseline lacks or has with a smaller error."""
    GONE = "gone"
    """A failure group of the baseline that the run lacks."""
    MISSING = "missing"
    """Requested cases without a result that the user did not stop or limit."""
    SHARD = "shard"
    """A shard without a run."""
    COVERAGE = "coverage"
    """Cases that passed and are no longer executed."""
    WAIVER = "waiver"
    """A waiver that expired, matches nothing or is otherwise wrong."""
    BROKEN = "broken"
    """A process or a part that could not run or write its record."""
    UNASKED = "unasked"
    """Cases of a baseline that a run with another selection did not request."""
    TIME_LIMIT = "time limit"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"
    """Stopped after the number of failures that the user set."""
    UNDECIDED = "undecided"
    """A measurement that gave no decision within its time."""
    UNEXECUTED = "unexecuted"
    """No cases ran."""
    UNPROVEN = "unproven"
    """No case passed on a backend."""

    def __str__(self) -> str:
        return self.value

    @property
    def exit(self) -> Exit:
        """Exit code of an outcome with this reason only."""
        if self in _INCOMPLETE:
            return Exit.INCOMPLETE
        return Exit.NOTHING if self in _NOTHING else Exit.FAILURES


_INCOMPLETE = frozenset({Why.TIME_LIMIT, Why.UNASKED, Why.INTERRUPTED, Why.STOPPED, Why.UNDECIDED})
_NOTHING = frozenset({Why.UNEXECUTED, Why.UNPROVEN})
_OF_MISSING = {
    MissingCause.LOST: Why.MISSING,
    MissingCause.INTERRUPTED: Why.INTERRUPTED,
    MissingCause.TIME_LIMIT: Why.TIME_LIMIT,
    MissingCause.STOPPED: Why.STOPPED,
    MissingCause.UNDECIDED: Why.UNDECIDED,
}
PRECEDENCE = (Exit.FAILURES, Exit.INCOMPLETE, Exit.NOTHING)
"""Precedence of exit codes, highest first."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a command did not succeed."""

    why: Why
    text: str
    """Line for people."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Reasons of a command; it succeeded if there is none. Outcomes of parts can be added."""

    reasons: tuple[Reason, ...] = ()

    @classmethod
    def of(cls, why: Why, texts: Iterable[str]) -> Outcome:
        """Make a reason for each text."""
        return cls(tuple(Reason(why, text) for text in texts))

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome((*self.reasons, *other.reasons))

    def without(self, why: Why) -> Outcome:
        """Return the outcome without these reasons."""
        return Outcome(tuple(r for r in self.reasons if r.why is not why))

    @property
    def exit_code(self) -> Exit:
        """Exit code of the worst reason."""
        codes = {r.why.exit for r in self.reasons}
        return next((code for code in PRECEDENCE if code in codes), Exit.OK)

    def lines(self) -> list[str]:
        """Return lines for a terminal; those that decide the exit code come first."""
        order = {code: n for n, code in enumerate(PRECEDENCE)}
        return [printable(r.text) for r in sorted(self.reasons, key=lambda r: order[r.why.exit])]


def judge(
    results: Iterable[Result],
    missing: Sequence[Missing] = (),
    *,
    waivers: Sequence[str] = (),
    unproven: Iterable[str] = (),
    before: Mapping[tuple[str, str], Result] | None = None,
) -> Outcome:
    """Compute the outcome of cases on backends.

    Args:
        results: all results.
        missing: requested cases without a result.
        waivers: a sentence for each invalid waiver.
        unproven: a sentence for each backend on which no case passed, if that matters.
        before: backend and case -> the result to compare with. Failures that are no worse do not count; a case that
            passed and is no longer executed does, and so does a backend on which no case passes.
    """
    rows = list(results)
    failed = [r for r in rows if r.fails_run]
    if before is None:
        reasons = _failed(Why.FAILED, failed, "failure")
    else:
        new = [r for r in failed if (r.backend, r.case) not in before or not before[r.backend, r.case].fails_run]
        reasons = [
            *_failed(Why.NEW, new, "new failure"),
            *_worse(before, failed),
            *_lost(before, rows, missing).reasons,
        ]
    reasons += unanswered(missing).reasons
    reasons += [Reason(Why.WAIVER, f"waivers fail this run: {w}") for w in waivers]
    reasons += [Reason(Why.UNPROVEN, text) for text in unproven]
    if before is not None:
        reasons += without_pass(rows).reasons
    if not any(r.verdict in EXECUTED for r in rows):
        refused = f" ({counted(len(rows), 'case')} UNSUPPORTED)" if rows else ""
        reasons.append(Reason(Why.UNEXECUTED, f"no cases ran{refused}"))
    return Outcome(tuple(reasons))


def _failed(why: Why, failed: Sequence[Result], noun: str) -> list[Reason]:
    counts = Counter(r.verdict for r in failed)
    each = ", ".join(f"{counts[v]} {v}" for v in Verdict if v in counts)
    return [Reason(why, f"{counted(len(failed), noun)}: {each}")] if failed else []


def _worse(before: Mapping[tuple[str, str], Result], failed: Sequence[Result]) -> list[Reason]:
    """Return a reason for each way in which cases that failed before are worse now."""
    groups: dict[tuple[str, str], list[str]] = {}
    for r in failed:
        was = before.get((r.backend, r.case))
        found = worse(Seen.of(was), Seen.of(r)) if was is not None and was.fails_run else None
        if found is not None:
            groups.setdefault((r.backend, str(found)), []).append(r.case)
    return [
        Reason(Why.WIDER, f"worse on {backend}: {text}: {counted(len(ids), 'case')}: {first(ids)}")
        for (backend, text), ids in groups.items()
    ]


def without_pass(results: Sequence[Result]) -> Outcome:
    """Return a reason for each backend with failures and without a PASS.

    A comparison proves nothing there.
    """
    passed = {r.backend for r in results if r.verdict is Verdict.PASS}
    totals = Counter(r.backend for r in results if r.fails_run and r.backend not in passed)
    return Outcome.of(Why.UNPROVEN, [f"{backend}: no case passed ({n:,} failed)" for backend, n in totals.items()])


def _lost(before: Mapping[tuple[str, str], Result], results: Sequence[Result], missing: Sequence[Missing]) -> Outcome:
    """Return coverage lost by cases that were requested again."""
    passed: dict[str, list[str]] = {}
    for r in results:
        then = before.get((r.backend, r.case))
        if then is not None and then.verdict is Verdict.PASS and not then.fresh:
            passed.setdefault(r.backend, []).append(r.case)
    return coverage(lost_coverage(passed, results, missing), passed)


def unanswered(missing: Iterable[Missing]) -> Outcome:
    """Return the outcome of cases without a result: a reason for each backend and cause."""
    groups: dict[tuple[str, MissingCause, str], Counter[str]] = {}
    for m in missing:
        groups.setdefault((m.backend, m.cause, m.reason), Counter())[m.case] += m.count
    reasons = [
        Reason(_OF_MISSING[cause], f"no result for {counted(n.total(), 'case')} on {backend}: {why}: {first(list(n))}")
        for (backend, cause, why), n in groups.items()
    ]
    return Outcome(tuple(reasons))


@dataclass(frozen=True, slots=True)
class Lost:
    """A case that passed on a backend and is no longer executed there."""

    backend: str
    case: str
    now: Verdict | None
    """UNSUPPORTED, or None if it is absent."""


def lost_coverage(
    passed: Mapping[str, Collection[str]], results: Iterable[Result], missing: Iterable[Missing] = ()
) -> list[Lost]:
    """Return the cases that passed before and are refused or absent now.

    A case that now runs with another seed replaces an absent one.

    Args:
        passed: backend -> ids of the cases that passed on it.
        results: current results of all backends.
        missing: current cases without a result; they are a separate reason, not lost coverage.
    """
    now: dict[tuple[str, str], Verdict] = {}
    for r in results:
        if now.get((r.backend, r.case)) not in EXECUTED:
            now[r.backend, r.case] = r.verdict
    known = {(m.backend, m.case) for m in missing}
    before = {(b, i) for b, ids in passed.items() for i in ids}
    others = Counter((b, _seedless(i)) for (b, i), v in now.items() if v in EXECUTED and (b, i) not in before)
    lost = []
    for backend, case in ((b, i) for b, ids in passed.items() for i in ids):
        verdict = now.get((backend, case))
        if verdict in EXECUTED or not known.isdisjoint(((backend, case), (backend, pattern(case)))):
            continue
        if verdict is None and others[backend, _seedless(case)] > 0:
            others[backend, _seedless(case)] -= 1
            continue
        lost.append(Lost(backend, case, verdict))
    return lost


def _seedless(case: str) -> str:
    return case.rpartition("@")[0] or case


def coverage(lost: Sequence[Lost], passed: Mapping[str, Collection[str]]) -> Outcome:
    """Return a reason for each backend that lost coverage: counts and the first cases."""
    texts = []
    for backend, rows in groupby(sorted(lost, key=lambda row: row.backend), key=lambda row: row.backend):
        own = list(rows)
        absent = sum(row.now is None for row in own)
        how = ", ".join(f"{n} {word}" for n, word in ((len(own) - absent, "UNSUPPORTED"), (absent, "absent")) if n)
        texts.append(
            f"coverage lost on {backend}: {len(own)} of {counted(len(passed[backend]), 'case')} that passed "
            f"({how}): {first([row.case for row in own])}"
        )
    return Outcome.of(Why.COVERAGE, texts)


def first(ids: Sequence[str], shown: int = SHOWN) -> str:
    """Format the first ids in a line, and the number of the others."""
    more = f" and {len(ids) - shown:,} more" if len(ids) > shown else ""
    return f"{', '.join(ids[:shown])}{more}"
