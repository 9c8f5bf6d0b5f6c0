"""Verdicts, the result of one case on one backend, and requested cases without a result."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isfinite
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from conformance.case.case import JSON
from conformance.ggml.text import printable

from . import text
from .evidence import Amount, Count, Error, Fault, Place, readable, to_json
from .wrong import Wrong


class Verdict(str, enum.Enum):
    """Outcome of a case on a backend; the list is closed."""

    PASS = "PASS"  # noqa: S105  # a verdict, no password
    """Every output and cache of every step is within tolerance."""
    FAIL = "FAIL"
    """The case ran, and its numbers are wrong."""
    UNSUPPORTED = "UNSUPPORTED"
    """The backend refused the case in supports_op; the detail has its reason."""
    OVERCLAIM = "OVERCLAIM"
    """The backend accepted the case in supports_op, and then failed."""
    CRASH = "CRASH"
    """The process that ran the case died."""
    TIMEOUT = "TIMEOUT"
    """The backend did not answer in time."""
    VACUOUS = "VACUOUS"
    """The case ran on another path than it demands, or could not be checked independently."""
    XFAIL = "XFAIL"
    """The case failed as a waiver expects."""
    XPASS = "XPASS"
    """The case passed, although a waiver expects a failure."""

    def __str__(self) -> str:
        return self.value


FAILURES = frozenset({Verdict.FAIL, Verdict.OVERCLAIM, Verdict.CRASH, Verdict.TIMEOUT, Verdict.VACUOUS, Verdict.XPASS})
"""Verdicts that fail a run."""

EXECUTED = frozenset(set(Verdict) - {Verdict.UNSUPPORTED})
"""Verdicts of cases that ran on a backend."""


class Golden(str, enum.Enum):
    """Outcome of a comparison with stored values."""

    COMPARED = "compared"
    """The backend was compared with them; the verdict shows the outcome."""
    DIFFERS = "differs"
    """The recomputed reference disagrees with the stored values, so one of the two is wrong."""
    NOT_COMPARABLE = "not comparable"
    """The backend requantises weights by its declared arithmetic; no output for these is stored."""

    def __str__(self) -> str:
        return self.value


class Pair(NamedTuple):
    """A case on a backend, with which a result begins: `Result(*pair, verdict)`."""

    case: str
    backend: str


@dataclass(frozen=True, slots=True)
class Result:
    """One case on one backend: the only source of every report."""

    case: str
    backend: str
    verdict: Verdict
    budget_used: Amount | None = None
    """Largest fraction of the tolerance that a checked tensor used; over 1 fails.

    None if nothing was checked, Inf (null in JSON) if bit-exact was required."""
    nmse: Amount | None = None
    """Largest NMSE of a checked tensor, in the backend's declared arithmetic."""
    nmse_exact: Amount | None = None
    """Largest NMSE relative to the exact value, if the declared arithmetic differs."""
    seconds: Amount = 0.0
    """Wall time of the backend's part."""
    steps: Count = 0
    """Number of steps that ran."""
    witness: dict[str, JSON] | None = None
    where: Place | None = None
    """Where the failure was located, if known."""
    error: Error | None = None
    """Why there are no numbers: reason of UNSUPPORTED and VACUOUS, or how the backend failed."""
    wrong: Wrong | None = None
    """Error of the tensors over their tolerance, for a FAIL."""
    saved: str | None = None
    """Case file that reproduces it."""
    fresh: bool = False
    """True if the case has a new random seed: a failure is saved, but does not fail the run."""
    waived: Verdict | None = None
    """Verdict before a waiver made it XFAIL or XPASS."""
    cause: str | None = None
    """Id of the failure group of its failure, among the `causes` of its run."""
    golden: Golden | None = None
    """Comparison with stored values; None if there are none, or no outputs."""
    notes: tuple[str, ...] = ()
    """Remarks for people; no decision depends on them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other measurements and counts of the family, such as `tokens_per_second`, `splits`."""
    undecided: bool = False
    """True if a measurement gave no decision: the case is missing, not UNSUPPORTED."""

    @property
    def detail(self) -> str:
        """Evidence and notes as text for people."""
        return text.explain(self.where, self.error, self.notes)

    def noted(self, *notes: str) -> Result:
        """Return the result with more notes; empty ones are dropped."""
        return replace(self, notes=(*self.notes, *filter(None, notes)))

    @property
    def unlocated(self) -> bool:
        """True if the failure has not been located."""
        return self.where is None or self.where.fault is Fault.UNLOCATED

    @property
    def wrong_op(self) -> str:
        """Op of the first wrong node, or of the node that failed; empty if none is known."""
        if self.where is None or self.where.op == "NONE":
            return ""
        return self.where.op if self.error is not None or self.where.fault is Fault.NODE else ""

    @property
    def fails_run(self) -> bool:
        """True if it makes the run fail."""
        return self.verdict in FAILURES and not self.fresh

    def to_json(self) -> dict[str, JSON]:
        """Encode the record as strict JSON (no NaN, no Inf)."""
        absent = {name for name in ("metrics", "undecided") if not getattr(self, name)}
        row = {f.name: _strict(getattr(self, f.name)) for f in fields(self) if f.name not in absent}
        return {**row, "detail": self.detail}

    @classmethod
    def from_json(cls, row: JSON) -> Result:
        """Decode `to_json`; msgspec.ValidationError if invalid."""
        return msgspec.convert(readable_result(row), cls)

    def sentence(self) -> str:
        """Return one line for people."""
        line = f"{self.verdict} {printable(self.case)} on {printable(self.backend)}"
        return f"{line}: {printable(' '.join(self.detail.split()))}" if self.detail else line


