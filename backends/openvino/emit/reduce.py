"""SUM_ROWS MEAN NORM RMS_NORM L2_NORM ARGSORT TOP_K SSM_CONV: ops along a row."""

from __future__ import annotations

import openvino.opset15 as o

from backends.openvino.nodes import Value, cut, reshape, shape_of, transpose
from backends.openvino.sources import src
from backends.openvino.walk import Walk
from conformance.backend.translating.plan import Emitter
from conformance.ggml.tensor import Tensor


def _sum_rows(e: Walk, node: Tensor) -> None:
    e.store(node, o.reduce_sum(e.number(src(node, 0)), e.c.i64(3), True))


def _mean(e: Walk, node: Tensor) -> None:
    e.store(node, o.reduce_mean(e.number(src(node, 0)), e.c.i64(3), True))


def _scaled(e: Walk, x: Value, eps: float) -> Value:
    """Divide x by sqrt(mean(x * x) + eps), in the form that the CPU plugin fuses to RMS."""
    power = o.reduce_mean(o.multiply(x, x), e.c.i64(3), True)
    return o.multiply(x, o.divide(e.c.f32(1.0), o.sqrt(o.add(power, e.c.f32(eps)))))


def _norm(e: Walk, node: Tensor) -> None:
    x = e.number(src(node, 0))
    e.store(node, _scaled(e, o.subtract(x, o.reduce_mean(x, e.c.i64(3), True)), node.param_f32(0)))


def _rms_norm(e: Walk, node: Tensor) -> None:
    e.store(node, _scaled(e, e.number(src(node, 0)), node.param_f32(0)))


def _l2_norm(e: Walk, node: Tensor) -> None:
    x = e.number(src(node, 0))
    length = o.sqrt(o.reduce_sum(o.multiply(x, x), e.c.i64(3), True))
    e.store(node, o.divide(x, o.maximum(length, e.c.f32(node.param_f32(0)))))


def _argsort(e: Walk, node: Tensor) -> None:
    """op_params[0]: 0 ascending, 1 descending. Equal elements keep their order; ggml leaves it open."""
    mode = "max" if node.param_i32(0) else "min"
    found = o.topk(e.number(src(node, 0)), e.c.axis(node.ne[0]), 3, mode, "value", stable=True)
    e.store(node, found.output(1))


def _top_k(e: Walk, node: Tensor) -> None:
    """The k largest, the first two swapped as ggml does to show that their order means nothing."""
    k = e.c.fixed(node.ne[0])
    x: Value = o.topk(e.number(src(node, 0)), e.c.axis(k), 3, "max", "value", stable=True).output(1)
    if k > 1:
        x = o.gather(x, e.c.i64(1, 0, *range(2, k)), e.c.axis(3))
    e.store(node, x)


def _ssm_conv(e: Walk, node: Tensor) -> None:
    """Each channel's window of d_conv inputs times the channel's own weights, per token."""
    x, w = e.number(src(node, 0)), e.number(src(node, 1))
    n_t, n_s, inner = node.ne[1], node.ne[2], node.ne[0]
    w = reshape(e.c, w, shape_of(e.c, w)[2:])
    x = reshape(e.c, x, shape_of(e.c, x)[1:])
    total: Value | None = None
    for i in range(e.c.fixed(src(node, 1).ne[0])):
        term = o.multiply(cut(e.c, x, [i], [i + n_t], [2]), cut(e.c, w, [i], [i + 1], [1]))
        total = term if total is None else o.add(total, term)
    assert total is not None  # d_conv is at least 1
    e.store(node, transpose(e.c, e.c.shaped(total, (n_s, inner, n_t)), (0, 2, 1)))


EMITTERS: dict[str, Emitter] = {
    "SUM_ROWS": _sum_rows,
    "MEAN": _mean,
    "NORM": _norm,
    "RMS_NORM": _rms_norm,
    "L2_NORM": _l2_norm,
    "ARGSORT": _argsort,
    "TOP_K": _top_k,
    "SSM_CONV": _ssm_conv,
}
