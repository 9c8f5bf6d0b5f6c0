"""What the rules of ops assert of inputs: which sizes belong to the model, and which agree with each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from conformance.ggml.tensor import MAX_DIMS, Tensor

from .sym import Assumption, Op, Poly, Sym, Symbol, derived, poly_of
from .symbols import SLOTS, Symbols, differs, even

Relation = tuple[int, tuple[int, int, int]]
"""An extent of an input, and the factor, extent of another and summand that give it."""


class Learner:
    """Turns assertions met in one round into facts for the next."""

    def __init__(self, symbols: Symbols, index: Mapping[Tensor, int]) -> None:
        self._symbols, self._index = symbols, index
        self._equal: list[Relation] = []
        self._bound: list[Relation] = []

    def learn(self, t: Tensor, a: Assumption) -> None:
        """Put to use that a rule found two numbers equal that expressions do not make so."""
        zero = derived(a.expr, self._symbols.bindings[0])
        if set(self._symbols.at(zero)) != {0} or a.held is (a.op == "<"):
            return
        poly = self._unmodulo(poly_of(zero))
        if a.op == "==" and t.op == "CPY" and self._hint(t):
            return
        linear = {atoms[0].index: n for atoms, n in poly.items() if len(atoms) == 1 and isinstance(atoms[0], Symbol)}
        if len(linear) != sum(map(bool, poly)) or not linear.keys() <= self._symbols.slot_of.keys():
            return
        if len(linear) == 1 and a.op == "==":
            self._freeze(t, *linear)
        elif len(linear) == 2 and (a.op == "==" or sum(linear.values()) == 0):
            self._relate(linear, poly.get((), 0), self._equal if a.op == "==" else self._bound)

    def _freeze(self, t: Tensor, k: int) -> None:
        """Symbol `k` must be what it is; if a view before `t` got it for its number alone, that was the mistake."""
        if differs(tuple(b[k] for b in self._symbols.bindings)):
            return
        guessed: dict[int, list[int]] = {}
        for slot in self._symbols.guesses.get(k, ()):
            guessed.setdefault(slot // SLOTS, []).append(slot)
        seen = [t]
        for x in seen:  # grows: breadth first, so the nearest come first
            if self._index[x] in guessed:
                self._symbols.facts.denied |= {(slot, self._symbols.slot_of[k]) for slot in guessed[self._index[x]]}
                return
            seen += [s for s in x.src if s is not None and s not in seen]
        self._symbols.facts.frozen.add(self._symbols.slot_of[k])

    def _relate(self, linear: dict[int, int], rest: int, to: list[Relation]) -> None:
        """Of two symbols with `n * x + m * y + rest == 0`, one follows from the other: the later, where both do."""
        for k, other in (sorted(linear, reverse=True), sorted(linear)):
            if linear[k] in {1, -1}:
                sign = -linear[k]
                to.append((self._symbols.slot_of[k], (sign * linear[other], self._symbols.slot_of[other], sign * rest)))
                return

    def merge(self) -> bool:
        """Take relations between inputs as facts; equalities before bounds that happen to be reached."""
        return sum(self._merge(*r) for r in self._equal) > 0 or sum(self._merge(*r) for r in self._bound) > 0

    def _merge(self, slot: int, relation: tuple[int, int, int]) -> bool:
        merged, below = self._symbols.facts.merged, relation[1]
        while below in merged:
            below = merged[below][1]
        if slot in merged or below == slot:
            return False
        merged[slot] = relation
        return True

    def _unmodulo(self, poly: Poly) -> Poly:
        """`x - y` for `x % y`, where both are the same number in every graph: a repetition of once."""
        atoms = next(iter(poly))
        if len(poly) == 1 and len(atoms) == 1 and isinstance(atoms[0], Op) and atoms[0].op == "%":
            x, y = (derived(e, self._symbols.bindings[0]) for e in (atoms[0].left, atoms[0].right))
            if self._symbols.at(x) == self._symbols.at(y):
                return poly_of(x - y)
        return poly

    def _hint(self, t: Tensor) -> bool:
        """Derive an extent of the view that `t` copies into from what it copies."""
        a, b = t.src[0], t.src[1]
        if a is None or b is None or b.op != "VIEW":
            return False
        i, total = self._index[b], math.prod(a.ne)
        for d in range(MAX_DIMS):
            slot = SLOTS * i + d
            rest = math.prod(b.ne[k] for k in range(MAX_DIMS) if k != d)
            n = total // rest if rest else 0
            if (
                isinstance(n, Sym)
                and even(n)
                and slot not in self._symbols.facts.hints
                and self._symbols.fits(n, self._symbols.vec(slot))
            ):
                atoms = {x for product in n.poly for x in product if isinstance(x, Symbol)}
                if all(x.index in self._symbols.slot_of for x in atoms):
                    self._symbols.facts.hints[slot] = tuple(
                        (times, tuple(self._symbols.slot_of[x.index] for x in product if isinstance(x, Symbol)))
                        for product, times in n.poly.items()
                    )
                    return True
        return False
