"""Templates: the constant part of a trajectory's cgraphs, and symbols for the varying part.

The template of a graph is its ops, `op_params`, types, flags, edges, roles, persistent tensors and outputs; its values
are every `ne`, `nb` and `view_offs`. The class of each extent (0, 1 or more) and the order of strides belong to the
template, so that broadcasting and permutation never change within one. Exception: GET_ROWS may pick one or more rows of
a computed tensor, the tokens of a batch whose results are wanted. `lift` finds symbols that determine all values; a
program compiled with these as arguments serves each graph that `Template.bind` can bind. Tensor names are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.views import view_offset
from conformance.ggml.tensor import MAX_DIMS, Dims, Tensor, nelements

from .factor import SLOTS, factor
from .sym import Assumption, Const, Expr, Sym, derived, evaluate, expr_of

OFFSET_PARAMS = 2
"""Leading `op_params` of a VIEW that are its offset, which varies, unlike all others."""


def values(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return `ne`, `nb`, `view_offs` of each tensor in order, then the offsets of VIEWs."""
    out: list[int] = []
    for t in tensors:
        out += t.ne
        out += t.nb
        out.append(t.view_offs)
    out += [view_offset(t) for t in tensors if t.op == "VIEW"]
    return tuple(out)


def structure(tensors: Sequence[Tensor], nodes: Collection[Tensor]) -> tuple[Hashable, ...]:
    """Return the fixed part of each tensor in a template; edges are indices into `tensors`."""
    index: dict[Tensor | None, int] = {t: i for i, t in enumerate(tensors)}
    index[None] = -1
    computed = set(nodes)
    loose = row_selectors(tensors)
    return tuple(
        (
            t.op,
            t.op_params if t.op != "VIEW" else t.op_params[OFFSET_PARAMS:],
            t.type.id,
            t.flags,
            index[t.view_src],
            tuple([index[s] for s in t.src]),
            t in computed,
            _kind(t.ne) if t not in loose else tuple([n > 0 for n in t.ne]),
            _order(t.nb),
        )
        for t in tensors
    )


