"""Views: a tensor's elements in its root, accessed with as few OpenVINO nodes as possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray

from backends.openvino.translating.template import Sym, poly_of, same
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Tensor, nelements

from .nodes import Constants, Shape, Value, cut, reshape, shape_of, transpose


@dataclass(frozen=True, slots=True)
class Region:
    """Position of a tensor's units in its root, in units: elements, or blocks of a block type."""

    total: int
    """Number of units of the root."""
    shape: Shape
    """NumPy shape, in units."""
    strides: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of units of the tensor."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """True if the units are adjacent, in every graph of the template."""
        step = 1
        for n, s in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if not same(s, step) and n != 1:
                return False
            step *= n
        return True

    @property
    def whole(self) -> bool:
        """True if it is all of the root, in order."""
        return same(self.size, self.total) and self.contiguous and same(self.offset, 0)

    @property
    def symbolic(self) -> bool:
        """True if it differs from graph to graph."""
        return any(isinstance(n, Sym) for n in (self.total, self.offset, *self.shape, *self.strides))

    def indices(self) -> NDArray[np.int32]:
        """Return the unit in the root of every unit of the tensor."""
        at = np.full(self.shape, self.offset, np.int32)
        for axis, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
            step = np.arange(n, dtype=np.int32) * s
            at += step.reshape(-1, *[1] * (len(self.shape) - 1 - axis))
        return at


@dataclass(frozen=True, slots=True)
class Factors:
    """A region as one reshape, one slice and one transposition of its root."""

    extents: list[int]
    """Shape of the root."""
    starts: list[int]
    counts: list[int]
    """First unit and number of units, per axis of that shape."""
    order: list[int]
    """Axes of the slice in the order of the region's shape."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Destination of a write: along one axis of a root in some shape, or along all its units."""

    extents: tuple[int, ...]
    """Shape of the root, in units."""
    axis: int
    ids: Value
    """Places along the axis, int of shape (n,)."""


