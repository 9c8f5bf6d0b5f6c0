"""Which value reaches a device of a scheduler with other bytes than the split before, or the suite, left it with.

A copy changes no bit, so no budget is needed and no reference: the case runs once more, every device is asked for the
persistent tensors that it is about to use, and each value is compared with the last one written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from conformance.backend.interface import Session
from conformance.case.case import JSON, Case
from conformance.ggml.tensor import Bytes, Tensor
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
class End:
    """Where a value was written or read; no device stands for the suite, which fills and reads caches and inputs."""

    step: int
    device: str = ""
    split: int = 0

    def __str__(self) -> str:
        return f"split {self.split} on {self.device} (step {self.step})" if self.device else "the host"

    def record(self) -> dict[str, JSON]:
        """As a result has it."""
        return {"step": self.step, **({"device": self.device, "split": self.split} if self.device else {})}


@dataclass(frozen=True, slots=True)
class Handover:
    """A value that went wrong between two ends."""

    tensor: Tensor
    source: End
    target: End

    def __str__(self) -> str:
        name = f"{self.tensor.name or self.tensor.op} {self.tensor.type}{list(self.tensor.ne)}"
        return (
            f"{name} left by {self.source} reaches {self.target} with other bytes: the hand-over between devices is "
            "at fault, and no kernel"
        )


def find(open_: Callable[[Case], Watched], case: Case) -> Handover | None:
    """The first value of `case` that goes wrong between devices; None where none does. BackendError if one failed."""
    with closing(open_(case)) as session:
        hidden = session.opaque()
        left = {t: (End(0), data) for t, data in case.persistent.items()}
        for k, step in enumerate(case.steps):
            left |= {t: (End(k), data) for t, data in step.inputs.items()}
            passed: list[Passed] = []
            session.passed = passed
            session.compute(step.graph, step.inputs, computed_nodes(step))
            session.passed = None
            seen = {t: session.read(t) for t in case.persistent if t not in hidden}
            for part in passed:
                end = End(k, part.device, part.split)
                if (wrong := _first_other(left, part.given, end)) is not None:
                    return wrong
                left |= {t: (end, data) for t, data in part.left.items()}
            if (wrong := _first_other(left, seen, End(k))) is not None:
                return wrong
    return None


def _first_other(left: Mapping[Tensor, tuple[End, Bytes]], given: Mapping[Tensor, Bytes], end: End) -> Handover | None:
    for t, data in given.items():
        if t in left and not np.array_equal(left[t][1], data):
            return Handover(t, left[t][0], end)
    return None
