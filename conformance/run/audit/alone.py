"""Nodes of a trajectory as cases by themselves, fed with what the reference has there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from conformance.backend.interface import Backend
from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor
from conformance.run.execute import execute
from conformance.suite.batch import isolated_nodes


def recorded(case: Case, reference: Backend) -> Case:
    """`case` with every node's value and every cache's as `reference` computes them.

    Raises:
        BackendError: the reference cannot run it.
    """
    values = execute(reference, case, every_node=range(len(case.steps))).steps
    steps = [
        Step(s.graph, s.inputs, s.outputs, {**v.outputs, **v.caches}) for s, v in zip(case.steps, values, strict=True)
    ]
    return replace(case, steps=steps)


def alone(case: Case, wanted: Collection[Tensor]) -> Iterator[tuple[Case, dict[Tensor, Tensor]]]:
    """Per step with any of the nodes `wanted` a case of these alone, without expected values; and copy -> original.

    Args:
        case: as `recorded` gives it.
        wanted: computed nodes.

    Raises:
        GraphError: a value that is needed was not recorded.
    """
    wanted = frozenset(wanted)
    for k, step in enumerate(case.steps):
        if wanted.isdisjoint(step.graph):
            continue
        made, original = isolated_nodes(case, k)
        copies = {copy: node for copy, node in original.items() if node in wanted}
        if copies:
            yield only(made, tuple(copies)), copies


def only(case: Case, outputs: tuple[Tensor, ...], nodes: Iterable[Tensor] | None = None) -> Case:
    """A case of one step cut down to what `outputs` need; of `nodes`, if they are not those of the case."""
    (step,) = case.steps
    needed = frozenset(Graph(outputs).tensors())
    graph = Graph(n for n in (step.graph if nodes is None else nodes) if n in needed)
    inputs = {t: data for t, data in step.inputs.items() if t in needed}
    held = {t: data for t, data in case.persistent.items() if t in needed}
    placement = {t: p for t, p in case.placement.items() if t in held}
    steps = [Step(graph, inputs, outputs)]
    return replace(case, persistent=held, steps=steps, placement=placement, provenance={})
