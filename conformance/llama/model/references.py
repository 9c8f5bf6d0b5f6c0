"""The reference's runs of recorded graphs, and what rounding they allow a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from conformance.backend.interface import Backend
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.judge.judge import Judged
from conformance.run.oracle import Oracle

from . import figures, graphs
from .graphs import GraphOutputs, Say, silent
from .recording import ModelRecording

F32 = NDArray[np.float32]
FACTOR = 4.0
"""Factor on the reference's own NMSE, because another run rounds differently."""
FLOAT32 = 1e-9
"""NMSE of logits that another summation order causes over a whole model."""
SAME = 1e-6
"""Maximum KL divergence in nats of equal distributions: above float32 rounding."""


@dataclass(slots=True)
class ReferenceRun:
    """A run of the reference in one arithmetic, which goes on as far as it is needed."""

    arithmetic: Arithmetic
    steps: Iterator[GraphOutputs]
    ran: GraphOutputs = field(default_factory=GraphOutputs)
    seconds: float = 0.0
    """Processor time so far."""


@dataclass(slots=True)
class References:
    """The reference's runs of a recording, one in each arithmetic that is asked for."""

    recording: ModelRecording
    seconds: float = 120.0
    """Processor time for each run; rows beyond it are judged by the rounding of earlier rows."""
    say: Say = silent
    oracle: Oracle = field(default_factory=Oracle)
    _begun: list[ReferenceRun] = field(default_factory=list)

    def backend(self, arithmetic: Arithmetic) -> Backend:
        """Return the reference in an arithmetic."""
        return self.oracle.reference_in(arithmetic)

    def outputs(self, arithmetic: Arithmetic, upto: int = 0) -> GraphOutputs:
        """Run the reference up to the first logits, and for `upto` steps if the time allows."""
        own = next((own for own in self._begun if own.arithmetic == arithmetic), None)
        if own is None:
            name = f"float64, rounding as {arithmetic.name}"
            steps = graphs.steps(
                self.backend(arithmetic), self.recording.case, lambda text: self.say(f"{name}: {text}")
            )
            self._begun.append(own := ReferenceRun(arithmetic, steps))
        begun, first = time.process_time(), self.recording.steps[0] + 1
        while len(own.ran.outputs) < max(first, upto) and (len(own.ran.outputs) < first or own.seconds < self.seconds):
            own.ran = next(own.steps)
            own.seconds += time.process_time() - begun
            begun = time.process_time()
        return own.ran

    def logits(self, arithmetic: Arithmetic, upto: int = 0) -> F32:
        """Return the logits of `outputs`, `[rows, n_vocab]`; a recording may have more rows."""
        return self.outputs(arithmetic, upto).logits(self.recording.case)

    def allowed(self, arithmetic: Arithmetic, upto: int = 0) -> AllowedRounding:
        """Return what rounding may change in an arithmetic, by the first `upto` steps."""
        exact, own = (self.logits(a, upto) for a in (EXACT, arithmetic))
        pairs = (exact, own), (exact, self.recording.decoded.logits)
        return AllowedRounding(allowance(*pairs), rounding(*pairs), min(len(exact), len(own)))

    def over(self, found: GraphOutputs, arithmetic: Arithmetic) -> list[Judged]:
        """Return outputs and final caches over the budget of their chain of nodes."""
        judged = graphs.judge(self.recording.case, found, self.outputs(arithmetic), arithmetic)
        return [j for j in judged if j.used > 1]

    def is_same(self, found: GraphOutputs, arithmetic: Arithmetic) -> bool:
        """Return True if the distributions equal those of the reference in the backend's arithmetic."""
        return worst(figures.divergence, found.logits(self.recording.case), self.logits(arithmetic)) <= SAME

    def close(self) -> None:
        """Close the reference."""
        self.oracle.close()


@dataclass(frozen=True, slots=True)
class AllowedRounding:
    """How much rounding may change the logits of a correct backend."""

    nmse: float
    """NMSE of a row."""
    difference: float
    """The difference of two logits of a row."""
    rows: int
    """Rows of logits by which it was measured."""


TwoRuns = tuple[F32, F32]
"""Logits of two correct runs, `[rows, n_vocab]`; one may have fewer rows."""


def worst(apart: Callable[[F32, F32], float], one: F32, other: F32) -> float:
    """Return the largest distance between corresponding rows, as measured by `apart`."""
    return max(apart(a, b) for a, b in zip(other, one, strict=False))


def allowance(own: TwoRuns, theirs: TwoRuns) -> float:
    """Return the allowed NMSE of logits: the roundings of both sides, added as roots.

    `own` is the reference in float64 and in the backend's arithmetic, `theirs` is float64 and llama.cpp.
    """
    return max(FLOAT32, sum(sqrt(FACTOR * worst(figures.nmse, *pair)) for pair in (own, theirs)) ** 2)


def rounding(own: TwoRuns, theirs: TwoRuns) -> float:
    """Return how much rounding may change a difference of two logits (see `allowance`)."""
    return 2 * sum(worst(figures.apart, *pair) for pair in (own, theirs))
