"""The symbols found so far, and every number of every graph they were found in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.ggml.tensor import MAX_DIMS

from .sym import Expr, Sym, Symbol, evaluate, poly_of, symbol

SLOTS = 9
"""Numbers of one tensor in `lift.values`: ne, nb, view_offs."""
Vec = tuple[int, ...]
"""One number in each of the graphs."""
Product = tuple[int, tuple[int, ...]]
"""A factor and extents of inputs, by slot."""


@dataclass(slots=True)
class Facts:
    """What one round learned of the inputs and hands to the next; slots are places in `lift.values`."""

    frozen: set[int] = field(default_factory=set)
    """Extents of inputs that a rule holds against a constant."""
    denied: set[tuple[int, int]] = field(default_factory=set)
    """Extent of a view, extent of an input that it is not, though the numbers are the same."""
    merged: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Extents of inputs that a rule holds against another's: slot -> factor, the other's slot, summand."""
    hints: dict[int, tuple[Product, ...]] = field(default_factory=dict)
    """Extents of views that follow from what is copied into them: factors and extents of inputs, multiplied and summed
    up."""

    def count(self) -> int:
        """How many; it only grows."""
        return len(self.frozen) + len(self.denied) + len(self.merged) + len(self.hints)


class Symbols:
    """Symbols in the order they were found, and what they are in every graph.

    Args:
        rows: `lift.values` of every graph.
        n_tensors: how many tensors those are the values of.
        facts: what rules are known to assert of inputs.
    """

    def __init__(self, rows: Sequence[Sequence[int]], n_tensors: int, facts: Facts) -> None:
        self.rows, self.facts = rows, facts
        self.how: list[Expr] = []
        """Per symbol, its value as an expression over slots."""
        self.names: list[str] = []
        """Per symbol, where it was first seen."""
        self.bindings: list[list[int]] = [[] for _ in rows]
        """Per graph, the value of every symbol."""
        self.slot_of: dict[int, int] = {}
        """Symbol that is an extent of an input -> its slot."""
        self.guesses: dict[int, list[int]] = {}
        """Symbol -> slots that were given it because the number is the same in all graphs."""
        self._views = SLOTS * n_tensors
        self._inputs: dict[int, Sym] = {}

    def vec(self, slot: int) -> Vec:
        """What stands in `slot` of every graph."""
        return tuple(row[slot] for row in self.rows)

    def at(self, n: int) -> Vec:
        """What `n` is in every graph; nothing where a divisor of it is 0 in one of them."""
        if not isinstance(n, Sym):
            return (n,) * len(self.rows)
        try:
            return tuple([evaluate(n.expr, b) for b in self.bindings])
        except ZeroDivisionError:
            return ()

    def fits(self, n: int, vec: Vec) -> bool:
        """Whether `n` gives `vec`."""
        return n == vec[0] and self.at(n) == vec

    def new(self, vec: Vec, how: Expr, name: str) -> Sym:
        """One more symbol, which `how` gives from a graph's slots."""
        self.how.append(how)
        self.names.append(name)
        for b, v in zip(self.bindings, vec, strict=True):
            b.append(v)
        return symbol(len(self.how) - 1, vec[0])

    def input(self, slot: int) -> int:
        """The extent of an input: a symbol above 1, but for what rules assert."""
        vec = self.vec(slot)
        if max(vec) <= 1 or slot in self.facts.frozen:
            return vec[0]
        if slot in self.facts.merged:
            times, other, plus = self.facts.merged[slot]
            return self.input(other) * times + plus
        if slot not in self._inputs:
            known = self.known(vec, slot, exact=True) if differs(vec) else None
            if isinstance(known, Sym):
                return known
            self._inputs[slot] = self.new(vec, Symbol(slot), f"tensors[{slot // SLOTS}].ne[{slot % SLOTS}]")
            self.slot_of[len(self.how) - 1] = slot
        return self._inputs[slot]

    def known(self, vec: Vec, slot: int, *, exact: bool = False) -> int | None:
        """`vec` as a constant, a symbol, a symbol times a constant or, for an extent, plus one.

        A position plus a constant is not looked for: from 255 to 256 tokens n_kv grows by 256, and so does the offset
        of a row of 256 elements.
        """
        symbols = [tuple(b[k] for b in self.bindings) for k in range(len(self.how))]
        if not differs(vec):
            for k, s in enumerate(symbols if vec[0] > 1 else ()):
                if s == vec and (slot, self.slot_of.get(k, -1)) not in self.facts.denied:
                    self.guesses.setdefault(k, []).append(slot)
                    return symbol(k, vec[0])
            return vec[0]
        for k, s in enumerate(symbols):
            if s == vec:
                return symbol(k, s[0])
        for k, s in enumerate(symbols if not exact else ()):
            if differs(s) and all(x > 0 and v % x == 0 for v, x in zip(vec, s, strict=True)) and vec[0] > 0:
                times = {v // x for v, x in zip(vec, s, strict=True)}
                if len(times) == 1:
                    return symbol(k, s[0]) * times.pop()
        for k, s in enumerate(symbols if not exact and self._is_extent(Symbol(slot)) else ()):
            plus = {v - x for v, x in zip(vec, s, strict=True)}
            if len(plus) == 1 and self._is_extent(self.how[k]):
                return symbol(k, s[0]) + plus.pop()
        return None

    def _is_extent(self, how: Expr) -> bool:
        """Whether a slot, or what gives a symbol, is an `ne`."""
        return isinstance(how, Symbol) and how.index < self._views and how.index % SLOTS < MAX_DIMS

    def free(self, slot: int, name: str) -> int:
        """A number that nothing else is known to give."""
        vec = self.vec(slot)
        known = self.known(vec, slot)
        return self.new(vec, Symbol(slot), name) if known is None else known


def differs(vec: Vec) -> bool:
    """Whether a number is not the same in every graph."""
    return any(v != vec[0] for v in vec)


def even(n: int) -> bool:
    """Whether `n` is a polynomial of symbols alone."""
    return all(isinstance(x, Symbol) for atoms in poly_of(n) for x in atoms)
