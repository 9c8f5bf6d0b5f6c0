"""`pytest conformance --perf`: one test per work unit and backend, its rounds handed to pytest-benchmark.

All backends of a unit are measured together, in turns, by the first of the unit's tests that runs; each test then
replays its own rounds on a clock that goes by what was measured. So pytest-benchmark stores, compares and judges the
seconds of `perf.measure`, which may be a session's own, and its options mean what they always mean; with
`--benchmark-disable` cases must pass and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Result, Verdict
from conformance.perf.bench import Bench, Row, document
from conformance.perf.measure import Rounds
from conformance.perf.units import ROUNDS, Unit, units
from conformance.run.session.environment import environment
from conformance.run.session.shard import WHOLE, parse
from conformance.suite.family import Level

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

FILE = "test_perf.py"
"""Collected with `--perf`, and then nothing else of the suite is."""


def add_options(group: pytest.OptionGroup) -> None:
    """The options of performance runs."""
    group.addoption("--perf", action="store_true", help="time backends instead, each case once it has passed")
    group.addoption("--unit", action="append", default=[], metavar="GLOB", help="with --perf: work units, repeatable")
    group.addoption(
        "--rounds",
        type=int,
        metavar="N",
        help="with --perf: measurements of each, warm-up apart (default: the level's)",
    )


class Perf:
    """What `--perf` adds to a session: tests of units, measured when the first of a unit's tests asks."""

    def __init__(
        self, bench: Bench, specs: list[Spec], level: Level, globs: list[str], rounds: int | None, *, timing: bool
    ) -> None:
        self.rows: list[Row] = []
        self._bench, self._specs, self._level = bench, specs, level
        self._units = units(level, globs)
        self._rounds = ROUNDS[level] if rounds is None else rounds
        self._timing = timing
        self._wanted: dict[Unit, list[Spec]] = {}
        self._found: dict[tuple[Unit, Spec], Row] = {}

    def row(self, unit: Unit, spec: Spec) -> Row:
        """Of one test; measures all that is wanted of its unit where nothing was yet."""
        if (unit, spec) not in self._found:
            found = self._measure(unit, self._wanted.get(unit, [spec]))
            self.rows += found
            self._found.update({(unit, r.backend): r for r in found})
        return self._found[unit, spec]

    def document(self, unavailable: dict[str, str]) -> dict[str, JSON]:
        """Of all that was measured."""
        return document(self.rows, self._level, unavailable)

    def results(self) -> Iterator[tuple[Spec, Result]]:
        """Of the cases behind the tests that ran."""
        return ((r.backend, r.result) for r in self.rows)

    def _measure(self, unit: Unit, specs: list[Spec]) -> list[Row]:
        if not self._timing:
            return [Row(unit, s, self._bench.result(unit, s), reason="nothing is timed in this run") for s in specs]

        def buy(r: Rounds) -> None:
            r.more(self._rounds)

        return self._bench.rows(unit, specs, buy)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per unit and backend, units outermost."""
        for name, timed in (("perf_timed", True), ("perf_memory", False)):
            if name in metafunc.fixturenames:
                keys = [(u, s) for u in self._units if u.timed is timed for s in self._specs]
                metafunc.parametrize(name, keys, ids=[f"{u.name}-{s}" for u, s in keys], indirect=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which backends are wanted of each unit."""
        for item in session.items:
            key = _key(item)
            if key is not None:
                self._wanted.setdefault(key[0], []).append(key[1])

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """A kind of machine in place of the name that its owner gave it."""
        machine_info["node"] = environment()["machine"]


PERF = pytest.StashKey[Perf]()


def configure(config: pytest.Config, bench: Bench, specs: list[Spec], level: Level) -> None:
    """Make the session one of performance.

    Raises:
        UsageError: an option that does not go with it, or a glob that matches no unit.
    """
    if getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput"):
        raise UsageError("--perf: several workers would take each other's time; run it without -n")
    if parse(config.getoption("shard")) != WHOLE or config.getoption("fresh"):
        raise UsageError("--perf: --shard and --fresh choose cases, not units; choose them with --unit")
    if not config.pluginmanager.hasplugin("benchmark"):
        raise UsageError("--perf: pytest-benchmark is needed and was switched off; run it without -p no:benchmark")
    rounds: int | None = config.getoption("rounds")
    if rounds is not None and rounds < 1:
        raise UsageError(f"--rounds: a number from 1 expected, {rounds} found")
    timing = not config.getoption("benchmark_disable")
    perf = config.stash[PERF] = Perf(bench, specs, level, config.getoption("unit"), rounds, timing=timing)
    config.pluginmanager.register(perf, "conformance-perf")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`--perf` chooses between the tests of numbers and those of time."""
    ours = collection_path.parent == Path(__file__).parent and collection_path.name.startswith("test_")
    return True if ours and (collection_path.name == FILE) != bool(config.getoption("perf")) else None


class Clock:
    """Goes by what was measured: the `timer` of a test's benchmark."""

    def __init__(self) -> None:
        self.now = 0.0

    def __repr__(self) -> str:
        return "what was measured"

    def __call__(self) -> float:
        """Seconds measured so far."""
        return self.now


def replay(row: Row, clock: Clock, benchmark: BenchmarkFixture, check: Callable[[Result], None]) -> None:
    """A row as a benchmark of as many rounds; a failure raises in it, as where the benchmarked function fails.

    Args:
        row: measured.
        clock: the benchmark's timer.
        benchmark: of the test.
        check: turns a verdict into the test's outcome.
    """
    if row.result.verdict in {Verdict.UNSUPPORTED, Verdict.XFAIL}:
        pytest.skip(row.reason)
    seconds = cycle(row.seconds or [0.0])

    def target() -> None:
        try:
            check(row.result)
        except pytest.fail.Exception as e:
            raise AssertionError(e.msg) from None  # pytest-benchmark knows ordinary exceptions only
        assert not row.broke, row.reason
        clock.now += next(seconds)

    apart = {"unit", "backend", "seconds", "elapsed"}  # the benchmark's name and data have these
    benchmark.extra_info.update({k: v for k, v in row.to_json().items() if k not in apart})
    pedantic: Any = benchmark.pedantic
    pedantic(target, rounds=len(row.seconds) or 1)


def is_empty(item: pytest.Item) -> bool:
    """Whether it is a test of units for which there is none, or no `--perf`."""
    return not {"perf_timed", "perf_memory"}.isdisjoint(getattr(item, "fixturenames", ())) and _key(item) is None


def _key(item: pytest.Item) -> tuple[Unit, Spec] | None:
    callspec = getattr(item, "callspec", None)
    found = [v for k, v in callspec.params.items() if k in {"perf_timed", "perf_memory"}] if callspec else []
    return found[0] if found and isinstance(found[0], tuple) else None
