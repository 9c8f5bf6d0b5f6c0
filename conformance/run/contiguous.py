"""Rebuild a one-step case with each strided source copied by CONT first.

Many kernels of ggml's CPU abort on strides that its constructors accept, or ignore them. Its CONT and CPY read and
write any strides, so with such copies ggml is a second opinion for every op.
"""

from __future__ import annotations

from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS, set_param
from conformance.ggml.ops.views import part
from conformance.ggml.partial import like
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Tensor, computes, contiguous_nb

_STORES = {"CPY": 1, "SET_ROWS": 2, "OPT_STEP_ADAMW": 0, "OPT_STEP_SGD": 0}
"""Ops that always write into a source -> its index."""
_MOMENTS = {"OPT_STEP_ADAMW": (2, 3)}
"""Ops -> further sources that they write."""


def contiguous(case: Case) -> tuple[Case, dict[Tensor, Tensor]] | None:
    """Return the copy and output -> its output; None for several steps or no strided source."""
    if len(case.steps) > 1:
        return None
    (step,) = case.steps
    if all(_is_plain(s) for n in step.graph if computes(n) for s in n.src if s is not None):
        return None
    copying = _Copying()
    for node in step.graph:
        copying.add(node)
    outputs = {t: copying.seen.get(t, copying.replacements[t]) for t in step.outputs}
    graph = Graph(copying.nodes)
    return Case(
        case.id, case.persistent, [Step(graph, step.inputs, tuple(outputs.values()))], family=case.family
    ), outputs


def _is_plain(t: Tensor) -> bool:
    """Return True for strides of a contiguous tensor, also of one element as kernels require."""
    return t.nb == contiguous_nb(t.type, t.ne)


class _Copying:
    def __init__(self) -> None:
        self.b = Builder()
        self.nodes: list[Tensor] = []
        self.replacements: dict[Tensor, Tensor] = {}
        """Tensor -> its replacement as a source; leaves are not in it."""
        self.seen: dict[Tensor, Tensor] = {}
        """Node without a unique copy -> a copy of its value right after it ran."""

    def add(self, node: Tensor) -> None:
        """Append the nodes that compute `node`; a parameter is among the nodes and owns its bytes."""
        if node.op == "NONE" and node.view_src is None:
            self.nodes.append(node)
            return
        view_src = None if node.view_src is None else self._replacement(node.view_src)
        src = [None if s is None or s is node else self._replacement(s) for s in node.src]
        if node.op in VIEW_OPS or not computes(node):
            self.replacements[node] = self._append(like(node, src, view_src))
            return
        dense = [None if s is None else self._dense(s) for s in src]
        at = _STORES.get(node.op, 0)
        into = src[at] if writes_in_place(node) else None
        if into is None or node.op in _STORES or _is_plain(into):
            dense[at] = into or dense[at]
            copied = like(node, dense, view_src)
            if view_src is None:
                copied.nb = contiguous_nb(node.type, node.ne)
            self.replacements[node] = self._append(copied)
        elif node.op == "SET":
            ne, nb, offset = part(node)
            window = self._append(self.b.view_4d(into, *ne, *nb[1:], offset))
            self._append(self.b.cpy(dense[1], window))  # type: ignore[arg-type]  # SET has two sources
            self.replacements[node] = into
            self.seen[node] = self._append(self.b.cont(into))
        else:
            fresh = like(node, dense, None)
            fresh.nb, fresh.view_offs = contiguous_nb(node.type, node.ne), 0
            if DECLARATIONS[node.op].field("inplace"):
                set_param(fresh, "inplace", False)
            self.replacements[node] = self._append(self.b.cpy(self._append(fresh), into))
        for i in _MOMENTS.get(node.op, ()):
            copy, moment = dense[i], src[i]
            if copy is not None and moment is not None and copy is not moment:
                self._append(self.b.cpy(copy, moment))

    def _replacement(self, t: Tensor) -> Tensor:
        return self.replacements.get(t, t)

    def _dense(self, t: Tensor) -> Tensor:
        return t if _is_plain(t) else self._append(self.b.cont(t))

    def _append(self, node: Tensor) -> Tensor:
        node.flags |= FLAG_COMPUTE
        self.nodes.append(node)
        return node
