"""The tolerance table: how far a right answer may be from the expected one, per op, type and reduction length.

The expected value is computed in the backend's *declared* arithmetic, so a budget covers rounding only: of float32
sums and products, of a transcendental function, of the last store. `u` is float32's unit roundoff, 2^-24. Relative
errors of one rounding have NMSE up to u^2; a float32 sum of K terms adds up to K u^2 if its errors are random.
docs/tolerances.md has measurements of right backends, and the budgets that have another reason than rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt

from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.quants.requant import weight_form
from conformance.ggml.tensor import VIEW_OPS, Tensor, nelements

from .compare import Difference

U2 = 2.0**-48
"""Squared unit roundoff of float32: 3.6e-15."""
HALF_U2 = 2.0**-22
"""Squared unit roundoff of F16: 2.4e-7."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The error allowed in one tensor; both 0: equal to the bit."""

    nmse: float
    element: float
    """Largest allowed `Difference.element`."""
    why: str = ""

    def used(self, d: Difference) -> float:
        """The fraction of the budget that `d` uses: over 1 is wrong, Inf if nothing is allowed."""
        if not d.raw:
            return 0.0
        if d.special or not self.nmse:
            return inf
        return max(d.nmse / self.nmse, d.element / self.element)


RAW = Budget(0.0, 0.0, "nothing is computed: equal to the bit")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: NMSE `(base + per_k * K) * u^2`, K the length of the op's reduction."""

    base: float
    per_k: float = 0.0
    why: str = ""


_MOVE = Row(0, why="moves values; only a change of type rounds, and rounds as ggml's reference does")
_ROUND = Row(4, why="one or two float32 roundings")
_NORM = Row(64, 1, "float32 sum of K squares, a root, a product")
_DOT = Row(64, 1, "float32 sum of K products")
_EXP = Row(256, why="float32 exp, tanh or erf of a few ulp, and the products around it")

LINEAR = ("RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "GATED_DELTA_NET")

ROWS: dict[str, Row] = {
    **dict.fromkeys(("CONT", "CPY", "DUP", "CONCAT", "REPEAT", "GET_ROWS", "SET_ROWS", "ARGSORT", "TOP_K"), _MOVE),
    **dict.fromkeys(("FILL", "ARGMAX", "PAD", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "SET", "TRI", "DIAG", "ROLL"), _MOVE),
    **dict.fromkeys(("ADD", "ADD1", "SUB", "MUL", "DIV", "ADD_ID", "SCALE", "SQR", "SQRT", "CLAMP"), _ROUND),
    "IM2COL": _MOVE,
    **dict.fromkeys(("LEAKY_RELU", "ARANGE", "ACC"), _ROUND),
    **dict.fromkeys(("SUM", "SUM_ROWS", "MEAN", "CUMSUM", "POOL_2D"), Row(16, 1, "float32 sum of K")),
    **dict.fromkeys(("NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM"), _NORM),
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "SSM_CONV", "OUT_PROD"), _DOT),
    "SOFT_MAX": Row(1024, 1, "exp of differences, their sum, a quotient"),
    **dict.fromkeys(("ROPE", "ROPE_BACK"), Row(16384, why="sin and cos of an angle of up to some hundred turns")),
    **dict.fromkeys(("SSM_SCAN", *LINEAR), Row(64, 1, "float32 sums of K products into a state that tokens share")),
    "SOLVE_TRI": Row(64, 1, "float32 sums of up to K products, each row from those before"),
    "LIGHTNING_INDEXER": Row(64, 1, "float32 sum of K products, then one over heads"),
    "DSV4_HC_COMB": Row(256, why="exp, and sums of four made one over and over"),
    **dict.fromkeys(("DSV4_HC_PRE", "DSV4_HC_POST"), Row(64, why="a float32 sum over the streams, a sigmoid")),
    "FLASH_ATTN_EXT": Row(4096, 1, "two products with a softmax between"),
    **dict.fromkeys(("UNARY", "GLU", "LOG", "SIN", "COS"), _EXP),
}

PEAK = 8.0
"""The error of one element may be this times the root of the allowed NMSE."""

