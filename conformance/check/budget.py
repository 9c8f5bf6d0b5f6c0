"""The tolerance table: how far a right answer may be from the expected one, per op, type and reduction length.

The expected value is computed in the backend's *declared* arithmetic, so a budget covers rounding only: of float32
sums and products, of a transcendental function, of the last store. `u` is float32's unit roundoff, 2^-24. Relative
errors of one rounding have NMSE up to u^2; a float32 sum of K terms adds up to K u^2 where its errors are random.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from conformance.cgraph.ops import GLU_OPS, UNARY_OPS
from conformance.cgraph.tensor import VIEW_OPS, Tensor, nelements

from .compare import Difference

U2 = 2.0**-48
"""Squared unit roundoff of float32: 3.6e-15."""


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
    """One row of the table: NMSE `(base + per_k * K) * u^2 + floor`, K the length of the op's reduction."""

    base: float
    per_k: float = 0.0
    floor: float = 0.0
    """Error that comes from an approximation of the op's definition rather than from float32."""
    peak: float = 8.0
    """One element's allowed error is the root of the NMSE times this."""
    why: str = ""


_ROUND = Row(4, why="one or two float32 roundings")
_MOVE = Row(0, why="moves values; only a change of type rounds, and rounds as ggml's reference does")
_EXP = Row(256, why="float32 exp, tanh, erf of a few ulp and the products around it")

ROWS: dict[str, Row] = {
    **dict.fromkeys(("CONT", "CPY", "DUP", "CONCAT", "REPEAT", "GET_ROWS", "SET_ROWS", "ARGSORT", "TOP_K"), _MOVE),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV", "ADD_ID", "SCALE", "SQR", "SQRT", "CLAMP"), _ROUND),
    "SUM_ROWS": Row(16, 1, why="float32 sum of K"),
    "MEAN": Row(16, 1, why="float32 sum of K"),
    "NORM": Row(64, 1, why="mean, variance, root"),
    "RMS_NORM": Row(64, 1, why="float32 sum of K squares, root"),
    "L2_NORM": Row(64, 1, why="float32 sum of K squares, root"),
    "MUL_MAT": Row(64, 1, why="float32 sum of K products"),
    "MUL_MAT_ID": Row(64, 1, why="float32 sum of K products"),
    "SOFT_MAX": Row(1024, 1, why="exp of differences, sum, quotient"),
    "ROPE": Row(4096, why="sin and cos of a float32 angle"),
    "FLASH_ATTN_EXT": Row(4096, 1, why="two products and a softmax between"),
    "SSM_CONV": Row(64, 1, why="float32 sum of K products"),
    "UNARY": _EXP,
    "GLU": _EXP,
}


def _reduction(node: Tensor) -> int:
    first = node.src[0] if node.src else None
    if first is None:
        return 1
    if node.op == "FLASH_ATTN_EXT":
        keys = node.src[1]
        return first.ne[0] + (keys.ne[1] if keys is not None else 0)
    if node.op == "SSM_CONV":
        kernel = node.src[1]
        return kernel.ne[0] if kernel is not None else 1
    return first.ne[0]


_STORE_ULP = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""One unit in the last place of a narrow float, relative to its value."""


_LOOSE = {"f16": 1e-6, "bf16": 1e-4}
_LOOSE_QUANTISED = 5e-4
"""NMSE between a product whose activations were rounded to the weights' vec_dot type and the exact one: the figure
that ggml's own tests allow, ten times what is measured (docs/tolerances.md)."""

_STEP = {"q8_0": 1e-4, "q8_1": 1e-4}
_STEP_OTHER = 1e-2
"""NMSE that a value one rounding away can cause when it is stored in blocks: a scale or a step may flip."""

_ACCUMULATE = 16.0
"""By how much a chain of nodes may amplify the sum of its own roundings."""


def budget_of(node: Tensor, *, same_arithmetic: bool = True) -> Budget:
    """The budget of one node whose sources are right.

    Args:
        node: the node that was computed.
        same_arithmetic: whether expected and found values were computed in the same declared arithmetic; where not,
            a product of narrow or quantised weights may also differ by the rounding of its activations.
    """
    if node.op in VIEW_OPS or node.type.is_quantized or (node.type.dtype is not None and node.type.dtype.kind == "i"):
        return RAW
    row = ROWS.get(_key(node)) or ROWS[node.op]
    nmse = (row.base + row.per_k * _reduction(node)) * U2 + row.floor
    why = row.why
    if not same_arithmetic and node.op in {"MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT"}:
        weights = node.src[1] if node.op == "FLASH_ATTN_EXT" else node.src[0]
        if weights is not None and weights.type.name != "f32":
            nmse = max(nmse, _LOOSE.get(weights.type.name, _LOOSE_QUANTISED))
            why = "activations rounded differently"
    if not nmse:
        return Budget(0.0, 0.0, why)
    return _stored(node, nmse, row.peak, why)


def _stored(node: Tensor, nmse: float, peak: float, why: str) -> Budget:
    """Add what the type of the result can add: a value near the middle of two may be rounded either way.

    That is rare among random values, so few elements may: one in 64, or four of a small tensor.
    """
    element = peak * sqrt(nmse)
    ulp = _STORE_ULP.get(node.type.name)
    if ulp is None:
        return Budget(nmse, element, why)
    flips = 1 / 64 + 4 / max(1, nelements(node))
    return Budget(nmse + ulp * ulp * flips, element + ulp, f"{why}; stored in {node.type}")


def _key(node: Tensor) -> str:
    """UNARY and GLU have a row of their own per sub-op where one is needed: `UNARY GELU`."""
    if node.op == "UNARY":
        return f"UNARY {UNARY_OPS[node.op_params[0]]}"
    if node.op == "GLU":
        return f"GLU {GLU_OPS[node.op_params[0]]}"
    return node.op


def propagated(t: Tensor, nodes: Iterable[Tensor]) -> Budget:
    """The budget of `t` where all of `nodes` had a part in it, each within its own budget."""
    nmse = _ACCUMULATE * sum(budget_of(n).nmse for n in nodes)
    if not nmse:
        return RAW
    if t.type.is_quantized:
        nmse = max(nmse, _STEP.get(t.type.name, _STEP_OTHER))
        return Budget(nmse, inf, "a chain of nodes, stored in blocks")
    return _stored(t, nmse, 32.0, "a chain of nodes")


def free_running(nmse: float) -> Budget:
    """The budget a trajectory states for itself when it runs freely against a recording."""
    return Budget(nmse, 32.0 * sqrt(nmse), "a whole trajectory run freely")
