"""Rules of the ops a language model is made of: matrix products, attention, positions, routing, convolution."""

from __future__ import annotations

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor, is_contiguous, is_transposed
from conformance.ggml.types import F16, F32, I32

from .matmul import OP_HINT, PREC
from .rope import ROPE_TYPE
from .rows import SORT_ORDER
from .rules_base import (
    INT32_MAX,
    Layout,
    Rule,
    divides,
    dup_or_inplace,
    fresh,
    is_matrix,
    is_vector,
    operand,
    optional,
    violated,
)

MROPE_SECTIONS = 4


def can_mul_mat(a: Tensor, b: Tensor) -> bool:
    """`ggml_can_mul_mat`: rows of one length, and a whole number of `a`'s matrices in `b`."""
    return a.ne[0] == b.ne[0] and divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3])


def _mul_mat(t: Tensor) -> Layout:
    """`ggml_mul_mat`: [k, n] x [k, m] -> F32 [n, m]."""
    a, b = operand(t), operand(t, 1)
    if not can_mul_mat(a, b):
        raise violated(t, "ggml_can_mul_mat(a, b)")
    if is_transposed(a):
        raise violated(t, "!ggml_is_transposed(a)")
    return fresh(F32, (a.ne[1], b.ne[1], b.ne[2], b.ne[3]))


def _mul_mat_id(t: Tensor) -> Layout:
    """`ggml_mul_mat_id`: [k, n, n_expert] x [k, r, n_tokens], ids [n_used, n_tokens] -> [n, n_used, n_tokens]."""
    as_, b, ids = operand(t), operand(t, 1), operand(t, 2)
    for holds, assertion in (
        (not is_transposed(as_), "!ggml_is_transposed(as)"),
        (ids.type is I32, "ids->type == GGML_TYPE_I32"),
        (as_.ne[3] == 1, "as->ne[3] == 1"),
        (b.ne[3] == 1, "b->ne[3] == 1"),
        (is_matrix(ids), "ids->ne[2] == 1 && ids->ne[3] == 1"),
        (ids.ne[1] == b.ne[2], "ids->ne[1] == b->ne[2]"),
        (as_.ne[0] == b.ne[0], "as->ne[0] == b->ne[0]"),
        (divides(b.ne[1], ids.ne[0]), "ids->ne[0] % b->ne[1] == 0"),
    ):
        if not holds:
            raise violated(t, assertion)
    return fresh(F32, (as_.ne[1], ids.ne[0], b.ne[2], 1))


def _mul_mat_runs(t: Tensor) -> None:
    acc, hint, prec0, prec1 = t.op_params[:4]
    if acc not in list(PREC) or prec1 not in list(PREC) or prec0:
        raise GraphError(f"op_params[0] and [3] must be a ggml_prec and [2] 0, {list(t.op_params[:4])} found")
    if hint not in list(OP_HINT) or (hint and t.op != "MUL_MAT"):
        raise GraphError(f"op_params[1]={hint} is no ggml_op_hint of {t.op}")
    n, rows = operand(t).ne[:2]
    if hint == OP_HINT["SRC0_IS_HADAMARD"] and (n != rows or n & (n - 1)):
        raise GraphError(
            f"op_params[1]={hint} is no ggml_op_hint of a src[0] of {n} x {rows}: ggml transforms rows in place, so a "
            "square matrix is expected whose order is a power of two"
        )


def _soft_max(t: Tensor) -> Layout:
    """`ggml_soft_max_ext`, `ggml_soft_max_add_sinks`: `op_params` scale, max_bias; `src` a, mask, sinks."""
    a, mask, sinks = operand(t), optional(t, 1), optional(t, 2)
    if not is_contiguous(a):
        raise violated(t, "ggml_is_contiguous(a)")
    if mask is not None:
        for holds, assertion in (
            (mask.type is F16 or mask.type is F32, "mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32"),
            (is_contiguous(mask), "ggml_is_contiguous(mask)"),
            (mask.ne[0] == a.ne[0], "mask->ne[0] == a->ne[0]"),
            (mask.ne[1] >= a.ne[1], "mask->ne[1] >= a->ne[1]"),
            (divides(mask.ne[2], a.ne[2]), "a->ne[2]%mask->ne[2] == 0"),
            (divides(mask.ne[3], a.ne[3]), "a->ne[3]%mask->ne[3] == 0"),
        ):
            if not holds:
                raise violated(t, assertion)
    elif t.param_f32(1) > 0:
        raise violated(t, "mask", max_bias=t.param_f32(1))
    if sinks is not None:
        check_sinks(t, sinks)
    return dup_or_inplace(t, a)


