"""A step over tokens with a state between them: one step where there is one token, else OpenVINO's Loop over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import openvino.opset15 as o
from openvino import Model, Node, Type

from backends.openvino.nodes import Constants, Shape, Value, reshape, shape_of
from conformance.backend.translating.sym import Sym

Step = Callable[[Constants, Value, list[Value], list[Value]], tuple[Value, Value]]
"""`f(constants, state, inputs of one token, what no token changes) -> (output of the token, new state)`."""


def scan(
    c: Constants, step: Step, state: Value, inputs: Sequence[Value], fixed: Sequence[Value], n: int, *, axis: int = 1
) -> tuple[Value, Value]:
    """`step` from token to token.

    Args:
        c: the model's constants.
        step: what one token does; its nodes may be those of a Loop's body, so it makes its own constants from `c`.
        state: what the first token starts from.
        inputs: each with tokens along `axis`, which the step gets without it.
        fixed: what every step gets whole.
        n: tokens. One is a graph of its own.
        axis: where tokens stand in `inputs`.

    Returns:
        The outputs, with tokens along `axis` again, and the last state.
    """
    shape = shape_of(c, state)
    if n == 1:
        at = [reshape(c, x, _without(shape_of(c, x), axis)) for x in inputs]
        y, last = step(c, state, at, list(fixed))
        return o.unsqueeze(y, c.i64(axis)), c.shaped(last, shape)
    inner = Constants()
    before = _parameter(shape)
    slices = [_parameter(_one(shape_of(c, x), axis)) for x in inputs]
    whole = [_parameter(shape_of(c, x)) for x in fixed]
    squeezed = [o.squeeze(p, inner.i64(axis)) for p in slices]
    y, after = step(inner, before, squeezed, list(whole))
    going = o.constant(np.array(True))
    out, carried = (_output(v) for v in (o.unsqueeze(y, inner.i64(axis)), after))
    body = Model([o.result(v) for v in (going, out, carried)], [before, *slices, *whole])
    loop = o.loop(c.axis(n), o.constant(np.array(True)))
    loop.set_function(body)
    loop.set_special_body_ports([-1, 0])
    loop.set_merged_input(before, _output(state), carried)
    for p, x in zip(slices, inputs, strict=True):
        loop.set_sliced_input(p, _output(x), 0, 1, 1, -1, axis)
    for p, x in zip(whole, fixed, strict=True):
        loop.set_invariant_input(p, _output(x))
    outputs = loop.get_concatenated_slices(out, 0, 1, 1, -1, axis)
    return outputs, c.shaped(loop.get_iter_value(carried, -1), shape)


def _output(x: Value) -> Value:
    """`x` as an `Output`, which is all that a Loop takes."""
    return x.output(0) if isinstance(x, Node) else x


def _parameter(shape: Shape) -> Value:
    return o.parameter([-1 if isinstance(n, Sym) else int(n) for n in shape], Type.f32)


def _one(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def dot(a: Value, b: Value) -> Value:
    """Rows of matrices `a`, (…, m, k), times `b`, (…, k): (…, m)."""
    last = o.constant(np.int64(-1))
    return o.squeeze(o.matmul(a, o.unsqueeze(b, last), False, False), last)


def outer(a: Value, b: Value) -> Value:
    """`a`, (…, m), times `b`, (…, n): (…, m, n)."""
    return o.multiply(o.unsqueeze(a, o.constant(np.int64(-1))), o.unsqueeze(b, o.constant(np.int64(-2))))


def flat(c: Constants, x: Value, shape: Shape) -> Value:
    """`x`, known to have `shape`, as a vector."""
    size = 1
    for n in shape:
        size = size * n
    return reshape(c, c.shaped(x, shape), (size,))
