"""Measures how many copies of a model's weights an adapter's process has.

A decoder with few weights and one with many run in a new worker each. The difference of the two processes' memory,
divided by the difference of the weights' bytes in their own types, is the number of copies: code, kernels, caches and
activations are the same in both and cancel. The case's own bytes in the process do not count.

The limit is derived from the layouts that an adapter needs (`PARTS`), not from a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError
from conformance.ggml.tensor import nbytes
from conformance.ggml.types import TYPES as GGML_TYPES
from conformance.run.isolation.isolate import process_of
from conformance.run.session.select import build

from .measure import Opener, play

MODELS = (
    ("kv_growth/llama-l=1,embd=1024,heads=16,kv=4,head=64,ff={},vocab=32,w={},ctx=256,run=p9.d2@1", 256, 8192),
    ("weight_placement/product-d=2048,n=1,m={},w={}@1", 256, 8192),
)
"""A decoder, or matrix products if it is not supported: id, small and large size."""
TYPES = ("q4_0", "q8_0")
"""Weight types whose layouts are known."""
HELD_MARGIN = 0.1
"""Copies beyond the derived ones: pages that the allocator has but does not use."""
PEAK_MARGIN = 0.25
"""The same at peak, where activations of the larger layers come in addition."""


@dataclass(frozen=True, slots=True)
class Part:
    """A layout of the weights that must be in memory."""

    why: str
    """Purpose and form."""
    bits: Mapping[str, float] | float | None = None
    """Bits of a number, by weight type if it depends on that; None for those of the type itself."""
    times: int = 1
    briefly: bool = False
    """True if only one matrix at a time has it, while it is converted."""

    def copies(self, weight_type: str, largest: float) -> float:
        """Return the copies of weights whose largest matrix has `largest` of them."""
        own = GGML_TYPES[weight_type]
        of_file = 8 * own.type_size / own.blck_size
        bits = self.bits[weight_type] if isinstance(self.bits, Mapping) else self.bits
        return self.times * (of_file if bits is None else bits) / of_file * (largest if self.briefly else 1)


_GRID = {"q4_0": 4 + 32 / 32, "q8_0": 8 + 32 / 32}
_GRID_128 = dict.fromkeys(TYPES, 4 + 32 / 128)
_BYTES = Part("the bytes as written, which `read` returns")
_OPENVINO = (
    Part("constants of all programs: integers, and a float32 scale for 32", _GRID),
    Part("packed by the kernels of two programs, for prompts and for tokens; the plugin shares none", _GRID, 2),
)
PARTS: Mapping[str, tuple[Part, ...]] = {
    "cpu": (_BYTES, Part("a matrix in float32 and float64", 96.0, briefly=True)),
    "ggml": (_BYTES,),
    "openvino-stateless": _OPENVINO,
    "openvino-stateful": _OPENVINO,
    "npu": (
        Part("constants of all programs: 4 bits, and a float32 scale for 128", _GRID_128),
        Part("packed by the kernels of two programs, for prompts and for tokens", _GRID_128, 2),
    ),
    "xdna2": (_BYTES, Part("int8 by rows, as the array reads them", 8.0)),
}
"""Adapter -> layouts that it needs, beside the case's own bytes."""
OTHERS = (_BYTES, Part("a matrix in float32, while it is converted", 32.0, briefly=True))
"""Layouts that an adapter of another package may have."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Derived copies of weights, as limits, with their reasons."""

    held: float
    peak: float
    why: str

    @classmethod
    def of(cls, spec: Spec, weight_type: str, largest: float, held: float | None = None) -> Allowed | None:
        """Derive the limits for `spec`, None if a layout is unknown; `held` replaces the first.

        The largest matrix has `largest` of the weights.
        """
        if held is None and weight_type not in TYPES:
            return None
        parts = PARTS.get(resolve(spec).name, OTHERS)
        kept = {p.why: p.copies(weight_type, largest) for p in parts if not p.briefly and held is None}
        brief = {p.why: p.copies(weight_type, largest) for p in parts if p.briefly}
        derived = sum(kept.values()) if held is None else held
        why = [f"{n:.2f} {why}" for why, n in kept.items()] + [f"{n:.2f} at peak for {why}" for why, n in brief.items()]
        most = derived + HELD_MARGIN if held is None else held
        return cls(most, derived + sum(brief.values()) + PEAK_MARGIN, "; ".join(why) or "as the id says")


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of a model's weights in a process."""

    model: str
    """Id of the case."""
    nbytes: int
    """Bytes of weights that the large model has beyond the small one."""
    held: float
    """Copies of the weights after the run; 1 as in a file."""
    peak: float
    """Copies of the weights at peak."""
    largest: float = 1.0
    """Ratio of its largest matrix to these bytes."""


def weights_held(spec: Spec, opener: Opener, weight_type: str) -> Weights:
    """Measure how many copies of weights `spec` has; `opener` starts it in a new process.

    Raises:
        BackendError: the backend failed.
        UnavailableError: the backend supports neither model, or the memory of its process cannot be measured.
    """
    for body, few, many in MODELS:
        small, large = (build(body.format(size, weight_type)) for size in (few, many))
        risen = [_risen(spec, opener, case) for case in (small, large)]
        if None in risen:
            continue
        (held, peak), (more_held, more_peak) = (r for r in risen if r is not None)
        extra = _weights(large) - _weights(small)
        largest = max(map(nbytes, large.persistent)) / extra
        return Weights(large.id, extra, (more_held - held) / extra, (more_peak - peak) / extra, largest)
    raise UnavailableError(
        f"{spec} supports neither of {', '.join(m for m, _, _ in MODELS)}, so nothing can be measured"
    )


def _weights(case: Case) -> int:
    return sum(nbytes(t) for t in case.persistent)


def _risen(spec: Spec, opener: Opener, case: Case) -> tuple[int, int] | None:
    """Return how many bytes a new process grows, finally and at peak; None if refused."""
    backend: Backend = opener()
    try:
        if (own := process_of(backend)) is None:
            raise UnavailableError(f"{spec}: exactly one process of its own expected, whose memory can be measured")
        if not all(all(backend.supports(s.graph)) for s in case.steps) or not backend.supports_case(case):
            return None
        own.watches = True
        with backend.open(case) as session:
            play(session, case.steps)
            rise = own.risen()
    finally:
        backend.close()
    if rise.held is None or rise.peak is None:
        raise UnavailableError(f"{spec}: this system does not report the memory of a process")
    return rise.held, rise.peak
