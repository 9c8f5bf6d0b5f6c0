"""Running one case on one backend and keeping what came out; no judging here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.backend.interface import Backend, Witness
from conformance.case.case import Case, Step
from conformance.ggml.tensor import Bytes, Tensor, computes, pack


@dataclass(slots=True)
class StepValues:
    """What a step left behind, packed."""

    outputs: dict[Tensor, Bytes] = field(default_factory=dict)
    caches: dict[Tensor, Bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Execution:
    """A whole case's run."""

    steps: list[StepValues]
    witness: Witness
    seconds: float
    opaque: frozenset[Tensor] = frozenset()
    """Caches that the backend cannot show: no step's values have them."""


def computed_nodes(step: Step) -> list[Tensor]:
    """The nodes of a step that compute something: flagged COMPUTE, no view op, not empty."""
    return [n for n in step.graph if computes(n)]


def execute(backend: Backend, case: Case, *, every_node: Sequence[int] = ()) -> Execution:
    """Run all steps of `case` freely: each step starts from the caches that the one before left.

    Args:
        backend: runs it.
        case: validated.
        every_node: indices of steps whose computed nodes are all wanted, not the outputs alone.

    Raises:
        BackendError: the backend failed, died or did not answer.
    """
    caches = case.caches()
    wanted = frozenset(every_node)
    steps: list[StepValues] = []
    start = time.perf_counter()
    with backend.open(case) as session:
        opaque = session.opaque().intersection(caches)
        caches = [t for t in caches if t not in opaque]
        for k, step in enumerate(case.steps):
            outputs = computed_nodes(step) if k in wanted else step.outputs
            for data in step.inputs.values():
                data.flags.writeable = False  # a backend that writes there would change what others are given
            found = session.compute(step.graph, step.inputs, outputs)
            steps.append(StepValues(dict(found), {t: pack(session.read(t), t, 0) for t in caches}))
        witness = session.witness()
    if any(p.buffer for p in case.placement.values()) and len(backend.buffer_types()) == 1:
        witness.notes.append("one buffer type, so nothing is placed elsewhere")
    return Execution(steps, witness, time.perf_counter() - start, opaque)
