"""The runner: each way in which a backend can be wrong gets its own verdict, and the first wrong node is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from stand_in import Faulty, Tamper, Tampered

from conformance.backend.interface import YES, Backend, Session, Support, no
from conformance.backend.kernel import KernelBackend, KernelSession, Raw, Sources
from conformance.backend.registry import Spec, create
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.ggml.types import F32, I64
from conformance.judge.evidence import Fault
from conformance.judge.outcome import judge
from conformance.judge.verdict import Result, Totals, Verdict
from conformance.run import locate
from conformance.run.execute import execute
from conformance.run.runner import Runner
from conformance.run.session.failures import file_name
from conformance.run.session.select import build, case_ids

SPEC = Spec("faulty")


class FaultyBackend(Faulty):
    """Eight cases at once."""

    batch = 8


def _bytes(a: np.ndarray) -> Bytes:
    return np.ascontiguousarray(a, np.float32).reshape(-1).view(np.uint8)


def _case(name: str = "test/add@0", *, steps: int = 1, seed: int = 0) -> Case:
    """`((a + b) * w) + a`, the middle and last node in a chain of three."""
    rng = np.random.Generator(np.random.PCG64(seed))
    weight = Builder().new_tensor_2d(F32, 8, 3)
    weight.name = "w"
    case = Case(name, {weight: _bytes(rng.standard_normal((3, 8)))}, [])
    for _ in range(steps):
        b = Builder()
        x, y = b.new_tensor_2d(F32, 8, 3), b.new_tensor_2d(F32, 8, 3)
        out = b.add(b.mul(b.add(x, y), weight), x)
        graph = b.build_forward_expand(out)
        inputs = {t: _bytes(rng.standard_normal((3, 8))) for t in (x, y)}
        case.steps.append(Step(graph, inputs, (out,)))
    case.validate()
    return case


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """A runner that keeps failures."""
    runner = Runner(save_failures=tmp_path / "failures")
    yield runner
    runner.close()


def _run(runner: Runner, backend: Backend, *cases: Case) -> list[Result]:
    runner._backends[SPEC] = backend
    return runner.run(SPEC, cases)


def _right(_: Graph, __: dict[Tensor, Bytes]) -> None:
    """No fault."""


def _on(op: str, change: Callable[[Bytes], None]) -> Tamper:
    def tamper(_: Graph, found: dict[Tensor, Bytes]) -> None:
        for t, data in found.items():
            if t.op == op:
                change(data)

    return tamper


def _raise(error: Exception) -> Tamper:
    def tamper(_: Graph, __: dict[Tensor, Bytes]) -> None:
        raise error

    return tamper


def test_a_right_backend_passes_alone_and_in_a_batch(runner: Runner) -> None:
    """Right values pass with no budget used, with a witness that counts the nodes that ran."""
    results = _run(runner, FaultyBackend(_right), *(_case(f"test/add@{i}", seed=i) for i in range(5)))
    assert [r.verdict for r in results] == [Verdict.PASS] * 5
    assert all(r.budget_used == 0 and r.witness is not None and r.witness["nodes"] > 0 for r in results)
    assert [r.case for r in results] == [f"test/add@{i}" for i in range(5)]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (BackendError("status 1"), Verdict.OVERCLAIM),
        (BackendCrashError("GGML_ASSERT(x)"), Verdict.CRASH),
        (BackendTimeoutError("120 s"), Verdict.TIMEOUT),
    ],
)
def test_a_backend_that_fails_costs_its_own_verdict(runner: Runner, error: Exception, verdict: Verdict) -> None:
    """Each kind of failure has its verdict, with the backend's own words in it, and no exception leaves the runner."""
    (result,) = _run(runner, FaultyBackend(_raise(error)), _case())
    assert result.verdict is verdict
    assert str(error) in result.detail


