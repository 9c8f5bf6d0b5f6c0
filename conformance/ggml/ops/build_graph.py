"""From outputs to a graph in execution order: `ggml_build_forward_expand`."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_PARAM, Tensor


class Expansion:
    """A cgraph that grows: nodes and leaves in the order ggml's depth-first walk meets them."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self._visited: set[Tensor] = set()

    def expand(self, tensor: Tensor, *, compute: bool = True) -> None:
        """Add `tensor` and all it needs, sources first, left to right: `ggml_build_forward_expand`.

        Nodes get FLAG_COMPUTE, and unnamed tensors the names `node_%d` and `leaf_%d`, as in ggml. With `compute` off
        (the branches that `ggml_build_forward_select` does not take) flags stay as they are.
        """
        # ggml recurses; a decoder is deeper than Python's stack
        stack = [self._enter(tensor, compute)]
        while stack:
            cur, srcs, new = stack[-1]
            src = next(srcs, None)
            if src is not None:
                stack.append(self._enter(src, compute))
                continue
            stack.pop()
            if new:
                self._append(cur)

    def select(self, tensors: tuple[Tensor, ...], idx: int) -> Tensor:
        """Add all of `tensors`, and mark only the `idx`-th for computing: `ggml_build_forward_select`."""
        if not 0 <= idx < len(tensors):
            raise GraphError(f"GGML_ASSERT(idx >= 0 && idx < n_tensors) failed: idx={idx}, n_tensors={len(tensors)}")
        for i, t in enumerate(tensors):
            self.expand(t, compute=i == idx)
        return tensors[idx]

    def graph(self) -> Graph:
        """The nodes so far."""
        return Graph(self.nodes)

    def _enter(self, t: Tensor, compute: bool) -> tuple[Tensor, Iterator[Tensor], bool]:
        """What `ggml_visit_parents_graph` does on the way down: the tensor, its sources to visit, whether it is new."""
        if compute and t.op != "NONE":
            t.flags |= FLAG_COMPUTE
        if t not in self._visited:
            self._visited.add(t)
            return t, iter([s for s in t.src if s is not None]), True
        if compute:
            return t, (s for s in t.src if s is not None and not s.flags & FLAG_COMPUTE), False
        return t, iter(()), False

    def _append(self, t: Tensor) -> None:
        if t.op == "NONE" and not t.flags & FLAG_PARAM:
            t.name = t.name or f"leaf_{len(self.leafs)}"
            self.leafs.append(t)
        else:
            t.name = t.name or f"node_{len(self.nodes)}"
            self.nodes.append(t)


def build_forward_expand(*outputs: Tensor) -> Graph:
    """The graph that computes `outputs`, as one `ggml_build_forward_expand` after the other builds it."""
    e = Expansion()
    for t in outputs:
        e.expand(t)
    return e.graph()
