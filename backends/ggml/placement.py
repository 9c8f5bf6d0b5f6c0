"""Buffers of persistent tensors by llama.cpp's rules: for one device, or for a scheduler.

As in llama.cpp's `weight_buft_supported`, `supports_op` sees a weight in an empty buffer of the type; here it is called
for every node that will read the weight, instead of for one example shape. Nothing may be written to the buffer before
the answer: a buffer that repacks accepts types for which it has no kernel, and crashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from conformance.case.case import Case
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.context import Context
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.layout import USAGE_ANY, USAGE_WEIGHTS
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import VIEW_OPS, Tensor

LOOKED_AT = 4
"""Number of sources whose buffers the CPU device checks (`supports_op`).

It accepts a repacked weight in a later source, such as the sinks of FLASH_ATTN_EXT, and the op then crashes."""
USAGES = {"any": USAGE_ANY, "weights": USAGE_WEIGHTS}
"""Usage of a case's placement -> `enum ggml_backend_buffer_usage`."""
CACHE_WRITERS = (*VIEW_OPS, "SET_ROWS", "CPY")
"""Ops that llama.cpp applies to a cache, which is on the device whatever it supports.

A case of one step has no cache, only a node that writes in place."""


@dataclass(frozen=True, slots=True)
class Home:
    """Buffer type and usage of a persistent tensor."""

    buft: int
    """`ggml_backend_buffer_type_t`."""
    usage: int
    """One of `USAGES`."""


def homes(
    library: Library, device: Device, bufts: Mapping[str, int], weights: int, case: Case
) -> tuple[dict[Tensor, Home], list[str]]:
    """Return the place of each persistent tensor: as the case requires, else `weights`.

    `weights` is used if the device supports every use there. `bufts` are the device's buffer types by name, default
    first. Returns the homes, and one note for each tensor that must stay in the default buffer. BackendError as
    `sched_homes`.
    """
    types = list(bufts.values())
    caches = frozenset(case.caches())
    places: dict[Tensor, Home] = {}
    for t in case.persistent:
        placement = case.placement.get(t)
        usage = USAGES["any" if t in caches else "weights" if placement is None else placement.usage]
        default = types[0] if t in caches else weights
        places[t] = Home(default if placement is None else types[placement.buffer % len(types)], usage)
    special = {t: home.buft for t, home in places.items() if home.buft != types[0]}
    notes = []
    names = {buft: name for name, buft in bufts.items()}
    for t, reason in _refused(library, device, special, caches, case).items():
        placement = case.placement.get(t)
        if placement is not None and placement.must:
            _insist(library, device, special[t], t, case)
            continue
        notes.append(f"{t.name or t} {t.type} is not in {names[special[t]]}, {reason}")
        places[t] = Home(types[0], places[t].usage)
    return places, notes


def sched_homes(
    library: Library, device: Device, cpu: Device, bufts: Sequence[int], weights: int, case: Case
) -> tuple[dict[Tensor, Home], list[str]]:
    """Return where llama.cpp would place each persistent tensor for a device and the CPU.

    `bufts` are the device's buffer types, `weights` the one for weights. Entries of the case's own placement count
    only if they have `must`. Returns the homes, and one note for each weight that is not on the device. BackendError if
    the device itself refuses a use of a tensor that must be where the case requires.
    """
    here, there = device.buffer_type, cpu.buffer_type
    caches = frozenset(case.caches())
    readers: dict[Tensor, set[str]] = {t: set() for t in case.persistent}
    refused: dict[Tensor, str] = {}
    with _empty(library, [weights]) as empty:
        for t, at in _each_tensor(library, case):
            lasting = len(case.steps) > 1 and t.op in CACHE_WRITERS
            if t.root in readers and not lasting and not device.supports_op(at[t]):
                refused.setdefault(t.root, f"which refuses {t.op} into it")
            for i, w in enumerate(t.src):
                if w is None or w.root not in readers or w.root in caches:
                    continue
                if t.op not in VIEW_OPS:
                    readers[w.root].add(t.op if t.src[0] is w else f"{t.op} elsewhere")
                if w is not w.root:
                    continue
                if why := _objection(library, device, t, i, at, empty[weights], unseen=weights != here):
                    refused.setdefault(w, why)
    refused |= {w: "as only GET_ROWS reads it" for w, ops in readers.items() if ops == {"GET_ROWS"}}
    places = {
        t: Home(
            there if t in refused else here if t in caches else weights, USAGES["any" if t in caches else "weights"]
        )
        for t in case.persistent
    }
    for t, p in case.placement.items():
        if p.must:
            buft = bufts[p.buffer % len(bufts)]
            _insist(library, device, buft, t, case)
            places[t] = Home(buft, USAGES[p.usage])
            refused.pop(t, None)
    return places, [f"{w.name or w} {w.type} is not on {device.name}, {why}" for w, why in refused.items()]


