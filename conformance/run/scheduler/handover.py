"""Which value reaches a device of a scheduler with other bytes than the split before, or the suite, left it with.

A copy changes no bit, so no budget is needed and no reference: the case runs once more, every device is asked for the
persistent tensors that it is about to use, and each value is compared with the last one written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from conformance.backend.interface import Session
from conformance.case.case import Case
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.evidence import Endpoint, Fault, Place
from conformance.run.execute import computed_nodes


@dataclass(frozen=True, slots=True)
class Passed:
    """What one split was given and what it left, by tensors of the whole graph."""

    device: str
    split: int
    given: Mapping[Tensor, Bytes]
    left: Mapping[Tensor, Bytes]


class Watched(Session):
    """A session that says what passes between its devices."""

    passed: list[Passed] | None = None
    """Filled by `compute` while it is a list."""


@runtime_checkable
class Scheduler(Protocol):
    """A backend that shares graphs out among devices."""

    def handover(self, case: Case) -> Handover | None:
        """The first value that goes wrong between devices, as `find`."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A value that went wrong between two ends; an end without a device is the host, which fills and reads caches and
    inputs.
    """

    tensor: Tensor
    source: Endpoint
    target: Endpoint

    def place(self, first: int = 0) -> Place:
        """Where it goes wrong; `first`: where the steps of the case begin in those of the result."""
        t = self.tensor
        source, target = (replace(e, step=first + e.step) for e in (self.source, self.target))
        return Place(
            Fault.HANDOVER, target.step, None, t.op, t.name, f"{t.type}{list(t.ne)}", source=source, target=target
        )


def find(open_: Callable[[Case], Watched], case: Case) -> Handover | None:
    """The first value of `case` that goes wrong between devices; None where none does. BackendError if one failed."""
    with closing(open_(case)) as session:
        hidden = session.opaque()
        left = {t: (Endpoint(0), data) for t, data in case.persistent.items()}
        for k, step in enumerate(case.steps):
            left |= {t: (Endpoint(k), data) for t, data in step.inputs.items()}
            passed: list[Passed] = []
            session.passed = passed
            session.compute(step.graph, step.inputs, computed_nodes(step))
            session.passed = None
            seen = {t: session.read(t) for t in case.persistent if t not in hidden}
            for part in passed:
                end = Endpoint(k, part.device, part.split)
                if (wrong := _first_other(left, part.given, end)) is not None:
                    return wrong
                left |= {t: (end, data) for t, data in part.left.items()}
            if (wrong := _first_other(left, seen, Endpoint(k))) is not None:
                return wrong
    return None


def _first_other(
    left: Mapping[Tensor, tuple[Endpoint, Bytes]], given: Mapping[Tensor, Bytes], end: Endpoint
) -> Handover | None:
    for t, data in given.items():
        if t in left and not np.array_equal(left[t][1], data):
            return Handover(t, left[t][0], end)
    return None
