"""Merges run files, the source of every report, and formats results for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.ggml.text import shell
from conformance.judge.cause import Cause
from conformance.judge.verdict import Missing, Request, Result, Verdict, counted, pattern
from conformance.perf.gates import FAMILY as GATE
from conformance.perf.units import FAMILY as PERF
from conformance.run.session.journal import BESIDE
from conformance.run.session.shard import whole

from .runfile import Document, Setup, read_document

T = TypeVar("T")
Fields = Mapping[str, JSON]

KEYS: dict[str, tuple[str, ...]] = {
    "results": ("case", "backend"),
    "missing": ("case", "backend"),
}
"""List -> fields that identify a row on one kind of machine; the newest row stays."""
PER_SECOND = "_per_second"
"""Suffix of metrics that are rates."""
MUCH = 1000
"""Multiple of an error budget above which exact numbers are not shown."""


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One row of a document's list, and its place there."""

    value: T
    document: Document
    place: str
    """`results[17]`."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The content of several run files, without duplicates.

    Among rows with equal `KEYS` on one kind of machine the newest stays; rows of two kinds of machine both stay.
    """

    documents: tuple[Document, ...]
    """Documents, oldest first; two different files of one run are both in it."""
    results: tuple[Row[Result], ...]
    missing: tuple[Row[Missing], ...]
    """Requested pairs without a result here or in a newer run, alone or many in one row."""
    superseded: tuple[Row[Result], ...]
    """Results with a newer one in `results`."""
    causes: tuple[Row[Cause], ...]
    """Causes of current failures, each once, those of the newest file first."""
    passed_over: tuple[Path, ...]
    """JSON files of a folder that are not run files."""

    def unavailable(self) -> dict[str, str]:
        """Backends that no machine had -> the newest reason."""
        reasons: dict[str, str] = {}
        for d in self.documents:
            reasons.update(d.environment.unavailable or {})
        ran = {r.value.backend for r in self.results}
        return {name: why for name, why in reasons.items() if name not in ran}

    def unlisted(self) -> list[tuple[Document, str, int]]:
        """Return documents that list fewer cases of a backend than requested, with the difference."""
        lacking = []
        for d in self.documents:
            r = d.record
            listed = Counter(row.backend for row in r.results)
            for row in r.missing:
                listed[row.backend] += row.count
            lacking += [(d, backend, n - listed[backend]) for backend, n in r.asked.items() if n > listed[backend]]
        return lacking

    def setups(self) -> list[Setup]:
        """Return the devices of the builds of `conform build test`."""
        return [t for d in self.documents if d.record.builds for t in d.record.builds.devices]

    def devices(self) -> dict[str, str]:
        """Return backend -> its device, for both builds of `conform build test`."""
        return {backend: t.name for t in self.setups() for backend in (t.backend, t.against) if backend}

    def lacking(self) -> int:
        """Return the number of requested cases without a result."""
        return sum(m.value.count for m in self.missing) + sum(n for _, _, n in self.unlisted())

    def first_seen(self) -> list[Document]:
        """Return the earliest document that has each of `causes`."""
        first: dict[tuple[str, str], Document] = {}
        for d in self.documents:
            for c in d.record.causes:
                first.setdefault((c.id, c.backend), d)
        return [first[c.value.id, c.value.backend] for c in self.causes]

    def faults(self) -> list[list[int]]:
        """Return the indices of `causes` of each fault; several backends may have the same."""
        found: dict[tuple[str, str], list[int]] = {}
        for i, c in enumerate(self.causes):
            found.setdefault((c.value.id, c.value.text), []).append(i)
        return list(found.values())

    def proofs(self) -> list[Row[Result]]:
        """Return the newest result of each cause's smallest case, else one made from the cause."""
        newest = {(r.value.case, r.value.backend): r for r in self.results}
        return [newest.get((c.value.smallest, c.value.backend), _said(c)) for c in self.causes]


def read_runs(paths: Sequence[Path]) -> Runs:
    """Read run files, and those in folders (recursively), and merge them.

    A JSON file in a folder that is not a run file is ignored; a file named in `paths` must be one. A folder
    also has the results of runs that were killed.

    Raises:
        UsageError: a file cannot be read or has a wrong field, or there is no run file at all.
    """
    documents: dict[str, Document] = {}
    passed_over: list[Path] = []
    for path, named in files(paths):
        document = read_document(path, named=named)
        if document is None:
            passed_over.append(path)
        else:
            documents.setdefault(document.digest, document)
    if not documents:
        raise UsageError(f"a run file (written with --json) expected, none found in {', '.join(map(str, paths))}")
    ordered = sorted(documents.values(), key=lambda d: d.written)
    results, superseded = _merge(ordered, "results")
    missing, _ = _merge(ordered, "missing")
    answered = {_pair(r): r.document.written for r in results}
    return Runs(
        documents=tuple(ordered),
        results=tuple(results),
        missing=tuple(_unanswered(missing, answered)),
        superseded=tuple(superseded),
        causes=tuple(_standing_causes(ordered, results, answered)),
        passed_over=tuple(passed_over),
    )


