"""The graph of the fused form: what it attends to are the rows of its logs, however many cells its views show."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import VIEW_OPS, Tensor, contiguous_nb

from .log import Logged

MARK = 15
"""The op_param, used by no op, that is 1 in a node whose cache is a log."""


def is_logged(node: Tensor) -> bool:
    """Whether `node` appends to a log or attends to one."""
    return node.op_params[MARK] == 1


def fused(graph: Graph, logs: Sequence[Logged], outputs: Sequence[Tensor]) -> tuple[Graph, tuple[Tensor, ...]]:
    """A copy of `graph` in which n_kv is 1 and says nothing, so that graphs of any n_kv are one; and its `outputs`.

    Persistent tensors and inputs stay the same objects, but for masks.
    """
    masks = {log.mask: _narrow(log.mask) for log in logs}
    attentions = {a.node for log in logs for a in log.attentions}
    marked = attentions | {w for log in logs for w in log.writers}
    made = {s: _one_cell(s) for a in attentions for s in a.src[1:3] if s is not None}
    for t in graph.tensors():
        if t in made:
            continue
        own = {**made, **masks} if t in attentions else made
        src = tuple(None if s is None else own.get(s, s) for s in t.src)
        root = None if t.view_src is None else made.get(t.view_src, t.view_src)
        offset = t.view_offs
        if t in marked and t.op == "CPY":  # it writes where the log ends, wherever its cells are
            src, offset = (src[0], _at_the_start(t)), 0
        if t in marked or root is not t.view_src or src != t.src:
            params = (*t.op_params[:MARK], 1) if t in marked else t.op_params
            made[t] = Tensor(t.type, t.ne, t.nb, t.op, params, src, root, offset, t.flags, t.name)
            if t in t.src:  # ggml_cast makes a node its own src
                made[t].src = tuple(made[t] if s is t else s for s in src)
    nodes = [made.get(n, n) for n in graph]
    wanted = tuple(made.get(t, t) for t in outputs)
    used = _reached([n for n in nodes if n.op not in VIEW_OPS], wanted)
    return Graph(n for n in nodes if n in used), wanted


def _narrow(mask: Tensor) -> Tensor:
    ne = (1, *mask.ne[1:])
    return Tensor(mask.type, ne, contiguous_nb(mask.type, ne), name=mask.name, flags=mask.flags)


def _one_cell(x: Tensor) -> Tensor:
    """The first cell of `x`, ne (head size, cells, heads, streams), straight from the cache."""
    offset = tuple(((x.view_offs >> shift) + 2**31) % 2**32 - 2**31 for shift in (0, 32))
    ne = (x.ne[0], 1, *x.ne[2:])
    return Tensor(x.type, ne, x.nb, "VIEW", (*offset, *(0,) * 14), (x.root,), x.root, x.view_offs, x.flags, x.name)


def _at_the_start(x: Tensor) -> Tensor:
    """As many rows as `x` has, but the first of its cache."""
    return Tensor(x.type, x.ne, x.nb, "VIEW", (0,) * 16, (x.root,), x.root, 0, x.flags, x.name)


def _reached(nodes: Collection[Tensor], outputs: Collection[Tensor]) -> set[Tensor]:
    seen: set[Tensor] = set()
    stack = [*nodes, *outputs]
    while stack:
        t = stack.pop()
        if t not in seen:
            seen.add(t)
            stack.extend(s for s in (*t.src, t.view_src) if s is not None)
    return seen