def test_one_bad_case_in_a_batch_costs_one_case(runner: Runner) -> None:
    """When a batch fails its cases run again alone, so that only the bad one is blamed."""
    cases = [_case(f"test/add@{i}", seed=i) for i in range(4)]
    bad = cases[2].steps[0].outputs[0]

    def tamper(graph: Graph, _: dict[Tensor, Bytes]) -> None:
        if bad in graph.nodes:
            raise BackendCrashError("signal 6")

    verdicts = [r.verdict for r in _run(runner, FaultyBackend(tamper), *cases)]
    assert verdicts == [Verdict.PASS, Verdict.PASS, Verdict.CRASH, Verdict.PASS]


def test_wrong_only_in_a_batch_is_still_wrong(runner: Runner) -> None:
    """A case that is right alone and wrong among others fails, and the detail says so."""

    def tamper(graph: Graph, found: dict[Tensor, Bytes]) -> None:
        if len(graph) > 3:
            next(iter(found.values()))[:] = 0

    results = _run(runner, FaultyBackend(tamper), *(_case(f"test/add@{i}", seed=i) for i in range(3)))
    assert results[0].verdict is Verdict.FAIL
    assert "wrong only in a graph with 2 other cases" in results[0].detail


def test_the_first_divergent_node_is_named(runner: Runner) -> None:
    """Of a chain the node that is wrong is named, not the output that it spoils, with index and both values."""

    def spoil(data: Bytes) -> None:
        data.view(np.float32)[5] += 0.25

    def tamper(graph: Graph, found: dict[Tensor, Bytes]) -> None:
        wrong = [t for t in graph if t.op == "MUL"]
        for t, data in found.items():
            if t in wrong:
                spoil(data)
            elif t is graph.nodes[-1]:
                data.view(np.float32)[5] += 0.25

    (result,) = _run(runner, FaultyBackend(tamper), _case(steps=3))
    assert result.verdict is Verdict.FAIL
    assert result.where is not None
    assert (result.where.step, result.where.op) == (0, "MUL")
    numbers = result.where.numbers
    assert numbers is not None
    assert numbers.index == (5, 0, 0, 0)
    assert numbers.found - numbers.expected == pytest.approx(0.25)
    assert "everything before it agrees" in result.detail


@pytest.mark.parametrize(
    "case_id", ["ops/SQR-f32-ne=18x6x3x2,vne=*", "ops/MUL_MAT-f32+f32-a=256x6x2x2,b=256x3x2x2,va=*"]
)
def test_a_node_behind_views_alone_runs_once(runner: Runner, monkeypatch: pytest.MonkeyPatch, case_id: str) -> None:
    """A wrong node that is all that a case computes is named as one among others would be, without another run."""
    case = build(case_ids((), (case_id,), "standard")[0])
    runs = 0

    def tamper(graph: Graph, found: dict[Tensor, Bytes]) -> None:
        nonlocal runs
        runs += 1
        found[graph.nodes[-1]][:] = 0

    monkeypatch.setattr(runner, "checks_stale_state", False)
    (result,) = _run(runner, FaultyBackend(tamper), case)
    assert runs == 1
    reference = runner.oracle.reference_in(Arithmetic())
    ran = execute(FaultyBackend(tamper), case, every_node=[0]).steps
    found = locate.first_divergent(ran, reference, case, 0)
    assert found is not None
    assert result.where == locate.describe(found, case)
    assert len(case.steps[0].graph) > 1


def test_right_node_by_node_blames_no_node(runner: Runner) -> None:
    """Where every node is right once intermediate values are asked for, the detail says that no node is at fault."""

    def tamper(graph: Graph, found: dict[Tensor, Bytes]) -> None:
        if len(found) == 1:
            found[graph.nodes[-1]][:] = 0

    (result,) = _run(runner, FaultyBackend(tamper), _case())
    assert result.verdict is Verdict.FAIL
    assert "; each node alone is right; " in result.detail


ATTENTION = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,fa=0,run=p3.d1.d1@0"