FORMER = ("first_divergence", "place")
"""Fields in place of `where` and `error`, in records before schema 1 was released."""


def readable_result(row: JSON) -> JSON:
    """Prepare a result for msgspec; ValidationError for invalid evidence or an older row."""
    if not isinstance(row, dict):
        return row
    if former := [k for k in FORMER if k in row]:
        raise msgspec.ValidationError(f"`where` expected, `{former[0]}` of an older version found: repeat the run")
    if isinstance(wrong := row.get("wrong"), dict) and wrong.get("nmse", 0) is None:
        row = {**row, "wrong": {**wrong, "nmse": inf}}
    return {**row, **readable({k: row.get(k) for k in ("where", "error")})}


def _strict(value: Any) -> JSON:  # noqa: ANN401  # whatever a record holds
    if isinstance(value, (Verdict, Golden)):
        return value.value
    if isinstance(value, (Place, Error)):
        value = to_json(value)
    if isinstance(value, Wrong):
        value = value.to_json()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return f"({type(value).__name__})"  # a bad value must not cost a run its record


@dataclass(slots=True)
class Totals:
    """Number of results per verdict."""

    counts: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    filed: int = 0
    """Failures of fresh cases among them."""
    golden: Counter[Golden] = field(default_factory=Counter)
    """Number of results per outcome of the comparison with stored values."""

    def add(self, result: Result) -> None:
        """Count one result."""
        self.counts[result.verdict] += 1
        if result.golden is not None:
            self.golden[result.golden] += 1
        self.filed += result.fresh and result.verdict in FAILURES

    @classmethod
    def of(cls, results: Iterable[Result]) -> Totals:
        """Count results."""
        totals = cls()
        for r in results:
            totals.add(r)
        return totals

    @property
    def executed(self) -> int:
        """Number of cases that ran."""
        return sum(n for v, n in self.counts.items() if v in EXECUTED)

    @property
    def failed(self) -> int:
        """Number of cases that fail the run."""
        return sum(n for v, n in self.counts.items() if v in FAILURES) - self.filed

    def to_json(self) -> dict[str, JSON]:
        """Encode the counts of verdicts, executed cases and comparisons with stored values."""
        golden = {g.value: self.golden[g] for g in Golden}
        return {**{v.value: n for v, n in self.counts.items()}, "executed": self.executed, "golden": golden}

    @property
    def verdicts(self) -> str:
        """Counts of verdicts as text; empty if no cases ran."""
        text = ", ".join(f"{n:,} {v}" for v, n in self.counts.items() if n)
        return f"{text} ({self.filed} of fresh cases, saved)" if self.filed else text

    def __str__(self) -> str:
        text = self.verdicts or "no cases ran"
        differ, incomparable = self.golden[Golden.DIFFERS], self.golden[Golden.NOT_COMPARABLE]
        words = {"compared": self.golden[Golden.COMPARED] + differ, "differ": differ, "not comparable": incomparable}
        golden = ", ".join(f"{n} {word}" for word, n in words.items() if n)
        return f"{text}; golden: {golden}" if golden else text


class MissingCause(str, enum.Enum):
    """Why a requested case has no result, as far as it affects the exit code."""

    LOST = "lost"
    """The backend, the process or the record broke before there was a result."""
    TIME_LIMIT = "time limit"
    """A limit of the run was reached first."""
    INTERRUPTED = "interrupted"
    """The user ended the run first."""
    STOPPED = "stopped"
    """The run ended after the number of failures that the user set."""
    UNDECIDED = "undecided"
    """The measurement gave no decision within its time."""

    def __str__(self) -> str:
        return self.value


