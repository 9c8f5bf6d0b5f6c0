"""Templates: what stays the same from one cgraph of a trajectory to the next, and the symbols that change.

The template of a graph is its ops, `op_params`, types, flags, edges, roles, persistent tensors and outputs; its values
are every `ne`, `nb` and `view_offs`. Two graphs of one template differ in values only, and not in kind: whether an
extent is 0, 1 or more, and in what order the strides come, belongs to the template, so that broadcasting and
permutation never change within one. Only how many rows GET_ROWS picks out of what was computed may be one or more: the
last tokens of a batch whose results are wanted. `lift` finds symbols from which all values follow; a program compiled
once with these as arguments serves each graph that `Template.bind` can bind. No tensor name is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.views import view_offset
from conformance.ggml.tensor import MAX_DIMS, Dims, Tensor, nelements

from .factor import factor
from .sym import Assumption, Const, Expr, Sym, derived, evaluate, expr_of
from .symbols import SLOTS

OFFSET_PARAMS = 2
"""A VIEW holds its offset from `src[0]` in so many `op_params`: values, unlike all others."""


def values(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """`ne`, `nb`, `view_offs` of every tensor in order, then the offset from `src[0]` of every VIEW."""
    out: list[int] = []
    for t in tensors:
        out += t.ne
        out += t.nb
        out.append(t.view_offs)
    out += [view_offset(t) for t in tensors if t.op == "VIEW"]
    return tuple(out)


def structure(tensors: Sequence[Tensor], nodes: Collection[Tensor]) -> tuple[Hashable, ...]:
    """What a template fixes of each tensor by itself.

    Args:
        tensors: `Graph.tensors()`; edges are places in it.
        nodes: those that are nodes.
    """
    index: dict[Tensor | None, int] = {t: i for i, t in enumerate(tensors)}
    index[None] = -1
    made = nodes if isinstance(nodes, (set, frozenset)) else set(nodes)
    loose = picked(tensors)
    return tuple(
        (
            t.op,
            t.op_params if t.op != "VIEW" else t.op_params[OFFSET_PARAMS:],
            t.type.id,
            t.flags,
            index[t.view_src],
            tuple([index[s] for s in t.src]),
            t in made,
            _kind(t.ne) if t not in loose else tuple([n > 0 for n in t.ne]),
            _order(t.nb),
        )
        for t in tensors
    )


def kinds(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """What `structure` leaves open: of each tensor that `picked` names, which extents are 0, 1 or more."""
    loose = picked(tensors)
    return tuple([_kind(t.ne) for t in tensors if t in loose])


def picked(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Leaves that do nothing but say which rows of something computed GET_ROWS picks, and all that follows from it.

    Such rows are computed each for itself, so that one is no special case of many: where an op or an emitter makes it
    one, guards find out.
    """
    ids: set[Tensor] = set()
    other: set[Tensor] = set()
    for t in tensors:
        for i, s in enumerate(t.src):
            if s is not None and s.op == "NONE":
                (ids if t.op == "GET_ROWS" and i == 1 and _is_computed(t.src[0]) else other).add(s)
    found = {t for t in ids - other if t.view_src is None}
    if found:
        for t in tensors:
            if t.view_src in found or not found.isdisjoint(t.src):
                found.add(t)
    return found


def _is_computed(t: Tensor | None) -> bool:
    return t is not None and t.root.op != "NONE"


def _kind(ne: Dims) -> tuple[int, ...]:
    return tuple([n if n < 2 else 2 for n in ne])  # noqa: FURB136  # min() takes three times as long


def _order(nb: Dims) -> tuple[int, ...] | None:
    """Dimensions by stride; None for the usual order."""
    return None if nb[0] <= nb[1] <= nb[2] <= nb[3] else tuple(sorted(range(MAX_DIMS), key=nb.__getitem__))


def template_key(
    tensors: Sequence[Tensor],
    roles: Mapping[Tensor, str],
    digests: Mapping[Tensor, Hashable],
    outputs: Iterable[Tensor],
    nodes: Collection[Tensor] | None = None,
) -> Hashable:
    """Equal for two graphs exactly when they are of one template.

    Args:
        tensors: `Graph.tensors()`.
        roles: leaf -> what it is to a program.
        digests: tensor -> what identifies it beyond its place: of a weight that becomes part of a program, its bytes.
        outputs: the tensors whose values are wanted, in order.
        nodes: `Graph.nodes`; left out, all tensors with an op or a role of none.
    """
    made = [t for t in tensors if t.op != "NONE"] if nodes is None else nodes
    index = {t: i for i, t in enumerate(tensors)}
    return (
        structure(tensors, made),
        tuple([roles.get(t) for t in tensors]),
        tuple([digests.get(t) for t in tensors]),
        tuple([index[t] for t in outputs]),
    )


