"""`struct ggml_cgraph`: nodes in execution order, leaves, and the rules of a valid graph."""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable, Iterable, Iterator
from itertools import accumulate

from .errors import GraphError
from .ops.op import check_node
from .tensor import MAX_NAME, MAX_OP_PARAMS, MAX_SRC, Tensor, contiguous_nb, nbytes
from .types import OPS


class Graph:
    """Nodes in execution order; leaves are tensors that nodes read and no node computes."""

    __slots__ = ("__weakref__", "nodes")

    def __init__(self, nodes: Iterable[Tensor]) -> None:
        self.nodes: list[Tensor] = list(nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.nodes)

    def leafs(self) -> list[Tensor]:
        """Return the tensors that nodes read and no node computes, in order of first use."""
        nodes = set(self.nodes)
        return [t for t in self.tensors() if t not in nodes]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, each after its `src` and `view_src`; nodes stay in execution order."""
        order: dict[Tensor, None] = {}
        nodes = set(self.nodes)
        for node in self.nodes:
            for s in (*node.src, node.view_src):
                if s is not None and s not in nodes:
                    _visit(s, order, nodes)
            order[node] = None
        return list(order)

    def key(self, persistent: Container[Tensor]) -> Hashable:
        """Return a key, equal for graphs that differ in names only and share `persistent` tensors."""
        place: dict[Tensor | None, int] = {t: i for i, t in enumerate(self.tensors())}
        place[None] = -1
        parts = [
            (t.op, t.op_params, t.type.id, t.ne, t.nb, t.view_offs, t.flags, place[t.view_src],
             tuple([place[s] for s in t.src]), t if t in persistent else None)
            for t in place if t is not None
        ]  # fmt: skip
        return tuple(parts), tuple([place[n] for n in self.nodes])

    def validate(self) -> None:
        """Raise GraphError, naming the first bad tensor, if ggml could not run this graph."""
        nodes = set(self.nodes)
        if len(nodes) != len(self.nodes):
            raise GraphError("a node occurs twice in the graph")
        earlier: set[Tensor] = set()
        for t in self.tensors():
            for s in (*t.src, t.view_src):
                if s in nodes and s not in earlier and s is not t:  # ggml_cast makes a node its own src
                    raise GraphError(f"{t}: uses {s} before it is computed")
            check_tensor(t)
            check_node(t)
            earlier.add(t)


def _visit(t: Tensor, order: dict[Tensor, None], nodes: set[Tensor]) -> None:
    """Add `t` and its sources to `order`, depth first, except `nodes`.

    It does not recurse, so a long or cyclic chain in an untrusted file is harmless.
    """
    open_: set[Tensor] = set()
    stack: list[tuple[Tensor, bool]] = [(t, False)]
    while stack:
        cur, ready = stack.pop()
        if cur in order:
            continue
        if ready:
            open_.discard(cur)
            order[cur] = None
            continue
        if cur in open_:
            raise GraphError(f"{cur}: is its own src through a cycle")
        open_.add(cur)
        stack.append((cur, True))
        below = (s for s in (*cur.src, cur.view_src) if s is not None and s is not cur)
        stack.extend((s, False) for s in below if s not in order and s not in nodes)


def check_tensor(t: Tensor) -> None:
    """Check the rules that every tensor must meet whatever its op; GraphError names the rule."""
    if t.op not in OPS:
        raise GraphError(f"{t.name or 'tensor'}: ggml has no op {t.op!r}")
    if any(n < 0 for n in t.ne):
        raise GraphError(f"{t}: ne must be non-negative")
    if any(n < 0 for n in t.nb):
        raise GraphError(f"{t}: nb must be non-negative strides in bytes")
    if t.ne[0] % t.type.blck_size:
        raise GraphError(f"{t}: ne[0] must be a multiple of {t.type}'s block of {t.type.blck_size}")
    if t.type.blck_size > 1 and t.nb[0] != t.type.type_size:
        raise GraphError(f"{t}: nb[0] of a block type must be its type size {t.type.type_size}, {t.nb[0]} found")
    _check_limits(t)
    _check_bytes(t)


def _check_limits(t: Tensor) -> None:
    if len(t.op_params) != MAX_OP_PARAMS or any(not -(2**31) <= p < 2**31 for p in t.op_params):
        raise GraphError(f"{t}: op_params must be {MAX_OP_PARAMS} int32")
    if len(t.src) > MAX_SRC:
        raise GraphError(f"{t}: {len(t.src)} src, ggml has room for {MAX_SRC}")
    if len(t.name.encode("utf-8", "surrogatepass")) >= MAX_NAME:
        raise GraphError(f"{t}: name is longer than {MAX_NAME - 1} bytes")


def _is_dense(t: Tensor) -> bool:
    """Return True if `t` is contiguous, or a node's result without gaps, in any order."""
    if t.nb == contiguous_nb(t.type, t.ne):
        return True
    if t.op == "NONE" or t.type.blck_size > 1:
        return False
    order = sorted(range(len(t.ne)), key=lambda i: (t.nb[i], t.ne[i]))
    sizes = accumulate((t.ne[i] for i in order[:-1]), operator.mul, initial=t.type.type_size)
    return all(t.nb[i] == size or t.ne[i] == 1 for i, size in zip(order, sizes, strict=True))


def _check_bytes(t: Tensor) -> None:
    if t.view_src is None:
        if t.view_offs:
            raise GraphError(f"{t}: view_offs {t.view_offs} without a view_src")
        if not _is_dense(t):
            raise GraphError(f"{t}: owns its bytes, so its strides must be {contiguous_nb(t.type, t.ne)}, {t.nb} found")
        return
    if t.view_src.view_src is not None:
        raise GraphError(f"{t}: view_src must be the tensor that owns the bytes, {t.view_src} is itself a view")
    if t.view_offs < 0 or t.view_offs + nbytes(t) > nbytes(t.view_src):
        raise GraphError(
            f"{t}: GGML_ASSERT(data_size + view_offs <= ggml_nbytes(view_src)): "
            f"bytes {t.view_offs} to {t.view_offs + nbytes(t)} of {nbytes(t.view_src)}"
        )
