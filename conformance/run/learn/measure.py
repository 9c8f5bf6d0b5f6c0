"""Run a plain case on a device and compare it with every known rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.interface import Backend
from conformance.backend.profile import Entry, Profile
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, ROUNDINGS
from conformance.ggml.errors import ConformanceError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import Bytes, Tensor, computes
from conformance.ggml.types import GGMLType
from conformance.judge.budget import budget_of, changes
from conformance.judge.compare import Difference, compare, values
from conformance.run.execute import execute
from conformance.run.oracle import Oracle

WEIGHTS = {"MUL_MAT": 0, "MUL_MAT_ID": 0, "OUT_PROD": 0, "FLASH_ATTN_EXT": 1}
"""Matrix product -> index of the source with the weights, or K."""
_PLACES = 8
"""Positions at which a wrong scale is inserted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A plain case on the device."""

    case: Case
    node: Tensor
    distances: dict[str, Difference]
    """Name of a rounding -> the difference from the reference in it."""
    scales: dict[str, float]
    """Name of a rounding -> the mean ratio of the values found to those expected."""

    @property
    def terms(self) -> int:
        """Number of terms in the sum of one element."""
        return max(1, DECLARATIONS[self.node.op].rounding.terms(self.node))


def measure(backend: Backend, oracle: Oracle, case: Case) -> Measured:
    """Run `case` and compare it with every rounding that changes it."""
    (output,) = case.steps[0].outputs
    node = next(n for n in case.steps[0].graph if computes(n))
    found = execute(backend, case).steps[0].outputs[output]
    distances: dict[str, Difference] = {}
    scales: dict[str, float] = {}
    for name, rounding in ROUNDINGS.items():
        if rounding is EXACT or changes(node, rounding):
            try:
                want = oracle.expect([case], rounding)[0].steps[0].outputs[output]
            except ConformanceError:
                if rounding is EXACT:
                    raise
                continue  # rows are not a multiple of its block size
            distances[name] = compare(output, want, found, unordered=node.op == "TOP_K")
            scales[name] = _scale(values(output, want), values(output, found))
    return Measured(case, node, distances, scales)


def _scale(want: NDArray[Any], found: NDArray[Any]) -> float:
    both = np.isfinite(want) & np.isfinite(found)
    energy = float(np.sum(np.square(want[both], dtype=np.float64)))
    return float(np.sum(want[both] * found[both], dtype=np.float64)) / energy if energy else 1.0


def blind(oracle: Oracle, measured: Sequence[Measured], key: str, entry: Entry) -> str:
    """Return how many doubled block scales, or weights, the entry's bound would hide.

    Each of `_PLACES` is doubled separately, in the case with the longest sum.
    """
    m = max(measured, key=lambda m: m.terms)
    place = WEIGHTS.get(m.node.op)
    weights = None if place is None else m.node.src[place]
    if weights is None or entry.finding:
        return ""
    profile = Profile("", "", "", {}, {key: entry}).arithmetic("blind")
    (output,) = m.case.steps[0].outputs
    right = oracle.expect([m.case], profile)[0].steps[0].outputs[output]
    budget = budget_of(m.node, profile)
    wrong = [oracle.expect([c], profile)[0].steps[0].outputs[output] for c in _planted(m.case, weights.root)]
    wrong = [w for w in wrong if not np.array_equal(w, right)]  # the others are never read
    unseen = sum(budget.used(compare(output, right, w)) <= 1 for w in wrong)
    what = "block scales" if weights.type.is_quantized else "weights"
    return f"{unseen} of {len(wrong)} {what}, doubled" if unseen else ""


def _planted(case: Case, weights: Tensor) -> Iterator[Case]:
    """Yield `case` with one scale or weight doubled, at each of `_PLACES` positions."""
    leaves = case.persistent if weights in case.persistent else case.steps[0].inputs
    n = leaves[weights].nbytes // weights.type.type_size
    for i in range(_PLACES):
        data = leaves[weights].copy()
        _double(weights.type, data.reshape(n, -1)[(2 * i + 1) * n // (2 * _PLACES)])
        if leaves is case.persistent:
            yield replace(case, persistent={**case.persistent, weights: data})
        else:
            step = case.steps[0]
            yield replace(case, steps=[replace(step, inputs={**step.inputs, weights: data})])


def _double(type_: GGMLType, block: Bytes) -> None:
    """Double the scale of a block, or an element; a block without its own scale is zeroed."""
    fields = BLOCK.get(type_)
    if fields is None:
        stored = block.view(type_.dtype or np.uint16)
        stored[:] = stored * 2 if type_.dtype is not None else stored + (1 << 7)  # the exponent of a BF16
    elif "d" in (fields.names or ()) and fields["d"] == np.dtype("<f2"):
        block.view(fields)["d"] *= 2
    else:
        block[:] = 0
