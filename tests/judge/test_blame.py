"""Blame: a fault in what a backend keeps is told from a kernel's, and a failure in foreign words names its node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from stand_in import Faulty, Tampered

from conformance.backend.interface import Backend, Session
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, Bytes, Tensor, new_tensor
from conformance.ggml.types import F16, F32, I64
from conformance.judge.evidence import Fault
from conformance.judge.text import STALE
from conformance.judge.verdict import Result, Verdict
from conformance.process import Deadline
from conformance.run import locate
from conformance.run.runner import Runner
from conformance.run.shrink import shrink
from conformance.run.shrink.cuts import Recorded
from conformance.run.signature import signature_of

SPEC = Spec("faulty")
B = Builder()
Tamper = Callable[["Kept", int, Graph, dict[Tensor, Bytes]], None]


class Kept(Faulty):
    """`fault` gets the outputs of the session's `k`-th compute, and the backend, as long as which `kept` lives."""

    def __init__(self, fault: Tamper) -> None:
        super().__init__(lambda *_: None)
        self.fault = fault
        self.kept: dict[Any, Bytes] = {}

    def open(self, case: Case) -> Session:
        """The reference's session with the fault."""
        steps = count()
        return Tampered(self.inner.open(case), lambda graph, found: self.fault(self, next(steps), graph, found))


class FaultyRunner(Runner):
    """Opens a backend with the fault as often as it is asked to."""

    fault: Tamper

    def open(self, spec: Spec, *, own: bool) -> Backend:
        """The backend with the fault."""
        return Kept(self.fault) if spec == SPEC else super().open(spec, own=own)


@pytest.fixture
def runner() -> Iterator[FaultyRunner]:
    """A runner that opens the faulty backend."""
    runner = FaultyRunner()
    yield runner
    runner.close()


def _floats(*shape: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).standard_normal(shape).astype("<f4").reshape(-1).view(np.uint8)


def _case(steps: int = 3) -> Case:
    """Rows into a cache, and the sum of all of it with an input, times 0.5, 1, 1.5, …: three nodes that compute."""
    cache = new_tensor(F16, 8, 4, name="cache_k_l0")
    case = Case("test/blame@0", {cache: np.zeros(64, np.uint8)}, [])
    for k in range(steps):
        x, new = (new_tensor(F32, 8, 4, name=name, flags=FLAG_INPUT) for name in ("x", "new"))
        ids = new_tensor(I64, 4, name="ids", flags=FLAG_INPUT)
        growing = Expansion()
        growing.expand(B.set_rows(cache, new, ids))
        out = B.scale(B.add(x, cache), 0.5 * (k + 1))
        growing.expand(out)
        inputs = {x: _floats(4, 8, seed=k), new: _floats(4, 8, seed=9 + k), ids: np.arange(4).view(np.uint8)}
        case.steps.append(Step(growing.graph(), inputs, (out,)))
    case.validate()
    return case


def _run(runner: FaultyRunner, fault: Tamper, case: Case | None = None) -> Result:
    runner.fault = fault
    (result,) = runner.run(SPEC, [case or _case()])
    return result


def _program_of_first(backend: Kept, _: int, graph: Graph, found: dict[Tensor, Bytes]) -> None:
    """A key without `op_params`: an equal graph with another factor gives what the first gave."""
    for t, data in found.items():
        if t.op == "SCALE":
            data[:] = backend.kept.setdefault((len(graph), t.ne), data.copy())


def _second_step(_: Kept, k: int, __: Graph, found: dict[Tensor, Bytes]) -> None:
    """A log that the session keeps: from the second step on the outputs are wrong."""
    for t, data in found.items():
        if k and t.op == "SCALE":
            data.view("<f4")[3] += 1


def _kernel(_: Kept, __: int, ___: Graph, found: dict[Tensor, Bytes]) -> None:
    for t, data in found.items():
        if t.op == "SCALE":
            data.view("<f4")[3] += 1


