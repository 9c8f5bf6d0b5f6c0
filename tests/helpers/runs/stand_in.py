"""Adapters before another one: its cases, or what it computes, are changed where a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from conformance.backend.interface import YES, Backend, DeviceInfo, Session, Support, Witness
from conformance.backend.registry import Spec, create
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor

Tamper = Callable[[Graph, dict[Tensor, Bytes]], None]
"""Changes what a graph gave."""


class StandIn(Backend):
    """Another backend, that opens another case than it was given or fails in what it is asked to compute."""

    def __init__(
        self,
        name: str,
        opens: Callable[[Case], Case] = lambda case: case,
        fails: Callable[[Case], Exception | None] = lambda _: None,
    ) -> None:
        self.inner = create(Spec.parse(name))
        self._opens, self._fails = opens, fails

    def info(self) -> DeviceInfo:
        """As the other's."""
        return self.inner.info()

    def supports_op(self, node: Tensor) -> Support:
        """As the other's."""
        return self.inner.supports_op(node)

    def arithmetic(self) -> Arithmetic:
        """As the other's."""
        return self.inner.arithmetic()

    def open(self, case: Case) -> Session:
        """A session of the other's on the case that it is made to run."""
        error = self._fails(case)
        if error is not None:
            raise error
        return self.inner.open(self._opens(case))


class Tampered(Session):
    """Another session, of whose outputs `tamper` gets copies."""

    def __init__(self, inner: Session, tamper: Tamper) -> None:
        self.inner, self._tamper = inner, tamper

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Write to the inner session."""
        self.inner.write(tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """Read from the inner session."""
        return self.inner.read(tensor)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Compute in the inner session, then change its outputs."""
        found = {t: data.copy() for t, data in self.inner.compute(graph, inputs, outputs).items()}
        self._tamper(graph, found)
        return found

    def witness(self) -> Witness:
        """Return the witness of the inner session."""
        return self.inner.witness()


class Faulty(Backend):
    """The reference, whose outputs are tampered with; it takes what `support` takes."""

    def __init__(self, tamper: Tamper, support: Callable[[Tensor], Support] = lambda _: YES) -> None:
        self.inner = create(Spec("cpu"))
        self.tamper, self._support = tamper, support

    def info(self) -> DeviceInfo:
        """A made-up device."""
        return DeviceInfo("faulty", "none", "the reference with a fault")

    def supports_op(self, node: Tensor) -> Support:
        """Return the answer that the test defines."""
        return self._support(node)

    def open(self, case: Case) -> Session:
        """The reference's session, tampered with."""
        return Tampered(self.inner.open(case), self.tamper)


def doubled(case: Case, name: str = "blk.1.ffn_up.weight") -> Case:
    """The same case with the scale of one block doubled in one weight."""
    changed = {}
    for t, data in case.persistent.items():
        changed[t] = data
        if t.name == name:
            changed[t] = wrong = data.copy()
            scale = wrong.reshape(-1, t.type.type_size)[17, :2].view(np.uint16)
            scale += 1 << 10
    return replace(case, persistent=changed)
