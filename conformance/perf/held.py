"""Measures how many copies of a model's weights an adapter's process has.

A decoder with few weights and one with many run in a new worker each. The difference of the two processes' memory,
divided by the difference of the weights' bytes in their own types, is the number of copies: code, kernels, caches and
activations are the same in both and cancel. The case's own bytes in the process do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError
from conformance.ggml.tensor import nbytes
from conformance.run.isolation.isolate import process_of
from conformance.run.session.select import build

from .measure import Opener, play

MODELS = (
    ("kv_growth/llama-l=1,embd=1024,heads=16,kv=4,head=64,ff={},vocab=32,w={},ctx=256,run=p9.d2@1", 256, 8192),
    ("weight_placement/product-d=2048,n=1,m={},w={}@1", 256, 8192),
)
"""A decoder, or matrix products if it is not supported: id, small and large size."""
TYPES = ("q4_0", "q8_0")
"""Weight types with an allowance."""
MARGIN = 0.5
"""Allowed copies beyond the measured number: half a copy."""
MEASURED: dict[str, tuple[float, float]] = {
    "cpu": (1.0, 1.0),
    "ggml": (1.0, 1.0),
    "openvino-stateless": (3.35, 3.2),
    "openvino-stateful": (3.35, 3.2),
    "npu": (2.85, 1.5),
    "xdna2": (2.8, 2.0),
}
"""Adapter -> copies of weights of each of `TYPES` (docs/live.md).

They are the bytes as written, the layout for computing, and copies that kernels of each program pack."""


def allowance(spec: Spec, weight_type: str) -> float | None:
    """Return the allowed copies of weights of a type; None if nothing was measured."""
    if weight_type not in TYPES:
        return None
    return MEASURED.get(resolve(spec).name, (1.0, 1.0))[TYPES.index(weight_type)] + MARGIN


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
        return Weights(large.id, extra, (more_held - held) / extra, (more_peak - peak) / extra)
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
        own.watch()
        with backend.open(case) as session:
            play(session, case.steps)
            rise = own.risen()
    finally:
        backend.close()
    if rise.held is None or rise.peak is None:
        raise UnavailableError(f"{spec}: this system does not report the memory of a process")
    return rise.held, rise.peak
