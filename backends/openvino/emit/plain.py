"""LOG SIN COS ADD1 LEAKY_RELU FILL ARANGE PAD SUM CUMSUM ARGMAX DIAG_MASK_* GROUP_NORM: what few models use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino.opset15 as o
from openvino import Type

from backends.openvino.nodes import Constants, Value, cut, reshape, shape_of
from backends.openvino.sources import src
from backends.openvino.walk import Walk
from conformance.backend.translating.plan import Emitter
from conformance.ggml.tensor import Tensor


def _map(make: Callable[[Value], Value]) -> Emitter:
    def emit(e: Walk, node: Tensor) -> None:
        e.store(node, make(e.number(src(node, 0))))

    return emit


def _add1(e: Walk, node: Tensor) -> None:
    e.store(node, o.add(e.number(src(node, 0)), e.number(src(node, 1))))


def _leaky_relu(e: Walk, node: Tensor) -> None:
    c, x = e.c, e.number(src(node, 0))
    below = o.multiply(o.minimum(x, c.f32(0.0)), c.f32(node.param_f32(0)))
    e.store(node, o.add(o.maximum(x, c.f32(0.0)), below))


def _fill(e: Walk, node: Tensor) -> None:
    e.store(node, e.c.shaped(o.broadcast(e.c.f32(node.param_f32(0)), e.c.i64(*node.shape)), node.shape))


def _arange(e: Walk, node: Tensor) -> None:
    """Each element from its number, as ggml computes it, and not from the one before."""
    c, n = e.c, node.ne[0]
    places = o.convert(o.range(c.axis(0), c.axis(n), c.axis(1), "i64"), Type.f32)
    x = o.add(o.multiply(places, c.f32(node.param_f32(2))), c.f32(node.param_f32(0)))
    e.store(node, reshape(c, c.shaped(x, (n,)), node.shape))


def _pad(e: Walk, node: Tensor) -> None:
    p, c = node.op_params, e.c
    x = e.number(src(node, 0))
    before, after = c.i64(*p[6::-2]), c.i64(*p[7::-2])
    if not p[8]:
        e.store(node, c.shaped(o.pad(x, before, after, "constant", c.f32(0.0)), node.shape), exact=True)
        return
    for axis, (left, right) in enumerate(zip(p[6::-2], p[7::-2], strict=True)):
        n = shape_of(c, x)[axis]
        sides = [cut(c, x, [n - left], [n], [axis])] if left else []
        sides += [x, *([cut(c, x, [0], [right], [axis])] if right else [])]
        shape = [*shape_of(c, x)]
        shape[axis] = n + left + right
        x = c.shaped(o.concat(sides, axis), shape) if len(sides) > 1 else x
    e.store(node, x, exact=True)


def _sum(e: Walk, node: Tensor) -> None:
    e.store(node, o.reduce_sum(e.number(src(node, 0)), e.c.i64(0, 1, 2, 3), True))


def _cumsum(e: Walk, node: Tensor) -> None:
    e.store(node, e.c.shaped(o.cum_sum(e.number(src(node, 0)), e.c.axis(3)), node.shape))


def _argmax(e: Walk, node: Tensor) -> None:
    """Of equals the last, so the first of the row read backwards."""
    c, n, rows = e.c, src(node, 0).ne[0], node.ne[0]
    backwards = o.slice(e.number(src(node, 0)), c.i64(-1), c.i64(-(2**31)), c.i64(-1), c.i64(3))
    at = o.topk(backwards, c.axis(1), 3, "max", "value", index_element_type="i32", stable=True).output(1)
    last = o.convert(c.i64(n - 1), Type.i32)
    e.store(node, reshape(c, c.shaped(o.subtract(last, at), (1, 1, rows, 1)), node.shape))


def _diag_mask(value: float) -> Emitter:
    def emit(e: Walk, node: Tensor) -> None:
        c, (n0, n1) = e.c, node.ne[:2]
        column = o.range(c.axis(0), c.axis(n0), c.axis(1), "i64")
        row = o.unsqueeze(o.range(c.axis(0), c.axis(n1), c.axis(1), "i64"), c.i64(1))
        above = o.greater(column, o.add(row, c.i64(node.param_i32(0))))
        x = o.select(above, c.f32(value), e.number(src(node, 0)))
        e.store(node, c.shaped(x, node.shape), exact=True)

    return emit


def _group_norm(e: Walk, node: Tensor) -> None:
    c, groups = e.c, node.param_i32(0)
    n3, n2, n1, n0 = node.shape
    if n2 % groups:
        each = -(-n2 // groups)
        parts = [(i, min(i + each, n2)) for i in range(0, n2, each)]
        x = e.number(src(node, 0))
        normed = [_normed(c, cut(c, x, [a], [b], [1]), (1, 2, 3), node.param_f32(1)) for a, b in parts]
        e.store(node, c.shaped(o.concat(normed, 1), node.shape))
        return
    x = reshape(c, e.number(src(node, 0)), (n3, groups, n2 // groups * n1 * n0))
    e.store(node, c.shaped(_normed(c, x, (2,), node.param_f32(1)), shape_of(c, x)))


def _normed(c: Constants, x: Value, axes: tuple[int, ...], eps: float) -> Value:
    x = o.subtract(x, o.reduce_mean(x, c.i64(*axes), True))
    return o.divide(x, o.sqrt(o.add(o.reduce_mean(o.multiply(x, x), c.i64(*axes), True), c.f32(eps))))


EMITTERS: dict[str, Emitter] = {
    "LOG": _map(o.log),
    "SIN": _map(o.sin),
    "COS": _map(o.cos),
    "ADD1": _add1,
    "LEAKY_RELU": _leaky_relu,
    "FILL": _fill,
    "ARANGE": _arange,
    "PAD": _pad,
    "SUM": _sum,
    "CUMSUM": _cumsum,
    "ARGMAX": _argmax,
    "DIAG_MASK_INF": _diag_mask(-np.inf),
    "DIAG_MASK_ZERO": _diag_mask(0.0),
    "GROUP_NORM": _group_norm,
}
