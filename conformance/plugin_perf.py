"""`pytest conformance --perf`: one pytest-benchmark test per work unit and backend.

The first test of a unit measures it on all backends in turn. Each test then replays its own rounds on a clock that
advances by the measured seconds, so that pytest-benchmark stores, compares and judges the seconds of `perf.measure`,
and its options keep their meaning. With `--benchmark-disable` the cases must pass and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result, Verdict
from conformance.perf.bench import Bench, Row
from conformance.perf.count import check_callgrind
from conformance.perf.measure import Rounds
from conformance.perf.units import ROUNDS, Unit, units
from conformance.run.session.environment import environment
from conformance.run.session.shard import WHOLE
from conformance.suite.family import LEVELS, Level
from conformance.testrun import Chosen

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


class Perf:
    """The tests of work units in a session with `--perf`."""

    def __init__(
        self,
        bench: Bench,
        specs: list[Spec],
        level: Level,
        globs: list[str],
        rounds: int | None,
        *,
        timing: bool,
        counts: bool,
    ) -> None:
        self.rows: list[Row] = []
        self._bench, self._specs, self._level, self._counts = bench, specs, level, counts
        self._units = units(level, globs)
        self._rounds = ROUNDS[level] if rounds is None else rounds
        self._timing = timing
        self._wanted: dict[Unit, list[Spec]] = {}
        self._rows: dict[tuple[Unit, Spec], Row] = {}

    def row(self, unit: Unit, spec: Spec) -> Row:
        """Return the row of one test; measure its unit on all backends of the session, once."""
        if (unit, spec) not in self._rows:
            rows = self._measure(unit, self._wanted.get(unit, [spec]))
            for row in rows if self._counts else ():
                self._bench.count(row)
            self.rows += rows
            self._rows.update({(unit, r.backend): r for r in rows})
        return self._rows[unit, spec]

    def results(self) -> Iterator[tuple[Spec, Result]]:
        """Return backend and result of each measured unit."""
        return ((r.backend, r.result) for r in self.rows)

    def _measure(self, unit: Unit, specs: list[Spec]) -> list[Row]:
        if not self._timing:
            return [Row(unit, s, replace(self._bench.result(unit, s), case=unit.id)) for s in specs]

        def buy(r: Rounds) -> None:
            r.more(self._rounds)

        return self._bench.rows(unit, specs, buy)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test per unit and backend; units vary slowest."""
        for name, timed in (("perf_timed", True), ("perf_memory", False)):
            if name in metafunc.fixturenames:
                keys = [(u, s) for u in self._units if u.timed is timed for s in self._specs]
                metafunc.parametrize(name, keys, ids=[f"{u.name}-{s}" for u, s in keys], indirect=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record on which backends each unit runs."""
        for item in session.items:
            key = _key(item)
            if key is not None:
                self._wanted.setdefault(key[0], []).append(key[1])

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Replace the machine's name by its kind."""
        machine_info["node"] = environment()["machine"]


PERF = pytest.StashKey[Perf]()


def configure(config: pytest.Config, bench: Bench, chosen: Chosen) -> None:
    """Set up a performance session.

    Raises:
        UsageError: an option is not possible with it, or a glob matches no unit.
        UnavailableError: the tool that counts is not installed.
    """
    if getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput"):
        raise UsageError("--perf: parallel workers disturb each other's timing; run it without -n")
    if chosen.shard != WHOLE or chosen.fresh:
        raise UsageError("--perf: --shard and --fresh choose cases, not units; choose them with --unit")
    if not config.pluginmanager.hasplugin("benchmark"):
        raise UsageError("--perf: pytest-benchmark is needed and was switched off; run it without -p no:benchmark")
    timing, counts = not config.getoption("benchmark_disable"), config.getoption("perf_count")
    if counts:
        check_callgrind()
    globs, rounds = config.getoption("unit_globs"), config.getoption("rounds")
    level = chosen.level or LEVELS[0]
    perf = config.stash[PERF] = Perf(bench, chosen.specs, level, globs, rounds, timing=timing, counts=counts)
    config.pluginmanager.register(perf, "conformance-perf")


class Clock:
    """The `timer` of a test's benchmark; it advances by the measured seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __repr__(self) -> str:
        return "measured seconds"

    def __call__(self) -> float:
        """Return the seconds measured so far."""
        return self.now


def replay(row: Row, clock: Clock, benchmark: BenchmarkFixture, check: Callable[[Result], None]) -> None:
    """Replay a row as a benchmark with as many rounds; a failure raises inside it."""
    if row.result.verdict in {Verdict.UNSUPPORTED, Verdict.XFAIL}:
        pytest.skip(row.result.sentence())
    seconds = cycle(row.seconds or [0.0])

    def target() -> None:
        try:
            check(row.result)
        except pytest.fail.Exception as e:
            raise AssertionError(e.msg) from None  # pytest-benchmark handles Exception only
        clock.now += next(seconds)

    benchmark.extra_info.update({"case": row.result.case, "verdict": str(row.result.verdict), **row.result.metrics})
    pedantic: Any = benchmark.pedantic
    pedantic(target, rounds=len(row.seconds) or 1)


def is_empty(item: pytest.Item) -> bool:
    """Return True for a test of units without a unit, or without `--perf`."""
    return not {"perf_timed", "perf_memory"}.isdisjoint(getattr(item, "fixturenames", ())) and _key(item) is None


def case_of(item: pytest.Item) -> tuple[Spec, str] | None:
    """Return backend and id of the unit that a test measures."""
    key = _key(item)
    return None if key is None else (key[1], key[0].id)


def _key(item: pytest.Item) -> tuple[Unit, Spec] | None:
    callspec = getattr(item, "callspec", None)
    keys = [v for k, v in callspec.params.items() if k in {"perf_timed", "perf_memory"}] if callspec else []
    return keys[0] if keys and isinstance(keys[0], tuple) else None
