"""What the numbers of a graph are made of: which are free, and how the others follow from them.

Several graphs of one template are looked at together. Values that differ, and every extent above 1 of an input, become
symbols. Layouts of ops follow by running the op's rule on symbols. What an op leaves to its caller (`ne`, `nb` and
offset of a view, `ne` of a reshape …) is looked for among the numbers known already: the parent's strides and extents,
products of them, symbols, symbols times or plus a constant; only then it becomes a symbol of its own.

A wrong guess costs generality, never correctness: every number is checked against every graph, here and when a later
graph is bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import MAX_DIMS, Dims, Tensor

from .learn import Learner
from .sym import Expr, Op, Sym, Symbol, assumptions, expr_of, same
from .symbols import SLOTS, Facts, Symbols, Vec, differs, even

ROUNDS = 16
"""How often facts that the rules assert of inputs are put in before what is left is taken as it is."""


def factor(
    tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], inputs: Collection[int], offsets: dict[int, int]
) -> Symbols:
    """Give every number of `tensors` its expression, in place.

    Args:
        tensors: copies of the first graph's, each after its `src` and `view_src`.
        rows: `lift.values` of every graph.
        inputs: places of the leaves that are filled for each run.
        offsets: place of each VIEW -> slot of its offset from `src[0]`.
    """
    facts = Facts()
    plain = [(t.ne, t.nb, t.view_offs) for t in tensors]
    for _ in range(ROUNDS):
        before = facts.count()
        done = Factoring(tensors, rows, inputs, offsets, facts)
        done.run()
        if facts.count() == before and not done.learner.merge():
            break
        for t, (ne, nb, offs) in zip(tensors, plain, strict=True):
            t.ne, t.nb, t.view_offs = ne, nb, offs
    else:
        done = Factoring(tensors, rows, inputs, offsets, facts)
        done.run()
    return done.symbols


class Factoring:
    """One round over all tensors."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[Sequence[int]],
        inputs: Collection[int],
        offsets: dict[int, int],
        facts: Facts,
    ) -> None:
        self._tensors, self._inputs, self._offsets = tensors, inputs, offsets
        self._index = {t: i for i, t in enumerate(tensors)}
        self.symbols = Symbols(rows, len(tensors), facts)
        self.learner = Learner(self.symbols, self._index)

    def run(self) -> None:
        """Inputs first, so that whatever follows can be found among their symbols."""
        for i in sorted(self._inputs):
            self._tensors[i].ne = _dims(self.symbols.input(SLOTS * i + d) for d in range(MAX_DIMS))
        for i, t in enumerate(self._tensors):
            self._lay_out(i, t)

    def _lay_out(self, i: int, t: Tensor) -> None:
        a = next((s for s in t.src if s is not None), t.view_src)
        if t.op == "VIEW" or (t.op == "NONE" and t.view_src is not None):
            if a is not None:
                self._view(i, t, a)
        elif t.op in {"RESHAPE", "CONT"} and a is not None:
            t.ne = self._split(i, a)
        elif t.op == "REPEAT":
            t.ne = _dims(self.symbols.free(SLOTS * i + d, f"tensors[{i}].ne[{d}]") for d in range(MAX_DIMS))
        elif t.op == "TOP_K" or (t.op == "NONE" and i not in self._inputs):
            t.ne = _dims(self._moving(i, d) for d in range(MAX_DIMS))
        if t.op != "VIEW" and t.op in DECLARATIONS:
            self._derive(t)
        self._settle(i, t)

    def _moving(self, i: int, d: int) -> int:
        slot = SLOTS * i + d
        return (
            self.symbols.free(slot, f"tensors[{i}].ne[{d}]")
            if differs(self.symbols.vec(slot))
            else self.symbols.rows[0][slot]
        )

    def _derive(self, t: Tensor) -> None:
        """The layout that the op's rule gives; and what it asserts on the way."""
        rule = DECLARATIONS[t.op]
        with assumptions() as found:
            try:
                _, t.ne, t.nb, _, t.view_offs = rule.layout(t)
                if rule.runs is not None:
                    rule.runs(t)
            except GraphError:
                return  # no legal node: its numbers stay what they are, and are factored one by one
        for a in found:
            self.learner.learn(t, a)

    def _settle(self, i: int, t: Tensor) -> None:
        """Replace every number that its expression does not give in every graph."""
        found = [*t.ne, *t.nb, t.view_offs]
        for k, n in enumerate(found):
            if not self.symbols.fits(n, self.symbols.vec(SLOTS * i + k)):
                found[k] = self.symbols.free(SLOTS * i + k, f"tensors[{i}].{_FIELDS[k]}")
        t.ne, t.nb, t.view_offs = _dims(found[:4]), _dims(found[4:8]), found[8]

    def _split(self, i: int, a: Tensor) -> Dims:
        """`ne` of a reshape of `a`: dimensions that split or join those of `a` between common boundaries."""
        vecs = [self.symbols.vec(SLOTS * i + d) for d in range(MAX_DIMS)]
        bounds: list[int] = []
        for n in a.ne:
            bounds.append(n * bounds[-1] if bounds else n)
        out, begin, before, ahead = [v[0] for v in vecs], 0, 1, (1,) * len(self.symbols.rows)
        if any(0 in v for v in vecs):
            return _dims(out)
        for d in range(MAX_DIMS):
            ahead = _times(ahead, vecs[d])
            bound = next((b for b in bounds if self.symbols.fits(b, ahead)), None)
            if bound is not None:
                self._segment(i, range(begin, d + 1), vecs, bound // before, out)
                begin, before = d + 1, bound
        return _dims(out)

    def _segment(self, i: int, ds: Iterable[int], vecs: Sequence[Vec], product: int, out: list[int]) -> None:
        """Extents `ds` that multiply to `product`."""
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
        ne, nb = (
            [self.symbols.vec(SLOTS * i + d) for d in range(4)],
            [self.symbols.vec(SLOTS * i + 4 + d) for d in range(4)],
        )
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
        """A stride of a view: one of its parent's, or a constant inside a constant one."""
        for n in a.nb:
            if self.symbols.fits(n, vec):
                return n
        return None if differs(vec) or not any(not isinstance(n, Sym) and n > vec[0] for n in a.nb) else vec[0]

    def _extent(
        self, i: int, d: int, ne: Sequence[Vec], nb: Sequence[Vec], steps: Sequence[int | None], a: Tensor
    ) -> int:
        """An extent of a view: its parent's at the same stride, what fills the next stride or the parent, a free one.

        The parent's only where the next stride is the parent's, too: a cache may be looked at transposed.
        """
        slot, step = SLOTS * i + d, steps[d]
        hint = self.symbols.facts.hints.get(slot)
        if hint is not None:
            n = sum(math.prod(map(self.symbols.input, slots)) * times for times, slots in hint)
            if self.symbols.fits(n, ne[d]):
                return n
        if step:
            outer = [nb[j][0] for j in range(MAX_DIMS) if nb[j][0] > step and max(ne[j]) > 1]
            for n, s in zip(a.ne, a.nb, strict=True):
                after = min((x for x in a.nb if x > s), default=0)
                if same(s, step) and self.symbols.fits(n, ne[d]) and (not outer or min(outer) == after):
                    return n
            full = _times(nb[d], ne[d])
            ends = [s for j, s in enumerate(steps) if s is not None and max(ne[j]) > 1]
            for end in (*ends, max(s * m for s, m in zip(a.nb, a.ne, strict=True))):
                n = end // step
                if self.symbols.fits(end, full) and even(n) and self.symbols.fits(n, ne[d]):
                    return n
        return self.symbols.free(slot, f"tensors[{i}].ne[{d}]")

    def _stride(self, i: int, d: int, vec: Vec, steps: Sequence[int | None], extents: Sequence[int], a: Tensor) -> int:
        """A stride of a view that is none of its parent's: the end of another dimension, or a multiple of a stride."""
        inner = [s * n for s, n in zip(steps[:d], extents, strict=False) if s is not None]
        for n in (*reversed(inner), *(s * m for s, m in zip(a.nb, a.ne, strict=True)), *a.nb):
            if self.symbols.fits(n, vec):
                return n
        if not differs(vec):
            return vec[0]
        found = self._multiple(vec, a, SLOTS * i + 4 + d, f"tensors[{i}].nb[{d}]")
        return self.symbols.free(SLOTS * i + 4 + d, f"tensors[{i}].nb[{d}]") if found is None else found

    def _offset(self, i: int, a: Tensor) -> int:
        """Where a view starts in its parent: a number of the parent's strides, and the same rest in every graph."""
        slot = self._offsets[i]
        vec = self.symbols.vec(slot)
        name = f"tensors[{i}].view_offs"
        if not differs(vec):
            total, rest = 0, vec[0]
            for n in sorted(set(a.nb), reverse=True):
                if n:
                    total, rest = total + rest // int(n) * n, rest % int(n)
            return total + rest if self.symbols.fits(total + rest, vec) else vec[0]
        found = self._multiple(vec, a, slot, name)
        if found is not None:
            return found
        return self.symbols.new(vec, Symbol(slot), name)

    def _multiple(self, vec: Vec, a: Tensor, slot: int, name: str) -> int | None:
        """`vec` as `k * nb + c`: the longest of `a`'s strides for which `c` is the same in every graph."""
        where = SLOTS * self._index[a] + 4
        for k in sorted(range(MAX_DIMS), key=lambda k: -int(a.nb[k])):
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
