"""Merging: many one-step cases as one graph, found again by their own tensors."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.case.codec import dump, load
from conformance.ggml.errors import GraphError
from conformance.suite.batch import merge
from conformance.suite.ops import build, ids

CASES = ids("smoke")[::4]


def test_a_batch_is_a_legal_case() -> None:
    """All persistent tensors, inputs, nodes and outputs of the cases, in their order, the same objects and bytes."""
    cases = [build(i) for i in CASES]
    batch = merge(cases)
    batch.validate()
    assert batch.id == f"batch/{len(cases)} cases"
    assert batch.params["cases"] == list(CASES)
    (step,) = batch.steps
    assert step.graph.nodes == [n for c in cases for n in c.steps[0].graph]
    assert step.outputs == tuple(t for c in cases for t in c.steps[0].outputs)
    assert [id(d) for d in batch.persistent.values()] == [id(d) for c in cases for d in c.persistent.values()]
    assert [id(d) for d in step.inputs.values()] == [id(d) for c in cases for d in c.steps[0].inputs.values()]
    assert set(batch.caches()) == {t for c in cases for t in c.caches()}


def test_a_batch_computes_what_its_cases_do() -> None:
    """On the reference, each output and cache of the batch equals the lone case's, byte for byte."""
    cpu = registry.create(Spec.parse("cpu"))
    batch = merge([build(i) for i in CASES])
    with cpu.open(batch) as session:
        found = session.compute(batch.steps[0].graph, batch.steps[0].inputs, batch.steps[0].outputs)
        together = [*found.values(), *(session.read(t) for t in batch.caches())]
    outputs, caches = [], []
    for case in map(build, CASES):
        with cpu.open(case) as session:
            alone = session.compute(case.steps[0].graph, case.steps[0].inputs, case.steps[0].outputs)
            outputs += [alone[t] for t in case.steps[0].outputs]
            caches += [session.read(t) for t in case.caches()]
    assert len(together) == len(outputs) + len(caches)
    assert all(np.array_equal(a, b) for a, b in zip(together, [*outputs, *caches], strict=True))


def test_expected_values_come_along() -> None:
    """Recorded values of the cases are the batch's, under the same tensors."""
    cases = [build(i) for i in CASES[:3]]
    for case in cases:
        out = case.steps[0].outputs[0]
        case.steps[0].expected[out] = np.zeros(4, np.uint8)
    assert merge(cases).steps[0].expected == {t: d for c in cases for t, d in c.steps[0].expected.items()}


def test_a_batch_travels() -> None:
    """A batch survives the form that cases have between processes."""
    batch = merge([build(i) for i in CASES])
    again = load(*dump(batch))
    assert [str(n) for n in again.steps[0].graph] == [str(n) for n in batch.steps[0].graph]


def test_what_cannot_be_merged_is_refused() -> None:
    """No case, a case of two steps, the same case twice: one sentence each."""
    case = build(CASES[0])
    with pytest.raises(GraphError, match="at least one case"):
        merge([])
    with pytest.raises(GraphError, match="shares tensors"):
        merge([case, case])
    two = Case("x/y@1", {}, [case.steps[0], case.steps[0]])
    with pytest.raises(GraphError, match="2 steps"):
        merge([two])
