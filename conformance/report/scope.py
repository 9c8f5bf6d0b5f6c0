"""The scope of a run: its level, its passed and refused ops, and the next command.

A scope is computed from the selection and the results; a success holds for the scope only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance.ggml.tensor import VIEW_OPS
from conformance.ggml.text import shell
from conformance.judge.outcome import first
from conformance.judge.verdict import Result, Verdict
from conformance.suite import FAMILIES
from conformance.suite.family import LEVELS
from conformance.suite.ops import KNOWN

from .matrix import PASSED, operation
from .runfile import Selection
from .runs import Runs

FEW = 5
"""Maximum number of ops, globs or families that a command repeats."""
NAMED = 4
"""Maximum number of refused ops that are listed."""
FRESH = 1000
"""Number of new cases that a whole level `full` suggests."""
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Scope:
    """Coverage of a run on one backend."""

    backend: str
    level: str
    """Empty if the run named each of its cases."""
    ops: int
    """Number of ops that the suite has; 0 if the run had no case of `ops`.

    Each level has a case of each op."""
    passed: tuple[str, ...]
    """Ops of which a case passed, each alone in its graph.

    Families, if the run had no case of `ops`."""
    refused: tuple[str, ...]
    """Ops of which every case was UNSUPPORTED."""
    further: tuple[str, ...]
    """Words of the command that looks further."""

    @property
    def told(self) -> str:
        """The sentence without the command that looks further."""
        refused = f"; refused: {first(self.refused, NAMED)}" if self.refused else ""
        alone = f"{len(self.passed)} of {self.ops} ops" if self.ops else ", ".join(self.passed) or "no family"
        passed = f"{alone} passed a case{f' at level {self.level}' if self.level else ''}"
        return f"{self.backend}: {passed}{refused}"

    def __str__(self) -> str:
        return f"{self.told}; further: {shell(self.further)}"


def scopes(selection: Selection, results: Iterable[Result]) -> list[Scope]:
    """Return the scope on each backend with results of levels and without a failure.

    Cases of files have no level; live families and timed units do not stand for ops.
    """
    if selection.files and not selection.families and not selection.cases:
        return []
    rows: dict[str, list[Result]] = {}
    for r in results:
        if operation(r.case).family in FAMILIES:
            rows.setdefault(r.backend, []).append(r)
    return [
        _scope(backend, level, selection.families, selection.cases, rows[backend])
        for backend, level in selection.levels.items()
        if level in LEVELS and backend in rows and not any(r.fails_run for r in rows[backend])
    ]


def scopes_of(runs: Runs) -> list[Scope]:
    """Return the scopes of merged runs; shards of one selection count together.

    Each case counts with its newest result.
    """
    newest = {(r.value.backend, r.value.case): r.value for r in runs.results}
    current = {(r.document.digest, r.value.backend) for r in runs.results}
    groups: dict[tuple[tuple[object, ...], ...], tuple[Selection, dict[tuple[str, str], Result]]] = {}
    for d in runs.documents:
        selection = d.record.selection
        if selection is None:
            continue
        key = tuple(map(tuple, (selection.levels.items(), selection.families, selection.cases, selection.files)))
        _, rows = groups.setdefault(key, (selection, {}))
        for r in d.record.results:
            if (d.digest, r.backend) in current:
                rows[r.backend, r.case] = newest.get((r.backend, r.case), r)
    return [scope for selection, rows in groups.values() for scope in scopes(selection, rows.values())]


def _scope(backend: str, level: str, families: Sequence[str], globs: Sequence[str], results: Sequence[Result]) -> Scope:
    verdicts: dict[str, set[Verdict]] = {}
    for r in results:
        if op := operation(r.case).op:
            verdicts.setdefault(op, set()).add(r.verdict)
    refused = tuple(sorted(op for op, found in verdicts.items() if found == {Verdict.UNSUPPORTED}))
    passed = tuple(sorted(op for op, found in verdicts.items() if found & PASSED))
    if not verdicts:
        passed = tuple(dict.fromkeys(operation(r.case).family for r in results if r.verdict in PASSED))
    ran = sorted(verdicts.keys() - set(refused) - VIEW_OPS)  # a backend computes nothing for a view
    more = _further(level, families, globs, ran)
    words = ("conform", "run", "--backend", backend, *(w for option, value in more for w in (option, value)))
    named = bool(globs) and all(map(_is_id, globs))
    return Scope(backend, "" if named else level, len(KNOWN) if verdicts else 0, passed, refused, words)


def _further(level: str, families: Sequence[str], globs: Sequence[str], ran: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options of a run with more cases of the same kind, or else of all."""
    higher = next(iter(LEVELS[LEVELS.index(level) + 1 :]), None)
    wider = list(dict.fromkeys(map(_widened, globs)))
    narrow = [*(("--family", f) for f in families), *(("--case", g) for g in wider)]
    if len(narrow) > FEW:
        return [("--level", level)]
    if wider != list(globs):
        return [("--level", level), *narrow]
    if higher is None:
        return [("--level", level)] if narrow else [("--level", level), ("--fresh", str(FRESH))]
    if not globs and 0 < len(ran) <= FEW:
        narrow = [("--case", _all_of(op)) for op in ran]
    return [("--level", higher), *narrow]


def _is_id(glob: str) -> bool:
    return "@" in glob and _WILD.isdisjoint(glob)


def _widened(glob: str) -> str:
    """Return a glob for all cases of an id's op or family; a glob is unchanged."""
    if not _is_id(glob):
        return glob
    what = operation(glob)
    return _all_of(what.op) if what.op else f"{what.family}/*"


def _all_of(op: str) -> str:
    return f"ops/{op}-*"
