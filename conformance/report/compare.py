"""Compares two sets of runs, by pair of case and backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from conformance.judge.cause import Cause
from conformance.judge.verdict import FAILURES, Missing, Result, Verdict, pattern
from conformance.judge.worse import Seen, Worse, worse

from .matrix import ORDER
from .runs import Row, Runs

LOST = "missing"
"""Stands for the verdict of a requested pair without a result; fails the run."""
ABSENT = "not run"
"""Stands for the verdict of a pair that was not requested."""


Key = tuple[str, str]
"""Id and backend of a cause."""


class State(str, Enum):
    """How a pair differs from the base, most urgent first."""

    NEW = "new"
    """The case fails now, and did not fail before."""
    WORSE = "worse"
    """The case failed, and fails in a worse way now (`judge.worse`)."""
    UNCOVERED = "lost coverage"
    """The case passed, and is UNSUPPORTED or not run now."""
    CHANGED = "changed"
    """Any other verdict or cause, such as a CRASH that is now a FAIL, or a FAIL that is refused."""
    STILL = "still failing"
    """The case fails as before."""
    FIXED = "fixed"
    """The case failed, and passes now."""
    GONE = "not run"
    """Only the base has the pair, and it did not pass there."""
    ADDED = "added"
    """The base does not have the pair."""
    SAME = "same"

    def __str__(self) -> str:
        return self.value


DIFFERS = (State.NEW, State.WORSE, State.UNCOVERED, State.CHANGED, State.FIXED)
"""States that a list of differences shows, pair by pair."""


@dataclass(frozen=True, slots=True)
class Side:
    """A pair in one of the two sets."""

    verdict: str
    """A verdict, LOST or ABSENT."""
    cause: str | None = None
    detail: str = ""
    machine: str = ""
    written: str = ""
    seen: Seen | None = None
    """The facts that `judge.worse` compares; None without a result."""

    @classmethod
    def of(cls, result: Result | None) -> Side:
        """Return the side that a result is; its verdict is ABSENT if there is no result."""
        return _NONE if result is None else cls(str(result.verdict), result.cause, result.detail, seen=Seen.of(result))

    @property
    def fails(self) -> bool:
        """True if this result fails its run."""
        return self.verdict in _FAILING


_FAILING = frozenset({LOST, *map(str, FAILURES)})
_RANK = {word: k for k, word in enumerate((*map(str, ORDER), LOST, ABSENT))}
_NONE = Side(ABSENT)


@dataclass(frozen=True, slots=True)
class Sides:
    """A case on a backend, before and after."""

    case: str
    backend: str
    before: Side
    after: Side

    @classmethod
    def of(cls, before: Result | None, after: Result) -> Sides:
        """Make the pair of a result and that of the base; None if the base has none."""
        return cls(after.case, after.backend, Side.of(before), Side.of(after))

    @property
    def worse(self) -> Worse | None:
        """How a case that failed before is worse now; None if it is not."""
        before, after = self.before, self.after
        if not (before.fails and after.fails and before.seen and after.seen):
            return None
        return worse(before.seen, after.seen)

    @property
    def state(self) -> State:
        """The difference."""
        before, after = self.before, self.after
        passed, passes = before.verdict == Verdict.PASS, after.verdict == Verdict.PASS
        moved = before.verdict != after.verdict or (before.cause and after.cause and before.cause != after.cause)
        rules = (
            (passed and after.verdict in (Verdict.UNSUPPORTED, ABSENT), State.UNCOVERED),
            (after.verdict == ABSENT, State.GONE),
            (before.verdict == ABSENT, State.ADDED),
            (after.fails and not before.fails, State.NEW),
            (self.worse is not None, State.WORSE),
            (before.fails and passes, State.FIXED),
            (moved, State.CHANGED),
            (after.fails, State.STILL),
        )
        return next((state for holds, state in rules if holds), State.SAME)

    @property
    def cause(self) -> str | None:
        """Id of the present cause, or else of the former one; None if neither run names one."""
        return self.after.cause or self.before.cause


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs, and their base."""

    base: tuple[str, ...]
    """Names of the base: of its files, or of a build."""
    pairs: tuple[Sides, ...]
    """Compared pairs, sorted by `State`, and within a state as in the runs."""
    sentences: Mapping[tuple[str, str], str]
    """Cause and backend -> the cause's sentence."""

    def counts(self) -> Counter[State]:
        """Return the number of pairs in each state."""
        return Counter(p.state for p in self.pairs)

    def sentence(self) -> str:
        """Format the counts as one line: `against base.json: 2 new, 1 fixed, …`."""
        return sentence(self.base, self.pairs)


