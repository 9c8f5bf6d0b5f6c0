"""Products of matrices, triangles and diagonals, and the precision of a product."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import FIELDS, MAX_SRC, Tensor, nelements
from conformance.ggml.types import F32

from .fields import GAP, enum
from .op import DOT, DOTS, LOOP, Layout, Op, Rounding, Work, failed, fresh, fresh_like, operand, set_param

PREC = IntEnum("PREC", {"DEFAULT": 0, "UNDEFINED": 0, "F32": 10, "BF16": 15, "F16": 20, "Q8": 30, "Q4": 40})
"""`enum ggml_prec`."""

OP_HINT = IntEnum("OP_HINT", {"NONE": 0, "SRC0_IS_HADAMARD": 1})
"""`enum ggml_op_hint`."""

TRI_TYPE = IntEnum("TRI_TYPE", {"UPPER_DIAG": 0, "UPPER": 1, "LOWER_DIAG": 2, "LOWER": 3})
"""`enum ggml_tri_type`: the part that is kept."""

PRODUCT = 64.0
"""`Rounding.products` of one matrix product."""


def _mul_mat(t: Tensor) -> Layout:
    """Multiply `a` [k, n, s2, s3] by `b` [k, m, r*s2, q*s3] to F32 [n, m, r*s2, q*s3]."""
    b = operand(t, 1)
    return fresh(F32, (operand(t).ne[1], b.ne[1], b.ne[2], b.ne[3]))


def _mul_mat_id(t: Tensor) -> Layout:
    """Lay out `ggml_mul_mat_id`: F32 [n, n_used, n_tokens].

    as [k, n, n_expert], b [k, r, n_tokens], ids [n_used, n_tokens].
    """
    return fresh(F32, (operand(t).ne[1], operand(t, 2).ne[0], operand(t, 1).ne[2], 1))


def _mul_mat_limits(t: Tensor) -> None:
    if t.params.hint == OP_HINT.NONE:
        return
    if t.op != "MUL_MAT":
        raise GraphError(f"only MUL_MAT has a ggml_op_hint; {t.params.hint} found")
    n, rows = operand(t).ne[:2]
    if n != rows or n & (n - 1):
        raise GraphError(
            f"op_params[1]={t.op_params[1]} is not a ggml_op_hint of a src[0] of {n} x {rows}: ggml transforms rows in "
            "place, so a square matrix is expected whose order is a power of two"
        )


def _out_prod(t: Tensor) -> Layout:
    """Multiply `a` [m, k, s2, s3] by `b` [n, k, r*s2, q*s3]: F32 [m, n, r*s2, q*s3]."""
    b = operand(t, 1)
    return fresh(F32, (operand(t).ne[0], b.ne[0], b.ne[2], b.ne[3]))


def _diag(t: Tensor) -> Layout:
    """Put rows `a` [n, 1, …] on the diagonals of [n, n, …]."""
    a = operand(t)
    return fresh(a.type, (a.ne[0], a.ne[0], a.ne[2], a.ne[3]))


def _solve_tri(t: Tensor) -> Layout:
    """Solve `a` x = `b` for x: `a` [n, n, …] lower triangular, `b` and x [k, n, …]."""
    return fresh(F32, operand(t, 1).ne)


def _columns(t: Tensor) -> int:
    return operand(t).ne[1]


_PREC = enum(
    "prec", PREC
)  # accumulation; no value changes the numbers beyond rounding, so an audit has nothing to vary
_PARAMS = (_PREC, enum("hint", OP_HINT), GAP, enum("prec_src1", PREC))
_AFTER = (("prec_set_acc", "prec"), ("prec_set_src", "prec_src1", 1))
_PRODUCTS = replace(DOTS, products=PRODUCT, by="mul_mat")
AT_ONCE = 1 << 24
"""Elements of weights that the reference converts at a time: 128 MiB of float64."""


def _mul_mat_held(t: Tensor) -> int:
    weights, x = operand(t), operand(t, 1)
    converted = min(nelements(weights), AT_ONCE + weights.ne[0])
    return converted * 3 // 2 + 2 * nelements(x) + 2 * nelements(t)


def _mul_mat_operations(t: Tensor) -> int:
    weights = operand(t)
    parts = max(1, nelements(weights) // AT_ONCE) * (weights.ne[2] if t.op == "MUL_MAT_ID" else 1)
    return 2 * nelements(t) * weights.ne[0] // DOT + LOOP * parts


def _repeated(t: Tensor) -> int:
    a = operand(t)
    return nelements(a) * max(1, t.ne[2] * t.ne[3] // max(1, a.ne[2] * a.ne[3]))


_MUL_MAT_WORK = Work(operations=_mul_mat_operations, held=_mul_mat_held)


MUL_MAT = Op(
    "MUL_MAT",
    src="a b",
    layout=_mul_mat,
    asserts="ggml_can_mul_mat(a, b); !ggml_is_transposed(a)",
    limits=_mul_mat_limits,
    rounding=_PRODUCTS,
    params=_PARAMS,
    after=(*_AFTER, ("mul_mat_set_hint", "hint")),
    work=_MUL_MAT_WORK,
)
MUL_MAT_ID = Op(
    "MUL_MAT_ID",
    src="as b ids",
    layout=_mul_mat_id,
    asserts="""
        !ggml_is_transposed(as); ids->type == GGML_TYPE_I32; as->ne[3] == 1; b->ne[3] == 1;
        ids->ne[2] == 1 && ids->ne[3] == 1; ids->ne[1] == b->ne[2]; as->ne[0] == b->ne[0]; ids->ne[0] % b->ne[1] == 0
    """,
    limits=_mul_mat_limits,
    rounding=_PRODUCTS,
    params=_PARAMS,
    after=_AFTER,
    work=_MUL_MAT_WORK,
)
OUT_PROD = Op(
    "OUT_PROD",
    src="a b",
    layout=_out_prod,
    asserts="ggml_can_out_prod(a, b); !ggml_is_transposed(a)",
    rounding=replace(DOTS, terms=_columns, products=PRODUCT),
    work=Work(_repeated, lambda t: 2 * nelements(t) * operand(t).ne[1] // DOT),
)
SOLVE_TRI = Op(
    "SOLVE_TRI",
    src="a b",
    layout=_solve_tri,
    asserts="""
        a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32; a->ne[0] == a->ne[1]; a->ne[1] == b->ne[1];
        a->ne[2] == b->ne[2]; a->ne[3] == b->ne[3]; ggml_is_contiguous(a); ggml_is_contiguous(b)
    """,
    rounding=Rounding(
        64, 1, "float32 sums of up to K products, each row from those before", terms=_columns, products=PRODUCT
    ),
    work=Work(operations=lambda t: nelements(t) * operand(t).ne[0] + LOOP * t.ne[1]),
)
TRI = Op(
    "TRI",
    src="a",
    layout=fresh_like,
    asserts="a->type == GGML_TYPE_F32; ggml_is_contiguous(a); a->ne[0] == a->ne[1]",
    params=(enum("type", TRI_TYPE, lambda _, kept: TRI_TYPE(kept ^ 1), always=True),),  # with the diagonal or without
)
DIAG = Op(
    "DIAG",
    src="a",
    layout=_diag,
    asserts="a->ne[1] == 1",
    runs="a->type == GGML_TYPE_F32",
    work=Work(lambda t: t.ne[0] * t.ne[0]),
)


class MatMul:
    """Constructors of products and setters of options: `prec` of `PREC`, `hint` of `OP_HINT`."""

    mul_mat = MUL_MAT.of_a_b()

    def mul_mat_set_prec(self, a: Tensor, prec: int) -> None:
        """Set the accumulation precision of a MUL_MAT."""
        expect(a, "MUL_MAT")
        set_param(a, "prec", prec)

    def mul_mat_set_hint(self, a: Tensor, hint: int) -> None:
        """Set a hint about the operands of a MUL_MAT."""
        expect(a, "MUL_MAT")
        set_param(a, "hint", hint)

    def prec_set_acc(self, a: Tensor, prec: int) -> bool:
        """Set the accumulation precision; False if the op has none."""
        if "prec" not in FIELDS[a.op]:
            return False
        set_param(a, "prec", prec)
        return True

    def prec_set_src(self, a: Tensor, prec: int, idx: int) -> bool:
        """Set the lowest precision to which `src[idx]` may be converted; False if there is none."""
        if not 0 <= idx < MAX_SRC:
            raise failed("idx >= 0 && idx < GGML_MAX_SRC", (a,), op=a.op, idx=idx)
        if f"prec_src{idx}" not in FIELDS[a.op]:
            return False
        set_param(a, f"prec_src{idx}", prec)
        return True

    @MUL_MAT_ID.constructor
    def mul_mat_id(self, as_: Tensor, b: Tensor, ids: Tensor) -> None:
        """Multiply `as_` [k, n, n_expert] by `b` [k, r, n_tokens]: F32 [n, n_used, n_tokens].

        `ids` is I32 [n_used, n_tokens].
        """

    out_prod = OUT_PROD.of_a_b()

    @TRI.constructor
    def tri(self, a: Tensor, type_: int) -> None:
        """Return one triangle of `a`'s square matrices; `type_` is a member of `TRI_TYPE`."""

    diag = DIAG.of_a()

    @SOLVE_TRI.form(left=lambda _: True, lower=lambda _: True, uni=lambda _: False)
    def solve_tri(self, a: Tensor, b: Tensor, left: bool, lower: bool, uni: bool) -> Tensor:
        """Solve `a` x = `b` for x, `a` lower triangular: ggml has no other variant."""
        t = SOLVE_TRI.node(a, b)
        if not (lower and left and not uni):
            raise failed("lower && left && !uni", (a, b), left=left, lower=lower, uni=uni)
        return t


def expect(a: Tensor, op: str) -> None:
    """Raise GraphError, as a setter of ggml asserts, unless `a` is a node of `op`."""
    if a.op != op:
        raise failed(f"a->op == GGML_OP_{op}", (a,), op=a.op)