def _kernel_of_large_factors(_: Kept, __: int, ___: Graph, found: dict[Tensor, Bytes]) -> None:
    """A kernel that is wrong for what only the last step has."""
    for t, data in found.items():
        if t.op == "SCALE" and t.params.s > 1:
            data.view("<f4")[3] += 1


def _no_large_factors(_: Kept, __: int, graph: Graph, ___: dict[Tensor, Bytes]) -> None:
    """A kernel that refuses what only the last step has."""
    if any(n.op == "SCALE" and n.params.s > 1 for n in graph):
        raise BackendError("ScatterUpdate_192 takes no factor of 1.5")


def _together(_: Kept, __: int, graph: Graph, found: dict[Tensor, Bytes]) -> None:
    """A fusion of ADD and SCALE, which nobody sees where ADD is asked for too."""
    adds = [n for n in graph if n.op == "ADD"]
    if adds and not any(n in found for n in adds):
        next(iter(found.values())).view("<f4")[3] += 1


@pytest.mark.parametrize("fault", [_program_of_first, _second_step])
def test_what_is_kept_is_told_from_a_kernel(runner: FaultyRunner, fault: Tamper) -> None:
    """Right by itself on a backend opened anew, from the same caches, and wrong after other steps: something kept."""
    result = _run(runner, fault)
    assert result.verdict is Verdict.FAIL
    assert result.detail.startswith("step 1: SCALE")
    assert result.detail.endswith(STALE[Fault.STALE])
    assert result.where is not None
    assert (result.where.fault, result.where.step) == (Fault.STALE, 1)
    assert str(signature_of(result)) == "FAIL, stale"


@pytest.mark.parametrize(("fault", "step"), [(_kernel, 0), (_kernel_of_large_factors, 2)])
def test_a_kernels_fault_is_no_kept_one(runner: FaultyRunner, fault: Tamper, step: int) -> None:
    """A node that is wrong by itself too is named, in whichever step it is, and nothing else is blamed."""
    result = _run(runner, fault)
    assert result.where is not None
    assert (result.where.fault, result.where.step) == (Fault.NODE, step)
    assert result.where.op == "SCALE"
    assert result.detail.endswith("everything before it agrees")


def test_nodes_that_are_wrong_together_are_no_kept_fault(runner: FaultyRunner) -> None:
    """Each node right alone, the step by itself wrong: fusion."""
    result = _run(runner, _together)
    assert result.where is not None
    assert result.where.fault is Fault.GRAPH
    assert result.detail.endswith(f"each node alone is right; {locate.TOGETHER}")


def _shows_outputs_alone(_: Kept, __: int, ___: Graph, found: dict[Tensor, Bytes]) -> None:
    """SCALE is wrong, and who asks for ADD gets an error."""
    for t, data in found.items():
        if t.op == "ADD":
            raise BackendError("no port for a node in between")
        if t.op == "SCALE":
            data.view("<f4")[3] += 1


def test_an_output_is_wrong_though_its_first_wrong_node_is_unknown(runner: FaultyRunner) -> None:
    """Where the backend fails when each node is asked for, the wrong output is named as such; shrunk, its node is."""
    result = _run(runner, _shows_outputs_alone)
    assert result.where is not None
    assert (result.where.fault, result.where.op) == (Fault.OUTPUT, "SCALE")
    assert "the first wrong node was not found: " in result.detail
    assert str(signature_of(result)) == "FAIL, output"
    small = shrink(runner, SPEC, _case(), deadline=Deadline.after(60))
    assert [n.op for s in small.case.steps for n in s.graph] == ["SCALE"]
    assert str(signature_of(small.result)) == "FAIL, SCALE, node"


