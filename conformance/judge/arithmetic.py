"""Which nodes a declared arithmetic changes: only those need the expected value computed a second time."""

from __future__ import annotations

from collections.abc import Callable

from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.ops.op import DECLARATIONS
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
    return str(node.params.op).replace("GEGLU", "GELU") in a.tables


def _turns(_: Tensor, a: Arithmetic) -> bool:
    return a.rope != EXACT.rope


_CHANGES: dict[str, Callable[[Tensor, Arithmetic], bool]] = {
    "quantize": _stores,
    "mul_mat": _multiplies,
    "rows": _requantises,
    "flash_attn": _attends,
    "tables": _looks_up,
    "rope": _turns,
}
"""`Rounding.by` -> whether a node of such an op is computed in another way."""


def changes(node: Tensor, arithmetic: Arithmetic) -> bool:
    """Whether `node`'s value in `arithmetic` may differ from the exact one by more than rounding."""
    declared = DECLARATIONS.get(node.op)
    rule = _CHANGES.get(declared.rounding.by) if declared is not None else None
    return rule is not None and rule(node, arithmetic.at(node))


def touches(case: Case, arithmetic: Arithmetic) -> bool:
    """Whether any node of `case` is changed by `arithmetic`."""
    return arithmetic != EXACT and any(changes(n, arithmetic) for s in case.steps for n in s.graph)
