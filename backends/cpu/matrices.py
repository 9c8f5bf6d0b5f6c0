"""Ops over parts, triangles and windows of matrices, the indexer of sparse attention, and hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from conformance.backend.kernel import Kernel, Raw, Sources
from conformance.ggml.ops.matmul import TRI_TYPE
from conformance.ggml.ops.views import part
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor

from .values import Values, in_float64, operand


def _window(node: Tensor, dst: Raw) -> Raw:
    """The part of `dst`, which is contiguous, that a SET or ACC replaces."""
    ne, nb, offset = part(node)
    flat = dst.reshape(-1)[offset // dst.itemsize :]
    return as_strided(flat, ne[::-1], nb[::-1])


def _part(node: Tensor, dst: Raw, src: Sources, *, add: bool) -> None:
    (_, a), (_, b) = operand(node, src, 0), operand(node, src, 1)
    if node.view_src is None:
        dst[...] = a
    to = _window(node, dst)
    to[...] = to.astype(np.float64) + b if add else b


def _set(node: Tensor, dst: Raw, src: Sources) -> None:
    """`src[1]` into the part of `src[0]` that `op_params` show."""
    _part(node, dst, src, add=False)


def _acc(node: Tensor, dst: Raw, src: Sources) -> None:
    """`src[1]` onto the part of `src[0]` that `op_params` show."""
    _part(node, dst, src, add=True)


def _out_prod(_: Tensor, a: Values, b: Values) -> Values:
    """`dst[i0, i1] = sum_k a[i0, k] b[i1, k]`; matrix i of `b` meets matrix `i / r` of `a`."""
    for axis in (0, 1):
        a = np.repeat(a, b.shape[axis] // a.shape[axis], axis)
    y: Values = b.swapaxes(-1, -2) @ a
    return y


_TRIANGLES: dict[int, Callable[[Values], Values]] = {
    TRI_TYPE["UPPER_DIAG"]: np.triu,
    TRI_TYPE["UPPER"]: lambda x: np.triu(x, 1),
    TRI_TYPE["LOWER_DIAG"]: np.tril,
    TRI_TYPE["LOWER"]: lambda x: np.tril(x, -1),
}


def _solve_tri(_: Tensor, a: Values, b: Values) -> Values:
    """Forward substitution: what stands above the diagonal is not read."""
    x = np.empty_like(b)
    for i in range(b.shape[-2]):
        known = (a[..., i : i + 1, :i] @ x[..., :i, :])[..., 0, :]
        x[..., i, :] = (b[..., i, :] - known) / a[..., i, i, None]
    return x


def _roll(node: Tensor, x: Values) -> Values:
    return np.roll(x, node.op_params[3::-1], (0, 1, 2, 3))


def _pool_2d(node: Tensor, x: Values) -> Values:
    """The mean counts padding as zeros; a window of nothing but padding has -FLT_MAX as its largest."""
    op, k0, k1, s0, s1, p0, p1 = node.op_params[:7]
    largest = op == OP_POOL["MAX"]
    empty = -float(np.finfo(np.float32).max) if largest else 0.0
    n0, n1 = node.ne[:2]
    wide = ((0, 0), (0, 0), (p1, max(p1, (n1 - 1) * s1 + k1)), (p0, max(p0, (n0 - 1) * s0 + k0)))
    x = np.pad(x, wide, constant_values=empty)
    y = np.full(node.shape, empty)
    for j in range(k1):
        for i in range(k0):
            window = x[:, :, j : j + n1 * s1 : s1, i : i + n0 * s0 : s0][:, :, :n1, :n0]
            y = np.maximum(y, window) if largest else y + window
    return y if largest else y / (k0 * k1)


def _im2col(node: Tensor, a: Values, b: Values) -> Values:
    s0, s1, p0, p1, d0, d1, is_2d = node.op_params[:7]
    x = b if is_2d else b[0][:, :, None]
    kh, kw = (a.shape[2], a.shape[3]) if is_2d else (1, a.shape[3])
    oh, ow = (node.ne[2], node.ne[1]) if is_2d else (1, node.ne[1])
    s1, p1, d1 = (s1, p1, d1) if is_2d else (1, 0, 1)
    reach = (oh - 1) * s1 + (kh - 1) * d1 + 1, (ow - 1) * s0 + (kw - 1) * d0 + 1
    x = np.pad(x, ((0, 0), (0, 0), (p1, max(0, reach[0])), (p0, max(0, reach[1]))))
    y = np.empty((x.shape[0], oh, ow, x.shape[1], kh, kw))
    for j in range(kh):
        for i in range(kw):
            window = x[:, :, j * d1 :, i * d0 :][:, :, : (oh - 1) * s1 + 1 : s1, : (ow - 1) * s0 + 1 : s0]
            y[..., j, i] = window.transpose(0, 2, 3, 1)
    return y.reshape(node.shape)


def _lightning_indexer(node: Tensor, q: Values, k: Values, weights: Values, mask: Values) -> Values:
    """`dst[j, t] = sum_h max(q_ht k_j, 0) weights_ht + mask[j, t]`."""
    keys = k[:, :, 0]  # s, n_kv, n
    found = np.maximum(q @ keys.swapaxes(-1, -2)[:, None], 0)  # s, n_t, heads, n_kv
    y: Values = (found * weights[:, 0][..., None]).sum(-2)[:, None] + np.tile(mask, (node.ne[3] // len(mask), 1, 1, 1))
    return y


def _hc_comb(node: Tensor, mixes: Values, scale: Values, base: Values) -> Values:
    eps, n_iter, hc = node.param_f32(0), node.param_i32(1), node.ne[0]
    x: Values = (mixes * scale[0, 0, 0, 2] + base)[0, 0, :, 2 * hc :].reshape(-1, hc, hc)
    x = np.exp(x - x.max(-1, keepdims=True))
    x = x / x.sum(-1, keepdims=True) + eps
    x = x / (x.sum(-2, keepdims=True) + eps)
    for _ in range(n_iter - 1):
        x = x / (x.sum(-1, keepdims=True) + eps)
        x = x / (x.sum(-2, keepdims=True) + eps)
    return x[None]


def _hc_pre(node: Tensor, x: Values, weights: Values) -> Values:
    share: Values = 1 / (1 + np.exp(-weights[0])) if node.param_i32(1) else weights[0, 0][..., None]
    y: Values = (x[0] * share).sum(-2) * node.param_f32(0)
    return y[None, None]


def _hc_post(_: Tensor, x: Values, residual: Values, post: Values, comb: Values | None = None) -> Values:
    """`dst[:, d, t] = x[:, t] post[d, t] + sum_s residual[:, s, t] comb[d, s, t]`."""
    given = x[0, 0][:, None, :] * post[0, 0][..., None]
    kept = residual[0] if comb is None else comb[0].swapaxes(-1, -2) @ residual[0]
    y: Values = (given + kept)[None]
    return y


FORMULAS: dict[str, Callable[..., NDArray[Any]]] = {
    "OUT_PROD": _out_prod,
    "TRI": lambda node, x: _TRIANGLES[node.param_i32(0)](x),
    "DIAG": lambda node, x: np.where(np.eye(node.ne[0], dtype=np.bool_), x, 0.0),
    "SOLVE_TRI": _solve_tri,
    "ROLL": _roll,
    "POOL_2D": _pool_2d,
    "IM2COL": _im2col,
    "LIGHTNING_INDEXER": _lightning_indexer,
    "DSV4_HC_COMB": _hc_comb,
    "DSV4_HC_PRE": _hc_pre,
    "DSV4_HC_POST": _hc_post,
}

KERNELS: dict[str, Kernel] = {"SET": _set, "ACC": _acc, **{op: in_float64(f) for op, f in FORMULAS.items()}}
