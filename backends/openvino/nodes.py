"""Small pieces of OpenVINO graph that several emitters share; shapes are NumPy's, constants are made once per model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import openvino.opset15 as o
from openvino import Node, Type

from conformance.backend.translating.sym import Expr, Sym, expr_of, same
from conformance.ggml.errors import BackendError

Value: TypeAlias = Any
"""A `Node` of one output, or an `Output` of one of several: openvino ships no type information."""
Shape = tuple[int, ...]

TYPES: dict[str, Type] = {
    "<f4": Type.f32, "<f2": Type.f16, "<i4": Type.i32, "|u1": Type.u8, "|i1": Type.i8,
}  # fmt: skip
"""dtype of a part -> OpenVINO's element type."""


class Constants:
    """What a model is made of besides its nodes: scalars and index vectors, each made once, and what shapes are known.

    An int may be a `Sym`: then its expression becomes a parameter, which the host computes at each run. What cannot
    depend on a symbol is frozen by a comparison, which holds later graphs to its outcome (`sym.assumptions`).
    """

    def __init__(self) -> None:
        self.symbols: dict[Expr, Node] = {}
        """Expression -> the parameter of shape [1] that takes its value."""
        self._floats: dict[float | str, Node] = {}
        self._ints: dict[tuple[int | Expr, ...] | int, Node] = {}
        self._shapes: dict[int, tuple[Value, Shape]] = {}
        self._sources: dict[int, Value] = {}

    def f32(self, x: float) -> Node:
        """A float32 scalar."""
        key = x if x == x and x != 0 else repr(x)  # noqa: PLR0124  # NaN equals nothing, and -0.0 equals 0.0
        if key not in self._floats:
            self._floats[key] = o.constant(np.float32(x))
        return self._floats[key]

    def i64(self, *x: int) -> Node:
        """A vector of int64."""
        key = tuple(n.expr if isinstance(n, Sym) else n for n in x)
        if key not in self._ints:
            self._ints[key] = self._vector(x)
        return self._ints[key]

    def _vector(self, x: Sequence[int]) -> Node:
        pieces: list[Node] = []
        for symbolic, run in groupby(x, key=lambda n: isinstance(n, Sym)):
            if symbolic:
                pieces += [self._symbol(n) for n in run]
            else:
                pieces.append(o.constant(np.array(list(run), np.int64)))
        return pieces[0] if len(pieces) == 1 else o.concat(pieces, 0) if pieces else o.constant(np.empty(0, np.int64))

    def _symbol(self, n: int) -> Node:
        expr = expr_of(n)
        if expr not in self.symbols:
            self.symbols[expr] = o.parameter([1], Type.i64)
        return self.symbols[expr]

    def symbol(self, n: int) -> Node:
        """`n` as a parameter of shape [1], which the compiler cannot see through: also where it is a plain number."""
        return self._symbol(n)

    def axis(self, x: int) -> Node:
        """An int64 scalar."""
        if isinstance(x, Sym):
            return o.squeeze(self._symbol(x), self.i64(0))
        if x not in self._ints:
            self._ints[x] = o.constant(np.array(x, np.int64))
        return self._ints[x]

    def fixed(self, n: int) -> int:
        """`n` as a number that the model may be built on: a symbolic one is held to it."""
        return int(n) if n == int(n) else 0  # the comparison is what holds later graphs to it

    # -- what is known of values ----------------------------------------------------------------------------------

    def shaped(self, x: Value, shape: Sequence[int]) -> Value:
        """`x`, which is known to have `shape`."""
        self._shapes[id(x)] = (x, tuple(shape))
        return x

    def shape(self, x: Value) -> Shape | None:
        """What `shaped` said of `x`."""
        known = self._shapes.get(id(x))
        return known and known[1]

    def reshaped(self, x: Value, source: Value, shape: Sequence[int]) -> Value:
        """`x`, which is `source` in another shape."""
        self._sources[id(x)] = source
        return self.shaped(x, shape)

    def source(self, x: Value) -> Value:
        """What `x` was reshaped from; itself where it was not."""
        return self._sources.get(id(x), x)


ELEMENTWISE = frozenset({
    "Abs", "Add", "Ceiling", "Convert", "Cos", "Divide", "Elu", "Equal", "Exp", "Floor", "FloorMod", "Gelu", "Greater",
    "GreaterEqual", "Less", "Log", "Maximum", "Minimum", "Multiply", "Negative", "ReLU", "Relu", "Round", "Select",
    "Sigmoid", "Sign", "Sin", "SoftMax", "Softmax", "Sqrt", "Subtract", "Swish", "Tanh",
})  # fmt: skip
"""Node types whose shape is that of their inputs, broadcast."""


def known_shape(c: Constants, x: Value) -> Shape | None:
    """The shape, symbolic where the graph's is; None where nothing tells it."""
    known = c.shape(x)
    if known is not None:
        return known
    node, partial = (x, x.get_output_partial_shape(0)) if isinstance(x, Node) else (x.get_node(), x.get_partial_shape())
    if partial.is_static:
        return tuple(int(n) for n in partial.to_shape())
    if node.get_type_name() not in ELEMENTWISE:
        return None
    shapes = [known_shape(c, v.get_node() if v.get_node().get_output_size() == 1 else v) for v in node.input_values()]
    made = _broadcast(shapes)
    return made and c.shaped(x, made) and made