def test_a_candidate_with_bytes_of_no_tensor_is_passed_over(
    runner: FaultyRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that leaves an input which nobody reads is no smaller case, and no end of the search."""

    def stray(recorded: Recorded, _: Result) -> Iterator[Case]:
        step = recorded.case.steps[0]
        unread = new_tensor(F32, 1, name="unread")
        inputs = {**step.inputs, unread: _floats(1, seed=1)}
        yield replace(recorded.case, steps=[Step(step.graph, inputs, step.outputs)])

    monkeypatch.setattr("conformance.run.shrink.PASSES", (("stray", stray),))
    runner.fault = _kernel
    small = shrink(runner, SPEC, _case(), deadline=Deadline.after(60))
    assert small.finished
    assert len(small.case.steps) == 3


def test_what_another_case_left_is_said(runner: FaultyRunner) -> None:
    """A case that is right on a backend opened anew is wrong by what cases before it left."""
    fine, other = _case(1), _case(2)
    other.steps = other.steps[1:]
    assert _run(runner, _program_of_first, fine).verdict is Verdict.PASS
    result = _run(runner, _program_of_first, other)
    assert result.verdict is Verdict.FAIL
    assert result.detail.endswith(STALE[Fault.EARLIER])


def _raises(op: str, *, from_step: int = 0, behind: str = "") -> Tamper:
    def fault(_: Kept, k: int, graph: Graph, __: dict[Tensor, Bytes]) -> None:
        ops = [n.op for n in graph]
        if k >= from_step and op in ops and (not behind or behind in ops):
            raise BackendError("shape.compatible(): ScatterUpdate_192")

    return fault


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (_raises("SET_ROWS"), "step 0: SET_ROWS cache_k_l0 (view) f16[8, 4, 1, 1] of f32[8, 4, 1, 1], i64[4, 1, 1, 1]"),
        (_raises("SCALE", behind="SET_ROWS"), "step 0: SCALE node_2 f32[8, 4, 1, 1] of f32[8, 4, 1, 1] fails behind"),
        (_raises("SCALE", from_step=1), f"step 1: {STALE[Fault.STALE]}"),
    ],
)
def test_foreign_words_are_followed_by_the_node(runner: FaultyRunner, fault: Tamper, where: str) -> None:
    """Behind what was raised stand the step and the node, with op, name and shapes, or that the step alone runs."""
    result = _run(runner, fault)
    assert result.verdict is Verdict.OVERCLAIM
    assert f"ScatterUpdate_192; where: {where}" in result.detail


def test_a_failure_keeps_its_signature_while_it_shrinks(runner: FaultyRunner) -> None:
    """Where it failed is no part of what must stay the same: with fewer steps and nodes it is elsewhere."""
    last = _case(3)
    last.steps = last.steps[2:]
    long, short = (_run(runner, _no_large_factors, c) for c in (_case(3), last))
    assert long.where is not None
    assert short.where is not None
    assert (long.where.step, short.where.step) == (2, 0)
    assert long.detail != short.detail
    assert signature_of(long) == signature_of(short)


def test_a_node_that_fails_otherwise_alone_is_not_named(runner: FaultyRunner) -> None:
    """SET_ROWS alone raises other words than the graph: the graph's own node is named, as one that fails behind it."""

    def fault(_: Kept, __: int, graph: Graph, ___: dict[Tensor, Bytes]) -> None:
        ops = {n.op for n in graph}
        if any(n.op == "SCALE" and n.src[0] in graph.nodes for n in graph):
            raise BackendError("no memory for the graph")
        if "SET_ROWS" in ops and "SCALE" in ops:  # each by itself, in one graph
            raise BackendError("no kernel for rows alone")

    result = _run(runner, fault)
    assert result.where is not None
    assert (result.where.op, result.where.fault) == ("SCALE", Fault.GRAPH)


def _loses(backend: Kept, _: int, graph: Graph, found: dict[Tensor, Bytes]) -> None:
    """What others read is no output: its memory stays as it was."""
    del backend
    for t, data in found.items():
        if any(t in n.src for n in graph):
            data.view("<f4")[:] = np.nan


def _loses_and_errs(backend: Kept, k: int, graph: Graph, found: dict[Tensor, Bytes]) -> None:
    """And a kernel is wrong, behind three nodes that are right."""
    for t, data in found.items():
        if t.op == "SQRT":
            data.view("<f4")[3] += 1
    _loses(backend, k, graph, found)


def _chain(*outputs: int) -> Case:
    """Four nodes of which each reads the one before."""
    x, y = (new_tensor(F32, 8, 4, name=name, flags=FLAG_INPUT) for name in ("x", "y"))
    nodes = [B.add(x, y)]
    nodes += [B.sqr(nodes[-1])]
    nodes += [B.scale(nodes[-1], 0.5)]
    nodes += [B.sqrt(nodes[-1])]
    for i, n in enumerate(nodes):
        n.name, n.flags = f"node_{i}", n.flags | FLAG_COMPUTE
    step = Step(Graph(nodes), {x: _floats(4, 8, seed=1), y: _floats(4, 8, seed=2)}, tuple(nodes[i] for i in outputs))
    case = Case("test/chain@0", {}, [step])
    case.validate()
    return case


def test_a_backend_that_loses_what_others_read_is_not_blamed_for_the_first_node(runner: FaultyRunner) -> None:
    """Asked for each node it loses all but the last: the one that is wrong without that is named."""
    assert _run(runner, _loses, _chain(3)).verdict is Verdict.PASS
    lost = _run(runner, _loses, _chain(1, 3))
    assert lost.where is not None
    assert (lost.where.fault, lost.where.node) == (Fault.NODE, 1)
    assert "right if no node reads it" in lost.detail
    runner.restart()
    kernel = _run(runner, _loses_and_errs, _chain(3))
    assert kernel.where is not None
    assert (kernel.where.fault, kernel.where.node) == (Fault.NODE, 3)


@pytest.mark.parametrize("op", ["ADD", "SQR", "SCALE", "SQRT"])
def test_the_first_wrong_node_is_found_though_all_before_the_last_are_lost(runner: FaultyRunner, op: str) -> None:
    """Graphs that end earlier tell which node is wrong, wherever it is: what follows reads what it gave."""

    def fault(backend: Kept, k: int, graph: Graph, found: dict[Tensor, Bytes]) -> None:
        ops = [n.op for n in graph]
        for t, data in found.items():
            if op in ops and graph.nodes.index(t) >= ops.index(op):
                data.view("<f4")[3] += 1
        _loses(backend, k, graph, found)

    result = _run(runner, fault, _chain(3))
    assert result.where is not None
    assert (result.where.fault, result.where.op) == (Fault.NODE, op)
    assert "nan" not in result.detail


def test_an_index_that_is_lost_hides_no_wrong_node(runner: FaultyRunner) -> None:
    """What memory held before is no index of a row: no node can be judged from it, and graphs that end earlier tell."""
    x, y = (new_tensor(F32, *ne, name=name, flags=FLAG_INPUT) for name, ne in (("x", (8, 4)), ("y", (5, 8, 4))))
    order = B.argsort(x, SORT_ORDER.ASC)
    rows = B.get_rows(y, order)
    for i, n in enumerate((order, rows)):
        n.name, n.flags = f"node_{i}", n.flags | FLAG_COMPUTE
    step = Step(Graph([order, rows]), {x: _floats(4, 8, seed=1), y: _floats(4, 8, 5, seed=2)}, (rows,))
    case = Case("test/rows@0", {}, [step])
    case.validate()

    def fault(_: Kept, __: int, graph: Graph, found: dict[Tensor, Bytes]) -> None:
        for t, data in found.items():
            if t.op == "GET_ROWS":
                data.view("<f4")[3] += 1
            if any(t in n.src for n in graph):
                data[:] = 255

    result = _run(runner, fault, case)
    assert result.where is not None
    assert (result.where.fault, result.where.op) == (Fault.NODE, "GET_ROWS")
    assert "not found" not in result.detail
