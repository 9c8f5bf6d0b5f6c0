"""Probe a library's CPU device by computation: how MUL_MAT and FLASH_ATTN_EXT accumulate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.library import Library
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor
from conformance.ggml.types import F16, F32

from .session import GgmlSession

CELLS = 4096
"""Twice the number at which an F16 sum of ones stops growing."""
STEPS = (1, 2, 4, 8, 16, 32, 64)
"""SIMD register sizes in elements; every kernel supports the last as row length."""
_HALF = 1024
"""Ones of the row; a multiple of the sums that a kernel has side by side."""


def flash_attn_step(library: Library, device: Device, tokens: int) -> int:
    """Return the divisor of V's `ne[0]` for which FLASH_ATTN_EXT sums F16 in F32; 0: never."""
    if not _sums_wide(library, device, tokens, STEPS[-1]):
        return 0
    return next(step for step in STEPS if _sums_wide(library, device, tokens, STEPS[-1] + step))


def flash_attn_splits(library: Library, device: Device) -> bool:
    """Return True if the threads of FLASH_ATTN_EXT share the cells of a token."""
    return _sums_wide(library, device, 1, STEPS[-1], threads=2)


@cache  # with a scheduler it is asked for each case
def flash_attn_weights(library: Library, device: Device) -> str:
    """Return the type of what FLASH_ATTN_EXT multiplies V by where it sums in F16."""
    weight, v = np.exp(np.float32(-1)), np.linspace(1, 2, STEPS[-1], endpoint=False).astype(np.float16)
    found = _attention(library, device, 1, np.stack([0 * v, v]), np.array([[0, -1]])) * (1 + weight)
    error = {}
    for name, width in (("float32", np.float32), ("f16", np.float16)):
        error[name] = np.abs(found - (width(weight) * v.astype(np.float32)).astype(np.float16)).max()
    return min(error, key=lambda name: error[name])


@cache
def mul_mat_sum(library: Library, device: Device) -> Mapping[str, str]:
    """Return types of weights whose products MUL_MAT sums in F16, where 1 + 2^-12 is 1."""
    row, wide = np.repeat([1.0, 2.0**-12], _HALF), _HALF * (1 + 2.0**-12)
    for tokens in (1, 16):
        g = Builder()
        w, x = g.new_tensor_2d(F16, 2 * _HALF, 16), g.new_tensor_2d(F32, 2 * _HALF, tokens)
        inputs = {w: np.ones((16, 2 * _HALF)), x: np.tile(row, (tokens, 1))}
        if _value(library, device, g.mul_mat(w, x), inputs).min() < wide:
            return {F16.name: F16.name}
    return {}


@cache
def _sums_wide(library: Library, device: Device, tokens: int, d: int, *, threads: int = 1) -> bool:
    """Return True if the mean of `CELLS` ones, in rows of `d`, is 1; an F16 sum stops halfway."""
    ones = np.ones((CELLS, d))
    return bool(_attention(library, device, tokens, ones, np.zeros((tokens, CELLS)), threads).min() > 0.75)


def _attention(
    library: Library, device: Device, tokens: int, cells: NDArray[Any], mask: NDArray[Any], threads: int = 1
) -> NDArray[np.float32]:
    """Return the result of FLASH_ATTN_EXT for F16 `cells` of V (n_kv, d) and Q and K of zeros."""
    n_kv, d = cells.shape
    g = Builder()
    q, k, v = g.new_tensor_2d(F32, d, tokens), g.new_tensor_2d(F16, d, n_kv), g.new_tensor_2d(F16, d, n_kv)
    seen = g.new_tensor_2d(F16, n_kv, tokens)
    inputs = {q: np.zeros((tokens, d)), k: np.zeros((n_kv, d)), v: cells, seen: mask}
    return _value(library, device, g.flash_attn_ext(q, k, v, seen, 1.0, 0.0, 0.0), inputs, threads)


def _value(
    library: Library, device: Device, node: Tensor, inputs: Mapping[Tensor, NDArray[Any]], threads: int = 1
) -> NDArray[np.float32]:
    """Return the F32 values of one node, for values of its F32 and F16 sources."""
    node.flags |= FLAG_COMPUTE
    data = {t: np.ascontiguousarray(a, t.type.dtype).reshape(-1).view(np.uint8) for t, a in inputs.items()}
    case = Case(f"probe/{node.op}@0", {}, [Step(Graph([node]), data, (node,))])
    backend = device.start(threads)
    try:
        with GgmlSession(library, "CPU", backend, device.buffer_type, case, {}) as session:
            return session.compute(case.steps[0].graph, data, (node,))[node].view("<f4")
    finally:
        library.ggml.backend_free(backend)
