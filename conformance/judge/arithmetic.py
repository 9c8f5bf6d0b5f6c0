"""Which nodes a declared arithmetic changes: only those need the expected value computed a second time."""

from __future__ import annotations

from collections.abc import Callable

from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.quants.requant import weight_form
from conformance.ggml.tensor import Tensor


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
    """Whether `node`'s value in `arithmetic` may differ from the exact one by more than rounding."""
    rule = _CHANGES.get(node.op)
    return rule is not None and rule(node, arithmetic.at(node))


def touches(case: Case, arithmetic: Arithmetic) -> bool:
    """Whether any node of `case` is changed by `arithmetic`."""
    return arithmetic != EXACT and any(changes(n, arithmetic) for s in case.steps for n in s.graph)
