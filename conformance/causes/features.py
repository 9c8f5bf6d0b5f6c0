"""Node and step properties that the conditions of a rule can name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from enum import IntEnum

import numpy as np

from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml import quants
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.partial import below
from conformance.ggml.tensor import (
    VIEW_OPS,
    Tensor,
    computes,
    layout,
    nelements,
    strided,
)
from conformance.run.shrink.simplify import TURNED, as_floats, turns_all
from conformance.run.signature import NORMAL

Features = Mapping[str, str]
"""Property name -> value."""
OP, STEP, IN_PLACE, OUTPUT, RESULT, OTHER_NODE = "op", "step", "in place", "output", "result.type", "another node"
TYPE, LAYOUT, VIEW, OFFSET, BARE = "type", "layout", "view of", "offset view", "bare view"
HOLDS, BROADCAST, SHARED, TAIL = "holds", "broadcast", "shared buffer", "tail of a block"
OPERANDS = {
    TYPE: "is {}", LAYOUT: "{}", VIEW: "is {}", OFFSET: "is a view with an offset", BARE: "is a view without an op",
    HOLDS: "holds {}", BROADCAST: "is broadcast", SHARED: "lies in a buffer that an earlier node writes",
    TAIL: "has rows that end within a block",
}  # fmt: skip
"""Property of one operand, besides sizes -> text of a clause after the operand.

Their keys begin with `src[0].` or the like. A bare view has no op, as from `ggml_view_tensor`. A shared buffer is a
leaf that an earlier node also writes, other than the node that computes the operand."""
YES, CONTIGUOUS, STRIDED, FIRST, PART = "yes", "contiguous", "strided rows", "first", "part of "
REPEATING = frozenset({"ADD", "SUB", "MUL", "DIV"})
"""Ops that broadcast `src[1]`."""
STORES = {"SET_ROWS": 2, "CPY": 1}
"""Op that writes into a source, such as a cache -> index of the source."""
BLOCK = 32
"""Elements per block or tile; the remainder of a row is its tail."""
BEYOND = {"numbers beyond U8": 8, "numbers beyond U16": 16}
"""Property of a leaf of integers -> bits; each implies the ones before."""
AND = ", "
"""Separator between the special values in an operand's `holds` property."""
LOOKED_AT = 4096
"""Maximum elements of a leaf whose values are examined."""
F16_MAX = 65504.0
SUBNORMAL = "subnormal numbers"


def name_of(node: Tensor) -> str:
    """Return the op with its sub-op, such as `UNARY.GELU`."""
    declared = DECLARATIONS.get(node.op)
    sub = declared.field("op") if declared else None
    return f"{node.op}.{sub.of(node.op_params)}" if sub else node.op


def nodes_of(case: Case) -> Iterator[tuple[int, int, Tensor]]:
    """Yield step index, node index and node for each node of `case` that computes."""
    for k, step in enumerate(case.steps):
        for i, node in enumerate(step.graph):
            if computes(node) and node.op not in VIEW_OPS:
                yield k, i, node


def features(case: Case, k: int, node: Tensor) -> Features:
    """Return the properties of `node` in step `k`."""
    found = {OP: name_of(node), STEP: _step(case, k), IN_PLACE: "no" if node.view_src is None else YES}
    for i, s in enumerate(node.src):
        if s is not None:
            found |= {f"src[{i}]": "given"}
            stored = STORES.get(node.op) == i
            found |= {f"src[{i}].{key}": v for key, v in _operand(case, k, node, s) if not (stored and key == TYPE)}
    if node.op in REPEATING and (b := node.src[1]) is not None and b.ne != node.ne:
        found |= {f"src[1].{BROADCAST}": YES}
    if (output := _output(case.steps[k], node)) is not None:
        found |= {OUTPUT: output}
    if any(n is not node for _, _, n in nodes_of(case)):
        found |= {OTHER_NODE: YES}
    found |= {RESULT: node.type.name}
    declared = DECLARATIONS.get(node.op)
    if declared:
        found |= {f.name: word(f.of(node.op_params)) for f in declared.fields if f.name and f.name != OP}
    if TURNED in found:
        found |= {TURNED: "ne[0]" if turns_all(node) else "less than ne[0]"}
    return found


