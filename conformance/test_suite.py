"""The suite: each case on each backend, or with `--perf` each work unit.

`--family NAME` selects one family. The plugin parametrises the tests and removes those without parameters.
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
    """Every output and cache matches the reference, in the arithmetic that the backend declares."""
    check(conformance_case)


def test_golden(conformance_golden: list[Result]) -> None:
    """Every golden output matches the reference and the real ggml."""
    wrong = [r.sentence() for r in conformance_golden if r.verdict in FAILURES]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.fixture
def perf_timed(request: pytest.FixtureRequest) -> tuple[Row, Clock]:
    """Measure the test's unit on its backend; return the row, and the clock of its benchmark."""
    clock = Clock()
    request.node.add_marker(pytest.mark.benchmark(timer=clock, group=request.param[0].name))
    return request.config.stash[PERF].row(*request.param), clock


@pytest.fixture
def perf_memory(request: pytest.FixtureRequest) -> Row:
    """Measure a unit that has no time, only memory."""
    return request.config.stash[PERF].row(*request.param)


def test_time(perf_timed: tuple[Row, Clock], benchmark: BenchmarkFixture) -> None:
    """The unit's case passes, and its rounds are measured."""
    replay(*perf_timed, benchmark, check)


def test_memory(perf_memory: Row) -> None:
    """The unit's case passes, and its backend's memory can be measured while it runs."""
    check(perf_memory.result)
