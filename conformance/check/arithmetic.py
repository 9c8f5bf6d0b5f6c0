"""Which nodes a declared arithmetic changes: only those need the expected value computed a second time."""

from __future__ import annotations

from conformance.backend.interface import Arithmetic
from conformance.cgraph.case import Case
from conformance.cgraph.tensor import Tensor

_STORES = frozenset({"CPY", "DUP", "CONT", "SET_ROWS"})


def changes(node: Tensor, arithmetic: Arithmetic) -> bool:
    """Whether `node`'s value in `arithmetic` may differ from the exact one by more than rounding."""
    first = node.src[0] if node.src else None
    if node.op in {"MUL_MAT", "MUL_MAT_ID"} and first is not None:
        return first.type.name in arithmetic.mul_mat
    if node.op == "FLASH_ATTN_EXT":
        keys = node.src[1]
        return keys is not None and keys.type.name in arithmetic.flash_attn
    return node.op in _STORES and node.type.is_quantized and arithmetic.quantize != "reference"


def touches(case: Case, arithmetic: Arithmetic) -> bool:
    """Whether any node of `case` is changed by `arithmetic`."""
    if not arithmetic.mul_mat and not arithmetic.flash_attn and arithmetic.quantize == "reference":
        return False
    return any(changes(n, arithmetic) for s in case.steps for n in s.graph)
