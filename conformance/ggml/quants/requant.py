"""Requantise weights as ggml's OpenVINO backend does before it compiles.

A form is a symmetric grid with one scale per group of a row, or F16. A mode is a table from type to form; the graph,
never a name, decides which nodes it affects. The reference and the backends both call this module, so they differ by
rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.tensor import FLAG_INPUT, Tensor
from conformance.ggml.types import F16, F32, TYPES, GGMLType

from .write import extreme, inverse, roundf

F32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Form:
    """Symmetric grid: value = q * d, q a signed integer of `bits`, one d per `group` of a row."""

    bits: int
    group: int
    """Elements per scale; 0 for the whole row."""
    scale: GGMLType = F16
    """Type of d: F16 or F32."""


FORMS: dict[str, Form | None] = {
    "q4_0x128": Form(4, 128),
    "q8_0xrow": Form(8, 0),
    "int8xrow": Form(8, 0, F32),
    "f16": None,
}
"""Name of a form -> its grid, or None for a float.

`ExtraQuantType` Q4_0_128, Q8_0_C and F16 of ggml-openvino, and `int8xrow` for integer matrix engines: weights with a
float32 scale per row, activations with one per token."""


@dataclass(frozen=True, slots=True)
class Requant:
    """Form to which a mode converts weights of each type; other types are unchanged."""

    weights: Mapping[str, str] = field(default_factory=dict)
    """Type of `src[0]` of MUL_MAT and MUL_MAT_ID -> form."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Type of `src[0]` of GET_ROWS (the embedding) -> form."""


_QUANTISED = tuple(n for n, t in TYPES.items() if t.is_quantized)

MODES: dict[str, Requant] = {
    "none": Requant(),
    "npu": Requant(
        {**dict.fromkeys(_QUANTISED, "q4_0x128"), "q6_K": "q8_0xrow"},
        {**dict.fromkeys(_QUANTISED, "q8_0xrow"), "q6_K": "f16"},
    ),
    "channel8": Requant(dict.fromkeys(("q5_K", "q6_K"), "q8_0xrow"), dict.fromkeys(_QUANTISED, "q8_0xrow")),
}
"""Mode -> forms, as in `ggml_openvino_get_requant_type`: `npu`, or `channel8`.

`channel8` is for CPU and GPU. ggml-openvino finds the embedding and the output projection by name and stores every
output projection as `q8_0xrow`. Here the embedding is the weight that GET_ROWS reads; the output projection is
assumed to be Q6_K, as llama-quantize makes it in every four-bit file. An output projection of another type is
treated as any other weight."""


def mode_named(name: str) -> Requant:
    """Return the tables of a mode; UsageError if there is no such mode."""
    try:
        return MODES[name]
    except KeyError:
        raise UsageError(f"requant: one of {', '.join(MODES)} expected, {name!r} found") from None


_PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


def weight_form(node: Tensor, weights: Mapping[str, str], rows: Mapping[str, str]) -> str:
    """Return the form in which `node` reads `src[0]`; "" for the tensor's own.

    A weight is a leaf that is not a graph input and is read whole, not through a view such as a window of a KV cache. A
    row that is not a whole number of groups is not converted; ggml-openvino's layout has no such row.
    """
    table = weights if node.op in _PRODUCTS else rows if node.op == "GET_ROWS" else {}
    leaf = node.src[0] if table else None
    if leaf is None or leaf.op != "NONE" or leaf.view_src is not None or leaf.flags & FLAG_INPUT:
        return ""
    name = table.get(leaf.type.name, "")
    grid = FORMS[name] if name else None
    return name if grid is None or not grid.group or leaf.ne[0] % grid.group == 0 else ""


def quantised(form: Form, x: F32Array) -> tuple[NDArray[np.int8], NDArray[np.float16 | np.float32]]:
    """Compute quants and scales as `quantize_q4_0` and `quantize_q8_0` of ggml-openvino.

    Float32, rounded after each step. d is the value of largest magnitude / -8 (4 bits), or the largest magnitude / 127
    (8 bits); q = roundf(x * (1 / d)), halves away from zero, clamped; then d is rounded to its type. A group of zeros
    has q = 0. `x` has shape (..., ne0), whole groups; q is (..., groups, group) and d (..., groups, 1).
    """
    group = form.group or x.shape[-1]
    v = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, group)
    top = 1 << form.bits - 1
    with np.errstate(all="ignore"):
        amax, largest = extreme(v)
        d = largest / np.float32(-top) if form.bits == 4 else amax / np.float32(top - 1)
        # fmax and fmin give a number for NaN too, which 1 / d makes of groups below 1e-38
        q = np.fmin(np.fmax(roundf(v * inverse(d)[..., None]), np.float32(-top)), np.float32(top - 1))
        return q.astype(np.int8), d.astype(form.scale.dtype)[..., None]


def requantised(name: str, x: NDArray[Any]) -> F32Array:
    """Store `x`, ne0 last, in the form `name` of `FORMS` and read it back as float32.

    GraphError if there is no such form.
    """
    if name not in FORMS:
        raise GraphError(f"requant: one of {', '.join(FORMS)} expected, {name!r} found")
    form = FORMS[name]
    if form is None:
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)
    q, d = quantised(form, np.asarray(x, np.float32))
    return np.asarray((q * d.astype(np.float32)).reshape(x.shape), np.float32)
