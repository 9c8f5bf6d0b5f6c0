"""The suite: each case on each backend, or with `--perf` each work unit. `--family NAME` chooses one family.

The plugin gives the tests their parameters, and takes out those that have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.judge.verdict import FAILURES, Result
from conformance.perf.bench import Row

from .plugin import check
from .plugin_perf import PERF, Clock, replay

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def test_case(conformance_case: Result) -> None:
    """Each output and cache of each step is what the reference gives, in the arithmetic that the backend declares."""
    check(conformance_case)


def test_golden(conformance_golden: list[Result]) -> None:
    """Each golden output is what the reference and the real ggml give now."""
    wrong = [r.sentence() for r in conformance_golden if r.verdict in FAILURES]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


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