def kinds(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the class of each extent (0, 1, more) of `row_selectors`, which `structure` omits."""
    loose = row_selectors(tensors)
    return tuple([_kind(t.ne) for t in tensors if t in loose])


def row_selectors(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Return leaves that only select rows of a computed tensor, and their dependents.

    Rows are computed independently, so a single row needs no template of its own; if an op or an emitter treats it
    differently, guards detect that.
    """
    ids: set[Tensor] = set()
    other: set[Tensor] = set()
    for t in tensors:
        for i, s in enumerate(t.src):
            if s is not None and s.op == "NONE":
                (ids if t.op == "GET_ROWS" and i == 1 and _is_computed(t.src[0]) else other).add(s)
    rows = {t for t in ids - other if t.view_src is None}
    if rows:
        for t in tensors:
            if t.view_src in rows or not rows.isdisjoint(t.src):
                rows.add(t)
    return rows


def _is_computed(t: Tensor | None) -> bool:
    return t is not None and t.root.op != "NONE"


def _kind(ne: Dims) -> tuple[int, ...]:
    return tuple([n if n < 2 else 2 for n in ne])  # noqa: FURB136  # min() takes three times as long


def _order(nb: Dims) -> tuple[int, ...] | None:
    """Return dimensions in order of stride; None for the usual order."""
    return None if nb[0] <= nb[1] <= nb[2] <= nb[3] else tuple(sorted(range(MAX_DIMS), key=nb.__getitem__))


def lift(graphs: Sequence[Graph], inputs: Collection[Tensor]) -> Template:
    """Return the template of `graphs`, with symbols that determine their values.

    Args:
        graphs: one or more of one template; the more they differ, the fewer coincidences become rules.
        inputs: leaves of `graphs[0]` that are filled for each run, without persistent tensors: their extents above 1
            become symbols even if all graphs have the same.

    Raises:
        UsageError: the graphs have different templates.
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
    return _new_template(kind, tuple(dict.fromkeys(rows)), frozenset(place[t] for t in inputs), _copies(first), nodes)


def _new_template(
    kind: tuple[Hashable, ...],
    rows: tuple[tuple[int, ...], ...],
    inputs: frozenset[int],
    tensors: list[Tensor],
    nodes: tuple[int, ...],
) -> Template:
    views = [i for i, t in enumerate(tensors) if t.op == "VIEW"]
    symbols = factor(tensors, rows, inputs, {i: SLOTS * len(tensors) + k for k, i in enumerate(views)})
    numbers = [n for t in tensors for n in (*t.ne, *t.nb, t.view_offs)]
    for i in views:
        a = tensors[i].src[0]
        numbers.append(tensors[i].view_offs - (a.view_offs if a is not None else 0))
    exprs = tuple(expr_of(n) for n in numbers)
    chances = list(dict.fromkeys(c for t in tensors for c in _coincidences(t)))
    bindings = [tuple(b) for b in symbols.bindings]
    always = tuple(c for c in chances if all(c.holds(b) for b in bindings))
    # compile from the graph with the fewest coincidences, so that the program depends on none
    generic = min(range(len(rows)), key=lambda k: sum(c.holds(bindings[k]) for c in chances))
    return Template(
        tuple(symbols.names),
        kind,
        rows,
        inputs,
        tuple(tensors),
        nodes,
        tuple(symbols.how),
        exprs,
        always,
        bindings[generic],
    )


def _coincidences(t: Tensor) -> Iterable[Assumption]:
    """Return facts that may be true for a graph's numbers but not for the expressions.

    Facts are an extent of 1, no gap between dimensions, a view of the whole root.
    """
    diffs = [n - 1 for n in t.ne]
    diffs += [t.nb[d] * t.ne[d] - t.nb[d + 1] for d in range(1, MAX_DIMS - 1) if t.ne[d + 1] > 1]
    if t.ne[1] > 1:
        diffs.append(t.nb[0] * t.ne[0] // t.type.blck_size - t.nb[1])
    if t.view_src is not None:
        diffs += [t.view_offs, nelements(t) - nelements(t.view_src)]
    return [Assumption("==", n.expr, True) for n in diffs if isinstance(n, Sym)]


def copied(graph: Graph) -> Graph:
    """Copy `graph` with its leaves; `tensors()` has the same order."""
    tensors = graph.tensors()
    new = dict(zip(tensors, _copies(tensors), strict=True))
    return Graph(new[n] for n in graph)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy `tensors` with the edges between them."""
    new = {t: Tensor(t.type, t.ne, t.nb, t.op, t.op_params, (), None, t.view_offs, t.flags, t.name) for t in tensors}
    for t, c in new.items():
        c.src = tuple(None if s is None else new[s] for s in t.src)
        c.view_src = None if t.view_src is None else new[t.view_src]
    return list(new.values())


Row = tuple[int, ...]


def _pick(places: Sequence[int]) -> Callable[[Row], Row]:
    """Return a fast function that selects items of a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda row: tuple([row[k] for k in places])


@dataclass(frozen=True, eq=False)
class Template:
    """Graphs that differ only in the values of `symbols`."""

    symbols: tuple[str, ...]
    """Field that introduced each symbol, such as `tensors[3].ne[1]` of `Graph.tensors()`."""
    structure: tuple[Hashable, ...]
    samples: tuple[tuple[int, ...], ...]
    """`values` of the graphs from which it was lifted."""
    inputs: frozenset[int]
    tensors: tuple[Tensor, ...]
    """Copies of the first graph's tensors, with symbols."""
    nodes: tuple[int, ...]
    how: tuple[Expr, ...]
    """Each symbol as an expression of `values`."""
    exprs: tuple[Expr, ...]
    """Each of `values` as an expression of the symbols."""
    guards: tuple[Assumption, ...]
    """Comparisons whose outcome must be the same."""
    generic: tuple[int, ...]
    """Bindings of the sample with the fewest coincidences (such as a view of its whole root)."""

    @cached_property
    def _solver(self) -> tuple[Callable[[Row], Row], Row, Callable[[Row], Row], tuple[Expr, ...], Callable[[Row], Row]]:
        """Selectors of constant and of varying values, for `solve`, with values and expressions."""
        moving = [k for k, e in enumerate(self.exprs) if not isinstance(e, Const)]
        fixed = _pick([k for k, e in enumerate(self.exprs) if isinstance(e, Const)])
        place = {e: j for j, e in enumerate(dict.fromkeys(self.exprs[k] for k in moving))}
        where = _pick([place[self.exprs[k]] for k in moving])
        return fixed, fixed(self.samples[0]), _pick(moving), tuple(place), where

    def bind(self, graph: Graph) -> tuple[int, ...] | None:
        """Return the symbols' values in `graph`; None if it is not an instance of the template."""
        tensors = graph.tensors()
        return self.solve(values(tensors)) if structure(tensors, graph.nodes) == self.structure else None

    def solve(self, row: tuple[int, ...]) -> tuple[int, ...] | None:
        """Bind the `values` of a graph that has the template's structure, roles and outputs."""
        fixed, constants, moving, distinct, where = self._solver
        if len(row) != len(self.exprs) or fixed(row) != constants:
            return None
        try:
            bindings = tuple([evaluate(e, row) for e in self.how])
            numbers = tuple([evaluate(e, bindings) for e in distinct])
            if moving(row) != where(numbers) or not all(g.holds(bindings) for g in self.guards):
                return None
        except ZeroDivisionError:
            return None
        return bindings

    def refine(self, graph: Graph) -> Template:
        """Lift again with one more graph that does not bind; UsageError for another template."""
        tensors = graph.tensors()
        if structure(tensors, graph.nodes) != self.structure:
            raise UsageError("a graph of the same template expected, but ops, parameters, types, edges or kinds differ")
        plain = _copies(self.tensors)
        _fill(plain, self.samples[0])
        rows = tuple(dict.fromkeys((*self.samples, values(tensors))))
        return _new_template(self.structure, rows, self.inputs, plain, self.nodes)

    def guarded(self, assumptions: Iterable[Assumption]) -> Template:
        """Add guards: comparisons made on the traced graph (`sym.assumptions`)."""
        return replace(self, guards=tuple(dict.fromkeys((*self.guards, *assumptions))))

    def traced(self, graph: Graph | None = None) -> Graph:
        """Copy `graph`, or the most generic sample, with `Sym` for all varying numbers.

        `tensors()` has the same order. UsageError if it is not an instance of the template.
        """
        bindings = self.generic if graph is None else self.bind(graph)
        if bindings is None:
            raise UsageError("an instance of the template expected")
        tensors = _copies(self.tensors if graph is None else graph.tensors())
        numbers = {e: derived(e, bindings) for e in dict.fromkeys(self.exprs)}
        row = [numbers[e] for e in self.exprs]
        _fill(tensors, [int(n) for n in row])
        _set(tensors, row)
        return Graph(tensors[i] for i in self.nodes)


def _set(tensors: Sequence[Tensor], row: Sequence[int]) -> None:
    for i, t in enumerate(tensors):
        n = row[SLOTS * i : SLOTS * (i + 1)]
        t.ne, t.nb, t.view_offs = (n[0], n[1], n[2], n[3]), (n[4], n[5], n[6], n[7]), n[8]


def _fill(tensors: Sequence[Tensor], row: Sequence[int]) -> None:
    """Set all `values` of `tensors`, including the offsets of views."""
    _set(tensors, row)
    views = (t for t in tensors if t.op == "VIEW")
    for t, offset in zip(views, row[SLOTS * len(tensors) :], strict=True):
        low, high = (((offset >> shift) + 2**31) % 2**32 - 2**31 for shift in (0, 32))
        t.op_params = (low, high, *t.op_params[OFFSET_PARAMS:])
