"""Estimates what computing a case takes, from its shapes, types and parameters, before anything is computed.

A case file of a few hundred bytes can ask for more than a machine has: REPEAT makes any size, and some kernels loop as
often as a parameter says. The figures are those of the reference `cpu`: a step's nodes stay until the step ends, a
kernel works on float64 copies of its operands, and outputs and caches of every step stay until they are compared, which
happens in float64 too. Where they differ, all nodes of a step are compared, each alone.
They are upper bounds within a small factor, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.case.case import Case, Step
from conformance.ggml.tensor import Tensor, computes, nbytes, nelements, packed_nbytes
from conformance.process.memory import default_limit

RATE = 1e9
"""Operations in a second: one pass over one element of an array, as NumPy makes it on one core."""
PRODUCTS = 10
"""Multiplications of a matrix product that take as long as one operation."""
LOOP = 10_000
"""Operations that one turn of a loop in Python takes whatever the size of its arrays."""
PASSES = 8
"""Passes over its operands and its result that a kernel makes."""
_AT_ONCE = 1 << 24
"""Elements of weights that a matrix product converts at a time."""
_F64 = 8
_COMPARED = 10
"""Float64 values that comparing two tensors holds for each of their elements."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the reference needs for a case."""

    bytes: int
    """Held at a time, at most."""
    operations: int
    """Of the step that takes the most."""


def of(cases: Sequence[Case]) -> Cost:
    """What computing `cases` together takes, those of one step in one graph.

    Of a graph of many, buffers, outputs and caches of all are held at once; kernels run and values are compared one
    after the other.
    """
    single = [(c, c.steps[0]) for c in cases if len(c.steps) == 1]
    costs = [_of(c) for c in cases if len(c.steps) != 1] + ([_of_graph(single)] if single else [])
    return Cost(max((c.bytes for c in costs), default=0), max((c.operations for c in costs), default=0))


def refusal(cases: Sequence[Case], *, memory_limit: int | None, time_limit: float) -> str:
    """Why `cases` are not computed together, in words; empty where they may be.

    `memory_limit` is in bytes (`default_limit` if None), `time_limit` in seconds for a step.
    """
    need = of(cases)
    limit = memory_limit or default_limit()
    if limit is not None and need.bytes > limit:
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


def _of(case: Case) -> Cost:
    held = sum(map(nbytes, case.persistent))
    peak, kept, operations = held, 0, 0
    for step in case.steps:
        kept += _kept(case, step)
        peak = max(peak, held + 3 * kept + max(_buffers(case, step) + _kernel(step), _comparing(step)))
        operations = max(operations, sum(map(_operations, _nodes(step))))
    return Cost(peak, operations)


def _of_graph(single: Sequence[tuple[Case, Step]]) -> Cost:
    """Cases of one step each, merged into one graph."""
    held = sum(sum(map(nbytes, c.persistent)) + 3 * _kept(c, s) for c, s in single)
    computing = sum(_buffers(c, s) for c, s in single) + max(_kernel(s) for _, s in single)
    comparing = max(_comparing(s) for _, s in single)
    operations = sum(_operations(n) for _, s in single for n in _nodes(s))
    return Cost(held + max(computing, comparing), operations)


def _nodes(step: Step) -> list[Tensor]:
    return [n for n in step.graph if computes(n)]


def _kept(case: Case, step: Step) -> int:
    """Outputs and caches of a step, once: they are held exact, in the backend's arithmetic, and as its own."""
    return sum(map(packed_nbytes, case.caches())) + sum(map(packed_nbytes, step.outputs))


def _kernel(step: Step) -> int:
    return max(map(_beside, _nodes(step)), default=0)


def _comparing(step: Step) -> int:
    nodes = _nodes(step)
    return 2 * sum(map(packed_nbytes, nodes)) + _F64 * _COMPARED * max(map(nelements, nodes), default=0)


def _buffers(case: Case, step: Step) -> int:
    written = {n.root for n in step.graph if computes(n)}
    roots = {n.root for n in step.graph}.union(s.root for n in step.graph for s in n.src if s is not None)
    return sum(nbytes(r) for r in roots if r not in case.persistent and (r in written or r not in step.inputs))


