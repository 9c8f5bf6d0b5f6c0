"""ROPE and ROPE_BACK in all modes, with YaRN, frequency factors and unrotated channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Type

from backends.openvino.axes import NONE, Axes, AxisContext, Rule, at, require
from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Constants, Shape, Value, cut, reshape, shape_of, tile
from backends.openvino.translating.plan import Emitter
from backends.openvino.translating.template import Sym
from conformance.ggml.ops.op import optional
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Params, Tensor

ALL = 2**31 - 1
"""End of a slice to the end, as in the plugin's pattern."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Angles of a ROPE node."""

    p: Params
    pairs: int

    def steps(self) -> list[tuple[int, int]]:
        """Return each pair's position index (0 to 3) and how often its frequency was scaled."""
        if not self.p.mode & ROPE_TYPE.MROPE:
            return [(0, i) for i in range(self.pairs)]
        pairs, since = [], [0, 0, 0, 0]
        s0, s1, s2, _ = self.p.sections
        starts = [0, s0, s0 + s1, s0 + s1 + s2]
        for i in range(self.pairs):
            sector = i % sum(self.p.sections)
            if self.p.mode == ROPE_TYPE.VISION and sector in starts:
                # an empty section shares its start with another; ggml resets the first that matches
                since[starts.index(sector)] = i
            kind = self._kind(sector, starts)
            pairs.append((kind, i - since[kind]))
        return pairs

    def _kind(self, sector: int, starts: list[int]) -> int:
        if self.p.mode == ROPE_TYPE.IMROPE:
            kind = sector % 3
            return kind if sector < 3 * self.p.sections[kind] else 3
        return 3 if sector >= starts[3] else 2 if sector >= starts[2] else 1 if sector >= starts[1] else 0

    def yarn(self, i: int) -> float:
        """Return the factor of pair `i`'s angle: ggml's `rope_yarn`, which is linear in the angle."""
        if self.p.ext_factor == 0.0:
            return float(self.p.freq_scale)
        low, high = (self._corr_dim(b) for b in (self.p.beta_fast, self.p.beta_slow))
        low, high = max(0.0, _whole(math.floor, low)), min(self.p.n_dims - 1.0, _whole(math.ceil, high))
        ramp = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
        mix = ramp * self.p.ext_factor
        return float(self.p.freq_scale * (1.0 - mix) + mix)

    def _corr_dim(self, beta: float) -> float:
        if self.p.n_ctx_orig <= 0:
            return -math.inf  # logf(0) in ggml
        turns = math.log(self.p.n_ctx_orig / (beta * 2 * math.pi))
        return float(self.p.n_dims * turns / (2 * math.log(self.p.freq_base)))

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin."""
        return float(self.p.attn_factor * (1.0 + 0.1 * math.log(1.0 / self.p.freq_scale) if self.p.ext_factor else 1.0))

    def frequencies(self) -> NDArray[np.float64]:
        """Return radians per position, per pair."""
        power = np.array([n for _, n in self.steps()])
        yarn = np.array([self.yarn(i) for i in range(self.pairs)])
        return np.asarray(self.p.freq_base ** (-2.0 * power / self.p.n_dims) * yarn, np.float64)


def _whole(rounded: Callable[[float], int], x: float) -> float:
    return rounded(x) if math.isfinite(x) else x


def _theta(e: EmitContext, node: Tensor, angles: Angles, positions: Value, factors: Value | None) -> Value:
    """Return radians per token and pair, shape (ne2, pairs)."""
    n = node.ne[2]
    if angles.p.mode & ROPE_TYPE.MROPE:
        kinds = np.array([k for k, _ in angles.steps()])
        rows = o.gather(reshape(e.c, positions, (4, n)), o.constant(kinds), e.c.axis(0))
        positions = o.transpose(rows, e.c.i64(1, 0))
    else:
        positions = reshape(e.c, positions, (n, 1))
    p, turns = o.convert(positions, Type.f32), angles.frequencies().reshape(1, -1) / (2 * np.pi)
    if factors is None:
        return _reduced(e, p, *(o.constant(x.astype(np.float32)) for x in _split(turns)))
    ff = cut(e.c, reshape(e.c, factors, shape_of(e.c, factors)[3:]), [0], [angles.pairs], [0])
    return _reduced(e, p, *_divided(e, turns, ff))


STEPS = (2.0**6, 2.0**12)
"""Turns per position are split into multiples of 1 / 64, of 1 / 4096, and a rest.

