"""Which weights go into a buffer other than the device's default: llama.cpp's rule, asked of every real use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.case.case import Case
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

from .context import Context
from .library import Library

LOOKED_AT = 4
"""The CPU device looks at the buffers of the first four src only and says yes to a repacked weight behind them, such
as the sinks of FLASH_ATTN_EXT, which then crashes (`ggml_backend_cpu_device_supports_op`)."""
USAGES = {"any": 0, "weights": 1}
"""`enum ggml_backend_buffer_usage`."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a persistent tensor lies."""

    buft: int
    """`ggml_backend_buffer_type_t`."""
    usage: int
    """One of `USAGES`."""


def homes(
    library: Library, device: int, bufts: Mapping[str, int], weights: int, case: Case
) -> tuple[dict[Tensor, Home], list[str]]:
    """Where every persistent tensor lies: as the case says, else `weights`, where each node that reads it can do so.

    As llama.cpp's `weight_buft_supported` it shows `supports_op` a weight in an empty buffer of the type, but it asks
    about the nodes that will run and not about one made-up shape. Nothing may be written before this is known: a
    buffer that repacks takes types it has no kernel for, and crashes.

    Args:
        library: where it runs.
        device: `ggml_backend_dev_t`.
        bufts: the device's buffer types by name, the default first.
        weights: buffer type of weights of which the case says nothing.
        case: what to place.

    Returns:
        The homes, and one note for each tensor that must stay in the default buffer.

    Raises:
        BackendError: the device itself refuses a use of a tensor that must lie where the case says.
    """
    known = list(bufts.values())
    caches = frozenset(case.caches())
    found: dict[Tensor, Home] = {}
    for t in case.persistent:
        said = case.placement.get(t)
        usage = USAGES["any" if t in caches else "weights" if said is None else said.usage]
        default = known[0] if t in caches else weights
        found[t] = Home(default if said is None else known[said.buffer % len(known)], usage)
    special = {t: home.buft for t, home in found.items() if home.buft != known[0]}
    refused = _refused(library, device, special, caches, case)
    notes = []
    names = {buft: name for name, buft in bufts.items()}
    for t, reason in refused.items():
        said = case.placement.get(t)
        if said is not None and said.must:
            insist(library, device, special[t], t, case)
            continue
        notes.append(f"{t.name or t} {t.type} is not in {names[special[t]]}, {reason}")
        found[t] = Home(known[0], found[t].usage)
    return found, notes


def taken(library: Library, device: int, buft: int, graph: Graph, tensor: Tensor) -> list[bool]:
    """`ggml_backend_dev_supports_op` of every node, asked while `tensor` and its views lie in an empty buffer.

    Raises:
        BackendError: this version of ggml cannot have a tensor of `graph`.
    """
    g = library.ggml
    tensors = graph.tensors()
    context = Context(library, len(tensors))
    empty = g.backend_buft_alloc_buffer(buft, 0)
    try:
        at: dict[Tensor, int] = {}
        for t in tensors:
            at[t] = context.add(t, at)
            if t.root is tensor:
                context.set_buffer(at[t], empty)
        return [bool(g.backend_dev_supports_op(device, at[node])) for node in graph]
    finally:
        context.free()
        if empty:
            g.backend_buffer_free(empty)


def insist(library: Library, device: int, buft: int, t: Tensor, case: Case) -> None:
    """Refuse to place `t` where the device takes not every use of it.

    Raises:
        BackendError: names the use.
    """
    for node, said in zip(case.uses(t), taken(library, device, buft, Graph(case.uses(t)), t), strict=True):
        if not said:
            name = library.ggml.backend_buft_name(buft).decode()
            raise BackendError(f"{t.name or t} {t.type} must lie in {name}, where supports_op refuses {node}")


def _refused(
    library: Library, device: int, special: Mapping[Tensor, int], caches: frozenset[Tensor], case: Case
) -> dict[Tensor, str]:
    """Tensors that cannot lie where they should, in the order of `special`, and why."""
    g = library.ggml
    why = {t: "as graphs write it" for t in special if t in caches}
    used: set[Tensor] = set()
    empty = {buft: g.backend_buft_alloc_buffer(buft, 0) for buft in dict.fromkeys(special.values())}
    try:
        for step in case.steps if special else ():
            tensors = step.graph.tensors()
            context = Context(library, len(tensors))
            try:
                at: dict[Tensor, int] = {}
                for t in tensors:
                    at[t] = context.add(t, at)
                for t in tensors:
                    for i, w in enumerate(t.src):
                        if w is None or w not in special:
                            continue
                        used.add(w)
                        context.set_buffer(at[w], empty[special[w]])
                        if t.view_src is w or not g.backend_dev_supports_op(device, at[t]):
                            why.setdefault(w, f"which refuses {t.op} on it")
                        elif i >= LOOKED_AT:
                            why.setdefault(w, f"as src[{i}] of {t.op}, where supports_op does not look")
                        context.set_buffer(at[w], 0)
            finally:
                context.free()
    finally:
        for buffer in empty.values():
            if buffer:
                g.backend_buffer_free(buffer)
    return {t: why.get(t, "as no node reads it") for t in special if t in why or t not in used}