class NanSession(Tampered):
    """Puts a NaN into a masked cell of every cache: before the first step (-1), or behind the back of a step."""

    def __init__(self, inner: Session, case: Case, step: int) -> None:
        super().__init__(inner, _right)
        self._case, self._step, self._k = case, step, -1
        self._spoil()

    def _spoil(self) -> None:
        for t in self._case.caches() if self._k == self._step and self._case.family == "kv_growth" else ():
            data = self.inner.read(t).copy()
            data.view("<u2")[-1] = 0x7E00
            self.inner.write(t, data)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the reference."""
        found = super().compute(graph, inputs, outputs)
        self._k += 1
        self._spoil()
        return found


@pytest.mark.parametrize(
    ("step", "at", "cause"), [(-1, 0, "it contained NaN before the first step"), (1, 1, "no node of the step wrote it")]
)
def test_a_nan_in_a_cache_is_traced_to_where_it_began(runner: Runner, step: int, at: int, cause: str) -> None:
    """What reads a cache with NaN is right by itself: the cache and the step that first held it are named instead."""
    case = build(ATTENTION)

    class Spoils(FaultyBackend):
        def open(self, case: Case) -> Session:
            return NanSession(self.inner.open(case), case, step)

    (result,) = _run(runner, Spoils(_right), case)
    assert result.verdict is Verdict.FAIL
    assert result.where is not None
    where = result.where
    assert (where.step, where.op, where.fault, where.node) == (at, "NONE", Fault.GRAPH, None), result.detail
    assert "the first NaN: " in result.detail
    assert cause in result.detail


def test_a_node_that_writes_nan_into_a_cache_is_the_first_divergence(runner: Runner) -> None:
    """It is named with its step, not the attention of a later step that reads the cell."""
    inner = create(Spec("cpu"))
    assert isinstance(inner, KernelBackend)
    right = inner.kernels()
    writes = count()

    def set_rows(node: Tensor, dst: Raw, src: Sources) -> None:
        right["SET_ROWS"](node, dst, src)
        if next(writes) % 6 == 3:  # K and V of 3 steps: V of the second
            dst.reshape(-1)[-1:] = np.nan

    class Writes(FaultyBackend):
        def open(self, case: Case) -> Session:
            return KernelSession("faulty", {**right, "SET_ROWS": set_rows}, case)

    (result,) = _run(runner, Writes(_right), build(ATTENTION))
    assert result.where is not None
    where = result.where
    assert (where.step, where.op, where.fault) == (1, "SET_ROWS", Fault.NODE), result.detail


def test_a_no_is_unsupported_with_its_reason(runner: Runner) -> None:
    """A refusal keeps the backend's words and is neither a pass nor a failure, and nothing is executed."""
    backend = FaultyBackend(_right, lambda n: no("no MUL here") if n.op == "MUL" else YES)
    (result,) = _run(runner, backend, _case())
    assert result.verdict is Verdict.UNSUPPORTED
    assert "no MUL here" in result.detail
    totals = Totals.of([result])
    assert (totals.executed, totals.failed, judge([result]).exit_code) == (0, 0, 3)


def test_nothing_checked_is_vacuous(runner: Runner) -> None:
    """A case with neither output nor cache proves nothing and fails the run."""
    case = _case()
    case.steps[0].outputs = ()
    (result,) = _run(runner, FaultyBackend(_right), case)
    assert result.verdict is Verdict.VACUOUS


@pytest.mark.parametrize(
    ("demands", "verdict"),
    [
        ({"compiles": "<=2"}, Verdict.PASS),
        ({"compiles": ">=1"}, Verdict.VACUOUS),
        ({"path": "eager"}, Verdict.PASS),
        ({"path": "cached"}, Verdict.VACUOUS),
        ({"kernels": ["RMS"]}, Verdict.VACUOUS),
    ],
)
def test_an_unmet_demand_is_vacuous(runner: Runner, demands: dict[str, object], verdict: Verdict) -> None:
    """Right numbers on a path that the case does not ask for are no pass."""
    case = _case()
    case.demands = dict(demands)
    (result,) = _run(runner, FaultyBackend(_right), case)
    assert result.verdict is verdict