def supports(library: Library, device: Device, buft: int, graph: Graph, tensor: Tensor) -> list[bool]:
    """Return `ggml_backend_dev_supports_op` per node while `tensor` is in an empty buffer.

    BackendError if this version of ggml cannot represent a tensor of `graph`.
    """
    with _empty(library, [buft]) as empty, addresses(library, graph.tensors()) as at:
        for t, pointer in at.items():
            if t.root is tensor:
                library.struct(pointer).buffer = empty[buft]
        return [device.supports_op(at[node]) for node in graph]


@contextmanager
def addresses(library: Library, tensors: Sequence[Tensor]) -> Iterator[dict[Tensor, int]]:
    """Rebuild `tensors`, each after its sources, in their own context: tensor -> address."""
    context = Context(library, len(tensors))
    at: dict[Tensor, int] = {}
    try:
        for t in tensors:
            at[t] = context.add(t, at)
        yield at
    finally:
        context.free()


def _each_tensor(library: Library, case: Case) -> Iterator[tuple[Tensor, Mapping[Tensor, int]]]:
    """Yield every tensor of every step, and the addresses of all tensors of that step."""
    for step in case.steps:
        with addresses(library, step.graph.tensors()) as at:
            for t in at:
                yield t, at


@contextmanager
def _empty(library: Library, bufts: Iterable[int]) -> Iterator[dict[int, int]]:
    """Make an empty buffer of each type."""
    buffers = {buft: library.ggml.backend_buft_alloc_buffer(buft, 0) for buft in dict.fromkeys(bufts)}
    try:
        yield buffers
    finally:
        for buffer in buffers.values():
            if buffer:
                library.ggml.backend_buffer_free(buffer)


def _objection(
    library: Library,
    device: Device,
    node: Tensor,
    i: int,
    at: Mapping[Tensor, int],
    buffer: int,
    *,
    unseen: bool = True,
) -> str:
    """Return why source `i` of a node cannot lie in `buffer`, an empty one; "" if it can.

    `unseen`: also object to a source that `supports_op` does not check.
    """
    weight = node.src[i]
    assert weight is not None
    library.struct(at[weight]).buffer = buffer
    answer = device.supports_op(at[node])
    library.struct(at[weight]).buffer = None
    if not answer:
        return f"which refuses {node.op} on it"
    return f"as src[{i}] of {node.op}, where supports_op does not look" if unseen and i >= LOOKED_AT else ""


def _insist(library: Library, device: Device, buft: int, t: Tensor, case: Case) -> None:
    """Raise BackendError if the device refuses a use of `t` where it must lie."""
    uses = case.uses(t)
    for node, yes in zip(uses, supports(library, device, buft, Graph(uses), t), strict=True):
        if not yes:
            name = library.ggml.backend_buft_name(buft).decode()
            raise BackendError(f"{t.name or t} {t.type} must lie in {name}, where supports_op refuses {node}")


def _refused(
    library: Library, device: Device, special: Mapping[Tensor, int], caches: frozenset[Tensor], case: Case
) -> dict[Tensor, str]:
    """Return tensors that cannot lie where they should, in the order of `special`, and why."""
    if not special:
        return {}
    why = {t: "because graphs write it" for t in special if t in caches}
    used: set[Tensor] = set()
    with _empty(library, special.values()) as empty:
        for t, at in _each_tensor(library, case):
            for i, w in enumerate(t.src):
                if w is None or w not in special:
                    continue
                used.add(w)
                if t.view_src is w:
                    why.setdefault(w, f"which refuses {t.op} on it")
                elif objection := _objection(library, device, t, i, at, empty[special[w]]):
                    why.setdefault(w, objection)
    return {t: why.get(t, "because no node reads it") for t in special if t in why or t not in used}
