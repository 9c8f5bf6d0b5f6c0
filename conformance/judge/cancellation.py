"""Cost of float32 rounding if a product of weights with minima cancels.

Weights of Q4_1, Q5_1, Q2_K, Q4_K and Q5_K are `scale * quant + offset`, and a product is the difference of two sums,
`sum(scale * quant * x)` and `sum(offset * sum(x))`. ggml computes these separately, so float32 rounding is relative to
the sums and not to their difference. If the activations of a model have a common offset, the sums have thousands of
times the energy of the difference. Both energies are computed here, from the bytes of the node.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, writes_in_place
from conformance.ggml import quants
from conformance.ggml.tensor import Bytes, Tensor, computes, is_contiguous, strided

F64 = NDArray[np.float64]
_PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID"})


def cancellations(case: Case, k: int, expected: Mapping[Tensor, Bytes]) -> dict[Tensor, float]:
    """Return the squared float32 roundoffs that cancellation costs each product of step `k`.

    They are relative to the energy of the difference. `expected` has packed bytes. Products whose operand or result
    bytes are unknown are absent.
    """
    known = KnownValues(case, k, expected)
    found = {n: known.cancellation(n) for n in case.steps[k].graph if computes(n)}
    return {n: worth for n, worth in found.items() if worth}


class KnownValues:
    """Values of leaves and results known and constant in step `k`; `expected`: packed bytes."""

    def __init__(self, case: Case, k: int, expected: Mapping[Tensor, Bytes]) -> None:
        step, caches = case.steps[k], set(case.caches())
        written = {n.root for n in step.graph if computes(n) and writes_in_place(n)}
        leaves = {t: x for t, x in {**case.persistent, **step.inputs}.items() if t not in caches}
        results = {t: x for t, x in expected.items() if t.view_src is None and is_contiguous(t)}
        self._bytes = {t: x for t, x in {**results, **leaves}.items() if t not in written}
        self._expected = expected

    def of(self, t: Tensor | None) -> NDArray[np.generic] | None:
        """Return the elements of `t`, as `strided` gives them; None if its bytes are unknown."""
        return None if t is None or t.root not in self._bytes else strided(self._bytes[t.root], t)

    def sort_keys(self, node: Tensor) -> NDArray[np.generic] | None:
        """Return the values that `node` sorts; None if it is no ARGSORT, or they are unknown."""
        return self.of(node.src[0]) if node.op == "ARGSORT" else None

    def cancellation(self, node: Tensor) -> float:
        """Return a squared roundoff by offset, times both sums' energy over the result's; else 0.

        A float32 sum of n terms adds up to n u^2 of its energy if its errors are random; a group of elements is one
        term.
        """
        if node.op not in _PRODUCTS or node not in self._expected:
            return 0.0
        weights, x = node.src[:2]
        w, a = self.of(weights), self.of(x)
        if w is None or a is None or weights is None or x is None:
            return 0.0
        offset = quants.offsets(weights.type, w)
        if offset is None:
            return 0.0
        groups = offset.shape[-1]
        values = quants.to_float(x.type, a).astype(np.float64)
        sums = values.reshape(*values.shape[:-1], groups, -1).sum(-1)
        y = self._expected[node].view("<f4").astype(np.float64).reshape(node.shape)
        if node.op == "MUL_MAT":
            second = _product(offset, sums)
        else:
            ids = self.of(node.src[2])
            if ids is None:
                return 0.0
            second = _product_id(offset, sums, ids[0, 0].astype(np.int64))[None]
        energy = float(np.sum(y * y))
        both = float(np.sum((y - second) ** 2) + np.sum(second * second))
        worth = groups * both / energy if energy else 0.0
        return worth if np.isfinite(worth) else 0.0


def _product(offset: NDArray[np.float32], sums: F64) -> F64:
    """Compute `sums @ offset^T`; matrix i of `sums` is multiplied by matrix i / r of `offset`."""
    for axis in (0, 1):
        offset = np.repeat(offset, sums.shape[axis] // offset.shape[axis], axis)
    return np.asarray(sums @ offset.astype(np.float64).swapaxes(-1, -2))


def _product_id(offset: NDArray[np.float32], sums: F64, ids: NDArray[np.int64]) -> F64:
    """Multiply each token's sums by the offsets of its own experts: (tokens, used, n)."""
    found = np.zeros((*ids.shape, offset.shape[2]))
    for expert in np.unique(ids):
        token, used = np.nonzero(ids == expert)
        found[token, used] = sums[0, token, used % sums.shape[2]] @ offset[0, expert].astype(np.float64).T
    return found
