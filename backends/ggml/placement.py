"""Which weights go into a buffer type other than the device's default: llama.cpp's rule, asked of every real use."""

from __future__ import annotations

from conformance.cgraph.case import Case
from conformance.cgraph.tensor import Tensor

from .context import Context
from .library import Library

LOOKED_AT = 4
"""The CPU device looks at the buffers of the first four src only and says yes to a repacked weight behind them, such
as the sinks of FLASH_ATTN_EXT, which then crashes (`ggml_backend_cpu_device_supports_op`)."""


def place(library: Library, device: int, buft: int, case: Case) -> tuple[frozenset[Tensor], list[str]]:
    """Find the weights that `buft` can hold: every node that reads one is supported with the weight there.

    As llama.cpp's `weight_buft_supported` it shows `supports_op` a weight in an empty buffer of the type, but it asks
    about the nodes that will run and not about one made-up shape. Nothing may be written before this is known: a
    buffer that repacks takes types it has no kernel for, and crashes.

    Returns:
        The weights, and one note for each weight that must stay in the default buffer.
    """
    g = library.ggml
    caches = set(case.caches())
    used: set[Tensor] = set()
    refused: dict[Tensor, str] = {}
    empty = g.backend_buft_alloc_buffer(buft, 0)
    name = g.backend_buft_name(buft).decode()
    try:
        for step in case.steps:
            tensors = step.graph.tensors()
            context = Context(library, len(tensors))
            try:
                at: dict[Tensor, int] = {}
                for t in tensors:
                    at[t] = context.add(t, at)
                for t in tensors:
                    for i, w in enumerate(t.src):
                        if w is None or w not in case.persistent or w in caches:
                            continue
                        used.add(w)
                        context.set_buffer(at[w], empty)
                        if t.view_src is w or not g.backend_dev_supports_op(device, at[t]):
                            refused.setdefault(w, f"which refuses {t.op} on it")
                        elif i >= LOOKED_AT:
                            refused.setdefault(w, f"as src[{i}] of {t.op}, where supports_op does not look")
                        context.set_buffer(at[w], 0)
            finally:
                context.free()
    finally:
        if empty:
            g.backend_buffer_free(empty)
    notes = [f"{w.name or w} {w.type} is not in {name}, {refused[w]}" for w in case.persistent if w in refused]
    return frozenset(used - refused.keys()), notes