def lift(graphs: Sequence[Graph], inputs: Collection[Tensor]) -> Template:
    """The template of `graphs`, with symbols from which the values of each of them follow.

    Args:
        graphs: one or more of one template; the more they differ, the fewer coincidences become rules.
        inputs: leaves of `graphs[0]` that are filled for each run: extents above 1 become symbols even where they are
            the same in all graphs. Persistent tensors are not among them.

    Raises:
        UsageError: the graphs are not of one template.
    """
    first = graphs[0].tensors()
    kind = structure(first, graphs[0].nodes)
    rows = [values(first)]
    for g in graphs[1:]:
        tensors = g.tensors()
        if structure(tensors, g.nodes) != kind:
            raise UsageError("graphs of one template expected, but ops, parameters, types, edges or kinds differ")
        rows.append(values(tensors))
    place = {t: i for i, t in enumerate(first)}
    nodes = tuple(place[t] for t in graphs[0].nodes)
    return _lifted(kind, tuple(dict.fromkeys(rows)), frozenset(place[t] for t in inputs), _copies(first), nodes)


def _lifted(
    kind: tuple[Hashable, ...],
    rows: tuple[tuple[int, ...], ...],
    inputs: frozenset[int],
    tensors: list[Tensor],
    nodes: tuple[int, ...],
) -> Template:
    views = [i for i, t in enumerate(tensors) if t.op == "VIEW"]
    found = factor(tensors, rows, inputs, {i: SLOTS * len(tensors) + k for k, i in enumerate(views)})
    numbers = [n for t in tensors for n in (*t.ne, *t.nb, t.view_offs)]
    for i in views:
        a = tensors[i].src[0]
        numbers.append(tensors[i].view_offs - (a.view_offs if a is not None else 0))
    exprs = tuple(expr_of(n) for n in numbers)
    chances = list(dict.fromkeys(c for t in tensors for c in _coincidences(t)))
    bindings = [tuple(b) for b in found.bindings]
    always = tuple(c for c in chances if all(c.holds(b) for b in bindings))
    # a program made from the graph with the fewest coincidences decides nothing by one
    generic = min(range(len(rows)), key=lambda k: sum(c.holds(bindings[k]) for c in chances))
    return Template(
        tuple(found.names),
        kind,
        rows,
        inputs,
        tuple(tensors),
        nodes,
        tuple(found.how),
        exprs,
        always,
        bindings[generic],
    )


