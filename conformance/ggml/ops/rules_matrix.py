"""Rules of the ops over matrices that recurrent models add: parts of a tensor, triangles, outer products, windows."""

from __future__ import annotations

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Dims, Tensor, dims, is_contiguous, is_transposed, nbytes, nelements
from conformance.ggml.types import F16, F32, I32

from .matmul import TRI_TYPE
from .rules_base import Layout, Rule, all_f32, check, divides, dup_or_inplace, fresh, operand, violated
from .windows import OP_POOL

MAX_OFFSET = 1 << 30


def _set(t: Tensor) -> Layout:
    """`ggml_set`, `ggml_set_inplace`: `b` into a part of `a`; `op_params`: nb1, nb2, nb3, offset, inplace."""
    a, b = operand(t), operand(t, 1)
    if nelements(a) < nelements(b):
        raise violated(t, "ggml_nelements(a) >= ggml_nelements(b)")
    _offset(t)
    return dup_or_inplace(t, a)


def _acc(t: Tensor) -> Layout:
    """`ggml_acc`, `ggml_acc_inplace`: `b` onto the part of `a` that `op_params` show, as in `ggml_set`."""
    a, b = operand(t), operand(t, 1)
    check(
        t,
        (
            (nelements(b) <= nelements(a), "ggml_nelements(b) <= ggml_nelements(a)"),
            (is_contiguous(a), "ggml_is_contiguous(a)"),
            (a.type is F32, "a->type == GGML_TYPE_F32"),
            (b.type is F32, "b->type == GGML_TYPE_F32"),
        ),
    )
    _offset(t)
    return dup_or_inplace(t, a)


def _offset(t: Tensor) -> None:
    offset = t.op_params[3]
    if not 0 <= offset < MAX_OFFSET:
        raise violated(t, "offset < (size_t)(1 << 30)", offset=offset)


def part(t: Tensor) -> tuple[Dims, Dims, int]:
    """Which part of `src[0]` a SET or ACC replaces: ne, nb and offset in bytes."""
    nb1, nb2, nb3, offset = t.op_params[:4]
    return operand(t, 1).ne, (operand(t).type.type_size, nb1, nb2, nb3), offset


def _part_runs(t: Tensor) -> None:
    """As `ggml_compute_forward_set_f32` and `ggml_compute_forward_acc_f32`."""
    a, b = operand(t), operand(t, 1)
    ne, nb, offset = part(t)
    last = offset + sum((n - 1) * s for n, s in zip(ne, nb, strict=True) if n)
    check(
        t,
        (
            (is_contiguous(a), "ggml_is_contiguous(src0)"),
            (a.type is F32 or a.type is I32, "src0->type == GGML_TYPE_F32 || src0->type == GGML_TYPE_I32"),
            (b.type is a.type, "src1->type == src0->type"),
            (b.nb[0] == b.type.type_size, "nb10 == sizeof(float)"),
            (min(nb) >= 0 and last + nb[0] <= nbytes(a), "offset + (ne1 - 1)*nb <= ggml_nbytes(dst)"),
            (t.op_params[4] == (t.view_src is not None), "op_params[4] says whether the result is a view"),
        ),
        part=[ne, nb, offset],
    )


def _out_prod(t: Tensor) -> Layout:
    """`ggml_out_prod`: [m, k, s2, s3] and [n, k, r*s2, q*s3] to F32 [m, n, r*s2, q*s3], the sum over k."""
    a, b = operand(t), operand(t, 1)
    if not (a.ne[1] == b.ne[1] and divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3])):
        raise violated(t, "ggml_can_out_prod(a, b)")
    if is_transposed(a):
        raise violated(t, "!ggml_is_transposed(a)")
    return fresh(F32, (a.ne[0], b.ne[0], b.ne[2], b.ne[3]))


def _out_prod_runs(t: Tensor) -> None:
    a, b = operand(t), operand(t, 1)
    if b.type is not F32:
        raise violated(t, "src1->type == GGML_TYPE_F32")
    if a.nb[0] != a.type.type_size:
        raise violated(t, "nb00 == ggml_type_size(src0->type)")


