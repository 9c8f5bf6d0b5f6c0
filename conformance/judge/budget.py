"""Tolerances: allowed error of a correct result, by op, type and reduction length.

The rows of the table are in the declarations of the ops (`ggml.ops.op.Rounding`).

The expected value is computed in the backend's *declared* arithmetic, so a tolerance covers only the rounding of
float32 sums and products, of transcendental functions and of the final store. `u` is float32's unit roundoff, 2^-24.
Relative errors of one rounding have NMSE up to u^2; a float32 sum of K terms adds up to K u^2 if its errors are random.
docs/suite.md lists the tolerances with reasons other than rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt

from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic, key_of, limit_at
from conformance.ggml.ops.matmul import PRODUCT
from conformance.ggml.ops.op import DECLARATIONS, Rounding, operand
from conformance.ggml.quants.requant import weight_form
from conformance.ggml.tensor import VIEW_OPS, Tensor, nelements

from .compare import Difference

U2 = 2.0**-48
"""Squared unit roundoff of float32: 3.6e-15."""
HALF_U2 = 2.0**-22
"""Squared unit roundoff of F16: 2.4e-7."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Error allowed in one tensor; both 0 means bit-exact."""

    nmse: float
    element: float
    """Largest allowed `Difference.element`."""
    why: str = ""
    profile: str = ""
    """Precision profile of the node, its key and the measured rounding; or empty."""
    zeros: bool = False
    """True if a zero may have either sign, as after a fused multiply-add of 0."""

    def used(self, d: Difference) -> float:
        """Return the fraction of the tolerance used by `d`; over 1 fails, Inf if bit-exact."""
        if not d.raw or (self.zeros and not d.special and not d.element):
            return 0.0
        if d.special or not self.nmse:
            return inf
        return max(d.nmse / self.nmse, d.element / self.element)


RAW = Budget(0.0, 0.0, "values are only moved: bit-exact")


PEAK = 8.0
"""Error allowed in one element, in roots of the allowed NMSE."""

_STORE_ULP = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""One unit in the last place of a narrow float, relative to its value."""


BLOCK_STEP = {"q8_0": 0.1, "q8_1": 0.1}
BLOCK_STEP_OTHER = 1.0
"""Largest error of an element of a block type if a step or a scale is rounded the other way."""
_PRODUCTS = {"f16": HALF_U2, "bf16": 2.0**-18}
"""Type that a device rounds the operands of products to -> its squared unit roundoff."""
ROUNDED = {to: PRODUCT * unit for to, unit in _PRODUCTS.items()}
"""`Arithmetic.products` -> NMSE that rounding the operands may add to one matrix product."""
ABOVE_UPSTREAM = {
    **dict.fromkeys(
        ("ROPE", "ROPE_BACK"), "rounds the rotated values, the sines and the result; 1.3e-5 measured in BF16"
    ),
    **dict.fromkeys(
        ("SSM_SCAN", "RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "GATED_DELTA_NET"),
        "a product that feeds a state; 2.3e-5 measured in BF16",
    ),
    **dict.fromkeys(("SOLVE_TRI", "DSV4_HC_POST", "CONV_TRANSPOSE_1D"), "one product, as MUL_MAT"),
    "LIGHTNING_INDEXER": "two products; 1.1e-4 measured in BF16",
}
"""Op -> why its budget may exceed upstream's limit if a device rounds operands.

For `Arithmetic.products`, up to `Rounding.products`. Other ops may not exceed it."""


_SUMMED = {
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "CONV_2D", "CONV_3D", "CONV_TRANSPOSE_1D", "CONV_TRANSPOSE_2D"), 0),
    "FLASH_ATTN_EXT": 1,
}
"""Op -> source whose type chooses the kernel that sums products."""
_SUM_IN_F16 = 1e-8
"""NMSE per term of such a sum in F16.

4e-9 measured for eight sums side by side, the fewest that a kernel has."""


def budget_of(node: Tensor, arithmetic: Arithmetic = EXACT, *, same: bool = True, cancellation: float = 0.0) -> Budget:
    """Return the tolerance of a node with correct sources, expected in `arithmetic`.

    `same`: the backend computes in that arithmetic, too. If not, the tolerance of a node that `arithmetic` changes
    includes the error of that change. `cancellation`: squared roundoffs due to cancellation in this node
    (`cancellations`).
    """
    if node.op in VIEW_OPS or (node.type.dtype is not None and node.type.dtype.kind == "i"):
        return RAW
    row = DECLARATIONS[node.op].rounding
    bound = arithmetic.bound(node, row.terms(node) if row.per_k else 1)  # upstream's limit at most
    if node.type.is_quantized:
        step = BLOCK_STEP.get(node.type.name, BLOCK_STEP_OTHER)
        return Budget(bound, step, arithmetic.name, _profile(node, arithmetic)) if bound else RAW
    nmse = (row.base + row.per_k * row.terms(node) + cancellation) * U2
    why, profile, arithmetic = row.why, _profile(node, arithmetic), arithmetic.at(node)
    if cancellation:
        why = f"{why}; sums that nearly cancel"
    if changes(node, arithmetic):
        extra, reason = _step(node, arithmetic) if same else _distance(node)
        nmse, why = nmse + extra, f"{why}; {reason}" if extra else why
    if extra := _summed(node, row, arithmetic):
        nmse, why = nmse + extra, f"{why}; products summed in F16"
    if arithmetic.products in _PRODUCTS and row.products:
        rounded = row.products * _PRODUCTS[arithmetic.products]
        bound = max(rounded, bound) if node.op in ABOVE_UPSTREAM else min(rounded + bound, limit_at(node))
        why = f"{why}; operands rounded to {arithmetic.products}"
    nmse += bound
    if not nmse:
        return Budget(0.0, 0.0, why, zeros=dequantises(node))
    return replace(stored(node, nmse, PEAK * sqrt(nmse), why), profile=profile)


def dequantises(node: Tensor) -> bool:
    """Return True if `node` unpacks blocks: a zero's sign may be lost."""
    return not node.type.is_quantized and any(s is not None and s.type.is_quantized for s in node.src)


