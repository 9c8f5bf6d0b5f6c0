"""What the checks of `contract.py` share: the adapter that they try, and how a fault becomes a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, packed_nbytes

from .interface import Backend, Session
from .samples import SAMPLES, TOLERANCE, Shape, Tried, Values, tried
from .strict import kind


class Fault(Exception):  # noqa: N818  # a sentence on its way to `check_adapter`
    """What is wrong, where nothing after it can be tried."""


@dataclass(slots=True)
class Subject:
    """An adapter under check, opened."""

    name: str
    backend: Backend
    shape: Shape

    def takes(self, graph: Graph) -> bool:
        """Whether every node is supported."""
        return all(self.backend.supports(graph))

    def samples(self, wrap: Callable[[Tensor], Tensor] | None = None) -> Iterator[Tried]:
        """Those that it takes, and can run."""
        for sample in SAMPLES:
            one = tried(sample, self.shape, wrap)
            if self.takes(one.graph) and self.backend.supports_case(one.case):
                yield one

    def first(self, wrap: Callable[[Tensor], Tensor] | None = None) -> Tried | None:
        """The first of them."""
        return next(self.samples(wrap), None)

    def open(self, case: Case) -> Session:
        """A session, or the fault that it is none."""
        session = self.backend.open(case)
        if not isinstance(session, Session):
            raise Fault(f"{self.name}.open returned {kind(session)}; it must return a Session, with the case in it.")
        return session

    def compute(self, session: Session, graph: Graph, inputs: Mapping[Tensor, Bytes], out: Tensor) -> Bytes:
        """The packed bytes of `out`, or the fault in their form."""
        found: object = session.compute(graph, inputs, (out,))
        if not isinstance(found, Mapping) or out not in found:
            raise Fault(
                f"{self.name}: compute did not give the output {out}; it must return a mapping with the bytes of every "
                "tensor of `outputs`."
            )
        data = found[out]
        size = packed_nbytes(out)
        if not is_bytes(data) or data.size != size:
            raise Fault(
                f"{self.name}: compute gave {kind(data)} for {out}; outputs must be packed: a one-dimensional uint8 "
                f"array of {size} bytes."
            )
        return data


def wrong(s: Subject, data: Bytes, node: Tensor, want: NDArray[Any]) -> Iterator[str]:
    """A sentence where `data` is not `want`, packed, as float32."""
    expected: Values = np.ascontiguousarray(want, np.float32).reshape(-1)
    if not is_bytes(data) or data.size != expected.nbytes:
        yield (
            f"{s.name}: compute gave {kind(data)} for {node}; outputs must be packed: a one-dimensional uint8 array "
            f"of {expected.nbytes} bytes."
        )
        return
    found = data.view(np.float32)
    off = np.abs(found - expected)
    if not np.all(off <= TOLERANCE * np.abs(expected).max()):
        at = int(np.argmax(~(off <= TOLERANCE * np.abs(expected).max())))
        yield f"{s.name}: compute of {node} gave {found[at]:.4g} as element {at}; it must be {expected[at]:.4g}."


def is_bytes(data: object) -> TypeGuard[Bytes]:
    """Whether it has the form in which bytes travel."""
    return isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1
