"""Find the first value that a scheduler copies incorrectly between devices or the host.

A copy changes no bits, so no tolerance and no reference is needed: the case runs once more, each device is asked for
the persistent tensors that it is about to use, and each value is compared with the last one written.
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
    """Inputs and results of one split, by tensors of the whole graph."""

    device: str
    split: int
    given: Mapping[Tensor, Bytes]
    left: Mapping[Tensor, Bytes]


class Watched(Session):
    """A session that records what its devices exchange."""

    passed: list[Passed] | None = None
    """Exchanges, which `compute` appends; None to record none."""


@runtime_checkable
class Scheduler(Protocol):
    """A backend that splits graphs over devices."""

    def handover(self, case: Case) -> Handover | None:
        """Return the first value that differs between devices, as `find`."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A value that differs between two endpoints; one without a device is the host."""

    tensor: Tensor
    source: Endpoint
    target: Endpoint

    def place(self, first: int = 0) -> Place:
        """Return the location; `first` is the step of the result at which the case's steps begin."""
        t = self.tensor
        source, target = (replace(e, step=first + e.step) for e in (self.source, self.target))
        return Place(
            Fault.HANDOVER, target.step, None, t.op, t.name, f"{t.type}{list(t.ne)}", source=source, target=target
        )


def find(open_: Callable[[Case], Watched], case: Case) -> Handover | None:
    """Return the first value of `case` that differs between devices; BackendError if one failed."""
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
