"""Work units on backends, timed: these tests exist with `--perf` only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.perf.bench import Row

from .plugin import check
from .plugin_perf import PERF, Clock, replay

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture
def perf_timed(request: pytest.FixtureRequest) -> tuple[Row, Clock]:
    """The test's unit on its backend, measured, and the clock of its benchmark, which is made after this."""
    clock = Clock()
    request.node.add_marker(pytest.mark.benchmark(timer=clock, group=request.param[0].name))
    return request.config.stash[PERF].row(*request.param), clock


@pytest.fixture
def perf_memory(request: pytest.FixtureRequest) -> Row:
    """As `perf_timed`, of a unit that has nothing to time."""
    return request.config.stash[PERF].row(*request.param)


def test_time(perf_timed: tuple[Row, Clock], benchmark: BenchmarkFixture) -> None:
    """The unit's case passes, and its rounds are measured."""
    replay(*perf_timed, benchmark, check)


def test_memory(perf_memory: Row) -> None:
    """The unit's case passes, and its backend can be watched while it runs."""
    check(perf_memory.result)
    assert not perf_memory.broke, perf_memory.reason