def _operand(case: Case, k: int, node: Tensor, s: Tensor) -> Iterator[tuple[str, str]]:
    yield from ((TYPE, s.type.name), (LAYOUT, layout(s)))
    if s.view_offs:
        yield OFFSET, YES
    if s.view_src is not None:
        yield VIEW, f"{PART if nelements(s) < nelements(s.root) else 'all of '}{root_of(case, k, s)}"
    if s.view_src is not None and s.op == "NONE":
        yield BARE, YES
    if _is_written_before(case.steps[k].graph, node, s):
        yield SHARED, YES
    if s.ne[0] % BLOCK:
        yield TAIL, YES
    if held := _held(case, k, s):
        yield HOLDS, held
    yield from ((f"ne[{d}]", str(n)) for d, n in enumerate(s.ne))
    yield "ne[2]*ne[3]", str(s.ne[2] * s.ne[3])


def _output(step: Step, node: Tensor) -> str | None:
    """Return how other tensors use the memory of the output `node`; None if none does."""
    if node in step.outputs and any(node in n.src for n in step.graph if n is not node):
        return "read by another node"
    return "shown by a view" if any(t.view_src is node and t.op in VIEW_OPS for t in step.outputs) else None


def _is_written_before(graph: Graph, node: Tensor, src: Tensor) -> bool:
    """Return True if an earlier node writes the leaf behind `src` and `src` is not its result."""
    if src.root in graph.nodes:
        return False
    shown: list[Tensor] = []
    at: Tensor | None = src
    while at is not None:
        shown.append(at)
        at = below(at)
    before = itertools.takewhile(lambda n: n is not node, graph)
    return any(n.root is src.root and writes_in_place(n) and n not in shown for n in before)


def root_of(case: Case, k: int, t: Tensor) -> str:
    """Return the kind of owner of `t`'s bytes in step `k`: node, input, weight or cache."""
    graph = case.steps[k].graph
    if t.root in graph.nodes:
        return "a node"
    if t.root not in case.persistent:
        return "an input"
    writers = [n.op for n in graph if n.root is t.root and writes_in_place(n)]
    return "a cache" if STORES.keys() & set(writers) else "a leaf written in place" if writers else "a weight"


def _held(case: Case, k: int, t: Tensor) -> str:
    """Return the special values in a small leaf; empty for large leaves, block types and nodes."""
    root = t.root
    data = case.steps[k].inputs.get(root, case.persistent.get(root))
    if data is None or nelements(root) > LOOKED_AT or root.type.blck_size > 1:
        return ""
    if not as_floats(root.type):
        x = strided(data, root).astype(np.int64)
        return AND.join(name for name, n in BEYOND.items() if ((x < 0) | (x >> n > 0)).any())
    x = np.abs(quants.to_float(root.type, strided(data, root)))
    found = {
        "NaN": np.isnan(x),
        "infinities": np.isinf(x),
        "numbers beyond F16": (x > F16_MAX) & np.isfinite(x),
        SUBNORMAL: (x > 0) & (x < NORMAL),
    }
    return AND.join(name for name, where in found.items() if where.any())


def word(value: object) -> str:
    """Format a parameter value for a condition."""
    if isinstance(value, IntEnum):
        return value.name
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _step(case: Case, k: int) -> str:
    """Return how the tensor sizes of step `k` relate to those of the previous step."""
    if k == 0:
        return FIRST
    now, before = ([n.ne for n in case.steps[j].graph] for j in (k, k - 1))
    return "same sizes as before" if now == before else "other sizes than before"
