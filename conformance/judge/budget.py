"""The tolerance table: how far a right answer may be from the expected one, per op, type and reduction length.

The expected value is computed in the backend's *declared* arithmetic, so a budget covers rounding only: of float32
sums and products, of a transcendental function, of the last store. `u` is float32's unit roundoff, 2^-24. Relative
errors of one rounding have NMSE up to u^2; a float32 sum of K terms adds up to K u^2 where its errors are random.
What was measured on right backends, and where a figure has another reason than rounding: docs/tolerances.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.tensor import VIEW_OPS, Tensor, nelements

from .arithmetic import changes
from .compare import Difference

U2 = 2.0**-48
"""Squared unit roundoff of float32: 3.6e-15."""
HALF_U2 = 2.0**-22
"""Squared unit roundoff of F16: 2.4e-7."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What is allowed of one tensor; both 0 mean equal to the bit."""

    nmse: float
    element: float
    """Largest allowed `Difference.element`."""
    why: str = ""

    def used(self, d: Difference) -> float:
        """The fraction of the budget that `d` takes: over 1 is wrong, Inf where nothing is allowed."""
        if not d.raw:
            return 0.0
        if d.special or not self.nmse:
            return inf
        return max(d.nmse / self.nmse, d.element / self.element)


RAW = Budget(0.0, 0.0, "nothing is computed: equal to the bit")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: NMSE `(base + per_k * K) * u^2`, K the length of the op's reduction."""

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
"""One element may be off by the root of the allowed NMSE times this."""

_STORE_ULP = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""One unit in the last place of a narrow float, relative to its value."""


_PRODUCTS = {"f16": HALF_U2, "bf16": 2.0**-18}
"""Squared unit roundoff of what a device rounds the operands of products to."""
_FACTOR = {
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "SOLVE_TRI", "DSV4_HC_POST", "SSM_SCAN", *LINEAR), 64.0),
    **dict.fromkeys(("FLASH_ATTN_EXT", "LIGHTNING_INDEXER"), 128.0),
    **dict.fromkeys(("ROPE", "ROPE_BACK"), 8.0),
}
"""How many times that a product may be off: two operands, products that nearly cancel, activations in 8 bits beside
compressed weights; attention has two products and a softmax between; a kernel for rotary embedding rounds what turns,
its sines and its result, never the angles."""

ROUNDED = {to: _FACTOR["MUL_MAT"] * unit for to, unit in _PRODUCTS.items()}
"""`Arithmetic.products` -> NMSE which rounding its operands is allowed to make in one matrix product."""

PRODUCTS = frozenset(_FACTOR)
"""Ops that multiply matrices, and ROPE: whose operands a device may round."""


def budget_of(node: Tensor, arithmetic: Arithmetic = EXACT, *, same: bool = True) -> Budget:
    """The budget of one node whose sources are right.

    Args:
        node: the node that was computed.
        arithmetic: in which the expected value was computed.
        same: whether the backend computes in that arithmetic too. Where it does not, a node that `arithmetic` changes
            may also be off by what the change is worth.
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


_TOKENS = frozenset({"SSM_SCAN", *LINEAR})


def _reduction(node: Tensor) -> int:
    """K: how many terms one element of the result is the sum of."""
    first = node.src[0] if node.src else None
    if first is None:
        return 1
    if node.op == "FLASH_ATTN_EXT":
        return first.ne[0] + _n_kv(node)
    if node.op == "SSM_CONV":
        kernel = node.src[1]
        return kernel.ne[0] if kernel is not None else 1
    if node.op in _TOKENS and node.src[1] is not None:
        return first.ne[0] + node.src[1].ne[2]
    if node.op == "POOL_2D":
        return node.op_params[1] * node.op_params[2]
    if node.op in {"OUT_PROD", "SOLVE_TRI"}:
        return first.ne[1]
    return nelements(first) if node.op in {"SUM", "GROUP_NORM"} else first.ne[0]


def _n_kv(node: Tensor) -> int:
    keys = node.src[1]
    return keys.ne[1] if keys is not None else 0


def _step(node: Tensor, arithmetic: Arithmetic) -> tuple[float, str]:
    """NMSE left where both sides round on the way: a value near the middle of two may go either way on one of them."""
    cells = node.src[2] if node.op == "FLASH_ATTN_EXT" else None
    if cells is not None and cells.type.name in arithmetic.flash_attn_sum:
        return HALF_U2 / 2 + _n_kv(node) * 1e-10, "a sum kept in F16"
    if node.op in {"UNARY", "GLU"}:
        return HALF_U2 * (1 / 64 + 4 / max(1, nelements(node))), "a table of F16"
    return 0.0, ""


_DISTANCE = {"f16": 4e-7, "bf16": 4e-5}
_DISTANCE_QUANTISED = 5e-4


def _distance(node: Tensor) -> tuple[float, str]:
    """NMSE between the same node in two arithmetics, at least four times what was measured (docs/tolerances.md).

    For quantised weights it is what ggml's own tests allow.
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
    """The budget of these figures and what the type of the result can add: a value near a tie may go either way.

    One element in eight may, or four of a small tensor: a float32 factor near a short decimal (0.7) puts many products
    of BF16 on a tie.
    """
    ulp = _STORE_ULP.get(node.type.name)
    if ulp is None:
        return Budget(nmse, element, why)
    flips = 1 / 8 + 4 / max(1, nelements(node))
    return Budget(nmse + ulp * ulp * flips, element + ulp, f"{why}; stored in {node.type}")


def free_running(nmse: float) -> Budget:
    """The budget a trajectory states for itself when it runs freely against a recording."""
    return Budget(nmse, 4 * PEAK * sqrt(nmse), "a whole trajectory run freely")