def files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each file once, and whether `paths` names it itself."""
    seen: set[Path] = set()
    for path in paths:
        candidates = sorted([*path.rglob("*.json"), *path.rglob(f"*{BESIDE}")]) if path.is_dir() else [path]
        for f in candidates:
            if (real := f.resolve()) not in seen and (f is path or f.is_file()):
                seen.add(real)
                yield f, f is path


def _merge(documents: Sequence[Document], name: str) -> tuple[list[Row[Any]], list[Row[Any]]]:
    """Return the newest row of each key, in order of first appearance, and the older rows.

    Equal rows of one document, from a case that also ran from a file, all stay.
    """
    newest: dict[tuple[JSON, ...], list[Row[Any]]] = {}
    older: list[Row[Any]] = []
    for d in documents:
        for i, value in enumerate(getattr(d.record, name, ())):
            rows = newest.setdefault((d.machine, *(getattr(value, k) for k in KEYS[name])), [])
            if rows and rows[0].document is not d:
                older += rows
                rows.clear()
            rows.append(Row(value, d, f"{name}[{i}]"))
    return [r for rows in newest.values() for r in rows], older


def _standing_causes(
    documents: Sequence[Document], results: Iterable[Row[Result]], answered: Mapping[tuple[JSON, ...], str]
) -> Iterator[Row[Cause]]:
    """Return the newest row of each cause in newest results, or whose cases did not all run."""
    named = {(r.value.cause, r.value.backend) for r in results}
    newest: dict[tuple[str, str], Row[Cause]] = {}
    for d in reversed(documents):
        for i, c in enumerate(d.record.causes):
            newest.setdefault((c.id, c.backend), Row(c, d, f"causes[{i}]"))
    for name, row in newest.items():
        pairs = ((row.document.machine, case, row.value.backend) for case in row.value.cases)
        if name in named or any(answered.get(pair, "") <= row.document.written for pair in pairs):
            yield row


def _unanswered(
    missing: Iterable[Row[Missing]], answered: Mapping[tuple[str, str, str], str]
) -> Iterator[Row[Missing]]:
    """Yield the rows without a newer result; of many cases those that have none are left."""
    for row in missing:
        one = row.value.count == 1
        newer = int(answered.get(_pair(row), "") > row.document.written) if one else _newer(row, answered)
        if (left := row.value.count - newer) > 0:
            yield replace(row, value=replace(row.value, count=left))


def _newer(row: Row[Missing], answered: Mapping[tuple[str, str, str], str]) -> int:
    """Return how many cases of a family have their first result in a newer document."""
    d, m = row.document, row.value
    newer = {
        case
        for (machine, case, backend), written in answered.items()
        if written > d.written and (machine, backend, pattern(case)) == (d.machine, m.backend, m.case)
    }
    if newer:
        newer.difference_update(r.case for r in d.record.results if r.backend == m.backend)
        newer.difference_update(r.case for r in d.record.missing if r.backend == m.backend)
    return len(newer)


def _said(cause: Row[Cause]) -> Row[Result]:
    c = cause.value
    return Row(Result(c.smallest, c.backend, c.verdict, cause=c.id), cause.document, cause.place)


def _pair(row: Row[Missing] | Row[Result]) -> tuple[str, str, str]:
    return row.document.machine, row.value.case, row.value.backend


def command(result: Result) -> str:
    """Return the shell command that runs a case again; words of files are quoted."""
    if result.saved:
        return shell(["conform", "repro", result.saved, "--backend", result.backend])
    family, _, rest = result.case.partition("/")
    again = ["perf", "run", rest.rpartition("/")[0]] if family == PERF else ["run", "--case", result.case]
    again = ["perf", "gate", "--gate", rest] if family == GATE else [*again, "--backend", result.backend]
    return shell(["conform", *again])


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a result."""

    rate: float
    """Work per second."""
    of: str
    """Unit of work: `tokens`, `cases` or `steps`."""
    low: float | None
    """95 % interval; None if it is not known."""
    high: float | None
    rounds: float


def pace(result: Result) -> Pace | None:
    """Return the rate among a result's metrics; None if it has none."""
    m = result.metrics
    name = next((k for k in m if k.endswith(PER_SECOND)), None)
    if name is None or not m[name] > 0:
        return None
    seconds, (short, long) = m.get("seconds", 0.0), (m.get("seconds.low"), m.get("seconds.high"))
    low, high = m[name] * seconds / long if long else None, m[name] * seconds / short if short else None
    return Pace(m[name], name.removesuffix(PER_SECOND), low, high, m.get("rounds", 1))


