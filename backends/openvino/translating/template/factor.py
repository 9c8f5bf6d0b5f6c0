"""Find symbols for varying numbers of a template's graphs, and expressions for the others.

Numbers that differ between the graphs, and every extent above 1 of an input, become symbols. The layout of most ops
follows from running the op's rule on symbols. A number that an op leaves to its caller (`ne`, `nb` and offset of a
view, `ne` of a reshape …) is searched among known numbers: strides and extents of the parent, products of them,
symbols, symbols times or plus a constant; if none of them fits, it becomes a new symbol.

Example: a cache of 64 x 512 x F16, seen in two graphs with n_kv = 256 and 512. All graphs' values of one number are its
`Vec`, and an expression fits if it has these values:

    number                  Vec             expression
    mask.ne[0]              (256, 512)      s0          an input's extent: a symbol
    view.ne[1]              (256, 512)      s0          a known symbol
    view.nb[1]              (128, 128)      128         the parent's stride
    view.nb[2]              (32768, 65536)  s0 * 128    the end of the dimension before: ne[1] * nb[1]
    mul_mat.ne[0]           (256, 512)      s0          by the rule of MUL_MAT, run on symbols

Rules also assert relations, such as `k.ne[1] == mask.ne[0]`. If two symbols stand for numbers that a rule requires to
be equal, the next round makes them one (`Learner`).

A wrong guess costs generality, never correctness: every number is checked for every graph, here and when a later graph
is bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Dims, Tensor

from .sample import SLOTS
from .sym import Assumption, Expr, Op, Poly, Sym, Symbol, assumptions, derived, evaluate, expr_of, poly_of, same, symbol

ROUNDS = 16
"""Maximum number of rounds that apply new facts about inputs."""
Vec = tuple[int, ...]
"""The values of one number in all graphs."""
Product = tuple[int, tuple[int, ...]]
"""A factor and extents of inputs, by slot."""
Relation = tuple[int, tuple[int, int, int]]
"""An extent that depends on another: slot, factor, slot of the other, summand."""


@dataclass(slots=True)
class Facts:
    """Facts that a round learned about inputs for the next; slots are those of `Sample.numbers`."""

    frozen: set[int] = field(default_factory=set)
    """Extents of inputs that a rule fixes to a constant."""
    denied: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (extent of a view, extent of an input): equal numbers, but not the same extent."""
    merged: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Extents of inputs that a rule derives: slot -> factor, another's slot, summand."""
    hints: dict[int, tuple[Product, ...]] = field(default_factory=dict)
    """Extents of views that follow from the tensors copied into them, as sums of products."""

    def count(self) -> int:
        """Return the number of facts, which only grows."""
        return len(self.frozen) + len(self.denied) + len(self.merged) + len(self.hints)


