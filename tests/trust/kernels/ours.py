"""This suite against the library with the mutants: which case reaches which of them, and which case notices one."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.judge.verdict import FAILURES, Verdict
from conformance.run.execute import execute
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.select import case_ids
from conformance.suite.family import Level

from .journal import appending, rows
from .tree import Mutant, Tree

LEVELS: tuple[Level, ...] = ("smoke", "standard")
_OF_ONE_NODE = ("ops/", "tbo/")
WAYS = ("", "mode=sched", "buffer=CPU_REPACK", "threads=8", "buffer=CPU_REPACK&threads=8")
"""Options of the adapter, as `conform build test` sets them."""
_SECONDS = 30.0
"""Limit of one request; a clean case takes milliseconds."""
_FAILURES = frozenset(v.name for v in FAILURES)
_FIRST = 8
"""Cases that run one by one; most mutants are noticed by then."""
_BATCH = 16
_DRAWN, _NOTICING = 250, 8
"""Cases of `sampled` at most, and those that notice a mutant after which no more are needed."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A case on the library with no active mutant."""

    case: str
    way: str
    level: Level
    seconds: float
    passes: bool
    seen: Sequence[int]
    """Mutants whose place it evaluates."""
    refused: bool = False
    """The device does not support a node; with a mutant it may claim to."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """The first case that fails."""

    case: str
    verdict: str
    level: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """Drawn cases of `ops` that reach a mutant, until enough of them notice it."""

    number: int
    noticing: Sequence[str]
    others: Sequence[str]


class Seen:
    """A mapped file with a byte per mutant, which the library sets."""

    def __init__(self, path: Path, mutants: Sequence[Mutant]) -> None:
        self.path = path
        self._size = max((m.number for m in mutants), default=0) + 1
        path.write_bytes(bytes(self._size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._size)

    def take(self) -> list[int]:
        """Return the numbers since the last call, and clear them."""
        data = self._map[:]
        self._map[:] = bytes(self._size)
        return [n for n, byte in enumerate(data) if byte]


class Ours:
    """Cases of the suite on the mutated library."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._ways = [way for way in WAYS if not (way and tree.device)]

    def spec(self, way: str, number: int = 0, seen: Path | None = None) -> Spec:
        """Return the backend with one active mutant."""
        device = [f"device={self._tree.device}"] if self._tree.device else []
        words = [f"lib={self._tree.library}", *device, *([way] if way else []), f"env.MUTANT={number}"]
        words += [f"env.MUTANT_SEEN={seen}"] if seen else []
        return Spec.parse(f"ggml?{'&'.join(words)}")

    def reach(self, path: Path, *, plain: bool = False) -> list[Reach]:
        """Run each case of `LEVELS` with no mutant; what `path` holds of an earlier call is not run again.

        `plain`: only cases of `ops`, on the plain device. Levels are those of today, as `smoke` changes.
        """
        levels = {i: level for level, i in _ids("")}
        stored = (Reach(**row) for row in rows(path))
        done = {(r.case, r.way): replace(r, level=levels[r.case]) for r in stored if r.case in levels}
        with appending(path) as add:
            for way in self._ways[:1] if plain else self._ways:
                wanted = ((level, i) for level, i in _ids(way) if not plain or i.startswith("ops/"))
                missing = [(level, i) for level, i in wanted if (i, way) not in done]
                if not missing:
                    continue
                seen = Seen(path.with_suffix(".seen"), self._tree.mutants)
                with _runner() as runner:
                    for level, i in missing:
                        row = _reach(runner, self.spec(way, seen=seen.path), seen, level, i, way)
                        done[i, way] = row
                        add(row)
        return [r for r in done.values() if not plain or (not r.way and r.case.startswith("ops/"))]

    def hunt(self, mutant: Mutant, reached: Sequence[Reach], seconds: float) -> tuple[Noticed | None, int]:
        """Run the cases that reach a mutant until one fails, in the order of `_in_turn`; also return how many ran.

        After `seconds` no further batch begins.
        """
        cases = _in_turn([r for r in reached if r.passes or r.refused])
        ran = 0
        end = time.monotonic() + seconds
        for row, verdict in self._verdicts(mutant, cases):
            if row is None:
                return Noticed("", verdict, "smoke"), 0
            ran += 1
            if verdict in _FAILURES:
                return Noticed(row.case, verdict, row.level), ran
            if time.monotonic() > end:
                break
        return None, ran

    def sampled(self, mutant: Mutant, reached: Sequence[Reach]) -> Sampled:
        """Run drawn cases of `ops` that reach a mutant, `_DRAWN` at most, until `_NOTICING` and a third notice it."""
        offered = [r for r in reached if r.passes and not r.way and r.case.startswith("ops/")]
        drawn = np.random.Generator(np.random.PCG64(mutant.number)).permutation(len(offered))[:_DRAWN]
        found: dict[bool, list[str]] = {True: [], False: []}
        for row, verdict in self._verdicts(mutant, [offered[k] for k in drawn]):
            if row is not None:
                found[verdict in _FAILURES].append(row.case)
            if len(found[True]) >= _NOTICING and 2 * len(found[True]) >= len(found[False]):
                break
        return Sampled(mutant.number, found[True], found[False])

    def first(self, mutant: Mutant, reached: Sequence[Reach], seconds: float) -> str:
        """Return the first case of `reached` that notices a mutant; "" if none does in so many seconds."""
        end = time.monotonic() + seconds
        for row, verdict in self._verdicts(mutant, reached):
            if row is None or verdict in _FAILURES:
                return (row or reached[0]).case
            if time.monotonic() > end:
                break
        return ""

    def failing(self, mutant: Mutant, reached: Sequence[Reach]) -> list[str]:
        """Return the cases that notice a mutant."""
        cases = [r for r in reached if r.passes or r.refused]
        return [row.case for row, v in self._verdicts(mutant, cases) if row is not None and v in _FAILURES]

    def _verdicts(self, mutant: Mutant, cases: Sequence[Reach]) -> Iterator[tuple[Reach | None, str]]:
        """Yield each case and its verdict; None and why, if the library does not open."""
        with _runner() as runner:
            for batch in _batches(cases):
                spec = self.spec(batch[0].way, mutant.number)
                try:
                    runner.backend(spec)
                except ConformanceError as e:
                    yield None, f"the library does not open: {e}"[:200]
                    return
                results = runner.run(spec, [runner.case(r.case) for r in batch])
                yield from zip(batch, (r.verdict.name for r in results), strict=True)

    def differs(self, mutant: Mutant, reached: Sequence[Reach], most: int) -> str:
        """Return the first of at most `most` cases in which a byte of an output or a cache differs; "" if none.

        A case that only the mutant fails to compute differs.
        """
        with _runner() as runner:
            for row in _in_turn([r for r in reached if r.passes])[:most]:
                case = runner.case(row.case)
                clean, changed = (runner.backend(self.spec(row.way, n)) for n in (0, mutant.number))
                try:
                    expected = execute(clean, case).steps
                except BackendError:  # the unchanged library crashes now and then
                    continue
                try:
                    found = execute(changed, case).steps
                except BackendError:
                    return row.case
                if any(
                    not np.array_equal(a.all[t], b.all[t]) for a, b in zip(expected, found, strict=True) for t in a.all
                ):
                    return row.case
        return ""


