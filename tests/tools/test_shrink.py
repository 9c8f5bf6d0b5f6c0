"""Shrinking: a planted fault ends as the few nodes that show it, and fails as the whole did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cpu import CpuBackend
from conformance.backend.kernel import Kernel, KernelSession, Raw, Sources
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.quants import from_float
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import F16, F32, I32, Q4_K, Q8_0, GGMLType
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.process import Deadline
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.run.shrink import Shrunk, _Search, measure, shrink, simplify
from conformance.run.shrink.workers import Runners
from conformance.run.signature import signature_of

SPEC = Spec("planted")
TRAJECTORY = "kv_growth/llama-l=2,embd=32,heads=4,kv=2,ff=32,vocab=32,seqs=4,run=p3.d4@1"
"""5 steps, 2 layers, 4 sequences."""

Fault = Callable[[Kernel, Tensor, Raw, Sources], None]


def wrong_kv_head(right: Kernel, node: Tensor, dst: Raw, src: Sources) -> None:
    """Each query head attends to the next head of K and V."""
    q, k, v, *rest = src
    assert k is not None
    assert v is not None
    right(node, dst, [q, np.roll(k, 1, axis=1), np.roll(v, 1, axis=1), *rest])


def row_late(right: Kernel, node: Tensor, dst: Raw, src: Sources) -> None:
    """A cache row is written one late."""
    b, index, a = src
    assert index is not None
    right(node, dst, [b, (index + 1) % node.ne[1], a])


def wrong_half(right: Kernel, node: Tensor, dst: Raw, src: Sources) -> None:
    """The rotation of rows by their position has its halves swapped."""
    right(node, dst, src)
    dst[...] = np.roll(dst, dst.shape[-1] // 2, axis=-1)


def rest_of_a_tile(right: Kernel, node: Tensor, dst: Raw, src: Sources) -> None:
    """The last column after whole tiles of 32 is not computed, if there is such a tile."""
    right(node, dst, src)
    if node.ne[0] > 32 and node.ne[0] % 32 == 1:
        dst[..., -1] = 0


class DiedError(Exception):
    """What the engine does not turn into a BackendError."""


def dies(right: Kernel, node: Tensor, dst: Raw, src: Sources) -> None:
    """The device dies of every product of a matrix and more than one column."""
    if node.ne[1] > 1:
        raise DiedError(node.ne[1])
    right(node, dst, src)


FAULTS: dict[str, tuple[str, Fault]] = {
    "wrong KV head": ("FLASH_ATTN_EXT", wrong_kv_head),
    "cache row one late": ("SET_ROWS", row_late),
    "rotation on the wrong half": ("ROPE", wrong_half),
    "rest of a tile": ("SQR", rest_of_a_tile),
    "dies": ("MUL_MAT", dies),
    "raises": ("MUL_MAT", dies),
}


class Mortal(KernelSession):
    """Dies as an isolated backend does, or raises where the fault says so."""

    raises = False

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the engine, but for how it ends."""
        try:
            return super().compute(graph, inputs, outputs)
        except DiedError as e:
            if self.raises:
                raise BackendError("ne1 == 1 expected") from None
            message = f"its process died (SIGABRT): ggml.c:{e}: GGML_ASSERT(ne1 == 1) failed / at 0x{e}"
            raise BackendCrashError(message) from None


class Raising(Mortal):
    """Raises where the other dies."""

    raises = True


