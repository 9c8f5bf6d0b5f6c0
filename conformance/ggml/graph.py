"""`struct ggml_cgraph`: nodes in execution order over leaves, and what makes one legal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .errors import GraphError
from .ops.names import OPS
from .ops.op import check_node
from .tensor import MAX_NAME, MAX_OP_PARAMS, MAX_SRC, Tensor, contiguous_nb, nbytes


class Graph:
    """Nodes in the order they run. Leaves are whatever the nodes read that no node makes."""

    __slots__ = ("__weakref__", "nodes")

    def __init__(self, nodes: Iterable[Tensor]) -> None:
        self.nodes: list[Tensor] = list(nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.nodes)

    def leafs(self) -> list[Tensor]:
        """Tensors that nodes read (through `src` or `view_src`) and none makes, in order of first use."""
        made = set(self.nodes)
        return [t for t in self.tensors() if t not in made]

    def tensors(self) -> list[Tensor]:
        """Every tensor of the graph, each after its `src` and `view_src`; nodes stay in execution order."""
        seen: dict[Tensor, None] = {}
        made = set(self.nodes)
        for node in self.nodes:
            for s in (*node.src, node.view_src):
                if s is not None and s not in made:
                    _visit(s, seen, made)
            seen[node] = None
        return list(seen)

    def validate(self) -> None:
        """Check that ggml could have built and would run this graph.

        Raises:
            GraphError: names the first tensor that breaks a rule, and the rule.
        """
        made = set(self.nodes)
        if len(made) != len(self.nodes):
            raise GraphError("a node stands twice in the graph")
        done: set[Tensor] = set()
        for t in self.tensors():
            for s in (*t.src, t.view_src):
                if s in made and s not in done and s is not t:  # ggml_cast makes a node its own src
                    raise GraphError(f"{t}: uses {s} before it is computed")
            check_tensor(t)
            check_node(t)
            done.add(t)


def _visit(t: Tensor, seen: dict[Tensor, None], made: set[Tensor]) -> None:
    """Depth first without recursion, so that a long or cyclic chain from a stranger's file is harmless.

    Nodes (`made`) are left to their place in execution order.
    """
    open_: set[Tensor] = set()
    stack: list[tuple[Tensor, bool]] = [(t, False)]
    while stack:
        cur, ready = stack.pop()
        if cur in seen:
            continue
        if ready:
            open_.discard(cur)
            seen[cur] = None
            continue
        if cur in open_:
            raise GraphError(f"{cur}: is its own src through a cycle")
        open_.add(cur)
        stack.append((cur, True))
        below = (s for s in (*cur.src, cur.view_src) if s is not None and s is not cur)
        stack.extend((s, False) for s in below if s not in seen and s not in made)


def check_tensor(t: Tensor) -> None:
    """The rules that hold for every tensor alone, whatever its op.

    Raises:
        GraphError: says which rule.
    """
    if t.op not in OPS:
        raise GraphError(f"{t.name or 'tensor'}: op {t.op!r} is none of ggml's")
    if any(n < 0 for n in t.ne):
        raise GraphError(f"{t}: ne must be non-negative")
    if any(n < 0 for n in t.nb):
        raise GraphError(f"{t}: nb must be non-negative strides in bytes")
    if t.ne[0] % t.type.blck_size:
        raise GraphError(f"{t}: ne[0] must be a multiple of {t.type}'s block of {t.type.blck_size}")
    if t.type.blck_size > 1 and t.nb[0] != t.type.type_size:
        raise GraphError(f"{t}: nb[0] of a block type must be its type size {t.type.type_size}, {t.nb[0]} found")
    if len(t.op_params) != MAX_OP_PARAMS or any(not -(2**31) <= p < 2**31 for p in t.op_params):
        raise GraphError(f"{t}: op_params must be {MAX_OP_PARAMS} int32")
    if len(t.src) > MAX_SRC:
        raise GraphError(f"{t}: {len(t.src)} src, ggml has room for {MAX_SRC}")
    if len(t.name.encode("utf-8", "surrogatepass")) >= MAX_NAME:
        raise GraphError(f"{t}: name is longer than {MAX_NAME - 1} bytes")
    if t.view_src is None:
        if t.view_offs:
            raise GraphError(f"{t}: view_offs {t.view_offs} without a view_src")
        if t.nb != contiguous_nb(t.type, t.ne):
            raise GraphError(f"{t}: owns its bytes, so its strides must be {contiguous_nb(t.type, t.ne)}, {t.nb} found")
    else:
        if t.view_src.view_src is not None:
            raise GraphError(f"{t}: view_src must be the tensor that owns the bytes, {t.view_src} is itself a view")
        if t.view_offs < 0 or t.view_offs + nbytes(t) > nbytes(t.view_src):
            raise GraphError(
                f"{t}: GGML_ASSERT(data_size + view_offs <= ggml_nbytes(view_src)): "
                f"bytes {t.view_offs} to {t.view_offs + nbytes(t)} of {nbytes(t.view_src)}"
            )
