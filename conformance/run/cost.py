"""Estimate the cost of a case from shapes, types and parameters, before anything runs.

A case file of a few hundred bytes can exceed any machine: REPEAT has results of any size, and some kernels loop as
often as a parameter says. The figures are those of the reference `cpu`: a step's nodes live until the step ends, a
kernel works on float64 copies of its operands, and outputs and caches of every step live until they are compared, in
float64 too, block by block. If they differ, all nodes of a step are compared, each alone. They are upper bounds within
a small factor, not measurements; additional costs of an op are in its declaration (`ggml.ops.op.Work`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.ops.op import DECLARATIONS, PASSES, operand
from conformance.ggml.tensor import Tensor, computes, nbytes, nelements, packed_nbytes
from conformance.judge.compare import BLOCK
from conformance.process.memory import default_limit

from .execute import computed_nodes

RATE = 1e9
"""Operations per second: one pass of NumPy over one element, on one core."""
_F64 = 8
_COMPARED = 10
"""Float64 values per element of a block while two tensors are compared."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Resources that the reference needs for a case."""

    bytes: int
    """Peak memory."""
    operations: int
    """Operations of the most expensive step."""


def estimate(cases: Sequence[Case]) -> Cost:
    """Estimate the cost of computing `cases` together, those of one step in one graph.

    In a shared graph, buffers, outputs and caches of all cases exist at the same time; kernels and comparisons run one
    by one.
    """
    single = [(c, c.steps[0]) for c in cases if len(c.steps) == 1]
    costs = [_alone(c) for c in cases if len(c.steps) != 1] + ([_together(single)] if single else [])
    return Cost(max((c.bytes for c in costs), default=0), max((c.operations for c in costs), default=0))


def total(case: Case, arithmetic: Arithmetic) -> int:
    """Return the operations of all steps, those of sums in F16 by terms."""
    nodes = [n for s in case.steps for n in computed_nodes(s)]
    rounded = [n for n in nodes if _sums_in_f16(n, arithmetic)]
    terms = sum(nelements(n) * DECLARATIONS[n.op].rounding.terms(n) for n in rounded)
    return sum(map(_operations, nodes)) + PASSES * terms


def _sums_in_f16(node: Tensor, arithmetic: Arithmetic) -> bool:
    by = DECLARATIONS[node.op].rounding.by
    if by == "flash_attn":
        return operand(node, 2).type.name in arithmetic.flash_attn_sum
    return by == "mul_mat" and arithmetic.sums != EXACT.sums


def refusal(cases: Sequence[Case], *, memory_limit: int | None, time_limit: float) -> str:
    """Return why `cases` together exceed the limits; empty if they do not.

    `memory_limit` is in bytes (`default_limit` if None), `time_limit` in seconds for a step.
    """
    need = estimate(cases)
    limit = memory_limit or default_limit()
    if need.bytes > limit:
        return f"computing it takes {_size(need.bytes)} in float64, {_size(limit)} are allowed (--memory-limit)"
    if need.operations > time_limit * RATE:
        took, allowed = f"{need.operations:.2g}", f"{time_limit * RATE:.2g}"
        return f"computing a step of it takes {took} operations, {allowed} are allowed (--time-limit {time_limit:g})"
    return ""


def _size(n: int) -> str:
    for unit, power in (("GB", 30), ("MB", 20)):
        if n >= 1 << power:
            return f"{n / (1 << power):,.3g} {unit}" if n < 1000 << power else f"{n >> power:,} {unit}"
    return f"{n:,} bytes"


def _alone(case: Case) -> Cost:
    held = sum(map(nbytes, case.persistent))
    peak, results, operations = held, 0, 0
    for step in case.steps:
        results += _results(case, step)
        peak = max(peak, held + 3 * results + max(_buffers(case, step) + _kernel(step), _comparing(step)))
        operations = max(operations, sum(map(_operations, computed_nodes(step))))
    return Cost(peak, operations)


def _together(single: Sequence[tuple[Case, Step]]) -> Cost:
    """Estimate one-step cases merged into one graph."""
    held = sum(sum(map(nbytes, c.persistent)) + 3 * _results(c, s) for c, s in single)
    computing = sum(_buffers(c, s) for c, s in single) + max(_kernel(s) for _, s in single)
    comparing = max(_comparing(s) for _, s in single)
    operations = sum(_operations(n) for _, s in single for n in computed_nodes(s))
    return Cost(held + max(computing, comparing), operations)


def _results(case: Case, step: Step) -> int:
    """Return the bytes of a step's outputs and caches, counted once; there are three versions."""
    return sum(map(packed_nbytes, case.caches())) + sum(map(packed_nbytes, step.outputs))


def _kernel(step: Step) -> int:
    return max(map(_scratch, computed_nodes(step)), default=0)


def _comparing(step: Step) -> int:
    nodes = computed_nodes(step)
    return 2 * sum(map(packed_nbytes, nodes)) + _F64 * _COMPARED * min(BLOCK, max(map(nelements, nodes), default=0))


def _buffers(case: Case, step: Step) -> int:
    written = {n.root for n in step.graph if computes(n)}
    roots = {n.root for n in step.graph}.union(s.root for n in step.graph for s in n.src if s is not None)
    return sum(nbytes(r) for r in roots if r not in case.persistent and (r in written or r not in step.inputs))


def _read(node: Tensor) -> int:
    """Return the number of elements of all sources."""
    return sum(nelements(s) for s in node.src if s is not None and s is not node)


def _scratch(node: Tensor) -> int:
    """Return the bytes that the kernel of `node` needs beside buffers."""
    work = DECLARATIONS[node.op].work
    if work.held is not None:
        return _F64 * work.held(node)
    return _F64 * (_read(node) + 3 * nelements(node) + work.elements(node))


def _operations(node: Tensor) -> int:
    own = DECLARATIONS[node.op].work.operations(node)
    return own + PASSES * (_read(node) + nelements(node))