def check_sinks(t: Tensor, sinks: Tensor) -> None:
    """What `ggml_soft_max_add_sinks` and `ggml_flash_attn_ext_add_sinks` assert of `sinks`: F32, one per head."""
    if operand(t).ne[2] != sinks.ne[0]:
        raise violated(t, "a->src[0]->ne[2] == sinks->ne[0]", sinks=list(sinks.ne))
    if sinks.type is not F32:
        raise violated(t, "sinks->type == GGML_TYPE_F32", sinks=sinks.type)


def _rope(t: Tensor) -> Layout:
    """`ggml_rope_ext`, `ggml_rope_multi` and their `_back`: `src` a, positions, frequency factors.

    `op_params`: [1] n_dims, [2] mode, [4] n_ctx_orig, [5:11] freq_base, freq_scale, ext_factor, attn_factor, beta_fast,
    beta_slow, [11:15] sections, [15] n_offs.
    """
    a, b, c = operand(t), operand(t, 1), optional(t, 2)
    n_dims, mode = t.op_params[1], t.op_params[2]
    if mode & 1:
        raise violated(t, '(mode & 1) == 0 && "mode & 1 == 1 is no longer supported"', mode=mode)
    if not is_vector(b):
        raise violated(t, "ggml_is_vector(b)")
    if b.type is not I32:
        raise violated(t, "b->type == GGML_TYPE_I32")
    if mode & ROPE_TYPE["MROPE"]:
        if a.ne[2] * 4 != b.ne[0]:
            raise violated(t, "a->ne[2] * 4 == b->ne[0]", mode=mode)
    elif a.ne[2] != b.ne[0]:
        raise violated(t, "a->ne[2] == b->ne[0]", mode=mode)
    if c is not None:
        if c.type is not F32:
            raise violated(t, "c->type == GGML_TYPE_F32")
        if c.ne[0] < int(n_dims / 2):
            raise violated(t, "c->ne[0] >= n_dims / 2", n_dims=n_dims)
    return dup_or_inplace(t, a)


def _rope_runs(t: Tensor) -> None:
    """As `ggml_compute_forward_rope_flt`."""
    n_dims, mode, sections, n_offs = t.op_params[1], t.op_params[2], t.op_params[11:15], t.op_params[15]
    ne0 = t.ne[0]
    for holds, assertion in (
        (mode in list(ROPE_TYPE), "mode is a GGML_ROPE_TYPE"),
        (0 <= n_dims <= ne0, "n_dims <= ne0"),
        (n_dims % 2 == 0, "n_dims % 2 == 0"),
        (n_offs >= 0, "n_offs >= 0"),
        (n_offs % 2 == 0, "n_offs % 2 == 0"),
        (n_offs + n_dims <= ne0, "n_offs + n_dims <= ne0"),
        (t.op_params[0] == 0 and t.op_params[3] == 0, "op_params[0] == 0 && op_params[3] == 0"),
    ):
        if not holds:
            raise violated(t, assertion, n_dims=n_dims, mode=mode, n_offs=n_offs)
    if not mode & ROPE_TYPE["MROPE"]:
        if any(sections):
            raise GraphError(f"sections {list(sections)} belong to mrope, mode {mode} is not")
    elif min(sections) < 0 or not any(s > 0 for s in sections[:3]):
        raise violated(t, "sections[0] > 0 || sections[1] > 0 || sections[2] > 0", sections=list(sections))
    if mode == ROPE_TYPE["VISION"] and (n_dims != ne0 // 2 or n_offs):
        raise violated(t, "n_dims == ne0/2 && n_offs == 0", n_dims=n_dims, n_offs=n_offs)


def _flash_attn_ext(t: Tensor) -> Layout:
    """`ggml_flash_attn_ext`: q [dk, n, heads, s], k [dk, n_kv, kv_heads, s], v [dv, n_kv, kv_heads, s], mask, sinks.

    `op_params`: scale, max_bias, logit_softcap, prec, n_kv_max. Result: F32 [dv, heads, n, s].
    """
    q, k, v, mask, sinks = operand(t), operand(t, 1), operand(t, 2), optional(t, 3), optional(t, 4)
    if not can_mul_mat(k, q):
        raise violated(t, "ggml_can_mul_mat(k, q)")
    if q.ne[3] != k.ne[3]:
        raise violated(t, "q->ne[3] == k->ne[3]")
    if q.ne[3] != v.ne[3]:
        raise violated(t, "q->ne[3] == v->ne[3]")
    if mask is not None:
        if mask.type is not F16:
            raise violated(t, "mask->type == GGML_TYPE_F16")
        if not is_contiguous(mask):
            raise violated(t, "ggml_is_contiguous(mask)")
        if not divides(mask.ne[2], q.ne[2]):
            raise violated(t, "q->ne[2] % mask->ne[2] == 0")
        if not divides(mask.ne[3], q.ne[3]):
            raise violated(t, "q->ne[3] % mask->ne[3] == 0")
    elif t.param_f32(1) > 0:
        raise violated(t, "mask", max_bias=t.param_f32(1))
    if sinks is not None:
        check_sinks(t, sinks)
    return fresh(F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]))