def _tri(t: Tensor) -> Layout:
    """`ggml_tri`: one triangle of each square matrix, zero elsewhere; `op_params[0]` is which, of `TRI_TYPE`."""
    a = operand(t)
    check(
        t,
        (
            (a.type is F32, "a->type == GGML_TYPE_F32"),
            (is_contiguous(a), "ggml_is_contiguous(a)"),
            (a.ne[0] == a.ne[1], "a->ne[0] == a->ne[1]"),
        ),
    )
    return fresh(a.type, a.ne)


def _tri_runs(t: Tensor) -> None:
    if t.op_params[0] not in list(TRI_TYPE):
        raise GraphError(f"op_params[0]={t.op_params[0]} is no ggml_tri_type")


def _diag(t: Tensor) -> Layout:
    """`ggml_diag`: [n, 1, …] onto the diagonal of [n, n, …]."""
    a = operand(t)
    if a.ne[1] != 1:
        raise violated(t, "a->ne[1] == 1")
    return fresh(a.type, (a.ne[0], a.ne[0], a.ne[2], a.ne[3]))


def _diag_runs(t: Tensor) -> None:
    all_f32(t, 1)
    if operand(t).nb[0] != F32.type_size:
        raise violated(t, "nb00 == sizeof(float)")


def _solve_tri(t: Tensor) -> Layout:
    """`ggml_solve_tri`: x of `a` x = `b`, `a` [n, n, …] lower triangular, `b` and x [k, n, …]."""
    a, b = operand(t), operand(t, 1)
    check(
        t,
        (
            (a.type is F32, "a->type == GGML_TYPE_F32"),
            (b.type is F32, "b->type == GGML_TYPE_F32"),
            (a.ne[0] == a.ne[1], "a->ne[0] == a->ne[1]"),
            (a.ne[1] == b.ne[1], "a->ne[1] == b->ne[1]"),
            (a.ne[2] == b.ne[2], "a->ne[2] == b->ne[2]"),
            (a.ne[3] == b.ne[3], "a->ne[3] == b->ne[3]"),
            (is_contiguous(a), "ggml_is_contiguous(a)"),
            (is_contiguous(b), "ggml_is_contiguous(b)"),
        ),
    )
    return fresh(F32, b.ne)