A position up to 2^18 times one of the first two is exact in float32."""


def _split(turns: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Split the fraction of `turns` into the parts of `STEPS`."""
    parts, rest = [], turns - np.round(turns)
    for scale in STEPS:
        parts.append(np.round(rest * scale) / scale)
        rest = rest - parts[-1]
    return [*parts, rest]


def _divided(e: EmitContext, turns: NDArray[np.float64], ff: Value) -> list[Value]:
    """Split `turns / ff` into the parts of `STEPS`.

    Each part times `ff` is subtracted from the rest of `turns` without rounding: `ff` is split into two halves of 12
    bits, and the two numbers are close to each other.
    """
    scaled = o.multiply(ff, e.c.f32(2.0**12 + 1))
    high = o.subtract(scaled, o.subtract(scaled, ff))
    low = o.subtract(ff, high)
    rest: Value = o.constant(turns.astype(np.float32))
    fine = o.constant((turns - turns.astype(np.float32)).astype(np.float32))
    parts = []
    for scale in STEPS:
        parts.append(o.multiply(o.round(o.multiply(o.divide(rest, ff), e.c.f32(scale))), e.c.f32(1 / scale)))
        rest = o.subtract(o.subtract(rest, o.multiply(parts[-1], high)), o.multiply(parts[-1], low))
    return [*parts, o.divide(o.add(rest, fine), ff)]


def _reduced(e: EmitContext, p: Value, coarse: Value, fine: Value, rest: Value) -> Value:
    """Return 2 pi p (coarse + fine + rest) without most whole turns, to preserve the fraction."""
    one = e.c.f32(1.0)
    turned, finer = (o.floor_mod(o.multiply(p, x), one) for x in (coarse, fine))
    return o.multiply(o.add(o.add(turned, finer), o.multiply(p, rest)), e.c.f32(2 * math.pi))


def _turns(e: EmitContext, node: Tensor, angles: Angles) -> tuple[Value, Value]:
    """Return cosine and sine, each (ne3 * ne2, pairs), shared by nodes with equal parameters."""
    frequency_factors = optional(node, 2)
    positions, factors = e.number(src(node, 1)), frequency_factors and e.number(frequency_factors)
    key = (node.op, node.op_params, angles.pairs, node.ne[3], id(positions), id(factors))
    if key not in e.shared:
        theta, m = _theta(e, node, angles, positions, factors), angles.magnitude
        halves = (f(theta) if m == 1.0 else o.multiply(f(theta), e.c.f32(m)) for f in (o.cos, o.sin))
        cos, sin = (_repeated(e.c, x, (node.ne[2], angles.pairs), node.ne[3]) for x in halves)
        e.shared[key] = (cos, o.negative(sin) if node.op == "ROPE_BACK" else sin)
        e.shared[key, "ids"] = (positions, factors)  # alive, so that no other value can have their ids
    cos, sin = e.shared[key]
    return cos, sin


def _repeated(c: Constants, table: Value, shape: Shape, n3: int) -> Value:
    """Repeat the rows of a table for each of `n3` equal batches."""
    table = c.shaped(table, shape)
    if n3 == 1:
        return table
    return reshape(c, tile(c, reshape(c, table, (1, *shape)), (n3, *shape)), (n3 * shape[0], shape[1]))


