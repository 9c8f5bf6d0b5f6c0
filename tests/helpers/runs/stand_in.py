"""An adapter before another one, that opens other cases than it is given or fails where a test wants it to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from conformance.backend.interface import Backend, DeviceInfo, Session, Support
from conformance.backend.registry import Spec, create
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor


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