class Forgetful(KernelSession):
    """Starts every step from the caches of the first."""

    def __init__(self, device: str, kernels: Mapping[str, Kernel], case: Case) -> None:
        super().__init__(device, kernels, case)
        self._first = {t: data.copy() for t, data in case.persistent.items()}

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the engine, from the first state."""
        for t, data in self._first.items():
            self.write(t, data)
        return super().compute(graph, inputs, outputs)


class Planted(CpuBackend):
    """The reference with one faulty kernel, or with a state that is not carried."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def kernels(self) -> Mapping[str, Kernel]:
        """All but one are right."""
        right = super().kernels()
        if self._fault not in FAULTS:
            return right
        op, fault = FAULTS[self._fault]

        def kernel(node: Tensor, dst: Raw, src: Sources) -> None:
            fault(right[op], node, dst, src)

        return {**right, op: kernel}

    def open(self, case: Case) -> KernelSession:
        """Forgetful where that is the fault."""
        kind = Forgetful if self._fault not in FAULTS else Raising if self._fault == "raises" else Mortal
        return kind(self.name, self.kernels(), case)


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner."""
    runner = Runner()
    yield runner
    runner.close()


def _shrunk(runner: Runner, fault: str, case_id: str = TRAJECTORY) -> Shrunk:
    runner._backends[SPEC] = Planted(fault)
    return shrink(runner, SPEC, build(case_id), deadline=Deadline.after(100))


@pytest.mark.parametrize(("fault", "steps"), [(f, 1) for f in FAULTS if f != "rest of a tile"] + [("forgetful", 2)])
def test_a_planted_fault_ends_as_its_few_nodes(runner: Runner, fault: str, steps: int) -> None:
    """Of 5 steps, 2 layers and 4 sequences at most 3 nodes are left; the result is legal and fails as the whole did."""
    found = _shrunk(runner, fault)
    found.case.validate()
    assert found.finished
    assert found.seconds < 100
    assert len(found.case.steps) == steps
    assert sum(len(s.graph) for s in found.case.steps) <= 3
    again = runner.run(SPEC, [found.case])[0]
    assert signature_of(again) == found.signature
    if fault in FAULTS:
        assert any(n.op == FAULTS[fault][0] for s in found.case.steps for n in s.graph)


def test_every_step_of_the_way_is_smaller_and_fails_alike(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken on the way has the signature of the whole and a smaller measure; the way is the same twice."""
    ways: list[list[tuple[tuple[int, ...], str]]] = []
    right = _Search._takes

    def watched(self: _Search, candidate: Case, result: Result) -> bool:
        taken = right(self, candidate, result)
        if taken:
            assert signature_of(self.result) == self._signature
            candidate.validate()
            ways[-1].append((measure(candidate), self.result.detail))
        return taken

    monkeypatch.setattr(_Search, "_takes", watched)
    for _ in range(2):
        ways.append([])
        _shrunk(runner, "wrong KV head")
    assert ways[0] == ways[1]
    assert len(ways[0]) > 5
    measures = [m for m, _ in ways[0]]
    assert all(b < a for a, b in pairwise(measures))


@pytest.mark.parametrize("fault", ["wrong KV head", "dies", "forgetful"])
def test_candidates_that_run_ahead_change_nothing(runner: Runner, fault: str) -> None:
    """With workers the smallest case, and how many were tried, are those without; what ran in vain is tried again."""
    alone = _shrunk(runner, fault)
    runners = [Runner(), Runner(), Runner()]
    for r in runners:
        r._backends[SPEC] = Planted(fault)
    beside = Runners(runners)
    found = shrink(runner, SPEC, build(TRAJECTORY), deadline=Deadline.after(100), workers=beside)
    beside.close()
    assert (measure(found.case), found.tried, found.finished) == (measure(alone.case), alone.tried, True)
    assert [n.op for s in found.case.steps for n in s.graph] == [n.op for s in alone.case.steps for n in s.graph]