def _pool_2d(t: Tensor) -> Layout:
    """`ggml_pool_2d`: windows of [k0, k1]; `op_params` op, k0, k1, s0, s1, p0, p1."""
    a, (k0, k1, s0, s1, p0, p1) = operand(t), t.op_params[1:7]
    if s0 < 1 or s1 < 1:
        raise GraphError(f"strides must be positive, {s0} and {s1} found")
    n0, n1 = ((n + 2 * p - k) // s + 1 for n, k, s, p in ((a.ne[0], k0, s0, p0), (a.ne[1], k1, s1, p1)))
    check(t, ((n0 > 0, "ne[0] > 0"), (n1 > 0, "ne[1] > 0")), kernel=[k0, k1])
    return fresh(F32, (n0, n1, a.ne[2], a.ne[3]))


def _pool_2d_runs(t: Tensor) -> None:
    """As `ggml_compute_forward_pool_2d`, which steps through planes by `nb[2]` and through rows by element."""
    a, (op, k0, k1) = operand(t), t.op_params[:3]
    check(
        t,
        (
            (op in list(OP_POOL), "op is a ggml_op_pool"),
            (a.type is F32 or a.type is F16, "src->type == GGML_TYPE_F32 || src->type == GGML_TYPE_F16"),
            (a.nb[0] == a.type.type_size, "nb00 == ggml_type_size(src->type)"),
            (a.nb[3] == a.ne[2] * a.nb[2], "src->nb[3] == src->ne[2]*src->nb[2]"),
            (k0 > 0 and k1 > 0, "k0 > 0 && k1 > 0"),
        ),
        op=op,
    )


def _im2col(t: Tensor) -> Layout:
    """`ggml_im2col`: `b`'s windows of the size of kernel `a`, one a row; `op_params` s0, s1, p0, p1, d0, d1, is_2D.

    2D: a [KW, KH, IC], b [IW, IH, IC, N] to [IC * KH * KW, OW, OH, N]; 1D: a [K, IC], b [IW, IC, N] to [IC * K, OW, N].
    The type, F16 or F32, is the caller's.
    """
    a, b = operand(t), operand(t, 1)
    s0, s1, p0, p1, d0, d1, is_2d = t.op_params[:7]
    if is_2d:
        check(t, ((a.ne[2] == b.ne[2], "a->ne[2] == b->ne[2]"),))
    else:
        check(t, ((b.ne[1] == a.ne[1], "b->ne[1] == a->ne[1]"), (b.ne[3] == 1, "b->ne[3] == 1")))
    if s0 < 1 or (is_2d and s1 < 1):
        raise GraphError(f"strides must be positive, {s0} and {s1} found")
    oh = _windows(b.ne[1], a.ne[1], s1, p1, d1) if is_2d else 1
    ow = _windows(b.ne[0], a.ne[0], s0, p0, d0)
    check(
        t,
        (
            (oh > 0, '(!is_2D || OH > 0) && "b too small compared to a"'),
            (ow > 0, '(OW > 0) && "b too small compared to a"'),
        ),
        OW=ow,
        OH=oh,
    )
    if is_2d:
        return fresh(t.type, (a.ne[2] * a.ne[1] * a.ne[0], ow, oh, b.ne[3]))
    return fresh(t.type, dims(a.ne[1] * a.ne[0], ow, b.ne[2]))


def _windows(n: int, k: int, stride: int, padding: int, dilation: int) -> int:
    """`ggml_calc_conv_output_size`; C divides toward zero."""
    left = n + 2 * padding - dilation * (k - 1) - 1
    return left // stride + 1 if left >= 0 else 1 - (-left) // stride


def _im2col_runs(t: Tensor) -> None:
    a, b = operand(t), operand(t, 1)
    check(
        t,
        (
            (t.type is F16 or t.type is F32, "dst->type == GGML_TYPE_F16 || dst->type == GGML_TYPE_F32"),
            (t.type is not F16 or a.type is F16, "src0->type == GGML_TYPE_F16"),
            (b.type is F32, "src1->type == GGML_TYPE_F32"),
            (b.nb[0] == F32.type_size, "nb10 == sizeof(float)"),
            (b.nb[1] == b.ne[0] * b.nb[0] or not t.op_params[6], "src1's rows follow one another"),
            (t.op_params[6] in (0, 1), "is_2D is 0 or 1"),
        ),
    )


def _roll(t: Tensor) -> Layout:
    """`ggml_roll`: element i of dimension d moves to `(i + op_params[d]) % ne[d]`."""
    a = operand(t)
    if a.nb[0] != a.type.type_size:
        raise violated(t, "a->nb[0] == ggml_type_size(a->type)")
    for d in range(4):
        if not abs(t.op_params[d]) < a.ne[d]:
            raise violated(t, f"abs(shift{d}) < a->ne[{d}]", shift=t.op_params[d])
    return fresh(a.type, a.ne)


MATRIX_RULES: dict[str, Rule] = {
    "SET": Rule(_set, 2, n_params=5, runs=_part_runs),
    "ACC": Rule(_acc, 2, n_params=5, runs=_part_runs),
    "OUT_PROD": Rule(_out_prod, 2, runs=_out_prod_runs),
    "TRI": Rule(_tri, n_params=1, runs=_tri_runs),
    "DIAG": Rule(_diag, runs=_diag_runs),
    "SOLVE_TRI": Rule(_solve_tri, 2),
    "POOL_2D": Rule(_pool_2d, n_params=7, runs=_pool_2d_runs),
    "IM2COL": Rule(_im2col, 2, n_params=7, runs=_im2col_runs),
    "ROLL": Rule(_roll, n_params=4),
}
