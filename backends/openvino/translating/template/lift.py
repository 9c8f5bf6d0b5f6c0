"""`template_of`: graphs of equal structure become a template with symbols.

`factor` finds symbols that determine all numbers of all graphs. A program that is emitted with these symbols serves
each graph that `Template.bind` can bind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias

from backends.openvino.translating.plan import Plan
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor, nelements

from .factor import factor
from .sample import OFFSET_PARAMS, SLOTS, sample_of
from .sym import Assumption, Const, Expr, Sym, derived, evaluate, expr_of

Numbers: TypeAlias = tuple[int, ...]
"""`Sample.numbers` of a graph, or some of them."""


@dataclass(frozen=True, eq=False)
class Template:
    """Graphs that differ only in the values of `symbols`: a symbolic graph, and how to bind it."""

    symbols: tuple[str, ...]
    """Field that introduced each symbol, such as `tensors[3].ne[1]` of `Graph.tensors()`."""
    tensors: tuple[Tensor, ...]
    """Copies of the first graph's tensors, with symbols."""
    nodes: tuple[int, ...]
    """Indices of the graph's nodes."""
    symbol_exprs: tuple[Expr, ...]
    """Each symbol as an expression of a graph's numbers: the first step of binding."""
    number_exprs: tuple[Expr, ...]
    """Each of a graph's numbers as an expression of the symbols: they must come out again."""
    guards: tuple[Assumption, ...]
    """Comparisons whose outcome must be the same in every graph."""
    generic: tuple[int, ...]
    """Bindings of the graph with the fewest coincidences (such as a view of its whole root)."""

    @cached_property
    def _constants(self) -> tuple[Callable[[Numbers], Numbers], Numbers]:
        """Selector of the numbers that are constant, and their values."""
        slots = [k for k, e in enumerate(self.number_exprs) if isinstance(e, Const)]
        return _selector(slots), tuple([e.n for e in self.number_exprs if isinstance(e, Const)])

    @cached_property
    def _varying(self) -> tuple[Callable[[Numbers], Numbers], tuple[Expr, ...], Callable[[Numbers], Numbers]]:
        """Selector of the varying numbers, their distinct expressions, selector to repeat these."""
        slots = [k for k, e in enumerate(self.number_exprs) if not isinstance(e, Const)]
        place = {e: j for j, e in enumerate(dict.fromkeys(self.number_exprs[k] for k in slots))}
        return _selector(slots), tuple(place), _selector([place[self.number_exprs[k]] for k in slots])

    def bind(self, numbers: Numbers) -> tuple[int, ...] | None:
        """Return the symbols' values in a graph of equal structure; None if it is not an instance."""
        select_constants, constants = self._constants
        select_varying, distinct, repeat = self._varying
        if len(numbers) != len(self.number_exprs) or select_constants(numbers) != constants:
            return None
        try:
            bindings = tuple([evaluate(e, numbers) for e in self.symbol_exprs])
            found = tuple([evaluate(e, bindings) for e in distinct])
            if select_varying(numbers) != repeat(found) or self.broken(bindings) is not None:
                return None
        except ZeroDivisionError:
            return None
        return bindings

    def broken(self, bindings: Sequence[int]) -> Assumption | None:
        """Return the first guard that does not hold for `bindings`, or None."""
        return next((g for g in self.guards if not g.holds(bindings)), None)

    def guarded(self, made: Iterable[Assumption]) -> Template:
        """Add guards: the comparisons that were made on the symbolic graph (`assumptions`)."""
        return replace(self, guards=tuple(dict.fromkeys((*self.guards, *made))))

    def symbolic(self, plan: Plan) -> Plan:
        """Return `plan`, of equal structure, over copies with `Sym` for all varying numbers."""
        graph = self.graph(self.generic)
        tensors = graph.tensors()
        index = {t: i for i, t in enumerate(tensors)}
        roles = {tensors[plan.index[t]]: r for t, r in plan.roles.items()}
        outputs = tuple(tensors[plan.index[t]] for t in plan.outputs)
        return Plan(graph, tensors, index, roles, outputs, plan.key, tuple(plan.tensors))

    def graph(self, bindings: Sequence[int]) -> Graph:
        """Return a copy of the graph with `Sym` for all varying numbers, as ints for `bindings`."""
        tensors = _copies(self.tensors)
        values = {e: derived(e, bindings) for e in dict.fromkeys(self.number_exprs)}
        numbers = [values[e] for e in self.number_exprs]
        views = [t for t in tensors if t.op == "VIEW"]
        for t, offset in zip(views, numbers[SLOTS * len(tensors) :], strict=True):
            low, high = (((int(offset) >> shift) + 2**31) % 2**32 - 2**31 for shift in (0, 32))
            t.op_params = (low, high, *t.op_params[OFFSET_PARAMS:])
        for i, t in enumerate(tensors):
            n = numbers[SLOTS * i : SLOTS * (i + 1)]
            t.ne, t.nb, t.view_offs = (n[0], n[1], n[2], n[3]), (n[4], n[5], n[6], n[7]), n[8]
        return Graph(tensors[i] for i in self.nodes)


def _selector(slots: Sequence[int]) -> Callable[[Numbers], Numbers]:
    """Return a fast function that selects items of a tuple."""
    return itemgetter(*slots) if len(slots) > 1 else lambda numbers: tuple([numbers[k] for k in slots])


def template_of(graphs: Sequence[Graph], inputs: Collection[Tensor]) -> Template:
    """Return the template of `graphs`, with symbols that determine their numbers.

    Args:
        graphs: one or more of equal structure; the more they differ, the fewer coincidences become rules.
        inputs: leaves of `graphs[0]` that are filled for each run, without persistent tensors: their extents above 1
            become symbols even if all graphs have the same.

    Raises:
        UsageError: the graphs have different structures.
    """
    first = graphs[0].tensors()
    samples = [sample_of(first, graphs[0].nodes), *(sample_of(g.tensors(), g.nodes) for g in graphs[1:])]
    if any(s.structure != samples[0].structure for s in samples):
        raise UsageError("graphs of one template expected, but ops, parameters, types, edges or kinds differ")
    index = {t: i for i, t in enumerate(first)}
    tensors = _copies(first)
    rows = list(dict.fromkeys(s.numbers for s in samples))
    symbols = factor(tensors, rows, {index[t] for t in inputs})
    bindings = [tuple(b) for b in symbols.bindings]
    chances = list(dict.fromkeys(c for t in tensors for c in _coincidences(t)))
    return Template(
        tuple(symbols.names),
        tuple(tensors),
        tuple([index[t] for t in graphs[0].nodes]),
        tuple(symbols.exprs),
        tuple([expr_of(n) for n in _numbers(tensors)]),
        tuple([c for c in chances if all(c.holds(b) for b in bindings)]),
        min(bindings, key=lambda b: sum(c.holds(b) for c in chances)),
    )


def _numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of symbolic `tensors` by slot, as `sample_of` does for plain ones."""
    offsets = [t.view_offs - (0 if t.src[0] is None else t.src[0].view_offs) for t in tensors if t.op == "VIEW"]
    return [*(n for t in tensors for n in (*t.ne, *t.nb, t.view_offs)), *offsets]


def _coincidences(t: Tensor) -> Iterable[Assumption]:
    """Return facts that may be true for a graph's numbers but not for the expressions.

    Facts are an extent of 1, no gap between dimensions, a view of the whole root.
    """
    diffs = [n - 1 for n in t.ne]
    diffs += [t.nb[d] * t.ne[d] - t.nb[d + 1] for d in range(1, 3) if t.ne[d + 1] > 1]
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
