"""One method per constructor of `ggml.h`: same name, argument order (less the context), result and assertions.

A method encodes `op_params` and asks the op's rule (`rules.py`) for type, shape, strides and view.
"""

from __future__ import annotations

from .build_graph import build_forward_expand
from .build_layout import LayoutOps
from .build_math import MathOps
from .build_model import ModelOps
from .graph import Graph
from .rules_base import failed
from .rules_model import SORT_ORDER
from .tensor import Tensor

__all__ = ["Builder", "build_forward_expand"]


class Builder(LayoutOps, MathOps, ModelOps):
    """All constructors. It holds nothing: tensors know their sources, and a graph is made from its outputs.

    Every method raises `GraphError` with the assertion where ggml would abort.
    """

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """I32 [k, …]: indices of each row's `k` largest, largest first; a view of an ARGSORT."""
        if a.ne[0] < k:
            raise failed("a->ne[0] >= k", (a,), k=k)
        t = self.argsort(a, SORT_ORDER["DESC"])
        return self.view_4d(t, k, *t.ne[1:], *t.nb[1:], 0)

    def build_forward_expand(self, *outputs: Tensor) -> Graph:
        """The graph that computes `outputs`; see `build_graph.build_forward_expand`."""
        return build_forward_expand(*outputs)
