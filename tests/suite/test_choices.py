"""A trajectory whose router is at a near-tie: a flip there is no fault, a wrong choice is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from stand_in import StandIn

from conformance.backend.interface import Session, Witness
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.types import F32
from conformance.judge.verdict import Result, Verdict
from conformance.run.runner import Runner

SPEC = Spec("stand-in")
GAP = 1e-8
"""Between the scores of experts 1 and 2: less than float32 rounds."""


def _bytes(a: object) -> Bytes:
    return np.ascontiguousarray(a, np.float32).reshape(-1).view(np.uint8)


def _case(gap: float) -> Case:
    """Scores of 4 experts, the best 2 taken, their values looked up and added."""
    b = Builder()
    w, table = b.new_tensor_2d(F32, 4, 4), b.new_tensor_2d(F32, 8, 4)
    w.name, table.name = "router", "experts"
    x = b.new_tensor_2d(F32, 4, 1)
    scores = b.mul_mat(w, x)
    order = b.argsort(scores, 1)
    order.name = "ffn_moe_argsort-0"
    top = b.view_2d(order, 2, 1, order.nb[1], 0)
    out = b.scale(b.get_rows(table, b.reshape_1d(b.cont(top), 2)), 2.0)
    graph = b.build_forward_expand(out)
    rows = np.array([[1, 0, 0, 0], [0.5 + gap, 0, 0, 0], [0.5, 0, 0, 0], [-1, 0, 0, 0]])
    held = {w: _bytes(rows), table: _bytes(np.arange(32) ** 2)}
    case = Case("test/choice@0", held, [Step(graph, {x: _bytes([1, 0, 0, 0])}, (out,))])
    case.validate()
    return case


class Rounding(StandIn):
    """The reference, whose scores are off before it goes on."""

    def __init__(self, by: float, *, blunt: bool = False) -> None:
        super().__init__("cpu")
        self._by, self._blunt = by, blunt

    def open(self, case: Case) -> Session:
        """The reference's session on a graph that is given other scores."""
        return Nudged(self.inner.open(case), self._by, blunt=self._blunt)


class Nudged(Session):
    """Scores of expert 2 are raised, and what follows is computed from those."""

    def __init__(self, inner: Session, by: float, *, blunt: bool) -> None:
        self._inner, self._by, self._blunt = inner, by, blunt

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """As the reference."""
        self._inner.write(tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """As the reference."""
        return self._inner.read(tensor)

    def witness(self) -> Witness:
        """As the reference."""
        return self._inner.witness()

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the reference would with another router; a blunt one gives the right scores and takes others."""
        router = next((t for t in graph.tensors() if t.name == "router"), None)
        if router is None:
            return self._inner.compute(graph, inputs, outputs)
        right = dict(self._inner.compute(graph, inputs, outputs))
        was = self._inner.read(router)
        rows = was.view(np.float32).reshape(4, 4).copy()
        rows[2, 0] += np.float32(self._by)
        self._inner.write(router, _bytes(rows))
        found = dict(self._inner.compute(graph, inputs, outputs))
        self._inner.write(router, was)
        return {t: right[t] if self._blunt and t.op == "MUL_MAT" else data for t, data in found.items()}


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner."""
    runner = Runner()
    yield runner
    runner.close()


def _run(runner: Runner, backend: StandIn, case: Case) -> Result:
    runner._backends[SPEC] = backend
    (result,) = runner.run(SPEC, [case])
    return result


def test_a_flip_at_a_near_tie_is_no_fault(runner: Runner) -> None:
    """Scores off by a rounding take the other expert: PASS, and the detail names both, the token and the margin."""
    result = _run(runner, Rounding(1.2e-7), _case(6e-8))
    assert result.verdict is Verdict.PASS, result.detail
    assert "expert 2 for 1 at ffn_moe_argsort-0, token 0: margin 6e-08, scores differ by 1.2e-07" in result.detail
    assert "what follows is not judged" in result.detail


@pytest.mark.parametrize("made", [lambda: Rounding(0.2), lambda: Rounding(0.2, blunt=True)], ids=["scores", "choice"])
def test_a_wrong_choice_is_a_fault(runner: Runner, made: Callable[[], Rounding]) -> None:
    """Scores that are wrong, or a choice that they do not explain, fail; the router is named."""
    result = _run(runner, made(), _case(0.1))
    assert result.verdict is Verdict.FAIL
    assert result.where is not None
    assert result.where.op in {"MUL_MAT", "ARGSORT"}


def test_a_view_may_be_an_output(runner: Runner) -> None:
    """Where a step also gives a view of its result, the near-tie is found all the same."""
    case = _case(6e-8)
    (step,) = case.steps
    out = step.outputs[-1]
    view = Builder().view_1d(out, 8, 0)
    steps = [Step(Graph([*step.graph, view]), step.inputs, (*step.outputs, view))]
    result = _run(runner, Rounding(1.2e-7), replace(case, steps=steps))
    assert result.verdict is Verdict.PASS, result.detail
    assert "margin" in result.detail