def budget_used(results: Iterable[Result], unchecked: str = "–") -> str:
    """Return the largest error (share of its budget); `unchecked` if nothing was compared."""
    used = [u for r in results if (u := _used(r)) is not None]
    return share(max(used)) if used else unchecked


def share(used: float) -> str:
    """Format a share of an error budget."""
    if used == inf:
        return "∞"  # a difference where none is allowed, or NaN or Inf in other places
    if used > MUCH:
        return f"> {MUCH}×"
    return f"{used:.3g}×" if used > 1 else f"{100 * used:.3g} %"


def _used(r: Result) -> float | None:
    """Return the share of the budget; a FAIL's null means infinity, which JSON lacks."""
    if r.budget_used is None and r.verdict is Verdict.FAIL and r.where is not None:
        return inf
    return r.budget_used


_LAST = ("CPU", "cpu")
"""Names of the device of a scheduler that runs nodes which no other takes."""


def refusals(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """Return backend -> reason for UNSUPPORTED, without nodes -> number of cases."""
    reasons: dict[str, Counter[str]] = {}
    for r in results:
        if r.verdict is Verdict.UNSUPPORTED and r.error is not None:
            reasons.setdefault(r.backend, Counter())[r.error.words or r.error.message] += 1
    return reasons


def refusal_lines(results: Iterable[Result]) -> list[str]:
    """Return `refusals` as lines for people, most frequent first."""
    lines = []
    for backend, reasons in refusals(results).items():
        lines.append(f"{counted(sum(reasons.values()), 'case')} unsupported by {backend}, by reason:")
        lines += [f"  {n:6,}  {why or 'no reason given'}" for why, n in reasons.most_common()]
    return lines


def placement_lines(results: Iterable[Result]) -> list[str]:
    """Return a line per backend that fills `Witness.placed`, with the first op that fell back."""
    nodes: dict[str, dict[str, Counter[str]]] = {}
    for r in results:
        placed = r.witness.get("placed") if r.witness else None
        for device, ops in placed.items() if isinstance(placed, dict) else ():
            if isinstance(ops, dict):
                on = nodes.setdefault(r.backend, {}).setdefault(device, Counter())
                on.update({op: n for op, n in ops.items() if isinstance(n, int)})
    return [f"{backend}: {_placement(found)}" for backend, found in nodes.items()]


def _placement(found: Mapping[str, Counter[str]]) -> str:
    whole = sum(ops.total() for ops in found.values())
    devices = sorted(found, key=lambda device: (device in _LAST, device))
    said = ", ".join(f"{found[name].total():,} of {whole:,} nodes on {name}" for name in devices)
    first = next(iter(found[devices[-1]]), "") if len(devices) > 1 and devices[-1] in _LAST else ""
    return f"{said}, first {first}" if first else said


def unproven(documents: Sequence[Mapping[str, JSON]]) -> dict[str, str]:
    """Return backend -> a sentence, for each without the PASS or failure that a run needs.

    Shards of one run count together: a single shard proves nothing, because cases of the others may have passed.
    """
    runs: dict[tuple[str, int], list[Mapping[str, JSON]]] = {}
    for d in documents:
        shard = d.get("shard")
        if isinstance(shard, dict) and shard.get("whole") not in {None, whole(())}:  # which is of fresh cases alone
            runs.setdefault((shard["whole"], shard["of"]), []).append(d)
    complete = [run for (_, of), run in runs.items() if {d["shard"]["index"] for d in run} == set(range(1, of + 1))]
    complete += [[d] for d in documents if d.get("gating") is True]
    return {backend: sentence for run in complete for backend, sentence in _unproven(run).items()}


def _unproven(run: Sequence[Mapping[str, JSON]]) -> dict[str, str]:
    rows = [r for r in _rows_of(run, "results") if not r.get("fresh")]
    results = [Result(str(r.get("case")), str(r.get("backend")), Verdict(r["verdict"])) for r in rows]
    missing = [Missing(str(m.get("backend")), str(m.get("case")), "") for m in _rows_of(run, "missing")]
    cases: dict[str, dict[str, None]] = {}
    for backend, case in [*((r.backend, r.case) for r in results), *((m.backend, m.case) for m in missing)]:
        cases.setdefault(backend, {})[case] = None
    return Request(cases).unproven(results, missing)


def _rows_of(documents: Sequence[Mapping[str, JSON]], name: str) -> list[dict[str, JSON]]:
    lists = [d.get(name) for d in documents]
    return [r for rows in lists if isinstance(rows, list) for r in rows if isinstance(r, dict)]