def test_an_error_in_a_lane_is_no_answer() -> None:
    """What is raised where a candidate runs reaches the caller, and the workers go on."""
    beside = Runners([Runner(), Runner()])
    for _ in range(2):
        found = beside.ahead(lambda _, item: 6 // item, [3, 2, 0, 1])
        assert [next(found), next(found)] == [(3, 2), (2, 3)]
        with pytest.raises(ZeroDivisionError):
            next(found)
        beside.restart()
    beside.close()


def test_types_are_simplified_and_sequences_dropped(runner: Runner) -> None:
    """Quantised weights and caches end as F32, and indices as I32, where the fault is not theirs."""
    found = _shrunk(runner, "cache row one late", TRAJECTORY.replace("vocab=32", "vocab=32,head=32,w=q4_0,cache=q8_0"))
    (step,) = found.case.steps
    assert [n.op for n in step.graph] == ["SET_ROWS"]
    assert all(t.type in {F32, I32} for t in step.graph.tensors())


@pytest.mark.parametrize("width", [65, 257, 2049])
def test_a_size_keeps_the_rest_of_its_tiles(runner: Runner, width: int) -> None:
    """A fault behind whole tiles of 32 is shown by 33 elements, however many rows and tiles there were."""
    found = _shrunk(runner, "rest of a tile", f"ops/SQR-f32-ne={width}x5@1")
    assert [t.ne for s in found.case.steps for t in s.graph.tensors()] == [(33, 1, 1, 1)] * 2


def test_values_stay_where_an_error_is_the_failure(runner: Runner) -> None:
    """Of a backend that raised, memory that it never wrote is no right output; one that dies shows itself."""
    raised, died = (_shrunk(runner, fault) for fault in ("raises", "dies"))
    assert raised.signature.verdict is Verdict.OVERCLAIM
    assert died.signature.verdict is Verdict.CRASH
    leaves, others = ([x.any() for s in found.case.steps for x in s.inputs.values()] for found in (raised, died))
    assert any(leaves)
    assert not any(others)
    (expected,) = runner.oracle.expect([raised.case], runner.backend(SPEC).arithmetic_in(raised.case))[0].steps
    assert expected.outputs
    assert all(x.any() for x in expected.outputs.values())


def test_what_does_not_fail_is_refused(runner: Runner) -> None:
    """There is nothing to shrink in a case that passes."""
    with pytest.raises(UsageError, match="does not fail on planted: PASS"):
        _shrunk(runner, "dies", "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p1@1")


def test_time_runs_out(runner: Runner) -> None:
    """The smallest case so far is the answer, and it says that more could be done."""
    ticks = iter(range(10_000))
    runner._backends[SPEC] = Planted("wrong KV head")
    found = shrink(runner, SPEC, build(TRAJECTORY), deadline=Deadline.after(20, lambda: float(next(ticks))))
    assert not found.finished
    assert signature_of(found.result) == found.signature


def test_the_first_run_counts(runner: Runner) -> None:
    """A case that takes the whole budget to run once is not tried further."""
    now = iter([0.0, *[100.0] * 1000])
    runner._backends[SPEC] = Planted("wrong KV head")
    found = shrink(runner, SPEC, build(TRAJECTORY), deadline=Deadline.after(60, lambda: next(now)))
    assert (found.tried, found.finished) == (0, False)


def test_what_is_left_bounds_each_run(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate may take longer than the budget has left when it starts; one that comes too late is not taken."""
    bounds: list[float] = []
    within = Runner.within

    def watched(self: Runner, deadline: Deadline) -> AbstractContextManager[None]:
        bounds.append(deadline.left())
        return within(self, deadline)

    monkeypatch.setattr(Runner, "within", watched)
    ticks = iter(range(10_000))
    runner._backends[SPEC] = Planted("wrong KV head")
    found = shrink(runner, SPEC, build(TRAJECTORY), deadline=Deadline.after(50, lambda: float(next(ticks))))
    assert len(bounds) == found.tried > 0
    assert all(0 <= later < earlier <= 50 for earlier, later in pairwise(bounds))


def test_each_pass_is_said_before_it_is_tried(runner: Runner) -> None:
    """On a case whose runs take long, lines say what is at work before the first success."""
    said: list[str] = []
    ticks = iter(range(10_000))
    runner._backends[SPEC] = Planted("wrong KV head")
    shrink(
        runner, SPEC, build(TRAJECTORY), deadline=Deadline.after(20, lambda: float(next(ticks))), progress=said.append
    )
    assert "trying: without its recording" in said


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (("a.c:12: GGML_ASSERT(n > 4) failed", "SIGABRT"), ("hm\na.c:12: GGML_ASSERT(n > 1) failed", "SIGABRT"), True),
        (("a.c:12: GGML_ASSERT(n > 4) failed", "SIGABRT"), ("", "SIGSEGV"), False),
        (("GGML_ASSERT(a) failed", "SIGABRT"), ("GGML_ASSERT(b) failed", "SIGABRT"), False),
    ],
)
def test_crashes_are_told_apart_by_their_last_words(a: tuple[str, str], b: tuple[str, str], *, same: bool) -> None:
    """How it died and the assertion count; steps, cases and numbers do not."""
    errors = (Error(f"x: computing steps[{k}] of f/a={k}@1: it died", *said) for k, said in enumerate((a, b)))
    first, second = (signature_of(Result("ops/x@1", "ggml", Verdict.CRASH, error=e)) for e in errors)
    assert (first == second) is same


@pytest.mark.parametrize("type_", [F32, F16, I32, Q8_0, Q4_K], ids=str)
@given(rows=st.integers(1, 3), level=st.integers(0, len(simplify.SIMPLE)), at=st.integers(0, 255), other=st.booleans())
def test_values_are_as_plain_as_the_first_that_changes_none(
    type_: GGMLType, rows: int, level: int, at: int, other: bool
) -> None:
    """Whichever row differs, all of them count; so does a type that rounds what it is given."""
    t = new_tensor(type_, 256, rows)
    x = np.random.default_rng(at).standard_normal((rows, 256))
    made = (simplify.SIMPLE[level](x) if level < len(simplify.SIMPLE) else x * 100).astype(
        "i4" if type_ is I32 else "f4"
    )
    if other:
        made[-1, at] = 3
    stored = made if type_.dtype is None or type_ is I32 else made.astype(type_.dtype)
    data = np.ascontiguousarray(from_float(type_, made) if type_.is_quantized else stored).reshape(-1).view(np.uint8)
    values = simplify._loaded(t, data)
    kept = [np.array_equal(simplify._stored(t, make(values)), data) for make in simplify.SIMPLE]
    assert simplify.plainness(t, data) == next((k for k, same in enumerate(kept) if same), len(kept))