def _read(node: Tensor) -> int:
    """Elements of its sources."""
    return sum(nelements(s) for s in node.src if s is not None and s is not node)


def _beside(node: Tensor) -> int:
    """Bytes that the kernel of `node` holds beside buffers."""
    if node.op in {"MUL_MAT", "MUL_MAT_ID"}:
        weights, x = _src(node), _src(node, 1)
        converted = min(nelements(weights), _AT_ONCE + weights.ne[0])
        return _F64 * (converted * 3 // 2 + 2 * nelements(x) + 2 * nelements(node))
    if node.op == "SET_ROWS":  # into a cache, of which it looks at no more than the rows it stores
        return 4 * _F64 * nelements(_src(node))
    more = _MORE[node.op](node) if node.op in _MORE else 0
    return _F64 * (_read(node) + 3 * nelements(node) + more)


def _operations(node: Tensor) -> int:
    """Operations of the kernel of `node`."""
    own = _OPERATIONS[node.op](node) if node.op in _OPERATIONS else 0
    return own + PASSES * (_read(node) + nelements(node))


def _src(node: Tensor, i: int = 0) -> Tensor:
    s = node.src[i]
    assert s is not None
    return s


def _product(node: Tensor) -> int:
    weights = _src(node)
    slices = max(1, nelements(weights) // _AT_ONCE) * (weights.ne[2] if node.op == "MUL_MAT_ID" else 1)
    return 2 * nelements(node) * weights.ne[0] // PRODUCTS + LOOP * slices


def _scores(node: Tensor) -> int:
    """Elements of Q K^T."""
    q, k = _src(node), _src(node, 1)
    return q.ne[1] * q.ne[2] * q.ne[3] * k.ne[1]


def _attention(node: Tensor) -> int:
    q, v = _src(node), _src(node, 2)
    passes = 4 * PASSES + 2 * (q.ne[0] + v.ne[0])
    return _scores(node) * passes + LOOP * v.ne[1]


def _indexed(node: Tensor) -> int:
    """Elements of the indexer's products."""
    q, k = _src(node), _src(node, 1)
    return q.ne[1] * q.ne[2] * q.ne[3] * k.ne[2]


def _padded(ne: int, before: int, windows: int, stride: int, reach: int) -> int:
    return ne + before + max(before, (windows - 1) * stride + reach)


def _pooled(node: Tensor) -> int:
    """Elements of the padded operand."""
    a, p = _src(node), node.params
    wide = _padded(a.ne[0], p.p0, node.ne[0], p.s0, p.k0)
    return wide * _padded(a.ne[1], p.p1, node.ne[1], p.s1, p.k1) * a.ne[2] * a.ne[3]


def _windows(node: Tensor) -> int:
    """Elements of the padded operand of IM2COL."""
    a, b, p = _src(node), _src(node, 1), node.params
    wide = _padded(b.ne[0], p.p0, node.ne[1], p.s0, abs(a.ne[0] * p.d0) + 1)
    if not p.is_2D:
        return wide * b.ne[1] * b.ne[2]
    return wide * _padded(b.ne[1], p.p1, node.ne[2], p.s1, abs(a.ne[1] * p.d1) + 1) * b.ne[2] * b.ne[3]


def _kernel_size(node: Tensor) -> int:
    a = _src(node)
    return a.ne[0] * (a.ne[1] if node.params.is_2D else 1)


def _turns(tokens: int, state: int) -> int:
    """A loop over tokens, each of which changes a state."""
    return tokens * (20 * LOOP + PASSES * state)


_MORE: dict[str, Callable[[Tensor], int]] = {
    "FLASH_ATTN_EXT": lambda n: 8 * _scores(n),
    "SSM_SCAN": lambda n: _src(n, 1).ne[2] * _scan_state(n) + 2 * _src(n, 1).ne[1] * nelements(_src(n, 4)),
    "GATED_DELTA_NET": lambda n: _src(n, 2).ne[2] * nelements(_src(n, 5)) + 3 * nelements(_src(n, 2)),
    "RWKV_WKV6": lambda n: 4 * nelements(_src(n, 5)),
    "RWKV_WKV7": lambda n: 6 * nelements(_src(n, 6)),
    "GATED_LINEAR_ATTN": lambda n: 4 * nelements(_src(n, 4)),
    "LIGHTNING_INDEXER": lambda n: 3 * _indexed(n),
    "POOL_2D": lambda n: 2 * _pooled(n),
    "IM2COL": lambda n: 2 * _windows(n),
    "OUT_PROD": lambda n: nelements(_src(n)) * max(1, n.ne[2] * n.ne[3] // max(1, _src(n).ne[2] * _src(n).ne[3])),
    "DIAG": lambda n: n.ne[0] * n.ne[0],
    "SSM_CONV": lambda n: nelements(n) * _src(n, 1).ne[0],
    "GET_ROWS": nelements,
    "CONCAT": lambda _: 0,
    "ARGSORT": nelements,
    "TOP_K": lambda n: nelements(_src(n)),
    "UNARY": lambda n: 3 * nelements(n),
    "GLU": lambda n: 3 * nelements(n),
    "ROPE": lambda n: 2 * nelements(n),
    "ROPE_BACK": lambda n: 2 * nelements(n),
    "DSV4_HC_POST": lambda n: 2 * nelements(n),
    "DSV4_HC_PRE": lambda n: 2 * nelements(_src(n)),
}
"""Op -> elements in float64 beside its operands and three times its result."""


def _scan_state(node: Tensor) -> int:
    s = _src(node)
    return s.ne[0] * s.ne[1] * s.ne[2] * _src(node, 1).ne[3]


def _sorted(node: Tensor) -> int:
    n = nelements(_src(node))
    return n * max(1, n.bit_length())


_OPERATIONS: dict[str, Callable[[Tensor], int]] = {
    "MUL_MAT": _product,
    "MUL_MAT_ID": _product,
    "OUT_PROD": lambda n: 2 * nelements(n) * _src(n).ne[1] // PRODUCTS,
    "FLASH_ATTN_EXT": _attention,
    "SSM_SCAN": lambda n: _turns(_src(n, 1).ne[2], _scan_state(n)),
    "GATED_DELTA_NET": lambda n: _turns(_src(n, 2).ne[2], nelements(_src(n, 5))),
    "RWKV_WKV6": lambda n: _turns(_src(n).ne[2], nelements(_src(n, 5))),
    "RWKV_WKV7": lambda n: _turns(_src(n).ne[2], nelements(_src(n, 6))),
    "GATED_LINEAR_ATTN": lambda n: _turns(_src(n).ne[2], nelements(_src(n, 4))),
    "LIGHTNING_INDEXER": lambda n: _indexed(n) * (PASSES + 2 * _src(n).ne[0] // PRODUCTS),
    "SOLVE_TRI": lambda n: nelements(n) * _src(n).ne[0] + LOOP * n.ne[1],
    "POOL_2D": lambda n: n.params.k0 * n.params.k1 * (LOOP + 2 * nelements(n)) + PASSES * _pooled(n),
    "IM2COL": lambda n: _kernel_size(n) * LOOP + PASSES * _windows(n),
    "SSM_CONV": lambda n: 2 * nelements(n) * _src(n, 1).ne[0],
    "DSV4_HC_COMB": lambda n: n.params.n_iter * (10 * LOOP + PASSES * nelements(n)),
    "DSV4_HC_POST": lambda n: 2 * nelements(n) * _src(n, 1).ne[1],
    "GROUP_NORM": lambda n: LOOP * max(1, min(n.params.n_groups, n.ne[2])),
    "ROPE": lambda n: LOOP * n.ne[0],
    "ROPE_BACK": lambda n: LOOP * n.ne[0],
    "ARGSORT": _sorted,
    "TOP_K": _sorted,
}
"""Op -> operations beside some passes over operands and result."""