def _ids(way: str) -> Iterator[tuple[Level, str]]:
    known: set[str] = set()
    for level in LEVELS:
        for i in case_ids((), (), level):
            if i not in known and _runs(way, level, i):
                known.add(i)
                yield level, i


def _runs(way: str, level: Level, case_id: str) -> bool:
    """Return True if a case runs with these options.

    Without options all do. CPU_REPACK also gets products, of `standard` only without threads. Otherwise cases of
    `smoke` run: those of one node with threads alone, graphs of several nodes with the other options.
    """
    if not way:
        return True
    if "CPU_REPACK" in way and case_id.startswith("ops/MUL_MAT"):
        return level == "smoke" or "threads" not in way
    return level == "smoke" and case_id.startswith(_OF_ONE_NODE) == (way == "threads=8")


def _reach(runner: Runner, spec: Spec, seen: Seen, level: Level, case_id: str, way: str) -> Reach:
    case = runner.case(case_id)
    runner.backend(spec)
    seen.take()
    start = time.perf_counter()
    (result,) = runner.run(spec, [case])
    seconds = time.perf_counter() - start
    passes, refused = (result.verdict is v for v in (Verdict.PASS, Verdict.UNSUPPORTED))
    return Reach(case_id, way, level, round(seconds, 4), passes, seen.take(), refused)


def _in_turn(cases: Sequence[Reach]) -> list[Reach]:
    """Return cases of `smoke` first, in a level those not refused, then the cheapest of each op and family first."""
    turns: Counter[tuple[str, bool, str, str]] = Counter()
    order: list[tuple[int, bool, int, float, Reach]] = []
    for r in sorted(cases, key=lambda r: (r.seconds, r.case)):
        kind = r.way, r.refused, r.level, r.case.partition("-" if r.case.startswith(_OF_ONE_NODE) else "/")[0]
        order.append((LEVELS.index(r.level), r.refused, turns[kind], r.seconds, r))
        turns[kind] += 1
    return [r for *_, r in sorted(order, key=lambda o: o[:4])]


def _batches(cases: Sequence[Reach]) -> Iterator[Sequence[Reach]]:
    """Yield cases of one way and level, few at first."""
    at = 0
    while at < len(cases):
        size = 1 if at < _FIRST else _BATCH
        end = at + 1
        while end < len(cases) and end - at < size and cases[end].way == cases[at].way:
            end += 1
        yield cases[at:end]
        at = end


@contextmanager
def _runner() -> Iterator[Runner]:
    runner = Runner(isolation=Isolation(time_limit=_SECONDS))
    runner.locates = runner.checks_stale_state = False
    try:
        yield runner
    finally:
        runner.close()
