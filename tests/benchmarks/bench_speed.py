"""How fast whole cases go through: `pytest tests/benchmarks/bench_speed.py`.

The whole cycle in one process: build the case from its id, compute what it should give on the reference, ask the
backend, run it there, compare, judge. The ggml library itself runs in its worker, as always.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from conformance.backend.interface import Backend, DeviceInfo, Session, Support, Witness
from conformance.backend.registry import REFERENCE, Spec
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.verdict import FAILURES
from conformance.run.runner import Runner
from conformance.run.session.cache import Cache
from conformance.suite import FAMILIES
from conformance.suite.batch import groups

IDS = FAMILIES["ops"].ids("standard")
GOALS = {"ggml": 1000, "cpu": 500, "openvino-stateless": 200, "openvino-stateless?stage=translate": 200}
"""Cases per second that a run at `standard` should reach."""


class Clock:
    """Seconds spent inside the adapter."""

    def __init__(self) -> None:
        self.inside = 0.0

    def __call__(self, f: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  # whatever the adapter gives
        """Call `f` and count the time."""
        start = time.perf_counter()
        try:
            return f(*args)
        finally:
            self.inside += time.perf_counter() - start


class TimedSession(Session):
    """A session with a clock around each call."""

    def __init__(self, inner: Session, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Timed."""
        self._clock(self._inner.write, tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """Timed."""
        return self._clock(self._inner.read, tensor)  # type: ignore[no-any-return]  # read gives bytes

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Timed."""
        return self._clock(self._inner.compute, graph, inputs, outputs)  # type: ignore[no-any-return]  # a mapping

    def witness(self) -> Witness:
        """Timed."""
        return self._clock(self._inner.witness)  # type: ignore[no-any-return]  # a witness

    def close(self) -> None:
        """Timed."""
        self._clock(self._inner.close)


class TimedBackend(Backend):
    """A backend with a clock around each call."""

    def __init__(self, inner: Backend, clock: Clock) -> None:
        self._inner, self._clock = inner, clock
        self.batch = inner.batch  # type: ignore[misc]  # what the class says of the one inside

    def info(self) -> DeviceInfo:
        """Of the one inside."""
        return self._inner.info()

    def arithmetic(self) -> Arithmetic:
        """Of the one inside."""
        return self._inner.arithmetic()

    def supports_op(self, node: Tensor) -> Support:
        """Timed."""
        return self._clock(self._inner.supports_op, node)  # type: ignore[no-any-return]  # an answer

    def supports(self, graph: Graph) -> list[Support]:
        """Timed."""
        return self._clock(self._inner.supports, graph)  # type: ignore[no-any-return]  # answers

    def open(self, case: Case) -> Session:
        """Timed, and so is what it gives."""
        return TimedSession(self._clock(self._inner.open, case), self._clock)


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner whose backends are started, with nothing in its memory."""
    runner = Runner()
    yield runner
    runner.close()


def _cycle(runner: Runner, spec: Spec, ids: Sequence[str]) -> None:
    size = runner.batch_size(spec)
    for start in range(0, len(ids), size):
        for cases in groups(map(runner.case, ids[start : start + size])):
            results = runner.run(spec, cases)
            assert not [r.sentence() for r in results if r.verdict in FAILURES]


def _forget(runner: Runner) -> None:
    runner._cases, runner.oracle._known = Cache(), Cache()


@pytest.mark.parametrize("name", GOALS)
def test_op_cases_per_second(benchmark: BenchmarkFixture, runner: Runner, name: str) -> None:
    """Whole op cases per second at level `standard`, and the share of the time that is not the adapter's."""
    spec, clock = Spec.parse(name), Clock()
    runner._backends[spec] = TimedBackend(runner.backend(spec), clock)
    _cycle(runner, spec, IDS[:64])

    def setup() -> None:
        _forget(runner)
        clock.inside = 0.0

    pedantic: Callable[..., None] = benchmark.pedantic
    pedantic(lambda: _cycle(runner, spec, IDS), setup=setup, rounds=3)
    assert benchmark.stats is not None
    times = benchmark.stats.stats
    seconds = times.median
    benchmark.extra_info.update(
        cases_per_second=round(len(IDS) / seconds),
        goal=GOALS[name],
    )
    if name != REFERENCE:
        share = 1 - clock.inside / times.data[-1]
        benchmark.extra_info["framework_share"] = round(share, 3)
    print(f"\n{name}: {benchmark.extra_info}")  # noqa: T201  # the figure is what this file is for
