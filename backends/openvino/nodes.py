"""Graph pieces that emitters share: constants, symbols, shapes, rounding to ggml's types.

Shapes are NumPy's, `ne` reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Node, Type

from backends.openvino.translating.template import Expr, Sym, expr_of, same
from conformance.ggml.errors import BackendError
from conformance.ggml.quants.blocks import KVALUES_FP4
from conformance.ggml.types import MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, GGMLType

from .storage import BLOCKS

Value: TypeAlias = Any
"""A `Node` with one output, or an `Output`; openvino ships no type information."""
Shape: TypeAlias = tuple[int, ...]
TYPES: dict[str, Type] = {
    "<f4": Type.f32, "<f2": Type.f16, "<i4": Type.i32, "|u1": Type.u8, "|i1": Type.i8,
}  # fmt: skip
"""dtype of a part -> OpenVINO's element type."""


class Constants:
    """Constants of a model (scalars and index vectors, made once), symbols and known shapes.

    An int may be a `Sym`: then its expression becomes a parameter, which the host computes at each run. A value that
    cannot depend on a symbol is frozen by a comparison, whose outcome later graphs must share (`sym.assumptions`).
    """

    def __init__(self) -> None:
        self.symbols: dict[Expr, Node] = {}
        """Expression -> the parameter of shape [1] with its value."""
        self._floats: dict[float | str, Node] = {}
        self._ints: dict[tuple[int | Expr, ...] | int, Node] = {}
        self._shapes: dict[int, tuple[Value, Shape]] = {}
        self._sources: dict[int, Value] = {}

    def f32(self, x: float) -> Node:
        """Return a float32 scalar."""
        key = x if x == x and x != 0 else repr(x)  # noqa: PLR0124  # NaN equals nothing, and -0.0 equals 0.0
        if key not in self._floats:
            self._floats[key] = o.constant(np.float32(x))
        return self._floats[key]

    def i64(self, *x: int) -> Node:
        """Return a vector of int64."""
        key = tuple(n.expr if isinstance(n, Sym) else n for n in x)
        if key not in self._ints:
            self._ints[key] = self._vector(x)
        return self._ints[key]

    def _vector(self, x: Sequence[int]) -> Node:
        pieces: list[Node] = []
        for symbolic, run in groupby(x, key=lambda n: isinstance(n, Sym)):
            if symbolic:
                pieces += [self.symbol(n) for n in run]
            else:
                pieces.append(o.constant(np.array(list(run), np.int64)))
        return pieces[0] if len(pieces) == 1 else o.concat(pieces, 0) if pieces else o.constant(np.empty(0, np.int64))

    def symbol(self, n: int) -> Node:
        """Return `n`, possibly a plain number, as a parameter [1] that the compiler cannot see."""
        expr = expr_of(n)
        if expr not in self.symbols:
            self.symbols[expr] = o.parameter([1], Type.i64)
        return self.symbols[expr]

    def axis(self, x: int) -> Node:
        """Return an int64 scalar."""
        if isinstance(x, Sym):
            return o.squeeze(self.symbol(x), self.i64(0))
        if x not in self._ints:
            self._ints[x] = o.constant(np.array(x, np.int64))
        return self._ints[x]

    def fixed(self, n: int) -> int:
        """Return `n` as a plain number; the model then serves only graphs with this value."""
        return int(n) if n == int(n) else 0  # the comparison requires the same outcome of later graphs

    # -- what is known of values ----------------------------------------------------------------------------------

    def shaped(self, x: Value, shape: Sequence[int]) -> Value:
        """Record that `x` has `shape`, and return it."""
        self._shapes[id(x)] = (x, tuple(shape))
        return x

    def shape(self, x: Value) -> Shape | None:
        """Return the shape that `shaped` recorded for `x`."""
        known = self._shapes.get(id(x))
        return known and known[1]

    def reshaped(self, x: Value, source: Value, shape: Sequence[int]) -> Value:
        """Record that `x` is `source` in another shape, and return it."""
        self._sources[id(x)] = source
        return self.shaped(x, shape)

    def source(self, x: Value) -> Value:
        """Return the node of which `x` is a reshape, or `x` itself."""
        return self._sources.get(id(x), x)