class Symbols:
    """Symbols found so far, and their values in every graph, whose numbers are `rows`."""

    def __init__(self, rows: Sequence[Sequence[int]], n_tensors: int, facts: Facts) -> None:
        self.rows, self.facts = rows, facts
        self.exprs: list[Expr] = []
        """Value of each symbol as an expression of slots."""
        self.names: list[str] = []
        """Field that introduced each symbol."""
        self.bindings: list[list[int]] = [[] for _ in rows]
        """Value of every symbol, by graph."""
        self.slot_of: dict[int, int] = {}
        """Symbol of an input's extent -> its slot."""
        self.guesses: dict[int, list[int]] = {}
        """Symbol -> slots assigned to it only because they have its number in all graphs."""
        self._views = SLOTS * n_tensors
        self._inputs: dict[int, Sym] = {}

    def vec(self, slot: int) -> Vec:
        """Return the number in `slot` of every graph."""
        return tuple(row[slot] for row in self.rows)

    def at(self, n: int) -> Vec:
        """Return the value of `n` in every graph; empty if a divisor is 0 in one of them."""
        if not isinstance(n, Sym):
            return (n,) * len(self.rows)
        try:
            return tuple([evaluate(n.expr, b) for b in self.bindings])
        except ZeroDivisionError:
            return ()

    def fits(self, n: int, vec: Vec) -> bool:
        """Return True if `n` has the values `vec`."""
        return n == vec[0] and self.at(n) == vec

    def new(self, vec: Vec, expr: Expr, name: str) -> Sym:
        """Add a symbol, which `expr` computes from a graph's slots."""
        self.exprs.append(expr)
        self.names.append(name)
        for b, v in zip(self.bindings, vec, strict=True):
            b.append(v)
        return symbol(len(self.exprs) - 1, vec[0])

    def input(self, slot: int) -> int:
        """Return the extent of an input: a symbol if it is above 1, unless a fact fixes it."""
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
            self._inputs[slot] = self.new(vec, Symbol(slot), name_of(slot))
            self.slot_of[len(self.exprs) - 1] = slot
        return self._inputs[slot]

    def known(self, vec: Vec, slot: int, *, exact: bool = False) -> int | None:
        """Express `vec` as a constant, a multiple of a symbol or (extents) a symbol plus a constant.

        None if it is neither. A position plus a constant is not tried: from 255 to 256 tokens n_kv grows by 256, and so
        does the offset of a row of 256 elements.
        """
        symbols = [tuple(b[k] for b in self.bindings) for k in range(len(self.exprs))]
        if not differs(vec):
            return self._constant(vec, slot, symbols)
        for k, s in enumerate(symbols):
            if s == vec:
                return symbol(k, s[0])
        return None if exact else self._linear(vec, slot, symbols)

    def _constant(self, vec: Vec, slot: int, symbols: Sequence[Vec]) -> int:
        for k, s in enumerate(symbols if vec[0] > 1 else ()):
            if s == vec and (slot, self.slot_of.get(k, -1)) not in self.facts.denied:
                self.guesses.setdefault(k, []).append(slot)
                return symbol(k, vec[0])
        return vec[0]

    def _linear(self, vec: Vec, slot: int, symbols: Sequence[Vec]) -> int | None:
        for k, s in enumerate(symbols):
            if differs(s) and all(x > 0 and v % x == 0 for v, x in zip(vec, s, strict=True)) and vec[0] > 0:
                times = {v // x for v, x in zip(vec, s, strict=True)}
                if len(times) == 1:
                    return symbol(k, s[0]) * times.pop()
        for k, s in enumerate(symbols if self._is_extent(Symbol(slot)) else ()):
            plus = {v - x for v, x in zip(vec, s, strict=True)}
            if len(plus) == 1 and self._is_extent(self.exprs[k]):
                return symbol(k, s[0]) + plus.pop()
        return None

    def _is_extent(self, expr: Expr) -> bool:
        """Return True if `expr` is the slot of an `ne`."""
        return isinstance(expr, Symbol) and expr.index < self._views and expr.index % SLOTS < 4

    def free(self, slot: int) -> int:
        """Return the number in `slot` as `known`, or as a new symbol."""
        vec = self.vec(slot)
        known = self.known(vec, slot)
        return self.new(vec, Symbol(slot), name_of(slot)) if known is None else known


def name_of(slot: int) -> str:
    """Return the name of the tensor field in `slot`."""
    return f"tensors[{slot // SLOTS}].{_FIELDS[slot % SLOTS]}"


def differs(vec: Vec) -> bool:
    """Return True if the number differs between graphs."""
    return any(v != vec[0] for v in vec)


def even(n: int) -> bool:
    """Return True if `n` is a polynomial of symbols, without `//` and `%`."""
    return all(isinstance(x, Symbol) for atoms in poly_of(n) for x in atoms)


class Learner:
    """Turns assertions of op rules into facts for the next round: fixed or equal extents."""

    def __init__(self, symbols: Symbols, index: Mapping[Tensor, int]) -> None:
        self._symbols, self._index = symbols, index
        self._equal: list[Relation] = []
        self._bound: list[Relation] = []

    def learn(self, t: Tensor, a: Assumption) -> None:
        """Learn from a rule of `t` that compared two numbers whose expressions differ."""
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
        """Fix symbol `k` to a constant, or reject it as a wrong guess for a view before `t`."""
        if differs(tuple(b[k] for b in self._symbols.bindings)):
            return
        guesses: dict[int, list[int]] = {}
        for slot in self._symbols.guesses.get(k, ()):
            guesses.setdefault(slot // SLOTS, []).append(slot)
        seen = [t]
        for x in seen:  # grows: breadth first, so the nearest come first
            if self._index[x] in guesses:
                self._symbols.facts.denied |= {(slot, self._symbols.slot_of[k]) for slot in guesses[self._index[x]]}
                return
            seen += [s for s in x.src if s is not None and s not in seen]
        self._symbols.facts.frozen.add(self._symbols.slot_of[k])

    def _relate(self, linear: dict[int, int], rest: int, to: list[Relation]) -> None:
        """Derive one of two symbols with `n * x + m * y + rest == 0`, if possible the later.

        It must have the factor 1 or -1, so that the result is an integer: n = 1 gives x = -m * y - rest, and n = -1
        gives x = m * y + rest.
        """
        for k, other in (sorted(linear, reverse=True), sorted(linear)):
            if linear[k] in {1, -1}:
                sign = -linear[k]
                to.append((self._symbols.slot_of[k], (sign * linear[other], self._symbols.slot_of[other], sign * rest)))
                return

    def merge(self) -> bool:
        """Accept relations between inputs as facts: equalities first, then bounds that are reached."""
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
        """Return `x - y` for `x % y` if both are the same number in every graph.

        A broadcast asserts `x % y == 0`, which is not linear; if it repeats once in every graph, `x == y` is a guess
        from which a relation can be learned.
        """
        atoms = next(iter(poly))
        if len(poly) == 1 and len(atoms) == 1 and isinstance(atoms[0], Op) and atoms[0].op == "%":
            x, y = (derived(e, self._symbols.bindings[0]) for e in (atoms[0].left, atoms[0].right))
            if self._symbols.at(x) == self._symbols.at(y):
                return poly_of(x - y)
        return poly

    def _hint(self, t: Tensor) -> bool:
        """Derive an extent of the view that `t` copies into from its source.

        CPY asserts equal numbers of elements. So one extent of `b`, the view, is `nelements(a) / (the others of b)`:

            a = K of this step     (64, 8, n_tokens)
            b = view of a cache    (n_tokens * 512,)      ne[0] = 64 * 8 * n_tokens / 1

        The first such quotient without remainder that has the right values in all graphs is the hint.
        """
        a, b = t.src[0], t.src[1]
        if a is None or b is None or b.op != "VIEW":
            return False
        i, total = self._index[b], math.prod(a.ne)
        for d in range(4):
            slot = SLOTS * i + d
            rest = math.prod(b.ne[k] for k in range(4) if k != d)
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


def factor(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], inputs: Collection[int]) -> Symbols:
    """Replace every number of `tensors` by its expression, in place.

    Args:
        tensors: copies of the first graph's, each after its `src` and `view_src`.
        rows: `Sample.numbers` of every graph.
        inputs: indices of the leaves that are filled for each run.
    """
    factoring = Factoring(tensors, rows, inputs)
    for _ in range(ROUNDS + 1):
        if not factoring.learns():
            break
    return factoring.symbols


class Factoring:
    """Rounds over all tensors, each with the facts of the earlier ones."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[Sequence[int]],
        inputs: Collection[int],
    ) -> None:
        self._tensors, self._rows, self._inputs = tensors, rows, inputs
        views = [i for i, t in enumerate(tensors) if t.op == "VIEW"]
        self._offsets = {i: SLOTS * len(tensors) + k for k, i in enumerate(views)}
        """Index of each VIEW -> slot of its offset from `src[0]`."""
        self._index = {t: i for i, t in enumerate(tensors)}
        self._plain = [(t.ne, t.nb, t.view_offs) for t in tensors]
        self._facts = Facts()
        self.symbols = Symbols(rows, len(tensors), self._facts)

    def learns(self) -> bool:
        """Run a round, inputs first so that others can use their symbols; True if it found facts."""
        before = self._facts.count()
        self.symbols = Symbols(self._rows, len(self._tensors), self._facts)
        self._learner = Learner(self.symbols, self._index)
        for t, (ne, nb, offs) in zip(self._tensors, self._plain, strict=True):
            t.ne, t.nb, t.view_offs = ne, nb, offs
        for i in sorted(self._inputs):
            self._tensors[i].ne = _dims(self.symbols.input(SLOTS * i + d) for d in range(4))
        for i, t in enumerate(self._tensors):
            self._lay_out(i, t)
        return self._facts.count() > before or self._learner.merge()

    def _lay_out(self, i: int, t: Tensor) -> None:
        a = next((s for s in t.src if s is not None), t.view_src)
        if t.op == "VIEW" or (t.op == "NONE" and t.view_src is not None):
            if a is not None:
                self._view(i, t, a)
        elif t.op in {"RESHAPE", "CONT"} and a is not None:
            t.ne = self._split(i, a)
        elif t.op == "REPEAT":
            t.ne = _dims(self.symbols.free(SLOTS * i + d) for d in range(4))
        elif t.op == "TOP_K" or (t.op == "NONE" and i not in self._inputs):
            slots = range(SLOTS * i, SLOTS * i + 4)
            moving = [differs(self.symbols.vec(s)) for s in slots]
            t.ne = _dims(self.symbols.free(s) if m else n for s, m, n in zip(slots, moving, t.ne, strict=True))
        if t.op != "VIEW" and t.op in DECLARATIONS:
            self._derive(t)
        self._settle(i, t)

    def _derive(self, t: Tensor) -> None:
        """Set the layout by the op's rule, and learn from its assertions."""
        rule = DECLARATIONS[t.op]
        with assumptions() as asserted:
            try:
                _, t.ne, t.nb, _, t.view_offs = rule.layout(t)
                rule.check_run(t)
            except GraphError:
                return  # an invalid node: its numbers are factored one by one
        for a in asserted:
            self._learner.learn(t, a)

    def _settle(self, i: int, t: Tensor) -> None:
        """Replace every number whose expression does not fit every graph."""
        row = [*t.ne, *t.nb, t.view_offs]
        for k, n in enumerate(row):
            if not self.symbols.fits(n, self.symbols.vec(SLOTS * i + k)):
                row[k] = self.symbols.free(SLOTS * i + k)
        t.ne, t.nb, t.view_offs = _dims(row[:4]), _dims(row[4:8]), row[8]

    def _split(self, i: int, a: Tensor) -> Dims:
        """Return `ne` of a reshape of `a`: dimensions split or joined between common boundaries.

        A boundary is a product of leading extents. A reshape from (64, 8, n) to (512, n), and one to (64, 4, 2, n):

            a     |  64  |  8  |     n     |        boundaries 64, 512, 512 n
            node  |    512     |     n     |        at 512 and at 512 n: 512 = 64 * 8, n
            a     |  64  |    8    |   n   |
            node  |  64  | 4  | 2  |   n   |        at 64, 512 and 512 n: 64, two that multiply to 8, n

        Extents between two common boundaries (`_segment`) multiply to the quotient of these.
        """
        vecs = [self.symbols.vec(SLOTS * i + d) for d in range(4)]
        bounds: list[int] = []
        for n in a.ne:
            bounds.append(n * bounds[-1] if bounds else n)
        out, begin, last, product = [v[0] for v in vecs], 0, 1, (1,) * len(self.symbols.rows)
        if any(0 in v for v in vecs):
            return _dims(out)
        for d in range(4):
            product = _times(product, vecs[d])
            bound = next((b for b in bounds if self.symbols.fits(b, product)), None)
            if bound is not None:
                self._segment(i, range(begin, d + 1), vecs, bound // last, out)
                begin, last = d + 1, bound
        return _dims(out)

    def _segment(self, i: int, ds: Iterable[int], vecs: Sequence[Vec], product: int, out: list[int]) -> None:
        """Set the extents `ds` that multiply to `product`."""
        if not isinstance(product, Sym):
            return
        big = [d for d in ds if max(vecs[d]) > 1]
        for d in big:
            known = self.symbols.known(vecs[d], SLOTS * i + d) if len(big) > 1 else None
            out[d] = vecs[d][0] if known is None else known
        for d in reversed(big):
            rest = product // math.prod(out[k] for k in big if k != d)
            if even(rest) and self.symbols.fits(rest, vecs[d]):
                out[d] = rest
                return

    def _view(self, i: int, t: Tensor, a: Tensor) -> None:
        """Set the layout of view `t` of `a`: strides of `a`, extents by these, other strides.

        a      ne (512, 1024)       nb (2, 1024)          a cache of 1,024 rows
        t      ne (64, n_kv, 8)     nb (2, 1024, 128)     its first n_kv rows by heads
                       |                     |
                       known extent s0       not a stride of a: ends dimension 0, 64 * 2
        offset 5 * 1024 + 128                             of row 5, head 1: 5 * nb[1] + 128
        """
        vecs = [self.symbols.vec(SLOTS * i + k) for k in range(8)]
        ne, nb = vecs[:4], vecs[4:]
        wide = [max(v) > 1 for v in ne]
        steps: list[int | None] = [self._step(nb[d], a) if wide[d] or d == 0 else None for d in range(4)]
        extents = [ne[d][0] if not wide[d] else self._extent(i, d, ne, nb, steps, a) for d in range(4)]
        for d in range(4):
            if steps[d] is None:
                steps[d] = self._stride(i, d, nb[d], steps, extents, a)
        t.ne, t.nb = _dims(extents), _dims(s or 0 for s in steps)
        if t.op == "VIEW":
            t.view_offs = a.view_offs + self._offset(i, a)

    def _step(self, vec: Vec, a: Tensor) -> int | None:
        """Return a stride of a view: one of its parent's, or a constant inside a constant one."""
        for n in a.nb:
            if self.symbols.fits(n, vec):
                return n
        return None if differs(vec) or not any(not isinstance(n, Sym) and n > vec[0] for n in a.nb) else vec[0]

    def _extent(
        self, i: int, d: int, ne: Sequence[Vec], nb: Sequence[Vec], steps: Sequence[int | None], a: Tensor
    ) -> int:
        """Return an extent of a view: its parent's, one that fills a stride or parent, or a symbol.

        It is the parent's only if the next stride is the parent's too: a view of a cache may be transposed. It fills a
        stride if it ends where the next dimension begins: `ne[d] * nb[d] == nb[j]`, so `ne[d] = nb[j] // nb[d]`.
        """
        slot, step = SLOTS * i + d, steps[d]
        hint = self.symbols.facts.hints.get(slot)
        if hint is not None:
            n = sum(math.prod(map(self.symbols.input, slots)) * times for times, slots in hint)
            if self.symbols.fits(n, ne[d]):
                return n
        if step:
            outer = [nb[j][0] for j in range(4) if nb[j][0] > step and max(ne[j]) > 1]
            for n, s in zip(a.ne, a.nb, strict=True):
                next_stride = min((x for x in a.nb if x > s), default=0)
                if same(s, step) and self.symbols.fits(n, ne[d]) and (not outer or min(outer) == next_stride):
                    return n
            full = _times(nb[d], ne[d])
            ends = [s for j, s in enumerate(steps) if s is not None and max(ne[j]) > 1]
            for end in (*ends, max(s * m for s, m in zip(a.nb, a.ne, strict=True))):
                n = end // step
                if self.symbols.fits(end, full) and even(n) and self.symbols.fits(n, ne[d]):
                    return n
        return self.symbols.free(slot)

    def _stride(self, i: int, d: int, vec: Vec, steps: Sequence[int | None], extents: Sequence[int], a: Tensor) -> int:
        """Return a stride of a view that its parent does not have: a dimension's end, or a multiple."""
        inner = [s * n for s, n in zip(steps[:d], extents, strict=False) if s is not None]
        for n in (*reversed(inner), *(s * m for s, m in zip(a.nb, a.ne, strict=True)), *a.nb):
            if self.symbols.fits(n, vec):
                return n
        if not differs(vec):
            return vec[0]
        slot = SLOTS * i + 4 + d
        multiple = self._multiple(vec, a, slot, name_of(slot))
        return self.symbols.free(slot) if multiple is None else multiple

    def _offset(self, i: int, a: Tensor) -> int:
        """Return the offset of a view: a multiple of the parent's strides plus a constant."""
        slot = self._offsets[i]
        vec = self.symbols.vec(slot)
        name = f"tensors[{i}].view_offs"
        if not differs(vec):
            total, rest = 0, vec[0]
            for n in sorted(set(a.nb), reverse=True):
                if n:
                    total, rest = total + rest // int(n) * n, rest % int(n)
            return total + rest if self.symbols.fits(total + rest, vec) else vec[0]
        multiple = self._multiple(vec, a, slot, name)
        return self.symbols.new(vec, Symbol(slot), name) if multiple is None else multiple

    def _multiple(self, vec: Vec, a: Tensor, slot: int, name: str) -> int | None:
        """Express `vec` as `k * nb + c` of `a`'s longest stride with equal `c` in all graphs.

        The offsets (1152, 3200) of a view of a cache with rows of 1,024 bytes are `(1, 3) * 1024 + 128`: its head
        stays and its row moves. `k` is a known expression, or a new symbol `offset // nb`.
        """
        where = SLOTS * self._index[a] + 4
        for k in sorted(range(4), key=lambda k: -int(a.nb[k])):
            unit = self.symbols.at(a.nb[k])
            if 0 in unit or not unit:
                continue
            rest = {v % u for v, u in zip(vec, unit, strict=True)}
            if len(rest) == 1:
                times = tuple(v // u for v, u in zip(vec, unit, strict=True))
                n = self.symbols.known(times, slot) if differs(times) else times[0]
                if n is None:
                    by: Expr = Symbol(where + k) if isinstance(a.nb[k], Sym) else expr_of(a.nb[k])
                    n = self.symbols.new(times, Op("//", Symbol(slot), by), f"{name} / nb[{k}]")
                return n * a.nb[k] + rest.pop()
        return None


_FIELDS = (*(f"ne[{d}]" for d in range(4)), *(f"nb[{d}]" for d in range(4)), "view_offs")


def _times(a: Vec, b: Vec) -> Vec:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _dims(n: Iterable[int]) -> Dims:
    a, b, c, d = n
    return a, b, c, d
