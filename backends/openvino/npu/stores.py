"""CPY into a window of a KV cache as SET_ROWS: where it lies becomes an input, and one model serves all steps."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor, is_contiguous, nbytes, nelements, new_tensor
from conformance.ggml.types import F32, I64

_B = Builder()


def indexed(graph: Graph, persistent: AbstractSet[Tensor]) -> tuple[Graph, dict[Tensor, Bytes]]:
    """`graph` with every CPY of rows, or of the transpose of rows, into a window of a cache replaced.

    Returns:
        The graph, and the new inputs: the rows that the windows show. The graph itself where there is no such CPY.
    """
    read = {s for n in graph for s in n.src if s is not n}
    nodes: list[Tensor] = []
    inputs: dict[Tensor, Bytes] = {}
    for node in graph:
        made = _stored(node, persistent) if node.op == "CPY" and node not in read else None
        if made is None:
            nodes.append(node)
            continue
        new, ids, rows = made
        inputs[ids] = rows.view(np.uint8)
        for t in new:
            t.flags |= node.flags
        nodes += new
    return (Graph(nodes), inputs) if inputs else (graph, {})


def _stored(node: Tensor, persistent: AbstractSet[Tensor]) -> tuple[list[Tensor], Tensor, NDArray[np.int64]] | None:
    a, b = node.src[:2]
    root = node.view_src
    if a is None or b is None or root is None or b.op != "VIEW":
        return None
    if root not in persistent or root.ne[2] * root.ne[3] != 1:
        return None
    return _rows(a, b, root) or _columns(a, b, root)


def _rows(a: Tensor, b: Tensor, root: Tensor) -> tuple[list[Tensor], Tensor, NDArray[np.int64]] | None:
    """Whole rows, one after the other."""
    width = root.ne[0]
    whole = not b.view_offs % root.nb[1] and not nelements(b) % width
    if not (whole and is_contiguous(b) and is_contiguous(a) and a.type is F32):
        return None
    n = nelements(b) // width
    ids = new_tensor(I64, n)
    rows = _B.reshape_2d(a, width, n)
    return [rows, _B.set_rows(root, rows, ids)], ids, np.arange(n, dtype=np.int64) + b.view_offs // root.nb[1]


def _columns(a: Tensor, b: Tensor, root: Tensor) -> tuple[list[Tensor], Tensor, NDArray[np.int64]] | None:
    """The transpose of rows, each of whose elements goes a whole cache apart."""
    x = a.src[0] if a.op == "TRANSPOSE" else None
    n, width = b.ne[:2]
    size = root.type.type_size
    fits = b.nb[0] == size and b.nb[1] * width == nbytes(root) and b.ne[2] * b.ne[3] == 1
    if x is None or not (fits and is_contiguous(x) and x.type is F32 and x.ne[:2] == (width, n)):
        return None
    ids = new_tensor(I64, n * width)
    rows, column = _B.reshape_2d(x, 1, n * width), _B.reshape_2d(root, 1, nelements(root))
    cells = np.arange(n, dtype=np.int64)[:, None] + b.view_offs // size
    at = cells + np.arange(width, dtype=np.int64) * (b.nb[1] // size)
    return [rows, column, _B.set_rows(column, rows, ids)], ids, at.reshape(-1)