def sentence(names: Iterable[str], pairs: Iterable[Sides]) -> str:
    """Format the number of pairs in each state as one line; `names` are those of the base."""
    counts = Counter(p.state for p in pairs)
    states = ", ".join(f"{counts[s]:,} {s}" for s in State if counts[s])
    return f"against {', '.join(names)}: {states or 'no cases to compare'}"


def compare(runs: Runs, base: Runs, names: Mapping[Key, Key] = MappingProxyType({})) -> Comparison:
    """Compare each pair with the base's on the same kind of machine, else its newest.

    `names`: id and backend of a cause of the base -> those that it has in `runs`, if it is there (`causes.same`). If a
    pair occurs several times in a file, such as a case that also ran from a case file, its worst verdict counts.
    """
    before, after = _sides(base, names), _sides(runs, {})
    many = {(m.value.case, m.value.backend): _lost(m) for m in runs.missing if m.value.count > 1}
    pairs = []
    for (case, backend), machines in after.items():
        known = before.get((case, backend), {})
        newest = max(known.values(), key=lambda side: side.written, default=_NONE)
        pairs += [Sides(case, backend, known.get(machine, newest), side) for machine, side in machines.items()]
    for (case, backend), machines in before.items():
        if (case, backend) not in after:
            now = many.get((pattern(case), backend), _NONE)
            pairs += [Sides(case, backend, side, now) for side in machines.values()]
    # the same cause is told in the words of the newer run
    return _sorted(dict.fromkeys(d.path.name for d in base.documents), pairs, [*base.causes, *runs.causes])


def compare_builds(runs: Runs) -> Comparison | None:
    """Compare the build of `conform build test` with its base; None if no record has a base.

    The pairs are named after the backends of the build.
    """
    base_of = {t.backend: t.against for t in runs.setups() if t.against}
    if not base_of:
        return None
    sides = _sides(runs, {})
    pairs = [
        Sides(case, backend, before[machine], side)
        for (case, backend), machines in sides.items()
        if (before := sides.get((case, base_of.get(backend) or "")))
        for machine, side in machines.items()
        if machine in before
    ]
    build_of = {base: build for build, base in base_of.items()}
    builds = (d.record.builds for d in runs.documents)
    names = dict.fromkeys(b.against.name for b in builds if b and b.against)
    return _sorted(names, pairs, runs.causes, build_of)


def _sorted(
    names: Iterable[str],
    pairs: Iterable[Sides],
    causes: Iterable[Row[Cause]],
    build_of: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    order = {state: k for k, state in enumerate(State)}
    told = (c.value for c in causes)
    sentences = {(c.id, build_of.get(c.backend, c.backend)): c.sentence for c in told}
    return Comparison(tuple(names), tuple(sorted(pairs, key=lambda p: order[p.state])), sentences)


def _sides(runs: Runs, names: Mapping[Key, Key]) -> dict[tuple[str, str], dict[str, Side]]:
    """Return pair -> kind of machine -> side; `names`: of causes in the other runs."""
    sides: dict[tuple[str, str], dict[str, Side]] = {}
    for case, backend, side in _all(runs, names):
        own = sides.setdefault((case, backend), {})
        own[side.machine] = min(own.get(side.machine, side), side, key=lambda s: _RANK[s.verdict])
    return sides


def _all(runs: Runs, names: Mapping[Key, Key]) -> Iterator[tuple[str, str, Side]]:
    for r in runs.results:
        yield r.value.case, r.value.backend, _side(r, names)
    for m in runs.missing:
        if m.value.count == 1:
            yield m.value.case, m.value.backend, _lost(m)


def _lost(row: Row[Missing]) -> Side:
    return Side(LOST, None, row.value.reason, row.document.machine, row.document.written)


def _side(row: Row[Result], names: Mapping[Key, Key]) -> Side:
    r, d = row.value, row.document
    cause = None if r.cause is None else names.get((r.cause, r.backend), (r.cause, r.backend))[0]
    return Side(str(r.verdict), cause, r.detail, d.machine, d.written, Seen.of(r))