_STORE_ULP = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""One unit in the last place of a narrow float, relative to its value."""


_PRODUCTS = {"f16": HALF_U2, "bf16": 2.0**-18}
"""Type that a device rounds the operands of products to -> its squared unit roundoff."""
_FACTOR = {
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "SOLVE_TRI", "DSV4_HC_POST", "SSM_SCAN", *LINEAR), 64.0),
    **dict.fromkeys(("FLASH_ATTN_EXT", "LIGHTNING_INDEXER"), 128.0),
    **dict.fromkeys(("ROPE", "ROPE_BACK"), 8.0),
}
"""Factor of that for a product: two operands, products that nearly cancel, activations in 8 bits with compressed
weights; attention has two products and a softmax between; a ROPE kernel rounds its operands, sines and result, not the
angles."""

ROUNDED = {to: _FACTOR["MUL_MAT"] * unit for to, unit in _PRODUCTS.items()}
"""`Arithmetic.products` -> NMSE that rounding its operands may add to one matrix product."""

PRODUCTS = frozenset(_FACTOR)
"""Ops whose operands a device may round: those that multiply matrices, and ROPE."""


def budget_of(node: Tensor, arithmetic: Arithmetic = EXACT, *, same: bool = True) -> Budget:
    """The budget of one node whose sources are right.

    Args:
        node: the node that was computed.
        arithmetic: of the expected value.
        same: the backend computes in that arithmetic too. If not, a node that `arithmetic` changes may also be off by
            what the change is worth.
    """
    if node.op in VIEW_OPS or node.type.is_quantized or (node.type.dtype is not None and node.type.dtype.kind == "i"):
        return RAW
    arithmetic = arithmetic.at(node)
    row = ROWS[node.op]
    nmse = (row.base + row.per_k * _reduction(node)) * U2
    why = row.why
    if changes(node, arithmetic):
        extra, reason = _step(node, arithmetic) if same else _distance(node)
        nmse, why = nmse + extra, f"{why}; {reason}" if extra else why
    if arithmetic.products in _PRODUCTS and node.op in _FACTOR:
        nmse += _FACTOR[node.op] * _PRODUCTS[arithmetic.products]
        why = f"{why}; operands rounded to {arithmetic.products}"
    if not nmse:
        return Budget(0.0, 0.0, why)
    return stored(node, nmse, PEAK * sqrt(nmse), why)


_LENGTH: dict[str, Callable[[Tensor, Tensor], int]] = {
    "FLASH_ATTN_EXT": lambda q, k: q.ne[0] + k.ne[1],
    "SSM_CONV": lambda _, kernel: kernel.ne[0],
    **dict.fromkeys(("SSM_SCAN", *LINEAR), lambda state, tokens: state.ne[0] + tokens.ne[2]),
    **dict.fromkeys(("OUT_PROD", "SOLVE_TRI"), lambda a, _: a.ne[1]),
}
"""Op -> the length of its reduction from `src[0]` and `src[1]`."""


def _reduction(node: Tensor) -> int:
    """K: the number of terms that one element of the result is the sum of; `src[0].ne[0]` for most ops."""
    a, b = (*node.src, None, None)[:2]
    if a is None:
        return 1
    if b is not None and node.op in _LENGTH:
        return _LENGTH[node.op](a, b)
    if node.op == "POOL_2D":
        return node.op_params[1] * node.op_params[2]
    return nelements(a) if node.op in {"SUM", "GROUP_NORM"} else a.ne[0]


def _n_kv(node: Tensor) -> int:
    keys = node.src[1]
    return keys.ne[1] if keys is not None else 0


def _step(node: Tensor, arithmetic: Arithmetic) -> tuple[float, str]:
    """NMSE that remains if both sides round: a value near the middle of two may go either way on one of them."""
    cells = node.src[2] if node.op == "FLASH_ATTN_EXT" else None
    if cells is not None and cells.type.name in arithmetic.flash_attn_sum:
        return HALF_U2 / 2 + _n_kv(node) * 1e-10, "a sum in F16"
    if node.op in {"UNARY", "GLU"}:
        return HALF_U2 * (1 / 64 + 4 / max(1, nelements(node))), "a table of F16"
    return 0.0, ""


_DISTANCE = {"f16": 4e-7, "bf16": 4e-5}
_DISTANCE_QUANTISED = 5e-4


def _distance(node: Tensor) -> tuple[float, str]:
    """NMSE between the same node in two arithmetics: at least four times the measured one (docs/tolerances.md), for
    quantised weights what ggml's own tests allow.
    """
    if node.op in {"ROPE", "ROPE_BACK"}:
        return 4e-7, "angles multiplied up in float32"
    if node.op in {"UNARY", "GLU"}:
        return 1e-6, "a table of F16 on one side"
    weights = node.src[1] if node.op == "FLASH_ATTN_EXT" else node.src[0]
    nmse = 0.0 if weights is None else _DISTANCE.get(weights.type.name, _DISTANCE_QUANTISED)
    if node.op == "FLASH_ATTN_EXT":
        nmse += _n_kv(node) * HALF_U2 / 3
    return nmse, "activations rounded on one side"


def stored(node: Tensor, nmse: float, element: float, why: str) -> Budget:
    """A budget, widened by what storing in the type of the result adds: a value near a tie may go either way.

    One element in eight may, or four of a small tensor: a float32 factor near a short decimal (0.7) puts many products
    of BF16 on a tie.
    """
    ulp = _STORE_ULP.get(node.type.name)
    if ulp is None:
        return Budget(nmse, element, why)
    flips = 1 / 8 + 4 / max(1, nelements(node))
    return Budget(nmse + ulp * ulp * flips, element + ulp, f"{why}; stored in {node.type}")


def free_running(nmse: float) -> Budget:
    """The budget of a trajectory that runs freely against a recording and states this NMSE."""
    return Budget(nmse, 4 * PEAK * sqrt(nmse), "a whole trajectory run freely")


def _type(node: Tensor, i: int) -> str:
    src = node.src[i] if i < len(node.src) else None
    return "" if src is None else src.type.name


def _stores(node: Tensor, a: Arithmetic) -> bool:
    return node.type.is_quantized and a.quantize != EXACT.quantize


def _multiplies(node: Tensor, a: Arithmetic) -> bool:
    return _type(node, 0) in a.mul_mat or _requantises(node, a)


def _requantises(node: Tensor, a: Arithmetic) -> bool:
    return bool(weight_form(node, a.weights, a.rows))


def _attends(node: Tensor, a: Arithmetic) -> bool:
    return _type(node, 1) in a.flash_attn or _type(node, 2) in a.flash_attn_sum


def _looks_up(node: Tensor, a: Arithmetic) -> bool:
    return UNARY_OPS[node.op_params[0]] in a.tables


def _looks_up_gate(node: Tensor, a: Arithmetic) -> bool:
    return GLU_OPS[node.op_params[0]].replace("GEGLU", "GELU") in a.tables


def _turns(_: Tensor, a: Arithmetic) -> bool:
    return a.rope != EXACT.rope


_CHANGES: dict[str, Callable[[Tensor, Arithmetic], bool]] = {
    **dict.fromkeys(("CPY", "DUP", "CONT", "SET_ROWS", "ADD"), _stores),
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID"), _multiplies),
    "GET_ROWS": _requantises,
    "FLASH_ATTN_EXT": _attends,
    "UNARY": _looks_up,
    "GLU": _looks_up_gate,
    **dict.fromkeys(("ROPE", "ROPE_BACK"), _turns),
}


def changes(node: Tensor, arithmetic: Arithmetic) -> bool:
    """Whether `arithmetic` may change `node`'s value by more than float32 rounding."""
    rule = _CHANGES.get(node.op)
    return rule is not None and rule(node, arithmetic.at(node))


def touches(case: Case, arithmetic: Arithmetic) -> bool:
    """Whether `arithmetic` changes any node of `case`; only then its expected values are computed a second time."""
    return arithmetic != EXACT and any(changes(n, arithmetic) for s in case.steps for n in s.graph)
