"""SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET: scans over tokens.

One token is a plain graph; several are OpenVINO's Loop. The result is the outputs, then the new states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import openvino.opset15 as o
from openvino import Model, Node, Type

from backends.openvino.emit.elementwise import softplus
from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Constants, Shape, Value, cut, reshape, shape_of, tile
from backends.openvino.translating.plan import Emitter
from backends.openvino.translating.template import Sym
from conformance.ggml.tensor import Tensor

Step = Callable[[Constants, Value, list[Value], list[Value]], tuple[Value, Value]]
"""`f(constants, state, token inputs, constant inputs) -> (output, new state)`."""


def scan(
    c: Constants, step: Step, state: Value, inputs: Sequence[Value], fixed: Sequence[Value], n: int, *, axis: int = 1
) -> tuple[Value, Value]:
    """Apply `step` to `n` tokens, starting from `state`; one token is a plain graph.

    A step gets a token of each of `inputs`, without `axis`, and `fixed` whole. Its nodes may be in a Loop's body, so it
    makes its own constants. Returns the outputs, with tokens along `axis` again, and the last state.
    """
    shape = shape_of(c, state)
    if n == 1:
        at = [reshape(c, x, _along(shape_of(c, x), axis)) for x in inputs]
        y, last = step(c, state, at, list(fixed))
        return o.unsqueeze(y, c.i64(axis)), c.shaped(last, shape)
    inner = Constants()
    state_in = _parameter(shape)
    slices = [_parameter(_along(shape_of(c, x), axis, 1)) for x in inputs]
    whole = [_parameter(shape_of(c, x)) for x in fixed]
    squeezed = [o.squeeze(p, inner.i64(axis)) for p in slices]
    y, state_out = step(inner, state_in, squeezed, list(whole))
    going = o.constant(np.array(True))
    out, carried = (_output(v) for v in (o.unsqueeze(y, inner.i64(axis)), state_out))
    body = Model([o.result(v) for v in (going, out, carried)], [state_in, *slices, *whole])
    loop = o.loop(c.axis(n), o.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([-1, 0])
    loop.set_merged_input(state_in, _output(state), carried)
    for p, x in zip(slices, inputs, strict=True):
        loop.set_sliced_input(p, _output(x), 0, 1, 1, -1, axis)
    for p, x in zip(whole, fixed, strict=True):
        loop.set_invariant_input(p, _output(x))
    outputs = loop.get_concatenated_slices(out, 0, 1, 1, -1, axis)
    return outputs, c.shaped(loop.get_iter_value(carried, -1), shape)


def _output(x: Value) -> Value:
    """Return `x` as an `Output`: a Loop accepts no `Node`."""
    return x.output(0) if isinstance(x, Node) else x


def _parameter(shape: Shape) -> Value:
    return o.parameter([-1 if isinstance(n, Sym) else int(n) for n in shape], Type.f32)


def _along(shape: Shape, axis: int, *n: int) -> Shape:
    return (*shape[:axis], *n, *shape[axis + 1 :])


def _dot(a: Value, b: Value) -> Value:
    """Multiply rows of matrices `a`, (…, m, k), by `b`, (…, k): (…, m)."""
    last = o.constant(np.int64(-1))
    return o.squeeze(o.matmul(a, o.unsqueeze(b, last), False, False), last)


def _outer(a: Value, b: Value) -> Value:
    """Multiply `a`, (…, m), by `b`, (…, n): (…, m, n)."""
    return o.multiply(o.unsqueeze(a, o.constant(np.int64(-1))), o.unsqueeze(b, o.constant(np.int64(-2))))


def _down(a: Value, s: Value) -> Value:
    """Compute `sum_i a_i s_ij`."""
    axis = o.constant(np.int64(-2))
    return o.squeeze(o.matmul(o.unsqueeze(a, axis), s, False, False), axis)


def _flat(c: Constants, x: Value, shape: Shape) -> Value:
    """Flatten `x`, known to have `shape`, to a vector."""
    return reshape(c, c.shaped(x, shape), (math.prod(shape),))


def _finish(e: EmitContext, node: Tensor, y: Value, y_shape: Shape, states: Sequence[Value], missing: int = 0) -> None:
    """Store outputs of `y_shape`, then the states; `missing` unwritten elements are zero."""
    c = e.c
    pieces = [_flat(c, y, y_shape), *(_flat(c, s, shape_of(c, s)) for s in states)]
    if missing:
        pieces.append(o.broadcast(c.f32(0.0), c.i64(missing)))
    size = node.ne[0] * node.ne[1]
    e.store(node, reshape(c, c.shaped(o.concat(pieces, 0), (size,)), node.shape))


def _run(
    e: EmitContext, node: Tensor, step: Step, state: Value, inputs: Sequence[Value], fixed: Sequence[Value],
    y_shape: Shape, *, count: int = 1
) -> None:  # fmt: skip
    """Store a scan over axis 1 and its last `count` states; `y_shape`: (sequences, tokens, …)."""
    c, shape, tokens = e.c, shape_of(e.c, state), y_shape[1]
    if count == 1:
        y, last = scan(c, step, state, inputs, fixed, tokens)
        _finish(e, node, y, y_shape, [last])
        return
    # every token's state leaves the loop
    width = math.prod(y_shape[2:])
    size = math.prod(shape[1:])

    def both(c: Constants, s: Value, xs: list[Value], whole: list[Value]) -> tuple[Value, Value]:
        y, s = step(c, s, xs, whole)
        rows = [o.reshape(v, c.i64(0, n), True) for v, n in ((y, width), (s, size))]
        return o.concat(rows, 1), s

    rows_out, _ = scan(c, both, state, inputs, fixed, tokens)
    rows_out = c.shaped(rows_out, (*y_shape[:2], width + size))
    n = min(count, tokens)
    states = [cut(c, rows_out, [tokens - 1 - i, width], [tokens - i, width + size], [1, 2]) for i in range(int(n))]
    missing = (count - n) * y_shape[0] * size
    _finish(e, node, cut(c, rows_out, [0], [width], [2]), (*y_shape[:2], width), states, missing)


# -- selective scan ---------------------------------------------------------------------------------------------------
def _ssm_step(c: Constants, s: Value, xs: list[Value], whole: list[Value]) -> tuple[Value, Value]:
    """Step: s (n_s, groups, heads, dim, state), x (…, dim), dt (…, heads), B, C (…, 1, state)."""
    x, dt, b, c_ = xs
    decay = o.exp(o.multiply(o.unsqueeze(dt, c.i64(-1)), whole[0]))
    step = o.multiply(x, o.unsqueeze(dt, c.i64(-1)))
    s = o.add(o.multiply(s, o.unsqueeze(decay, c.i64(-2))), _outer(step, b))
    return _dot(s, c_), s


def _ssm_scan(e: EmitContext, node: Tensor) -> None:
    """Emit with heads in groups that share B and C, so that nothing is repeated."""
    c = e.c
    s, x, dt, a, b = (src(node, i) for i in range(5))
    d_state, (dim, heads, n_t, n_s), groups = s.ne[0], x.ne, b.ne[1]
    per = heads // groups
    ids = reshape(c, e.number(src(node, 6)), (n_s,))
    rows = c.shaped(o.gather(e.number(s), ids, c.axis(0)), (n_s, heads, dim, d_state))
    state = reshape(c, rows, (n_s, groups, per, dim, d_state))
    inputs = [
        reshape(c, e.number(x), (n_s, n_t, groups, per, dim)),
        reshape(c, c.shaped(softplus(c, e.number(dt)), dt.shape), (n_s, n_t, groups, per)),
        *(reshape(c, e.number(src(node, i)), (n_s, n_t, groups, 1, d_state)) for i in (4, 5)),
    ]
    decay = reshape(c, e.number(a), (1, groups, per, a.ne[0]))
    _run(e, node, _ssm_step, state, inputs, [decay], (n_s, n_t, groups, per, dim), count=node.params.K)


# -- linear attention -------------------------------------------------------------------------------------------------
def _sequences(e: EmitContext, node: Tensor, which: Sequence[int], last: int) -> tuple[list[Value], Value, Shape]:
    """Return src `which` as (n_seqs, tokens, H, S), the state as (n_seqs, H, S, S), the shape."""
    size, heads, tokens, _ = src(node, which[0]).ne
    n_seqs = src(node, last).ne[1]
    shape = (n_seqs, tokens // n_seqs, heads, size)
    xs = [reshape(e.c, e.number(src(node, i)), shape) for i in which]
    return xs, reshape(e.c, e.number(src(node, last)), (n_seqs, heads, size, size)), shape


def _wkv6_step(c: Constants, s: Value, xs: list[Value], whole: list[Value]) -> tuple[Value, Value]:
    k, v, r, decay = xs
    kv = _outer(k, v)
    y = _down(r, o.add(o.multiply(o.unsqueeze(whole[0], c.i64(-1)), kv), s))
    return y, o.add(o.multiply(s, o.unsqueeze(decay, c.i64(-1))), kv)


def _wkv6(e: EmitContext, node: Tensor) -> None:
    xs, state, shape = _sequences(e, node, (0, 1, 2, 4), 5)
    first = reshape(e.c, e.number(src(node, 3)), (1, *shape[2:]))
    _run(e, node, _wkv6_step, state, xs, [first], shape)


def _wkv7_step(c: Constants, s: Value, xs: list[Value], _: list[Value]) -> tuple[Value, Value]:
    r, w, k, v, a, b = xs
    removed = _outer(_dot(s, a), b)
    s = o.add(o.add(o.multiply(s, o.unsqueeze(w, c.i64(-2))), _outer(v, k)), removed)
    return _dot(s, r), s


def _wkv7(e: EmitContext, node: Tensor) -> None:
    xs, state, shape = _sequences(e, node, (0, 1, 2, 3, 4, 5), 6)
    _run(e, node, _wkv7_step, state, xs, [], shape)


def _gla_step(c: Constants, s: Value, xs: list[Value], _: list[Value]) -> tuple[Value, Value]:
    k, v, q, g = xs
    s = o.add(o.multiply(s, o.unsqueeze(g, c.i64(-1))), _outer(k, v))
    return _down(q, s), s


def _gated_linear_attn(e: EmitContext, node: Tensor) -> None:
    (k, v, q, g), state, shape = _sequences(e, node, (0, 1, 2, 3), 4)
    q = e.c.shaped(o.multiply(q, e.c.f32(node.params.scale)), shape)
    _run(e, node, _gla_step, state, [k, v, q, g], [], shape)


def _delta_step(c: Constants, s: Value, xs: list[Value], _: list[Value]) -> tuple[Value, Value]:
    """Step: s (n_s, H, j, i); q, k, v (n_s, H, S); decay (n_s, H, 1 or S), beta (n_s, H, 1)."""
    q, k, v, decay, beta = xs
    s = o.multiply(s, o.unsqueeze(decay, c.i64(-2)))
    delta = o.multiply(o.subtract(v, _dot(s, k)), beta)
    s = o.add(s, _outer(delta, k))
    return _dot(s, q), s


def _gated_delta_net(e: EmitContext, node: Tensor) -> None:
    c, v = e.c, src(node, 2)
    size, heads, n_t, n_s = v.ne
    q, k = (_spread(e, src(node, i), v) for i in (0, 1))
    q = c.shaped(o.multiply(q, c.f32(1.0 / math.sqrt(c.fixed(size)))), v.shape)
    g = src(node, 3)
    decay = c.shaped(o.exp(e.number(g)), g.shape)
    inputs = [q, k, e.number(v), decay, e.number(src(node, 4))]
    state, shape = e.number(src(node, 5)), (n_s, n_t, heads, size)
    _run(e, node, _delta_step, state, inputs, [], shape, count=node.params.K)


def _spread(e: EmitContext, x: Tensor, v: Tensor) -> Value:
    """Repeat heads (cyclically) and sequences (each for its neighbours) to those of `v`."""
    c, value = e.c, e.number(x)
    _, heads, n_t, n_s = v.ne
    if x.ne[3] != n_s:
        each = n_s // x.ne[3]
        rows = reshape(c, value, (x.ne[3], 1, n_t, x.ne[1] * x.ne[0]))
        value = reshape(c, tile(c, rows, (x.ne[3], each, n_t, x.ne[1] * x.ne[0])), (n_s, n_t, x.ne[1], x.ne[0]))
    return tile(c, value, (n_s, n_t, heads, x.ne[0]))


EMITTERS: dict[str, Emitter] = {
    "SSM_SCAN": _ssm_scan,
    "RWKV_WKV6": _wkv6,
    "RWKV_WKV7": _wkv7,
    "GATED_LINEAR_ATTN": _gated_linear_attn,
    "GATED_DELTA_NET": _gated_delta_net,
}
