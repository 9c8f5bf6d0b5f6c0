"""Weights as a node reads them: their own elements, or what is left of them in another form."""

from __future__ import annotations

from conformance.backend.kernel import Raw, Sources
from conformance.ggml import quants
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.quants.requant import requantised, weight_form
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32, GGMLType

from .values import operand


def weight(arithmetic: Arithmetic, node: Tensor, src: Sources) -> tuple[GGMLType, Raw]:
    """Type and elements of `src[0]`, stored in another form first where `arithmetic` asks for it."""
    w, raw = operand(node, src, 0)
    form = weight_form(node, arithmetic.weights, arithmetic.rows)
    return (F32, requantised(form, quants.to_float(w.type, raw))) if form else (w.type, raw)
