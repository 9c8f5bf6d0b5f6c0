"""Values of leaves in test-backend-ops graphs, by the ops that read them (`suite/exchange`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.case.case import writes_in_place
from conformance.case.streams import Stream
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import written
from conformance.ggml.tensor import Bytes, Tensor, contiguous_nb, nbytes, strided
from conformance.suite.data import Fill, encode, values
from conformance.suite.exchange.build import RULES
from conformance.suite.exchange.line import line_of


def fill(case_id: str, graph: Graph, leaves: Sequence[Tensor]) -> tuple[dict[Tensor, Bytes], dict[Tensor, Bytes]]:
    """Return persistent tensors (written or quantised leaves) and inputs, with their bytes.

    A leaf has its type's usual values. If the first node that reads it needs others, they are placed where it reads,
    also through a view.
    """
    changed = {n.view_src for n in graph if writes_in_place(n)} | {t for n in graph for t in written(n)}
    persistent: dict[Tensor, Bytes] = {}
    inputs: dict[Tensor, Bytes] = {}
    for i, t in enumerate(leaves):
        own = persistent if t in changed or t.type.is_quantized else inputs
        own[t] = _bytes(case_id, f"{i} {t.name}", t, graph)
    return persistent, inputs


def _bytes(case_id: str, name: str, leaf: Tensor, graph: Graph) -> Bytes:
    found = _rule(leaf, graph)
    if found is not None and found[0] is leaf:
        return encode(leaf.type, Stream(case_id, name), leaf.ne, found[1])
    data = encode(leaf.type, Stream(case_id, name), leaf.ne, values(leaf.type))
    if found is not None:
        seen, rule = found
        packed = encode(seen.type, Stream(case_id, f"{name}, seen"), seen.ne, rule)
        whole = Tensor(seen.type, seen.ne, contiguous_nb(seen.type, seen.ne))
        data = data if data.flags.writeable else data.copy()
        strided(data, seen)[...] = strided(packed, whole)
    assert data.nbytes == nbytes(leaf)
    return np.ascontiguousarray(data)


def _rule(leaf: Tensor, graph: Graph) -> tuple[Tensor, Fill] | None:
    """Return the first operand in the bytes of `leaf` that has a rule, and the rule's fill."""
    for node in graph:
        for i, s in enumerate(node.src):
            if s is not None and s.root is leaf and (node.op, i) in RULES:
                return s, RULES[node.op, i](line_of(node))
    return None
