"""Many one-step cases as one: for a backend that pays per graph rather than per node."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.case.case import Case, Step
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor


def merge(cases: Sequence[Case]) -> Case:
    """One case whose only step runs the cases' graphs one after the other.

    Tensors and bytes are the cases' own, not copies: outputs, caches and expected values are found by the original
    tensors. Names may repeat, as they do in llama.cpp's graphs.

    Raises:
        GraphError: a case has another number of steps than one, or two cases share a tensor.
    """
    if not cases:
        raise GraphError("merge: at least one case expected, none given")
    persistent: dict[Tensor, Bytes] = {}
    inputs: dict[Tensor, Bytes] = {}
    expected: dict[Tensor, Bytes] = {}
    nodes: list[Tensor] = []
    outputs: list[Tensor] = []
    for case in cases:
        if len(case.steps) != 1:
            raise GraphError(f"merge: {case.id} has {len(case.steps)} steps, only cases of one step can be merged")
        step = case.steps[0]
        if not persistent.keys().isdisjoint(case.persistent) or not inputs.keys().isdisjoint(step.inputs):
            raise GraphError(f"merge: {case.id} shares tensors with a case before it")
        persistent |= case.persistent
        inputs |= step.inputs
        expected |= step.expected
        nodes += step.graph.nodes
        outputs += step.outputs
    step = Step(Graph(nodes), inputs, tuple(outputs), expected)
    return Case(
        f"batch/{len(cases)} cases", persistent, [step], family="batch", params={"cases": [c.id for c in cases]}
    )
