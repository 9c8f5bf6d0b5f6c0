"""`ggml?guard=on`: bytes written outside a tensor are found, and a library that behaves passes unchanged."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_wheel

from backends.ggml import GgmlBackend
from conformance.case.case import Case, Step
from conformance.ggml import types
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.layout import CTensor
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, nbytes
from conformance.suite import decoder as models

pytestmark = needs_wheel

INPUT = -1
"""The input instead of a node; the offset is then one into it."""


@pytest.fixture(scope="module")
def guarded() -> Iterator[GgmlBackend]:
    """The wheel's CPU, guarded."""
    made = GgmlBackend(guard="on")
    yield made
    made.close()


def small(n: int = 33) -> Case:
    """Two nodes over one input: 4 n bytes each, which leaves room behind them that alignment alone would hide."""
    g = Builder()
    x = g.new_tensor_1d(types.F32, n)
    x.name = "x"
    first = g.scale(x, 2.0)
    first.name = "first"
    second = g.scale(first, 2.0)
    second.name = "second"
    graph = Graph([first, second])
    for node in graph:
        node.flags |= FLAG_COMPUTE
    data = np.ones(n, np.float32).view(np.uint8)
    return Case("test/guard@0", {}, [Step(graph, {x: data}, (second,))])


class Vandal:
    """A library that after each graph writes one byte at an offset from a tensor's start."""

    def __init__(self, backend: GgmlBackend, offset: int, which: int) -> None:
        self._compute = backend._ggml.backend_graph_compute
        self.offset, self.which = offset, which
        self.session: Any = None

    def __call__(self, backend: int, graph: int) -> int:
        """`ggml_backend_graph_compute`, and then the byte."""
        status: int = self._compute(backend, graph)
        plan = self.session._plan
        inside = self.which == INPUT
        t = next(iter(plan.inputs.at)) if inside else plan.graph.nodes[self.which]
        data = CTensor.from_address(plan.at[t]).data
        place = data + (self.offset if self.offset < 0 or inside else nbytes(t) + self.offset)
        ctypes.c_uint8.from_address(place).value ^= 0xFF
        return status


def attacked(backend: GgmlBackend, monkeypatch: pytest.MonkeyPatch, offset: int, which: int) -> None:
    """Run the small case while one byte is written at `offset` from the end (or, negative, the start) of a node."""
    case = small()
    with backend.open(case) as session, monkeypatch.context() as patch:
        vandal = Vandal(backend, offset, which)
        vandal.session = session
        patch.setattr(backend._ggml, "backend_graph_compute", vandal)
        step = case.steps[0]
        session.compute(step.graph, step.inputs, step.outputs)


@pytest.mark.parametrize("offset", [0, 1, 27, 61])
def test_one_byte_behind_a_node_is_found(guarded: GgmlBackend, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """From the first byte behind a tensor on, in what alignment leaves too; the message names the node."""
    with pytest.raises(BackendError, match=rf"1 bytes behind the end of SCALE first .* the first {offset} behind it"):
        attacked(guarded, monkeypatch, offset, 0)


def test_one_byte_before_a_node_is_found(guarded: GgmlBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes just before a tensor are its own doing, and named so."""
    with pytest.raises(BackendError, match=r"1 bytes before SCALE second .* the first 1 before it"):
        attacked(guarded, monkeypatch, -1, 1)


def test_a_written_input_is_found(guarded: GgmlBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that writes into its own input, though no node does, is at fault."""
    with pytest.raises(BackendError, match="an input was written on CPU: leaf x"):
        attacked(guarded, monkeypatch, 0, INPUT)


def test_a_trajectory_is_what_it_is_without_guards(guarded: GgmlBackend) -> None:
    """Weights, caches, inputs and nodes apart from each other: every output and cache to the bit as before."""
    case = models.make("kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=at254.d3.back2.d2@7")
    plain = GgmlBackend()
    with guarded.open(case) as a, plain.open(case) as b:
        for s in case.steps:
            x, y = (session.compute(s.graph, s.inputs, s.outputs) for session in (a, b))
            assert all(np.array_equal(x[t], y[t]) for t in s.outputs)
            assert all(np.array_equal(a.read(t), b.read(t)) for t in case.caches())
    plain.close()


@settings(deadline=None, max_examples=20)
@given(n=st.integers(1, 200))
def test_any_size_passes_untouched(guarded: GgmlBackend, n: int) -> None:
    """Whatever a tensor's size, a library that behaves damages nothing."""
    case = small(n)
    step = case.steps[0]
    with guarded.open(case) as session:
        found = session.compute(step.graph, step.inputs, step.outputs)
    assert found[step.outputs[0]].view(np.float32).tolist() == [4.0] * n


def test_guards_are_for_graphs() -> None:
    """A scheduler allocates nodes itself, so guards around them cannot be had there."""
    with pytest.raises(UsageError, match="guard=on and ref=on need mode=graph"):
        GgmlBackend(mode="sched", guard="on")