def origin(x: Value) -> Node:
    """Return the node with the value of `x` or of the result `x`, ignoring casts and reshapes."""
    node = x if isinstance(x, Node) else x.get_node()
    if node.get_type_name() == "Result":
        node = node.input_value(0).get_node()
    while node.get_type_name() in ("Convert", "Reshape"):
        node = node.input_value(0).get_node()
    return node


def ancestors(nodes: Iterable[Node]) -> set[str]:
    """Return the names of `nodes` and of all nodes on which they depend."""
    names: set[str] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.get_name() not in names:
            names.add(node.get_name())
            stack += [v.get_node() for v in node.input_values()]
    return names


# -- shapes -----------------------------------------------------------------------------------------------------------
ELEMENTWISE = frozenset({
    "Abs", "Add", "Ceiling", "Convert", "Cos", "Divide", "Elu", "Equal", "Exp", "Floor", "FloorMod", "Gelu", "Greater",
    "GreaterEqual", "Less", "Log", "Maximum", "Minimum", "Multiply", "Negative", "ReLU", "Relu", "Round", "Select",
    "Sigmoid", "Sign", "Sin", "SoftMax", "Softmax", "Sqrt", "Subtract", "Swish", "Tanh",
})  # fmt: skip
"""Node types whose shape is that of their inputs, broadcast."""


def known_shape(c: Constants, x: Value) -> Shape | None:
    """Return the shape, symbolic where the graph's is; None if it is unknown."""
    known = c.shape(x)
    if known is not None:
        return known
    node, partial = (x, x.get_output_partial_shape(0)) if isinstance(x, Node) else (x.get_node(), x.get_partial_shape())
    if partial.is_static:
        return tuple(int(n) for n in partial.to_shape())
    if node.get_type_name() not in ELEMENTWISE:
        return None
    shapes = [known_shape(c, v.get_node() if v.get_node().get_output_size() == 1 else v) for v in node.input_values()]
    common = _broadcast(shapes)
    return common and c.shaped(x, common) and common


def _broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    known = [s for s in shapes if s is not None]
    if len(known) < len(shapes):
        return None
    rank = max(map(len, known))
    out: list[int] = []
    for i in range(-rank, 0):
        dims: list[int] = []
        for s in known:
            n = s[i] if -i <= len(s) else 1
            if not same(n, 1) and not (dims and same(dims[0], n)):
                dims.append(n)
        if len(dims) > 1:  # compare only now: later graphs must share the outcome
            dims = [n for n in dims if n != 1]
        if len(dims) > 1:
            return None
        out.append(dims[0] if dims else 1)
    return tuple(out)


def shape_of(c: Constants, x: Value) -> Shape:
    """Return the shape, symbolic where the graph's is; BackendError if it is unknown."""
    known = known_shape(c, x)
    if known is None:
        raise BackendError(f"unknown shape of {x}; declare it with Constants.shaped")
    return known


