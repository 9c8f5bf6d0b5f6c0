"""One method per constructor of `ggml.h`: same name, argument order (less the context), result and assertions.

A method encodes `op_params` and asks the op's rule (`rules.py`) for type, shape, strides and view.
"""

from __future__ import annotations

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import BF16, F16, F32

from .build_graph import build_forward_expand
from .build_layout import LayoutOps
from .build_math import MathOps
from .build_matrix import MatrixOps
from .build_model import ModelOps
from .build_recurrent import RecurrentOps
from .rows import SORT_ORDER
from .rules_base import failed

__all__ = ["Builder", "build_forward_expand"]


class Builder(LayoutOps, MathOps, ModelOps, RecurrentOps, MatrixOps):
    """All constructors. It holds nothing: tensors know their sources, and a graph is made from its outputs.

    Every method raises `GraphError` with the assertion where ggml would abort.
    """

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """I32 [k, …]: indices of each row's `k` largest, largest first; a view of an ARGSORT."""
        if a.ne[0] < k:
            raise failed("a->ne[0] >= k", (a,), k=k)
        t = self.argsort(a, SORT_ORDER.DESC)
        return self.view_4d(t, k, *t.ne[1:], *t.nb[1:], 0)

    def conv_1d(self, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
        """`b` [n, channels, batch] convolved with `a` [k, channels, filters] to [n', filters, batch]."""
        windows = self.im2col(a, b, s0, 0, p0, 0, d0, 0, False, F32 if a.type is BF16 else F16)
        n_in, n, batch, _ = windows.ne
        rows = self.reshape_2d(windows, n_in, batch * n)
        product = self.mul_mat(rows, self.reshape_2d(a, a.ne[0] * a.ne[1], a.ne[2]))
        return self.reshape_3d(product, n, a.ne[2], batch)

    def conv_1d_ph(self, a: Tensor, b: Tensor, s: int, d: int) -> Tensor:
        """`conv_1d` padded by half the kernel."""
        return self.conv_1d(a, b, s, a.ne[0] // 2, d)

    def conv_1d_dw(self, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
        """`b` [n, channels] convolved channel by channel with `a` [k, 1, channels]."""
        apart = self.reshape_4d(b, b.ne[0], 1, b.ne[1], b.ne[2])
        windows = self.im2col(a, apart, s0, 0, p0, 0, d0, 0, False, F32 if a.type is BF16 else F16)
        product = self.mul_mat(windows, a)
        return self.reshape_3d(product, product.ne[0], product.ne[2], 1)

    def conv_1d_dw_ph(self, a: Tensor, b: Tensor, s0: int, d0: int) -> Tensor:
        """`conv_1d_dw` padded by half the kernel."""
        return self.conv_1d_dw(a, b, s0, a.ne[0] // 2, d0)

    def build_forward_expand(self, *outputs: Tensor) -> Graph:
        """The graph that computes `outputs`; see `build_graph.build_forward_expand`."""
        return build_forward_expand(*outputs)