def _broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    rank = max(0 if s is None else len(s) for s in shapes)
    out: list[int] = []
    for i in range(-rank, 0):
        dims: list[int] = []
        for s in shapes:
            if s is None:
                return None
            n = s[i] if -i <= len(s) else 1
            if not same(n, 1) and not (dims and same(dims[0], n)):
                dims.append(n)
        if len(dims) > 1:  # only now compare: it holds later graphs to the outcome
            dims = [n for n in dims if n != 1]
        if len(dims) > 1:
            return None
        out.append(dims[0] if dims else 1)
    return tuple(out)


def shape_of(c: Constants, x: Value) -> Shape:
    """The shape, symbolic where the graph's is.

    Raises:
        BackendError: nothing tells it.
    """
    known = known_shape(c, x)
    if known is None:
        raise BackendError(f"the shape of {x} is not known; an emitter must say it with Constants.shaped")
    return known


def alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are one in every graph of the template."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def reshape(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """`x` in another shape; nothing where it has it already, and never one reshape after another."""
    x = c.source(x)
    have = known_shape(c, x)
    if have is not None and alike(have, shape):
        return x
    return c.reshaped(_reshaped(c, x, have or (), shape), x, shape)


def _reshaped(c: Constants, x: Value, have: Shape, shape: Sequence[int]) -> Value:
    """With a constant target where all symbolic dimensions but one stay in place: OpenVINO then knows the rest."""
    free = [i for i, n in enumerate(shape) if isinstance(n, Sym)]
    if not free:
        return o.reshape(x, c.i64(*shape), False)
    kept = {i for i in free if i < len(have) and same(have[i], shape[i])} if len(free) > 1 else set()
    if len(free) - len(kept) <= 1:
        target = [0 if i in kept else -1 if i in free else n for i, n in enumerate(shape)]
        return o.reshape(x, c.i64(*target), bool(kept))
    x = o.reshape(x, c.i64(*shape), False)
    return o.reshape(x, c.i64(*(0 if i in free else n for i, n in enumerate(shape))), True)


def transpose(c: Constants, x: Value, order: Sequence[int]) -> Value:
    """`x` with its axes in another order; nothing for the identity."""
    if list(order) == sorted(order):
        return x
    shape = shape_of(c, x)
    return c.shaped(o.transpose(x, c.i64(*order)), [shape[a] for a in order])


def cut(c: Constants, x: Value, starts: Sequence[int], stops: Sequence[int], axes: Sequence[int]) -> Value:
    """The part of `x` from `starts` to `stops` along `axes`; nothing where that is all of it."""
    shape = list(shape_of(c, x))
    kept = [(a, b, d) for a, b, d in zip(starts, stops, axes, strict=True) if not (same(a, 0) and same(b, shape[d]))]
    if not kept:
        return x
    for a, b, d in kept:
        shape[d] = b - a
    first, last, along = zip(*kept, strict=True)
    return c.shaped(o.slice(x, c.i64(*first), c.i64(*last), c.i64(*[1] * len(kept)), c.i64(*along)), shape)


def tile(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """`x` repeated whole to `shape`: what ggml does when `ggml_can_repeat`.

    Of a dynamic shape with one channel a Softmax or Tile of the CPU plugin (2026.4.1) has its channels last, and a Tile
    that is given such values repeats the wrong ones. A Reshape lays them out again.
    """
    have = shape_of(c, x)
    times = [1 if same(n, m) else n // m for n, m in zip(shape, have, strict=True)]
    if all(same(n, 1) for n in times):
        return x
    if any(isinstance(n, Sym) for n in (*shape, *have)):
        x = o.reshape(x, c.i64(*[0] * len(shape)), True)
    return c.shaped(o.tile(x, c.i64(*times)), shape)


def broadcastable(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """`x`, repeated where NumPy's broadcasting to `shape` would not do it."""
    have = shape_of(c, x)
    return tile(c, x, [n if same(n, m) or m != 1 else m for n, m in zip(shape, have, strict=True)])


def round_f16(c: Constants, x: Value) -> Value:
    """The float32 `x` rounded to F16's grid: nearest even, subnormals, overflow to infinity, NaN kept.

    By arithmetic, because the CPU plugin drops a Convert to f16 and back even in accuracy mode (2026.4.1; a Convert
    that ends at a Result stays). Veltkamp's splitting leaves 11 bits; below 2^-14 the grid is 2^-24 wide.
    """
    t = o.multiply(x, c.f32(8193.0))
    normal = o.subtract(t, o.subtract(t, x))
    tiny = o.multiply(o.round(o.multiply(x, c.f32(2.0**24)), "half_to_even"), c.f32(2.0**-24))
    size = o.abs(x)
    held = o.select(o.less(size, c.f32(2.0**-14)), tiny, normal)
    return o.select(o.less(size, c.f32(65520.0)), held, o.multiply(x, c.f32(float("inf"))))


def round_bf16(c: Constants, x: Value) -> Value:
    """The float32 `x` rounded to BF16's grid, 8 bits, by Veltkamp's splitting; infinities and NaN kept.

    By arithmetic for the same reason as `round_f16`. Near the end of the range `x` is scaled down first.
    """

    def split(y: Value) -> Value:
        t = o.multiply(y, c.f32(65537.0))
        return o.subtract(t, o.subtract(t, y))

    size = o.abs(x)
    big = o.multiply(split(o.multiply(x, c.f32(2.0**-40))), c.f32(2.0**40))
    held = o.select(o.less(size, c.f32(2.0**100)), split(x), big)
    return o.select(o.less(size, c.f32(float("inf"))), held, x)
