"""Partial graphs: consecutive nodes as a separate graph, for a scheduler that splits graphs.

Roots that the nodes read from outside become new leaves; views of them are rebuilt. Persistent tensors stay the same
objects, so the parts share a session's weights and caches. A root that a part changes and a later part reads is passed
on whole, with its bytes at the end of the part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .errors import GraphError
from .graph import Graph
from .ops.op import written
from .tensor import FLAG_COMPUTE, FLAG_INPUT, VIEW_OPS, Tensor, computes


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous run of a graph's nodes, as a graph of its own."""

    graph: Graph
    """Copies of the nodes in order, each after the view ops that it needs.

    At the end, a VIEW of each root in `passed` that was written in place."""
    inputs: dict[Tensor, Tensor] = field(default_factory=dict)
    """Leaf of the part -> root of the whole graph for which it stands.

    The root is an input, or in `passed` of an earlier part; else no computing node reads it and its bytes are
    irrelevant."""
    wanted: dict[Tensor, Tensor] = field(default_factory=dict)
    """Node of the part -> the output of the whole graph that it computes."""
    passed: dict[Tensor, Tensor] = field(default_factory=dict)
    """Node of the part -> root that it passes on, with its bytes at the end of the part."""
    copies: dict[Tensor, Tensor] = field(default_factory=dict)
    """Tensor of the whole graph -> its copy; persistent tensors are their own copies."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Outputs to request from a run of the part: `wanted`, then `passed`."""
        return tuple(dict.fromkeys((*self.wanted, *self.passed)))


def partial(
    graph: Graph, first: int, last: int, *, persistent: Collection[Tensor] = (), outputs: Collection[Tensor] = ()
) -> Part:
    """Return nodes `first` to `last` (exclusive) of `graph`, which is unchanged, as a `Part`.

    Run after the earlier parts, with their `passed` bytes as its `inputs`, it gives the same values as these nodes in
    the whole graph, and leaves the same bytes in `persistent` tensors (leaves whose bytes live across graphs).
    `outputs` are those of the whole graph. GraphError for a bad range, or as in `below`.
    """
    if not 0 <= first <= last <= len(graph):
        raise GraphError(f"partial: 0 <= first <= last <= {len(graph)} expected, {first} and {last} given")
    part = _Copying(frozenset(persistent))
    nodes = graph.nodes[first:last]
    for node in nodes:
        part.add(node)
    later = _read_by(graph.nodes[last:], frozenset(outputs))
    last_change = {root: n for n in nodes for root in written(n)}
    passed: dict[Tensor, Tensor] = {}
    for root, node in last_change.items():
        if root not in later or root in part.persistent:
            continue
        if node is root:
            passed[part.copies[node]] = root
        else:
            passed[part.pass_on(root)] = root
    wanted = {part.copies[n]: n for n in nodes if n in outputs}
    return Part(Graph(part.nodes), part.inputs, wanted, passed, part.copies)


def below(t: Tensor) -> Tensor | None:
    """Return the tensor of which `t` is a view, one step towards the root; None for a root.

    GraphError if `t` computes in place on a view that is not one of its src.
    """
    if t.view_src is None:
        return None
    if t.op in VIEW_OPS:
        return t.src[0] if t.src and t.src[0] is not None else t.view_src
    for s in t.src:
        if s is not None and s is not t and s.root is t.view_src and _place(s) == _place(t):
            return s
    raise GraphError(f"{t}: computes in place, so one of its src must be the view it writes")


def like(t: Tensor, src: Sequence[Tensor | None], view_src: Tensor | None) -> Tensor:
    """Return a copy of `t` with other sources; None is the copy itself if `t` reads itself."""
    copy = Tensor(t.type, t.ne, t.nb, t.op, t.op_params, tuple(src), view_src, t.view_offs, t.flags, t.name)
    if t in t.src:  # as ggml_cast makes it
        copy.src = tuple(copy if s is t and c is None else c for s, c in zip(t.src, src, strict=True))
    return copy


class _Copying:
    """Builds the copied nodes of one part and the tensors they need."""

    def __init__(self, persistent: frozenset[Tensor]) -> None:
        self.persistent = persistent
        self.nodes: list[Tensor] = []
        self.inputs: dict[Tensor, Tensor] = {}
        self.copies: dict[Tensor, Tensor] = {}

    def add(self, node: Tensor) -> None:
        """Append copies of the missing tensors that `node` reads, then a copy of `node`."""
        if node.op == "NONE":  # still a leaf: ggml_build_forward_expand puts a parameter among the nodes
            self.nodes.append(self._copy(node))
            return
        view_src = None if node.view_src is None else self._copy(node.view_src)
        src = [None if s is None or s is node else self._copy(s) for s in node.src]
        copy = like(node, src, view_src)
        self.nodes.append(copy)
        self.copies[node] = copy

    def pass_on(self, root: Tensor) -> Tensor:
        """Append a VIEW of the whole `root`."""
        copy = self.copies[root]
        view = Tensor(root.type, root.ne, root.nb, "VIEW", src=(copy,), view_src=copy, flags=FLAG_COMPUTE)
        view.name = root.name
        self.nodes.append(view)
        return view

    def _copy(self, t: Tensor) -> Tensor:
        """Return the copy of `t`, made of a leaf for its root and the view ops up to `t`."""
        chain: list[Tensor] = []
        cur: Tensor | None = t
        while cur is not None and cur not in self.copies:
            chain.append(cur)
            cur = below(cur)
        for c in reversed(chain):
            under = below(c)
            if under is None:
                self.copies[c] = self._leaf(c)
            elif c.op not in VIEW_OPS:
                self.copies[c] = self.copies[under]  # an earlier part computed it in place: only the view remains
            else:
                self.copies[c] = copy = like(c, (self.copies[under],) if c.src else (), self.copies[c.root])
                if c.op != "NONE":
                    self.nodes.append(copy)
        return self.copies[t]

    def _leaf(self, root: Tensor) -> Tensor:
        if root in self.persistent:
            return root
        flags = root.flags if root.op == "NONE" else FLAG_INPUT
        leaf = Tensor(root.type, root.ne, root.nb, flags=flags, name=root.name)
        self.inputs[leaf] = root
        return leaf


def _place(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return t.ne, t.nb, t.view_offs


def _read_by(nodes: Sequence[Tensor], outputs: frozenset[Tensor]) -> set[Tensor]:
    """Return the roots that computing nodes read and those of outputs."""
    roots: set[Tensor] = set()
    for n in nodes:
        if computes(n):
            roots.update(s.root for s in n.src if s is not None)  # includes what it writes in place
        if n in outputs:
            roots.add(n.root)
    return roots