# -- the two forms that the CPU plugin fuses to one RoPE layer (docs/openvino.md) -------------------------------
def rope_neox(c: Constants, x: Value, cos: Value, sin: Value, heads: int, head_size: int, n_dims: int) -> Value:
    """Rotate channels i and i + n_dims / 2 (`GGML_ROPE_TYPE_NEOX`): one RoPE layer.

    Tokens are in the batch dimension: the plugin supports cosines broadcast over dimension 1 only, and a reshape moves
    nothing. `x` is (…, tokens, heads, head_size) of any rank; `cos` and `sin` are (tokens, 1, 1, n_dims), the second
    half equal to the first. Returns (1, tokens, heads, head_size).
    """
    rows: Value = o.reshape(x, c.i64(-1, heads, 1, head_size), False)
    parts = [rows]
    if n_dims != head_size:
        parts = o.variadic_split(rows, c.axis(3), c.i64(n_dims, head_size - n_dims)).outputs()
    halves = o.variadic_split(parts[0], c.axis(3), c.i64(n_dims // 2, n_dims // 2))
    turned = o.concat([o.multiply(halves.output(1), c.f32(-1.0)), halves.output(0)], -1)
    y: Value = o.add(o.multiply(parts[0], cos), o.multiply(turned, sin))
    if n_dims != head_size:
        y = o.concat([y, parts[1]], -1)
    return o.reshape(y, c.i64(1, -1, heads, head_size), False)


def rope_normal(
    c: Constants, x: Value, turns: Value, tokens: Value, heads: int, head_size: int, n_dims: int, count: int = -1
) -> Value:
    """Rotate channels 2i and 2i + 1 (`GGML_ROPE_TYPE_NORMAL`): one RoPE layer.

    The plugin recognises this rotation only as in GPT-J, with channels left over at the end of each head, and only
    while none of its Unsqueezes has become a Reshape. So every dimension that a shape could decide is hidden from the
    compiler: the batch of 1, and the width of the rest, which may be 0. `turns` is (tokens, n_dims): the sines of all
    pairs, then their cosines; `tokens` is i64 (1), not a constant. Shapes of `x` and of the result are those of
    `rope_neox`. `count` is the number of tokens if it is equal in every graph, so that later nodes have a known shape.
    """
    one = o.minimum(tokens, c.i64(1))
    rows = o.reshape(x, o.concat([tokens, one, c.i64(heads), c.i64(-1)], 0), False)
    table = o.variadic_split(o.reshape(turns, o.concat([tokens, one, c.i64(n_dims)], 0), False),
                             c.axis(-1), c.i64(n_dims // 2, -1))  # fmt: skip
    twice = o.constant(np.repeat(np.arange(n_dims // 2, dtype=np.int32), 2))
    sin, cos = (o.gather(o.unsqueeze(half, c.axis(2)), twice, c.axis(3)) for half in table.outputs())
    turning, rest = o.variadic_split(rows, c.axis(3), c.i64(n_dims, -1)).outputs()
    even, odd = (o.slice(turning, c.i64(i), c.i64(ALL), c.i64(2), c.i64(3)) for i in range(2))
    pairs = [o.unsqueeze(part, c.axis(-1)) for part in (o.multiply(odd, c.f32(-1.0)), even)]
    turned = o.reshape(o.concat(pairs, -1), c.i64(0, 0, 0, -1), True)
    y = o.concat([o.add(o.multiply(turning, cos), o.multiply(turned, sin)), rest], -1)
    return o.reshape(y, c.i64(1, count, heads, head_size), False)


# -- nodes ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Turning:
    """Operands of a rotation."""

    x: Value
    """Input with the elements of (tokens, heads, size), in this order."""
    cos: Value
    """Cosines of shape (tokens, pairs), like `sin`."""
    sin: Value
    tokens: int
    heads: int
    size: int
    pairs: int
    """Pairs in `size`; the rest is unchanged."""

    def table(self, e: EmitContext, name: str, make: Callable[[], Value]) -> Value:
        """Return a form's table of cos and sin, computed once for all nodes that share it."""
        key = (name, id(self.cos))
        if key not in e.shared:
            e.shared[key] = make()
        return e.shared[key]


def _neox(e: EmitContext, t: Turning) -> Value:
    """Rotate channels i and i + pairs: fuses."""
    c, wide = e.c, (t.tokens, 1, 1, 2 * t.pairs)

    def twice(x: Value) -> Value:
        return reshape(c, c.shaped(o.concat([x, x], 1), (t.tokens, 2 * t.pairs)), wide)

    cos, sin = (t.table(e, name, partial(twice, x)) for name, x in (("cos", t.cos), ("sin", t.sin)))
    return rope_neox(c, t.x, cos, sin, t.heads, t.size, 2 * t.pairs)


def _normal(e: EmitContext, t: Turning) -> Value:
    """Rotate channels 2i and 2i + 1: fuses, as the number of tokens is hidden."""
    turns = t.table(e, "turns", lambda: o.concat([t.sin, t.cos], 1))
    count = -1 if isinstance(t.tokens, Sym) else t.tokens
    return rope_normal(e.c, t.x, turns, e.c.symbol(t.tokens), t.heads, t.size, 2 * t.pairs, count)


def _normal_static(e: EmitContext, t: Turning) -> Value:
    """Rotate channels 2i and 2i + 1 in plain operations, for devices without dynamic sizes."""
    c, width = e.c, 2 * t.pairs
    each = o.constant(np.repeat(np.arange(t.pairs, dtype=np.int32), 2))

    def wide(x: Value, signs: list[float]) -> Value:
        turned = o.multiply(o.gather(x, each, c.axis(1)), o.constant(np.tile(np.array(signs, np.float32), t.pairs)))
        return reshape(c, c.shaped(turned, (t.tokens, width)), (t.tokens, 1, 1, width))

    cos = t.table(e, "wide cos", lambda: wide(t.cos, [1, 1]))
    sin = t.table(e, "wide sin", lambda: wide(t.sin, [-1, 1]))
    rows = reshape(c, c.source(t.x), (t.tokens, t.heads, 1, t.size))
    x, still = cut(c, rows, [0], [width], [3]), cut(c, rows, [width], [t.size], [3])
    partner = o.gather(x, o.constant(np.arange(width, dtype=np.int32) ^ 1), c.axis(3))
    y: Value = o.add(o.multiply(x, cos), o.multiply(partner, sin))
    y = y if width == t.size else o.concat([y, still], 3)
    return reshape(c, c.shaped(y, (t.tokens, t.heads, 1, t.size)), (1, t.tokens, t.heads, t.size))


def _rope(e: EmitContext, node: Tensor, *, static: bool = False) -> None:
    """Emit; channels before `n_offs` and after the last pair are unchanged."""
    c, x, p, size = e.c, e.number(src(node, 0)), node.params, e.c.fixed(node.ne[0])
    vision = p.mode == ROPE_TYPE.VISION
    first, angles = 0 if vision else p.n_offs, Angles(p, (size if vision else p.n_dims) // 2)
    part = cut(c, x, [first], [size], [3])
    cos, sin = _turns(e, node, angles)
    moving = part if first else c.source(x)
    t = Turning(moving, cos, sin, node.ne[2] * node.ne[3], node.ne[1], size - first, angles.pairs)
    turn = _neox if p.mode != ROPE_TYPE.NORMAL else _normal_static if static else _normal
    y = c.shaped(turn(e, t), (1, t.tokens, t.heads, t.size))
    if first:
        y = reshape(c, y, shape_of(c, part))
        y = c.shaped(o.concat([cut(c, x, [0], [first], [3]), y], 3), shape_of(c, x))
    e.store(node, y)


def _axes(w: AxisContext, t: Tensor) -> Axes:
    a, pos = src(t, 0), src(t, POSITIONS[t.op])
    axes = w.axes_of(a)
    require(axes[0] is None, t, "rotates across tokens or cells")
    own = w.axes_of(pos, at(0, axes[2]))
    require(own[0] == axes[2] and pos.ne[0] == a.ne[2], t, "one position per token expected")
    factors = optional(t, 2)
    require(factors is None or w.axes_of(factors) == NONE, t, "frequency factors that depend on the tokens")
    return axes


EMITTERS: dict[str, Emitter] = dict.fromkeys(("ROPE", "ROPE_BACK"), _rope)
STATIC: dict[str, Emitter] = dict.fromkeys(EMITTERS, partial(_rope, static=True))
"""Emitters for devices without dynamic sizes."""
AXES: dict[str, Rule] = {"ROPE": _axes}
POSITIONS = {"ROPE": 1}
"""Op -> index of its source with the tokens' positions."""
