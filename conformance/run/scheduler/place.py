"""Where weights and caches live: on the first device that takes *every* use of theirs.

llama.cpp asks about one made-up activation when it loads a weight, and a graph may later hold a shape that no device
of that buffer takes. Here the graphs are known, so every use is asked about.
"""

from __future__ import annotations

from collections.abc import Sequence

from conformance.case.case import Case, writes_in_place
from conformance.ggml.tensor import VIEW_OPS, Tensor

from .assign import Home, Supports


def place(case: Case, n: int, supports: Supports) -> Home:
    """Homes of the persistent tensors of `case`.

    A weight goes to the first device that takes every node that reads it; a cache to the first that takes every node
    that reads or writes it, or else to the first that takes every writer. What no device takes whole goes to the last,
    from where it is copied as ggml copies weights.

    Args:
        case: all its steps.
        n: number of devices.
        supports: whether a device takes a node.
    """
    uses: dict[Tensor, list[Tensor]] = {t: [] for t in case.persistent}
    for step in case.steps:
        for node in step.graph:
            if node.op not in VIEW_OPS:  # one that is not computed is placed all the same
                for root in {s.root for s in (*node.src, node.view_src) if s is not None} & uses.keys():
                    uses[root].append(node)
    caches = frozenset(case.caches())

    def first(nodes: Sequence[Tensor]) -> int | None:
        return next((b for b in range(n) if all(supports(b, node) for node in nodes)), None)

    of: dict[Tensor, int] = {}
    for t, nodes in uses.items():
        b = first(nodes)
        if b is None and t in caches:
            b = first([node for node in nodes if writes_in_place(node) and node.root is t])
        of[t] = n - 1 if b is None else b
    return Home(of, frozenset(t for t in uses if t not in caches))