def test_a_failing_case_is_kept_and_reproduces(runner: Runner) -> None:
    """The saved file holds the same case: run again it gives the same verdict and numbers."""

    def tamper(_: Graph, found: dict[Tensor, Bytes]) -> None:
        for data in found.values():
            data.view(np.float32)[0] += 1

    (result,) = _run(runner, FaultyBackend(tamper), _case())
    assert result.saved is not None
    (again,) = _run(runner, FaultyBackend(tamper), *casefile.read(Path(result.saved)))
    assert (again.verdict, again.nmse, again.where) == (result.verdict, result.nmse, result.where)


def test_the_reference_is_never_its_own_oracle(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second opinion a case proves nothing of the reference: VACUOUS, which fails the run."""
    monkeypatch.setattr(runner.oracle, "_second_reason", "it is not installed")
    (result,) = runner.run(Spec("cpu"), [_case()])
    assert result.verdict is Verdict.VACUOUS
    assert "ggml, which checks the reference, is not available: it is not installed" in result.detail


def test_what_ggml_itself_refuses_is_no_fault_of_the_reference(runner: Runner) -> None:
    """UNSUPPORTED with ggml's reason: nothing can hold the reference to it."""
    (result,) = runner.run(Spec("cpu"), [build("ops/SOFT_MAX_BACK-f32-ne=16x16,max_bias=8.0@91")])
    assert result.verdict is Verdict.UNSUPPORTED
    assert "ggml, which checks the reference, does not support it: " in result.detail


def test_stale_caches_are_seen() -> None:
    """Cache bytes are judged after every step, not outputs alone."""
    b = Builder()
    cache = b.new_tensor_2d(F32, 4, 8)
    cache.name = "cache"
    rows, idx = b.new_tensor_2d(F32, 4, 2), b.new_tensor_1d(I64, 2)
    out = b.set_rows(cache, rows, idx)
    graph = b.build_forward_expand(out)
    inputs = {rows: _bytes(np.arange(8.0) + 1), idx: np.array([5, 1], "<i8").view(np.uint8)}
    case = Case("test/cache@0", {cache: np.zeros(nbytes(cache), np.uint8)}, [Step(graph, inputs, ())])
    runner = Runner()

    class Stale(FaultyBackend):
        def open(self, case: Case) -> Session:
            session = super().open(case)
            session.read = lambda t: np.zeros(nbytes(t), np.uint8)  # type: ignore[method-assign,assignment]  # the planted fault
            return session

    try:
        (right,) = _run(runner, FaultyBackend(_right), case)
        (stale,) = _run(runner, Stale(_right), case)
    finally:
        runner.close()
    assert (right.verdict, stale.verdict) == (Verdict.PASS, Verdict.FAIL)


@pytest.mark.parametrize("body", ["ops/X-a=1", "zoo/" + "x" * 300, "s/\u202e*?|" * 40])
def test_saved_names_are_bounded_and_one_for_each_id(body: str) -> None:
    """At most 99 characters, none that a file system refuses; ids that differ anywhere have files of their own."""
    names = {file_name(f"{body}{middle}{'y' * 200}@1_ggml") for middle in ("a", "b", "*", "?")}
    assert len(names) == 4
    assert all(len(n) < 100 and re.fullmatch(r"[A-Za-z0-9_.=@-]+", n) for n in names)
    assert file_name("ops/ADD-f32+f32-a=4,b=1@1_ggml") == "ops_ADD-f32_f32-a=4_b=1@1_ggml.gguf"


def test_a_death_when_asked_together_is_no_pass(runner: Runner) -> None:
    """A process that dies when it is asked what it supports of many cases, and of none by itself, is a CRASH."""
    asked = []

    def support(node: Tensor) -> Support:
        asked.append(node)
        if len(asked) == 4:
            raise BackendCrashError("faulty: its process died")
        return YES

    spec = Spec("faulty")
    runner._backends[spec] = FaultyBackend(lambda _graph, _found: None, support)
    first, second = runner.run(spec, [_case("test/a@0"), _case("test/b@1", seed=1)])
    assert first.verdict is Verdict.CRASH
    assert "failed for these cases together; each is asked alone" in first.detail
    assert second.verdict is Verdict.PASS
