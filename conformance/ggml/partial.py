"""Partial graphs: any contiguous run of nodes as a graph by itself, as a scheduler needs that splits a cgraph.

What the nodes read from outside becomes fresh leaves, roots only: a view of a root that an earlier part made is built
again over its leaf. Persistent tensors stay the same objects, so the parts share a session's weights and caches. What a
part changes and a later part reads travels as whole roots, as they are when the part ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .errors import GraphError
from .graph import Graph
from .tensor import FLAG_COMPUTE, FLAG_INPUT, VIEW_OPS, Tensor, computes


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes `first` to `last` (not included) of a graph, as a graph of their own."""

    graph: Graph
    """Copies of the nodes in their order, each after the view ops that it needs built again, and at the end a VIEW of
    each root that is handed on and was written in place."""
    inputs: dict[Tensor, Tensor] = field(default_factory=dict)
    """Leaf of the part -> the root in the whole graph that it stands for: an input of the whole, or what earlier parts
    hand on. A root that no part hands on is read by nobody who computes; its bytes do not matter."""
    wanted: dict[Tensor, Tensor] = field(default_factory=dict)
    """Node of the part -> the output of the whole graph that it is."""
    handed: dict[Tensor, Tensor] = field(default_factory=dict)
    """Node of the part -> the root in the whole graph whose bytes, as they are when the part ends, it holds."""
    copies: dict[Tensor, Tensor] = field(default_factory=dict)
    """Tensor of the whole graph -> its copy in the part; persistent tensors are their own."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What to ask of a run of the part: `wanted`, then `handed`."""
        return tuple(dict.fromkeys((*self.wanted, *self.handed)))


def partial(
    graph: Graph,
    first: int,
    last: int,
    *,
    persistent: Collection[Tensor] = (),
    outputs: Collection[Tensor] = (),
) -> Part:
    """Nodes `first` to `last` (not included) of `graph` by themselves.

    Run after the parts before it, with their `handed` bytes in its `inputs`, it computes what these nodes compute in
    the whole graph, and leaves the same in persistent tensors.

    Args:
        graph: the whole; it stays as it is.
        first: index of a node.
        last: index after a node.
        persistent: leaves whose bytes live across graphs.
        outputs: nodes of the whole graph that its caller asks for.

    Raises:
        GraphError: no such run of nodes, or a node computes in place on a view that is none of its src.
    """
    if not 0 <= first <= last <= len(graph):
        raise GraphError(f"partial: 0 <= first <= last <= {len(graph)} expected, {first} and {last} given")
    made = _Copying(graph, frozenset(persistent))
    nodes = graph.nodes[first:last]
    for node in nodes:
        made.add(node)
    later = _read_by(graph.nodes[last:], frozenset(outputs))
    last_change = {n.root: n for n in nodes if computes(n)}
    handed: dict[Tensor, Tensor] = {}
    for root, node in last_change.items():
        if root not in later or root in made.persistent:
            continue
        if node is root:
            handed[made.copies[node]] = root
        else:
            handed[made.hand_on(root)] = root
    wanted = {made.copies[n]: n for n in nodes if n in outputs}
    return Part(Graph(made.nodes), made.inputs, wanted, handed, made.copies)


def below(t: Tensor) -> Tensor | None:
    """The tensor that `t` shows the bytes of, one step towards the root; None for a root.

    Raises:
        GraphError: `t` computes in place on a view that is none of its src.
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
    """`t` over other tensors."""
    return Tensor(t.type, t.ne, t.nb, t.op, t.op_params, tuple(src), view_src, t.view_offs, t.flags, t.name)


class _Copying:
    """The part being made."""

    def __init__(self, graph: Graph, persistent: frozenset[Tensor]) -> None:
        self.persistent = persistent
        self.nodes: list[Tensor] = []
        self.inputs: dict[Tensor, Tensor] = {}
        self.copies: dict[Tensor, Tensor] = {}
        self._whole = frozenset(graph.nodes)

    def add(self, node: Tensor) -> None:
        """A copy of `node`, after what it needs from outside."""
        view_src = None if node.view_src is None else self._copy(node.view_src)
        src = [None if s is None or s is node else self._copy(s) for s in node.src]
        copy = like(node, src, view_src)
        if node in node.src:  # as ggml_cast makes it
            copy.src = tuple(copy if s is node else c for s, c in zip(node.src, src, strict=True))
        self.nodes.append(copy)
        self.copies[node] = copy

    def hand_on(self, root: Tensor) -> Tensor:
        """A VIEW at the end that holds the whole of `root`."""
        copy = self.copies[root]
        view = Tensor(root.type, root.ne, root.nb, "VIEW", src=(copy,), view_src=copy, flags=FLAG_COMPUTE)
        view.name = root.name
        self.nodes.append(view)
        return view

    def _copy(self, t: Tensor) -> Tensor:
        """The copy of `t`; where there is none yet, a leaf for its root and the view ops from there to `t`."""
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
                self.copies[c] = self.copies[under]  # an earlier part wrote there; what is left of the node is the view
            else:
                self.copies[c] = copy = like(c, (self.copies[under],) if c.src else (), self.copies[c.root])
                if c.op != "NONE":
                    self.nodes.append(copy)
        return self.copies[t]

    def _leaf(self, root: Tensor) -> Tensor:
        if root in self.persistent:
            return root
        flags = FLAG_INPUT if root in self._whole else root.flags
        leaf = Tensor(root.type, root.ne, root.nb, flags=flags, name=root.name)
        self.inputs[leaf] = root
        return leaf


def _place(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return t.ne, t.nb, t.view_offs


def _read_by(nodes: Sequence[Tensor], outputs: frozenset[Tensor]) -> set[Tensor]:
    """Roots whose bytes matter to `nodes`: one that computes reads them or keeps a part of them, or they are wanted."""
    found: set[Tensor] = set()
    for n in nodes:
        if computes(n):
            found.update(s.root for s in n.src if s is not None)  # what it writes in place is among them
        if n in outputs:
            found.add(n.root)
    return found