def _flash_attn_ext_runs(t: Tensor) -> None:
    """What `ggml_compute_forward_flash_attn_ext` takes for granted: it would read past the end otherwise."""
    q, k, v, mask = operand(t), operand(t, 1), operand(t, 2), optional(t, 3)
    if k.ne[1] != v.ne[1]:
        raise violated(t, "k->ne[1] == v->ne[1]")
    if not divides(v.ne[2], q.ne[2]):
        raise violated(t, "q->ne[2] % v->ne[2] == 0")
    if mask is not None and (mask.ne[0] < k.ne[1] or mask.ne[1] < q.ne[1]):
        raise violated(t, "mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1]")
    if t.op_params[3] not in list(PREC):
        raise GraphError(f"op_params[3]={t.op_params[3]} is no ggml_prec")
    if t.op_params[4] < 0:
        raise violated(t, "n_kv_max >= 0", n_kv_max=t.op_params[4])


def _argsort(t: Tensor) -> Layout:
    """`ggml_argsort`: I32 indices, `op_params[0]` the order."""
    a = operand(t)
    if a.ne[0] > INT32_MAX:
        raise violated(t, "a->ne[0] <= INT32_MAX")
    return fresh(I32, a.ne)


def _argsort_runs(t: Tensor) -> None:
    if t.op_params[0] not in list(SORT_ORDER):
        raise GraphError(f"op_params[0]={t.op_params[0]} is no ggml_sort_order")


def _top_k(t: Tensor) -> Layout:
    """`ggml_top_k`: I32 indices of the `ne[0]` largest, which is the caller's k."""
    a, k = operand(t), t.ne[0]
    if a.ne[0] < k:
        raise violated(t, "a->ne[0] >= k", k=k)
    return fresh(I32, (k, *a.ne[1:]))


def _ssm_conv(t: Tensor) -> Layout:
    """`ggml_ssm_conv(sx, c)`: [d_conv - 1 + n_t, d_inner, n_s] and [d_conv, d_inner] -> [d_inner, n_t, n_s]."""
    sx, c = operand(t), operand(t, 1)
    n_t = sx.ne[0] - c.ne[0] + 1
    if sx.ne[3] != 1:
        raise violated(t, "ggml_is_3d(sx)")
    if not is_matrix(c):
        raise violated(t, "ggml_is_matrix(c)")
    if sx.ne[1] != c.ne[1]:
        raise violated(t, "sx->ne[1] == d_inner")
    if n_t < 0:
        raise violated(t, "n_t >= 0", n_t=n_t)
    return fresh(F32, (c.ne[1], n_t, sx.ne[2], 1))


MODEL_RULES: dict[str, Rule] = {
    "MUL_MAT": Rule(_mul_mat, 2, n_params=4, runs=_mul_mat_runs),
    "MUL_MAT_ID": Rule(_mul_mat_id, 3, n_params=4, runs=_mul_mat_runs),
    "SOFT_MAX": Rule(_soft_max, 1, 3, n_params=2),
    "ROPE": Rule(_rope, 2, 3, n_params=16, runs=_rope_runs),
    "ROPE_BACK": Rule(_rope, 2, 3, n_params=16, runs=_rope_runs),
    "FLASH_ATTN_EXT": Rule(_flash_attn_ext, 3, 5, n_params=5, runs=_flash_attn_ext_runs),
    "ARGSORT": Rule(_argsort, n_params=1, runs=_argsort_runs),
    "TOP_K": Rule(_top_k),
    "SSM_CONV": Rule(_ssm_conv, 2),
}
