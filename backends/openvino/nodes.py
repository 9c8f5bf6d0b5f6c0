"""Small pieces of OpenVINO graph that several emitters share; shapes are NumPy's, constants are made once per model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import openvino.opset15 as o
from openvino import Node, Output, Type

Value: TypeAlias = Any
"""A `Node` of one output, or an `Output` of one of several: openvino ships no type information."""
Shape = tuple[int, ...]

TYPES: dict[str, Type] = {
    "<f4": Type.f32, "<f2": Type.f16, "<i4": Type.i32, "|u1": Type.u8, "|i1": Type.i8,
}  # fmt: skip
"""dtype of a part -> OpenVINO's element type."""


class Constants:
    """Scalars and index vectors of one model, each made once."""

    def __init__(self) -> None:
        self._floats: dict[float | str, Node] = {}
        self._ints: dict[tuple[int, ...] | int, Node] = {}

    def f32(self, x: float) -> Node:
        """A float32 scalar."""
        key = x if x == x and x != 0 else repr(x)  # noqa: PLR0124  # NaN equals nothing, and -0.0 equals 0.0
        if key not in self._floats:
            self._floats[key] = o.constant(np.float32(x))
        return self._floats[key]

    def i64(self, *x: int) -> Node:
        """A vector of int64."""
        if x not in self._ints:
            self._ints[x] = o.constant(np.array(x, np.int64))
        return self._ints[x]

    def axis(self, x: int) -> Node:
        """An int64 scalar."""
        if x not in self._ints:
            self._ints[x] = o.constant(np.array(x, np.int64))
        return self._ints[x]


def shape_of(x: Value) -> Shape:
    """The static shape."""
    return tuple(int(n) for n in x.shape)


def reshape(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """`x` in another shape; nothing where it has it already, and never one reshape after another."""
    node = x.get_node() if isinstance(x, Output) else x
    while node.get_type_name() == "Reshape":
        x = node.input_value(0)
        node = x.get_node()
    return x if shape_of(x) == tuple(shape) else o.reshape(x, c.i64(*shape), False)


def transpose(c: Constants, x: Value, order: Sequence[int]) -> Value:
    """`x` with its axes in another order; nothing for the identity."""
    return x if list(order) == sorted(order) else o.transpose(x, c.i64(*order))


def cut(c: Constants, x: Value, starts: Sequence[int], stops: Sequence[int], axes: Sequence[int]) -> Value:
    """The part of `x` from `starts` to `stops` along `axes`; nothing where that is all of it."""
    shape = shape_of(x)
    kept = [(a, b, d) for a, b, d in zip(starts, stops, axes, strict=True) if a or b != shape[d]]
    if not kept:
        return x
    first, last, along = zip(*kept, strict=True)
    return o.slice(x, c.i64(*first), c.i64(*last), c.i64(*[1] * len(kept)), c.i64(*along))


def tile(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """`x` repeated whole to `shape`: what ggml does when `ggml_can_repeat`."""
    times = [n // m for n, m in zip(shape, shape_of(x), strict=True)]
    return x if set(times) <= {1} else o.tile(x, c.i64(*times))


def broadcastable(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """`x`, repeated where NumPy's broadcasting to `shape` would not do it."""
    have = shape_of(x)
    return tile(c, x, [m if m == 1 else n for n, m in zip(shape, have, strict=True)])


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
