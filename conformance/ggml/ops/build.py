"""`Builder`: the constructors of all ops, and graphs made from their results.

A constructor has the name, argument order (less the context), result and assertions that it has in `ggml.h`.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_PARAM, Tensor
from conformance.ggml.types import BF16, F16, F32

from .attention import Attention
from .elementwise import Elementwise
from .matmul import MatMul
from .media.conv import Convolutions
from .media.images import Images
from .media.signals import Signals
from .op import failed
from .recurrent import Recurrent
from .rope import Rope
from .rows import SORT_ORDER, RowOps
from .training.gradients import Gradients
from .training.steps import Steps
from .views import Leaves, Views
from .windows import Windows


class Expansion:
    """A growing cgraph: nodes and leaves in the order of ggml's depth-first walk."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self._visited: set[Tensor] = set()

    def expand(self, tensor: Tensor, *, compute: bool = True) -> None:
        """Add `tensor` and all it needs, sources first, left to right: `ggml_build_forward_expand`.

        Nodes get FLAG_COMPUTE, and unnamed tensors the names `node_%d` and `leaf_%d`, as in ggml. Without `compute`
        (branches that `ggml_build_forward_select` does not take) flags stay as they are.
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
        """Add all of `tensors`, the `idx`-th for computing: `ggml_build_forward_select`."""
        if not 0 <= idx < len(tensors):
            raise GraphError(f"GGML_ASSERT(idx >= 0 && idx < n_tensors) failed: idx={idx}, n_tensors={len(tensors)}")
        for i, t in enumerate(tensors):
            self.expand(t, compute=i == idx)
        return tensors[idx]

    def graph(self) -> Graph:
        """Return a graph of the nodes so far."""
        return Graph(self.nodes)

    def _enter(self, t: Tensor, compute: bool) -> tuple[Tensor, Iterator[Tensor], bool]:
        """Visit as `ggml_visit_parents_graph`: return `t`, its sources to visit, True if it is new."""
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
    """Return the graph that `ggml_build_forward_expand` of each of `outputs` builds."""
    e = Expansion()
    for t in outputs:
        e.expand(t)
    return e.graph()


class Builder(
    Leaves,
    Views,
    Elementwise,
    RowOps,
    MatMul,
    Attention,
    Rope,
    Recurrent,
    Windows,
    Convolutions,
    Images,
    Signals,
    Gradients,
    Steps,
):
    """All constructors, without state: a graph is made from its outputs.

    Every method raises `GraphError` with the assertion where ggml would abort.
    """

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """Return I32 [k, …]: indices of each row's `k` largest, in order; a view of an ARGSORT."""
        if a.ne[0] < k:
            raise failed("a->ne[0] >= k", (a,), k=k)
        t = self.argsort(a, SORT_ORDER.DESC)
        return self.view_4d(t, k, *t.ne[1:], *t.nb[1:], 0)

    def conv_1d(self, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
        """Convolve `b` [n, channels, batch] with `a` [k, channels, filters]: [n', filters, batch]."""
        windows = self.im2col(a, b, s0, 0, p0, 0, d0, 0, False, F32 if a.type is BF16 else F16)
        n_in, n, batch, _ = windows.ne
        rows = self.reshape_2d(windows, n_in, batch * n)
        product = self.mul_mat(rows, self.reshape_2d(a, a.ne[0] * a.ne[1], a.ne[2]))
        return self.reshape_3d(product, n, a.ne[2], batch)

    def conv_1d_ph(self, a: Tensor, b: Tensor, s: int, d: int) -> Tensor:
        """Apply `conv_1d` padded by half the kernel."""
        return self.conv_1d(a, b, s, a.ne[0] // 2, d)

    def conv_1d_dw(self, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
        """Convolve `b` [n, channels] channel by channel with `a` [k, 1, channels]."""
        planes = self.reshape_4d(b, b.ne[0], 1, b.ne[1], b.ne[2])
        windows = self.im2col(a, planes, s0, 0, p0, 0, d0, 0, False, F32 if a.type is BF16 else F16)
        product = self.mul_mat(windows, a)
        return self.reshape_3d(product, product.ne[0], product.ne[2], 1)

    def conv_1d_dw_ph(self, a: Tensor, b: Tensor, s0: int, d0: int) -> Tensor:
        """Apply `conv_1d_dw` padded by half the kernel."""
        return self.conv_1d_dw(a, b, s0, a.ne[0] // 2, d0)

    def build_forward_expand(self, *outputs: Tensor) -> Graph:
        """Return the graph that computes `outputs`; see the function of this name."""
        return build_forward_expand(*outputs)