def reshape(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """Reshape `x`; return `x` itself if it has that shape, and never two reshapes in a row."""
    x = c.source(x)
    have = known_shape(c, x)
    if have is not None and len(have) == len(shape) and all(map(same, have, shape)):
        return x
    return c.reshaped(_reshaped(c, x, have or (), shape), x, shape)


def _reshaped(c: Constants, x: Value, have: Shape, shape: Sequence[int]) -> Value:
    """Reshape with a constant target if all symbolic dimensions but one stay in place."""
    free = [i for i, n in enumerate(shape) if isinstance(n, Sym)]
    if not free:
        return o.reshape(x, c.i64(*shape), False)
    same_place = {i for i in free if i < len(have) and same(have[i], shape[i])} if len(free) > 1 else set()
    if len(free) - len(same_place) <= 1:
        target = [0 if i in same_place else -1 if i in free else n for i, n in enumerate(shape)]
        return o.reshape(x, c.i64(*target), bool(same_place))
    x = o.reshape(x, c.i64(*shape), False)
    return o.reshape(x, c.i64(*(0 if i in free else n for i, n in enumerate(shape))), True)


def transpose(c: Constants, x: Value, order: Sequence[int]) -> Value:
    """Permute the axes of `x`; return `x` itself for the identity."""
    if list(order) == sorted(order):
        return x
    shape = shape_of(c, x)
    return c.shaped(o.transpose(x, c.i64(*order)), [shape[a] for a in order])


def cut(c: Constants, x: Value, starts: Sequence[int], stops: Sequence[int], axes: Sequence[int]) -> Value:
    """Slice `x` from `starts` to `stops` along `axes`; return `x` itself if that is all of it."""
    shape = list(shape_of(c, x))
    cuts = [(a, b, d) for a, b, d in zip(starts, stops, axes, strict=True) if not (same(a, 0) and same(b, shape[d]))]
    if not cuts:
        return x
    for a, b, d in cuts:
        shape[d] = b - a
    first, last, along = zip(*cuts, strict=True)
    return c.shaped(o.slice(x, c.i64(*first), c.i64(*last), c.i64(*[1] * len(cuts)), c.i64(*along)), shape)


def tile(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """Repeat `x` to `shape`, as ggml does if `ggml_can_repeat`.

    With one channel a Softmax or Tile of the CPU plugin (2026.4.1) may have its channels last, and a Tile of such
    values repeats the wrong ones; the plugin also makes a Tile of a Concat of equal sources. With a dynamic shape a
    Reshape restores the usual layout; else a fifth dimension prevents the other one.
    """
    have = shape_of(c, x)
    times = [1 if same(n, m) else n // m for n, m in zip(shape, have, strict=True)]
    if all(same(n, 1) for n in times):
        return x
    if any(isinstance(n, Sym) for n in (*shape, *have)):
        x = o.reshape(x, c.i64(*[0] * len(shape)), True)
    elif have[1:2] == (1,):
        return c.shaped(o.squeeze(o.tile(o.unsqueeze(x, c.i64(0)), c.i64(1, *times)), c.i64(0)), shape)
    return c.shaped(o.tile(x, c.i64(*times)), shape)


def broadcastable(c: Constants, x: Value, shape: Sequence[int]) -> Value:
    """Repeat `x` if NumPy's broadcasting to `shape` does not suffice."""
    have = shape_of(c, x)
    return tile(c, x, [n if same(n, m) or m != 1 else m for n, m in zip(shape, have, strict=True)])


def windows(
    c: Constants, x: Value, kernel: Sequence[int], size: Sequence[int], strides: Sequence[int], steps: Sequence[int]
) -> Iterator[Value]:
    """Yield slices of `x`, (n, channels, …, height, width), for each element of a kernel.

    Slices are strided and have `size`. `steps`, ggml's dilation, lie between neighbours in the kernel.
    """
    axes = c.i64(*range(2, 2 + len(kernel)))
    for place in np.ndindex(*kernel):
        first = [i * step for i, step in zip(place, steps, strict=True)]
        last = [i + (n - 1) * stride + 1 for i, n, stride in zip(first, size, strides, strict=True)]
        yield o.slice(x, c.i64(*first), c.i64(*last), c.i64(*strides), axes)


# -- rounding to F16 and BF16 -----------------------------------------------------------------------------------------
def round_f16(c: Constants, x: Value) -> Value:
    """Round float32 `x` to F16: nearest even, subnormals, overflow to infinity, NaN unchanged.

    It uses arithmetic, because the CPU plugin drops a Convert to f16 and back even in accuracy mode (2026.4.1; a
    Convert that ends at a Result stays). Veltkamp's splitting leaves 11 bits; below 2^-14 the grid is 2^-24 wide.
    """
    t = o.multiply(x, c.f32(8193.0))
    normal = o.subtract(t, o.subtract(t, x))
    tiny = o.multiply(o.round(o.multiply(x, c.f32(2.0**24)), "half_to_even"), c.f32(2.0**-24))
    size = o.abs(x)
    held = o.select(o.less(size, c.f32(2.0**-14)), tiny, normal)
    return o.select(o.less(size, c.f32(65520.0)), held, o.multiply(x, c.f32(float("inf"))))


def round_bf16(c: Constants, x: Value) -> Value:
    """Round float32 `x` to BF16 (8 bits) by Veltkamp's splitting; infinities and NaN unchanged.

    It uses arithmetic for the same reason as `round_f16`. Near the end of the range `x` is scaled down first.
    """

    def split(y: Value) -> Value:
        t = o.multiply(y, c.f32(65537.0))
        return o.subtract(t, o.subtract(t, y))

    size = o.abs(x)
    big = o.multiply(split(o.multiply(x, c.f32(2.0**-40))), c.f32(2.0**40))
    held = o.select(o.less(size, c.f32(2.0**100)), split(x), big)
    return o.select(o.less(size, c.f32(float("inf"))), held, x)


# -- block types: parts to numbers, and numbers to parts as ggml's `quantize_row_*_ref` -------------------------------
Parts = dict[str, Value]
"""Parts of blocks: `d`, `m` and `e` of shape (…, 1), `q` of (…, blck_size).

`d` and `m` are float32 on F16's grid, `e` is uint8, `q` int8 or uint8."""
KVALUES = np.array(KVALUES_FP4, np.float32)
_POWERS = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
"""Factor of each MXFP4 exponent: `GGML_E8M0_TO_FP32_HALF`."""
_INVERSES = np.ldexp(np.float32(1), np.minimum(128 - np.arange(256), 127)).astype(np.float32)
_MIDDLES = (KVALUES[:7] + KVALUES[1:8]) / 2


def _firsts() -> NDArray[np.float32]:
    """Return the smallest magnitude per MXFP4 exponent from 1: `floorf(log2f(amax)) - 2 + 127`.

    A little below a power of two the float32 logarithm is already the next integer.
    """
    powers = np.ldexp(np.float32(1), np.arange(1, 250) - 125).astype(np.float32)
    below = (powers.view(np.uint32)[:, None] - np.arange(128, dtype=np.uint32)).view(np.float32)
    same = np.floor(np.log2(below.astype(np.float64)).astype(np.float32)) == np.log2(powers)[:, None]
    return np.asarray(below[np.arange(len(powers)), same.sum(axis=1) - 1], np.float32)


def numbers(c: Constants, type_: GGMLType, parts: Parts) -> Value:
    """Dequantise to float32 of shape (…, blck_size): `dequantize_row_*`."""
    b = BLOCKS[type_]
    if "e" in b.scales:
        kvalue = o.gather(o.constant(KVALUES), o.convert(parts["q"], Type.i32), c.axis(0))
        return o.multiply(kvalue, o.gather(o.constant(_POWERS), o.convert(parts["e"], Type.i32), c.axis(0)))
    q: Value = o.convert(parts["q"], Type.f32)
    if b.zero:
        q = o.subtract(q, c.f32(float(b.zero)))
    x = o.multiply(q, parts["d"])
    return o.add(x, parts["m"]) if "m" in b.scales else x


def quantized(c: Constants, type_: GGMLType, x: Value, *, read_again: bool) -> Parts:
    """Quantise the float32 `x` of shape (…, blck_size) to parts: `quantize_row_*_ref`.

    Scales and minima are rounded to F16 if the graph reads them again; if they only leave it, a Convert does that.
    """
    new = _QUANTIZE[type_](c, x)
    return {n: round_f16(c, p) if read_again and n in ("d", "m") else p for n, p in new.items()}


def _unfused(c: Constants, x: Value) -> Value:
    """Prevent a fused multiply-add of `x` with what follows: ggml rounds the product first."""
    return o.maximum(x, c.f32(-1e30))


def _inverse(c: Constants, d: Value) -> Value:
    """Compute 1 / d, and 0 where d is 0."""
    zero = c.f32(0.0)
    return o.select(o.equal(d, zero), zero, o.divide(c.f32(1.0), d))


def _divided(c: Constants, x: Value, n: float) -> Value:
    """Compute the quotient x / n, correctly rounded, for a whole n below 2^12.

    The CPU plugin multiplies by the reciprocal, which is one unit off for every second value. A scale halfway between
    two F16 values then differs from ggml's. The remainder, exact because the quotient is split in two, corrects it.
    """
    r = c.f32(float(np.float32(1.0) / np.float32(n)))
    q = o.multiply(x, r)
    t = o.multiply(q, c.f32(4097.0))
    high = o.subtract(t, o.subtract(t, q))
    rest = o.subtract(o.subtract(x, o.multiply(high, c.f32(n))), o.multiply(o.subtract(q, high), c.f32(n)))
    return o.add(q, o.multiply(rest, r))


def _extreme(c: Constants, x: Value) -> Value:
    """Return the first value of largest magnitude, with its sign."""
    size = o.abs(x)
    top = o.reduce_max(size, c.i64(-1), True)
    count = int(shape_of(c, x)[-1])
    place = o.constant(np.arange(count, dtype=np.float32))
    first = o.reduce_min(o.select(o.equal(size, top), place, c.f32(float(count))), c.i64(-1), True)
    return o.reduce_sum(o.select(o.equal(place, first), x, c.f32(0.0)), c.i64(-1), True)


def _symmetric(levels: float) -> Callable[[Constants, Value], Parts]:
    """Quantise Q4_0 and Q5_0: the value of largest magnitude is -levels; halves round up."""

    def quantize(c: Constants, x: Value) -> Parts:
        d = o.multiply(_extreme(c, x), c.f32(-1.0 / levels))  # exact: levels is a power of two
        d = o.select(o.equal(d, c.f32(0.0)), c.f32(-0.0), d)  # 0 / -levels, whose sign OpenVINO loses
        y = o.add(_unfused(c, o.multiply(x, _inverse(c, d))), c.f32(levels + 0.5))
        q = o.minimum(o.floor(y), c.f32(2 * levels - 1))
        return {"d": d, "q": o.convert(q, Type.u8)}

    return quantize


def _affine(levels: float) -> Callable[[Constants, Value], Parts]:
    """Quantise Q4_1 and Q5_1: the smallest value becomes 0, the largest `levels`."""

    def quantize(c: Constants, x: Value) -> Parts:
        low = o.reduce_min(x, c.i64(-1), True)
        d = _divided(c, o.subtract(o.reduce_max(x, c.i64(-1), True), low), levels)
        y = o.add(_unfused(c, o.multiply(o.subtract(x, low), _inverse(c, d))), c.f32(0.5))
        q = o.minimum(o.floor(y), c.f32(levels))
        return {"d": d, "m": low, "q": o.convert(q, Type.u8)}

    return quantize


def _q8_0(c: Constants, x: Value) -> Parts:
    d = _divided(c, o.reduce_max(o.abs(x), c.i64(-1), True), 127.0)
    q = o.round(o.multiply(x, _inverse(c, d)), "half_away_from_zero")
    return {"d": d, "q": o.convert(q, Type.i8)}


def _mxfp4(c: Constants, x: Value) -> Parts:
    """Quantise by the block's power of two, then to the nearest entry, the smaller of a tie."""
    top = o.reduce_max(o.abs(x), c.i64(-1), True)
    e = o.bucketize(top, o.constant(_firsts()), "i32", False)
    y = o.multiply(x, o.gather(o.constant(_INVERSES), e, c.axis(0)))
    size = o.convert(o.bucketize(o.abs(y), o.constant(_MIDDLES), "i32", True), Type.f32)
    below = o.logical_and(o.less(y, c.f32(0.0)), o.greater(size, c.f32(0.0)))
    q = o.select(below, o.add(size, c.f32(8.0)), size)
    return {"e": o.convert(e, Type.u8), "q": o.convert(q, Type.u8)}


_QUANTIZE: dict[GGMLType, Callable[[Constants, Value], Parts]] = {
    Q4_0: _symmetric(8.0),
    Q4_1: _affine(15.0),
    Q5_0: _symmetric(16.0),
    Q5_1: _affine(31.0),
    Q8_0: _q8_0,
    MXFP4: _mxfp4,
}