def _coincidences(t: Tensor) -> Iterable[Assumption]:
    """What is not so by the expressions, but may be by the numbers: an extent of 1, no gap between two dimensions, the
    whole root.
    """
    diffs = [n - 1 for n in t.ne]
    diffs += [t.nb[d] * t.ne[d] - t.nb[d + 1] for d in range(1, MAX_DIMS - 1) if t.ne[d + 1] > 1]
    if t.ne[1] > 1:
        diffs.append(t.nb[0] * t.ne[0] // t.type.blck_size - t.nb[1])
    if t.view_src is not None:
        diffs += [t.view_offs, nelements(t) - nelements(t.view_src)]
    return [Assumption("==", n.expr, True) for n in diffs if isinstance(n, Sym)]


def copied(graph: Graph) -> Graph:
    """A copy of `graph` down to its leaves; `tensors()` has the same order."""
    tensors = graph.tensors()
    new = dict(zip(tensors, _copies(tensors), strict=True))
    return Graph(new[n] for n in graph)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`tensors` and the edges between them again."""
    new = {t: Tensor(t.type, t.ne, t.nb, t.op, t.op_params, (), None, t.view_offs, t.flags, t.name) for t in tensors}
    for t, c in new.items():
        c.src = tuple(None if s is None else new[s] for s in t.src)
        c.view_src = None if t.view_src is None else new[t.view_src]
    return list(new.values())


class _Pick:
    """Some places of a tuple, taken at once."""

    __slots__ = ("_get",)

    def __init__(self, places: Sequence[int]) -> None:
        self._get: Callable[[tuple[int, ...]], tuple[int, ...]] = (
            itemgetter(*places) if len(places) > 1 else lambda row: tuple([row[k] for k in places])
        )

    def of(self, row: tuple[int, ...]) -> tuple[int, ...]:
        return self._get(row)


@dataclass(frozen=True, eq=False)
class Template:
    """Graphs that differ in the values of `symbols` only."""

    symbols: tuple[str, ...]
    """Where each symbol was first seen: the place of a tensor in `Graph.tensors()` and one of its fields."""
    structure: tuple[Hashable, ...]
    samples: tuple[tuple[int, ...], ...]
    """`values` of the graphs it was lifted from."""
    inputs: frozenset[int]
    tensors: tuple[Tensor, ...]
    """Copies of the first graph's, with symbols."""
    nodes: tuple[int, ...]
    how: tuple[Expr, ...]
    """Each symbol out of `values`, which stand for the expression's symbols."""
    exprs: tuple[Expr, ...]
    """Each of `values` out of the symbols."""
    guards: tuple[Assumption, ...]
    """What must be so beyond the values themselves."""
    generic: tuple[int, ...]
    """Bindings of the graph with the fewest coincidences (a view that happens to be all of its root)."""
    fixed: _Pick = field(init=False)
    constants: tuple[int, ...] = field(init=False)
    moving: _Pick = field(init=False)
    distinct: tuple[Expr, ...] = field(init=False)
    where: _Pick = field(init=False)
    """For `solve`: values that never change and what they are; those that do, and which of the distinct expressions
    each of them is."""

    def __post_init__(self) -> None:
        moving = [k for k, e in enumerate(self.exprs) if not isinstance(e, Const)]
        fixed = [k for k, e in enumerate(self.exprs) if isinstance(e, Const)]
        place = {e: j for j, e in enumerate(dict.fromkeys(self.exprs[k] for k in moving))}
        object.__setattr__(self, "fixed", _Pick(fixed))
        object.__setattr__(self, "constants", self.fixed.of(self.samples[0]))
        object.__setattr__(self, "moving", _Pick(moving))
        object.__setattr__(self, "distinct", tuple(place))
        object.__setattr__(self, "where", _Pick([place[self.exprs[k]] for k in moving]))

    def bind(self, graph: Graph) -> tuple[int, ...] | None:
        """The symbols' values in `graph`; None where it is no instance of the template."""
        tensors = graph.tensors()
        return self.solve(values(tensors)) if structure(tensors, graph.nodes) == self.structure else None

    def solve(self, row: tuple[int, ...]) -> tuple[int, ...] | None:
        """`bind` for the `values` of a graph whose `template_key` is known to be the template's."""
        if len(row) != len(self.exprs) or self.fixed.of(row) != self.constants:
            return None
        try:
            bindings = tuple([evaluate(e, row) for e in self.how])
            found = tuple([evaluate(e, bindings) for e in self.distinct])
            if self.moving.of(row) != self.where.of(found) or not all(g.holds(bindings) for g in self.guards):
                return None
        except ZeroDivisionError:
            return None
        return bindings

    def refine(self, graph: Graph) -> Template:
        """The template lifted again with one more graph, for one that it does not bind.

        Raises:
            UsageError: `graph` is of another template.
        """
        tensors = graph.tensors()
        if structure(tensors, graph.nodes) != self.structure:
            raise UsageError("a graph of the same template expected, but ops, parameters, types, edges or kinds differ")
        plain = _copies(self.tensors)
        _fill(plain, self.samples[0])
        rows = tuple(dict.fromkeys((*self.samples, values(tensors))))
        return _lifted(self.structure, rows, self.inputs, plain, self.nodes)

    def guarded(self, assumptions: Iterable[Assumption]) -> Template:
        """The same, held to what a walk over the traced graph decided by comparing (`sym.assumptions`)."""
        return replace(self, guards=tuple(dict.fromkeys((*self.guards, *assumptions))))

    def traced(self, graph: Graph | None = None) -> Graph:
        """A copy of `graph` whose `ne`, `nb` and `view_offs` are `Sym` where they depend on symbols.

        Without a graph the numbers are those of the sample with the fewest coincidences, which is the one to compile
        from: what a program decides there holds for all. `tensors()` has the order of the original's.

        Raises:
            UsageError: `graph` is no instance of the template.
        """
        bindings = self.generic if graph is None else self.bind(graph)
        if bindings is None:
            raise UsageError("an instance of the template expected")
        return self._made(bindings, symbolic=True, of=self.tensors if graph is None else graph.tensors())

    def instantiate(self, bindings: Sequence[int]) -> Graph:
        """The graph of these values: `instantiate(bind(g))` equals `g` but for names."""
        return self._made(bindings, symbolic=False, of=self.tensors)

    def _made(self, bindings: Sequence[int], *, symbolic: bool, of: Sequence[Tensor]) -> Graph:
        distinct = {e: evaluate(e, bindings) for e in dict.fromkeys(self.exprs)}
        row = [distinct[e] for e in self.exprs]
        tensors = _copies(of)
        _fill(tensors, row)
        if symbolic:
            known = {e: derived(e, bindings) for e in distinct}
            _set(tensors, [known[e] for e in self.exprs])
        return Graph(tensors[i] for i in self.nodes)


def _set(tensors: Sequence[Tensor], row: Sequence[int]) -> None:
    for i, t in enumerate(tensors):
        n = row[SLOTS * i : SLOTS * (i + 1)]
        t.ne, t.nb, t.view_offs = (n[0], n[1], n[2], n[3]), (n[4], n[5], n[6], n[7]), n[8]


def _fill(tensors: Sequence[Tensor], row: Sequence[int]) -> None:
    """Give `tensors` these values, offsets of views included."""
    _set(tensors, row)
    views = (t for t in tensors if t.op == "VIEW")
    for t, offset in zip(views, row[SLOTS * len(tensors) :], strict=True):
        low, high = (((offset >> shift) + 2**31) % 2**32 - 2**31 for shift in (0, 32))
        t.op_params = (low, high, *t.op_params[OFFSET_PARAMS:])
