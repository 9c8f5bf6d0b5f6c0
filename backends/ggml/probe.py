"""Probe a library's CPU device by computation: how FLASH_ATTN_EXT accumulates."""

from __future__ import annotations

from functools import cache

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.lib.library import Library
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, nbytes
from conformance.ggml.types import F16, F32

from .session import GgmlSession

CELLS = 4096
"""Twice the number at which an F16 sum of ones stops growing."""
STEPS = (1, 2, 4, 8, 16, 32, 64)
"""SIMD register sizes in elements; every kernel supports the last as row length."""


def flash_attn_step(library: Library, device: int, tokens: int) -> int:
    """Return the divisor of V's `ne[0]` for which FLASH_ATTN_EXT sums F16 in F32; 0: never."""
    if not _sums_wide(library, device, tokens, STEPS[-1]):
        return 0
    return next(step for step in STEPS if _sums_wide(library, device, tokens, STEPS[-1] + step))


def flash_attn_splits(library: Library, device: int) -> bool:
    """Return True if the threads of FLASH_ATTN_EXT share the cells of a token."""
    return _sums_wide(library, device, 1, STEPS[-1], threads=2)


@cache  # with a scheduler it is asked for each case
def _sums_wide(library: Library, device: int, tokens: int, d: int, *, threads: int = 1) -> bool:
    """Return True if the mean of `CELLS` ones, in rows of `d`, is 1; an F16 sum stops halfway."""
    g = Builder()
    q, k, v = g.new_tensor_2d(F32, d, tokens), g.new_tensor_2d(F16, d, CELLS), g.new_tensor_2d(F16, d, CELLS)
    node = g.flash_attn_ext(q, k, v, None, 1.0, 0.0, 0.0)
    node.flags |= FLAG_COMPUTE
    inputs = {t: np.zeros(nbytes(t), np.uint8) for t in (q, k)}
    inputs[v] = np.ones(d * CELLS, "<f2").view(np.uint8)
    case = Case("probe/flash_attn@0", {}, [Step(Graph([node]), inputs, (node,))])
    backend = library.start(device, threads)
    buft = library.ggml.backend_dev_buffer_type(device)
    try:
        with GgmlSession(library, "CPU", backend, buft, case, {}) as session:
            values = session.compute(case.steps[0].graph, inputs, (node,))[node].view("<f4")
    finally:
        library.ggml.backend_free(backend)
    return bool(values.min() > 0.75)