LISTED = 100
"""Maximum number of cases without a result that are listed, by backend, family and reason."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A requested pair of backend and case without a result, or many (`grouped`)."""

    backend: str
    case: str
    """Id of the case; of many the pattern, such as `ops/*`."""
    reason: str
    """Reason for people."""
    cause: MissingCause = MissingCause.LOST
    count: Annotated[int, msgspec.Meta(ge=1, lt=2**53)] = 1
    """Number of cases; some other cases that match the pattern may have results."""

    def to_json(self) -> dict[str, JSON]:
        """Encode as `{"backend", "case", "reason", "cause"}`, with `count` if it is not 1."""
        row = {**asdict(self), "cause": self.cause.value}
        return row if self.count != 1 else {k: v for k, v in row.items() if k != "count"}


def pattern(case_id: str) -> str:
    """Return the pattern of all cases of a case's family, such as `ops/*`."""
    return f"{case_id.partition('/')[0]}/*"


def grouped(cases: Iterable[tuple[str, str, str, MissingCause]]) -> list[Missing]:
    """Return missing cases, more than `LISTED` of one backend, family and reason as one entry.

    `cases`: backend, id, reason and cause of each.
    """
    groups: dict[tuple[str, str, str, MissingCause], list[str]] = {}
    for backend, case, why, cause in cases:
        groups.setdefault((backend, pattern(case), why, cause), []).append(case)
    missing: list[Missing] = []
    for (backend, family, why, cause), ids in groups.items():
        if len(ids) > LISTED:
            missing.append(Missing(backend, family, why, cause, len(ids)))
        else:
            missing += [Missing(backend, i, why, cause) for i in ids]
    return missing


def remaining(missing: Iterable[Missing], pairs: Iterable[tuple[str, str]]) -> Iterator[Missing]:
    """Yield what is left of `missing` once the `pairs` (backend, case) have results."""
    counts = Counter(key for backend, case in pairs for key in ((backend, case), (backend, pattern(case))))
    for m in missing:
        done = min(m.count, counts[m.backend, m.case])
        counts[m.backend, m.case] -= done
        if done < m.count:
            yield replace(m, count=m.count - done)


class Request:
    """Cases that a run requests of each backend, in order; a case may be requested twice."""

    def __init__(self, cases: Mapping[str, Iterable[str]] | None = None) -> None:
        self.cases: dict[str, list[str]] = {backend: list(ids) for backend, ids in (cases or {}).items()}

    def to_json(self) -> dict[str, JSON]:
        """Encode as backend -> number of cases."""
        return {backend: len(ids) for backend, ids in self.cases.items()}

    def missing(
        self,
        results: Iterable[Result],
        reason: str,
        reasons: Mapping[tuple[str, str], str] | None = None,
        cause: MissingCause = MissingCause.LOST,
    ) -> list[Missing]:
        """Return the pairs that `results` lack or leave undecided, `grouped`.

        Args:
            results: all results.
            reason: why the others are missing, in words.
            reasons: (backend, case), or (backend, "") for all its cases -> why it is missing; each of them is LOST.
            cause: the cause that `reason` describes.
        """
        known = reasons or {}
        counts: Counter[tuple[str, str]] = Counter()
        undecided: dict[tuple[str, str], str] = {}
        for r in results:
            if r.undecided:
                undecided[r.backend, r.case] = r.detail
            else:
                counts[r.backend, r.case] += 1
        missing: list[tuple[str, str, str, MissingCause]] = []
        for backend, ids in self.cases.items():
            for case in ids:
                if counts[backend, case]:
                    counts[backend, case] -= 1
                elif (backend, case) in undecided:
                    missing.append((backend, case, undecided[backend, case], MissingCause.UNDECIDED))
                else:
                    why = known.get((backend, case)) or known.get((backend, ""))
                    missing.append((backend, case, why or reason, MissingCause.LOST if why else cause))
        return grouped(missing)

    def unproven(self, results: Sequence[Result], missing: Sequence[Missing] = ()) -> dict[str, str]:
        """Return backend -> a sentence if it has all results and none of them passed or failed."""
        totals = {backend: Totals() for backend, ids in self.cases.items() if ids}
        for r in results:
            if r.backend in totals:
                totals[r.backend].add(r)
        for m in missing:
            totals.pop(m.backend, None)
        return {
            backend: f"{backend}: no case passed ({t})"
            for backend, t in totals.items()
            if not t.counts[Verdict.PASS] and not t.failed
        }


def elapsed(seconds: float) -> str:
    """Format a wall time: `7.2 s`, `1 min 43 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(n: int, noun: str) -> str:
    """Format a number and its noun: `1 case`, `1,200 cases`."""
    return f"{n:,} {noun}{'s' * (n != 1)}"