def region(t: Tensor, *, blocks: bool) -> Region:
    """Return the region of `t` in its root, in blocks or in elements.

    A root of a block type that is stored as numbers has no blocks. BackendError if the strides are not whole units.
    """
    size, blck = t.type.type_size, t.type.blck_size
    if any(x % size != 0 for x in (*t.nb[1:], t.view_offs, *t.nb[: blck == 1])):
        raise BackendError(f"{t}: strides {t.nb} at {t.view_offs} are not multiples of the type's {size} bytes")
    unit = 1 if blocks else blck
    ne0 = t.ne[0] // blck if blocks else t.ne[0]
    nb0 = t.nb[0] // size if blck == 1 else 1
    strides = (*(nb // size * unit for nb in t.nb[:0:-1]), nb0)
    total = nelements(t.root) // (blck if blocks else 1)
    return Region(total, (*t.ne[:0:-1], ne0), strides, t.view_offs // size * unit)


def read(c: Constants, x: Value, r: Region, width: int = 0) -> tuple[Value, str]:
    """Read the units of `r` from `x`, the whole root in order in any shape; return the method.

    The value has `r.shape` and, if it is not 0, `width` entries per unit; the method is `whole`, `slice` or `gather`.
    """
    tail = (width,) if width else ()
    shape = (*r.shape, *tail)
    if r.whole:
        return reshape(c, x, shape), "whole"
    if r.contiguous:
        flat = reshape(c, x, (r.total, *tail))
        return reshape(c, cut(c, flat, [r.offset], [r.offset + r.size], [0]), shape), "slice"
    f = factored(r)
    if f is None:
        flat = reshape(c, x, (r.total, *tail))
        return c.shaped(o.gather(flat, _indices(c, r), c.axis(0)), shape), "gather"
    x = reshape(c, x, (*f.extents, *tail))
    x = cut(c, x, f.starts, [s + n for s, n in zip(f.starts, f.counts, strict=True)], range(len(f.starts)))
    x = transpose(c, x, (*f.order, *range(len(f.extents), len(f.extents) + len(tail))))
    return reshape(c, x, shape), "slice"


def _indices(c: Constants, r: Region) -> Value:
    """Return `Region.indices`, computed in the model if the region differs between graphs."""
    if not r.symbolic:
        return o.constant(r.indices())
    at: Value = c.i64(r.offset)
    for axis, (n, s) in enumerate(zip(r.shape, r.strides, strict=True)):
        if n != 1:
            place = o.multiply(count(c, 0, n), c.i64(s))
            at = o.add(at, o.unsqueeze(place, c.i64(*range(1, len(r.shape) - axis))) if axis < 3 else place)
    missing = [i for i, n in enumerate(r.shape) if n != 1][:1]
    if missing and missing[0] > 0:
        at = o.unsqueeze(at, c.i64(*range(missing[0])))
    return c.shaped(at, r.shape)


def count(c: Constants, first: int, n: int) -> Value:
    """Return `n` integers from `first` on."""
    if not isinstance(first, Sym) and not isinstance(n, Sym):
        return c.i64(*range(first, first + n))
    return c.shaped(o.range(c.axis(first), c.axis(first + n), c.axis(1), "i64"), (n,))


def factored(r: Region) -> Factors | None:
    """Factor `r` into one reshape, one slice and one transposition of its root, or None.

    If the region differs from graph to graph, comparisons require the same outcome for later graphs
    (`sym.assumptions`).
    """
    axes = sorted((a for a, n in enumerate(r.shape) if n != 1), key=lambda a: -int(r.strides[a]))
    steps = [r.strides[a] for a in axes]
    if not axes or not all(a > b for a, b in pairwise([*steps, 0])):
        return None
    counts = [r.shape[a] for a in axes]
    if not same(steps[-1], 1):
        steps.append(1)
        counts.append(1)
    if not all(a % b == 0 for a, b in pairwise([r.total, *steps])):
        return None
    extents = [a // b for a, b in pairwise([r.total, *steps])]
    starts, rest = [], r.offset
    for step in steps:
        starts.append(rest // step)
        rest %= step
    if not all(s + n <= e for s, n, e in zip(starts, counts, extents, strict=True)):
        return None
    rank = {a: i for i, a in enumerate(axes)}
    order = [rank[a] for a in sorted(axes)]
    return Factors(extents, starts, counts, [*order, *range(len(axes), len(steps))])


def place(c: Constants, r: Region) -> tuple[Rows, list[int], str]:
    """Return the rows of `r`, if possible along one axis, so that a write affects nothing else.

    Also returns the order of the region's axes for new units, and the method of writing: rows or scatter.
    """
    if r.contiguous:
        unit = math.gcd(*poly_of(r.size).values(), int(r.total), int(r.offset))
        if not isinstance(r.total, Sym) and r.offset % unit == 0:
            ids = count(c, r.offset // unit, r.size // unit)
            return Rows((r.total // unit, unit), 0, ids), [], "rows"
    f = None if r.contiguous else factored(r)
    if f is not None:
        part = [i for i, (n, e) in enumerate(zip(f.counts, f.extents, strict=True)) if not same(n, e)]
        if len(part) == 1:
            ids = count(c, f.starts[part[0]], f.counts[part[0]])
            return Rows(tuple(f.extents), part[0], ids), f.order, "rows"
    return Rows((r.total,), 0, reshape(c, _indices(c, r), (r.size,))), [], "scatter"


def arranged(c: Constants, new: Value, r: Region, where: Rows, order: list[int], width: int = 0) -> Value:
    """Arrange `new` (the units of `r`, in order) as `where` requires."""
    tail = (width,) if width else ()
    if not order:
        rest = where.extents[1:]
        return reshape(c, new, (r.size // math.prod(rest), *rest, *tail))
    extents = [n for n in r.shape if n != 1]
    extents += [1] * (len(order) - len(extents))
    new = reshape(c, new, (*extents, *tail))
    back = [order.index(i) for i in range(len(order))]
    return transpose(c, new, (*back, *range(len(order), len(order) + len(tail))))


def scatter(c: Constants, x: Value, where: Rows, rows: Value, width: int = 0) -> Value:
    """Write `rows` to their places in the root `x`; the result has the shape of `x`."""
    shape = shape_of(c, x)
    table = reshape(c, x, (*where.extents, *((width,) if width else ())))
    done = c.shaped(o.scatter_update(table, where.ids, rows, c.axis(where.axis)), shape_of(c, table))
    return reshape(c, done, shape)


def write(c: Constants, x: Value | None, r: Region, new: Value, width: int = 0) -> tuple[Value, str]:
    """Replace the units of `r` in the root `x` by `new`; return the method too.

    The method is `whole`, `rows` or `scatter`. `x` is None if nothing of it is left; `new` is in order, of any shape,
    with `width` entries per unit.
    """
    if r.whole:
        return new, "whole"
    if x is None:
        msg = "a part of a tensor is written before the tensor is initialised"
        raise BackendError(msg)
    where, order, how = place(c, r)
    return scatter(c, x, where, arranged(c, new, r, where, order, width), width), how