def _profile(node: Tensor, arithmetic: Arithmetic) -> str:
    key = key_of(node) if arithmetic.roundings else ""
    return f"{arithmetic.name}: {key}, {arithmetic.roundings[key]}" if key in arithmetic.roundings else ""


def _step(node: Tensor, arithmetic: Arithmetic) -> tuple[float, str]:
    """Return NMSE and reason of the error if both sides round: values near a tie may differ."""
    by = DECLARATIONS[node.op].rounding.by
    if by == "flash_attn" and operand(node, 2).type.name in arithmetic.flash_attn_sum:
        return HALF_U2 / 2 + operand(node, 1).ne[1] * 1e-10, "a sum in F16"
    if by == "tables":
        return HALF_U2 * (1 / 64 + 4 / max(1, nelements(node))), "a table of F16"
    return 0.0, ""


def _summed(node: Tensor, row: Rounding, arithmetic: Arithmetic) -> float:
    """Return the NMSE of products that are summed in F16."""
    if node.op not in _SUMMED or operand(node, _SUMMED[node.op]).type.name not in arithmetic.mul_mat_sum:
        return 0.0
    terms = operand(node, 1).ne[0] if node.op == "FLASH_ATTN_EXT" else row.terms(node)
    return min(limit_at(node), terms * _SUM_IN_F16)


_DISTANCE = {"f16": 4e-7, "bf16": 4e-5}
_DISTANCE_QUANTISED = 5e-4


def _distance(node: Tensor) -> tuple[float, str]:
    """Return NMSE and reason between two arithmetics: at least four times the measured one.

    For quantised weights it is the limit of ggml's own tests (docs/suite.md).
    """
    by = DECLARATIONS[node.op].rounding.by
    if by == "rope":
        return (3.4e-6 if node.params.ext_factor else 4e-7), "angles computed by repeated multiplication in float32"
    if by == "tables":
        return 1e-6, "a table of F16 on one side"
    weights = operand(node, 1) if by == "flash_attn" else operand(node)
    nmse = _DISTANCE.get(weights.type.name, _DISTANCE_QUANTISED)
    if by == "flash_attn":
        nmse += weights.ne[1] * HALF_U2 / 3
    return nmse, "activations rounded on one side"


def stored(node: Tensor, nmse: float, element: float, why: str) -> Budget:
    """Return a tolerance widened for storing in the result's type: values near a tie differ.

    It allows this for one element in eight, or for four of a small tensor: a float32 factor near a short decimal (0.7)
    puts many products of BF16 on a tie.
    """
    ulp = _STORE_ULP.get(node.type.name)
    if ulp is None:
        return Budget(nmse, element, why)
    flips = 1 / 8 + 4 / max(1, nelements(node))
    return Budget(nmse + ulp * ulp * flips, element + ulp, f"{why}; stored in {node.type}")


def free_running(nmse: float) -> Budget:
    """Return the tolerance of a trajectory run freely, with the NMSE that its recording states."""
    return Budget(nmse, 4 * PEAK * sqrt(nmse), "a whole trajectory run freely")


def type_of(node: Tensor, i: int) -> str:
    """Return the type name of `node.src[i]`; empty if it is absent."""
    src = node.src[i] if i < len(node.src) else None
    return "" if src is None else src.type.name


def changes(node: Tensor, arithmetic: Arithmetic) -> bool:
    """Return True if `arithmetic` changes `node` beyond float32 rounding (`Rounding.by`)."""
    a, declared = arithmetic.at(node), DECLARATIONS.get(node.op)
    match declared.rounding.by if declared is not None else "":
        case "quantize":
            changed = node.type.is_quantized and a.quantize != EXACT.quantize
        case "mul_mat":
            narrow = a.operands != EXACT.operands or a.sums != EXACT.sums
            changed = narrow or type_of(node, 0) in a.mul_mat or bool(weight_form(node, a.weights, a.rows))
        case "rows":
            changed = bool(weight_form(node, a.weights, a.rows))
        case "flash_attn":
            narrow = a.operands != EXACT.operands
            changed = narrow or type_of(node, 1) in a.flash_attn or type_of(node, 2) in a.flash_attn_sum
        case "tables":
            changed = str(node.params.op).replace("GEGLU", "GELU") in a.tables
        case "rope":
            changed = a.rope != EXACT.rope
        case _:
            changed = False
    return changed


def touches(case: Case, arithmetic: Arithmetic) -> bool:
    """Return True if `arithmetic` changes a node of `case`, so that expected values differ."""
    return arithmetic != EXACT and any(changes(n, arithmetic) for s in case.steps for n in s.graph)
