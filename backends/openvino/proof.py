"""Proof of what ran: what OpenVINO's runtime models tell of a session's programs, put into its witness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from conformance.backend.interface import Witness

from .weights import packed_copies

if TYPE_CHECKING:
    from .bind import Request

CONSTANTS = frozenset({"Const", "Constant"})
"""Layer type, or type of a node of a model that is interpreted."""
_VIEWS = "views "
"""How the walk's notes on views begin; how they were read or written is their last word."""


def testify(w: Witness, programs: Iterable[Request], stage: str) -> None:
    """Put into `w` the devices that executed, layer types, views, and bytes of constants and of packed copies.

    Bytes are summed over programs: constants that several of them share are counted for each.

    Args:
        w: has the engine's counts; what stands here is replaced.
        programs: all that ran.
        stage: of the backend; at `translate` nothing was compiled.
    """
    kernels: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    views: Counter[str] = Counter()
    held: Counter[str] = Counter()
    devices: dict[str, None] = {}
    peaks: list[int] = []
    for p in programs:
        notes.update(p.notes)
        if p.compiled is None:
            continue
        devices.update(dict.fromkeys(p.compiled.get_property("EXECUTION_DEVICES")))
        peaks += [] if p.peak is None else [p.peak]
        held["packed copies"] += packed_copies(p.compiled)
        for node in p.compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            kind = info["layerType"].astype(str) if "layerType" in info else node.get_type_name()
            kernels[kind] += 1
            if kind in CONSTANTS:
                x = node.output(0)
                count = 1
                for n in x.get_shape():
                    count *= n
                held["constants"] += (count * x.get_element_type().bitwidth + 7) // 8
    for what, n in notes.items():
        if what.startswith(_VIEWS):
            views[what.rpartition(" ")[2]] += n
    w.device = ", ".join(sorted(devices)) or w.device
    w.kernels = dict(sorted(kernels.items()))
    w.views = dict(sorted(views.items()))
    w.bytes = {**w.bytes, **dict(sorted(held.items()))}
    w.notes = [f"{n} {what}" for what, n in sorted(notes.items())]
    w.peak_compile_bytes = max(peaks, default=None)
    if stage != "run":
        w.stage, w.path, w.compiles, w.cache_hits, w.peak_compile_bytes = stage, "interpreted", 0, 0, None
