"""Cost of float32 rounding if the sums of an op cancel.

Weights of Q4_1, Q5_1, Q2_K, Q4_K and Q5_K are `scale * quant + offset`, and a product is the difference of two sums,
`sum(scale * quant * x)` and `sum(offset * sum(x))`. ggml computes these separately, so float32 rounding is relative to
the sums and not to their difference. If the activations of a model have a common offset, the sums have thousands of
times the energy of the difference. NORM subtracts a mean that may be many deviations. LIGHTNING_INDEXER adds the scores
of all heads by weights of both signs, whose sum may be far smaller than they are. GELU of a negative x is
`x / 2 * (1 + erf(x / sqrt 2))` (or tanh), whose sum is far smaller than 1. The energies are computed here, from the
bytes of the node.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, writes_in_place
from conformance.ggml import quants
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Bytes, Tensor, computes, is_contiguous, nelements, strided

F64 = NDArray[np.float64]
_PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID"})
_SUMS = frozenset({"SUM", "SUM_ROWS", "MEAN"})
_OF_TERMS = _SUMS | {"MUL_MAT"}
_OF_GELU = frozenset({"GELU", "GELU_ERF", "GEGLU", "GEGLU_ERF"})
FEW = 64
"""Number of elements up to which all sums of a result may cancel; those of more seldom do."""


def cancellations(case: Case, k: int, expected: Mapping[Tensor, Bytes]) -> dict[Tensor, float]:
    """Return the squared float32 roundoffs that cancellation costs each node of step `k`.

    They are relative to the energy of the result. `expected` has packed bytes. Nodes whose operand or result bytes are
    unknown are absent.
    """
    known = KnownValues(case, k, expected)
    found = {n: known.cancellation(n) for n in case.steps[k].graph if computes(n)}
    return {n: cost for n, cost in found.items() if cost}


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
        """Return the squared roundoffs of a node's sums, relative to its result; 0 if unknown.

        A float32 sum of n terms adds up to n u^2 of their energy if its errors are random.
        """
        if node not in self._expected:
            return 0.0
        with np.errstate(all="ignore"):  # operands may be NaN or Inf
            cost = self._by_offset(node) if node.op in _PRODUCTS else 0.0
            if node.op == "LIGHTNING_INDEXER":
                cost = self._over_heads(node)
            elif node.op == "NORM":
                cost = self._around_mean(node)
            elif node.op in _OF_TERMS and nelements(node) <= FEW:
                cost += self._of_few(node)
            elif node.op in {"UNARY", "GLU"} and nelements(node) <= FEW:
                cost = self._of_gelu(node)
        return cost if np.isfinite(cost) else 0.0

    def _floats(self, t: Tensor | None) -> F64 | None:
        values = self.of(t)
        return None if t is None or values is None else quants.to_float(t.type, values).astype(np.float64)

    def _result(self, node: Tensor) -> F64:
        return self._expected[node].view("<f4").astype(np.float64).reshape(node.shape)

    def _of_few(self, node: Tensor) -> float:
        """Return the worth of sums of products or elements beyond that of terms of random signs."""
        x, by = self._floats(node.src[0]), None if node.op in _SUMS else self._floats(node.src[1])
        if x is None or node.type.name != "f32":
            return 0.0
        if node.op in _SUMS:
            n = x.size if node.op == "SUM" else x.shape[-1]
            terms = float(np.sum(x * x)) / (n * n if node.op == "MEAN" else 1)
        elif by is not None:
            n, terms = x.shape[-1], float(np.sum(_product(x * x, by * by)))
        else:
            return 0.0
        energy = float(np.sum(self._result(node) ** 2))
        return n * max(0.0, terms / energy - 1) if energy else 0.0

    def _of_gelu(self, node: Tensor) -> float:
        """Return the worth of `1 + erf` of negative elements.

        erf, close to -1, is right to two units in its last place: an error of `2 u |x / 2|`, times the gate of a GLU.
        """
        params = {f.name: f.of(node.op_params) for f in DECLARATIONS[node.op].fields}
        a, gate = (self._floats(s) for s in (*node.src, None)[:2])
        if a is None or node.type.name != "f32" or params["op"] not in _OF_GELU:
            return 0.0
        if node.op == "GLU" and gate is None:
            a, gate = np.split(a, 2, -1)[:: -1 if params["swapped"] else 1]
        x = np.where(a < 0, a, 0.0) * (1.0 if gate is None else gate)
        energy = float(np.sum(self._result(node) ** 2))
        return float(np.sum(x * x)) / energy if energy else 0.0

    def _around_mean(self, node: Tensor) -> float:
        """Return the worth of the rounding of each row's mean, which all of its elements share."""
        x = self._floats(node.src[0])
        if x is None:
            return 0.0
        energy = np.sum(x * x, -1)
        left = np.sum((x - x.mean(-1, keepdims=True)) ** 2, -1)
        return float(np.mean(np.where(left > 0, energy / left - 1, 0)))

    def _over_heads(self, node: Tensor) -> float:
        """Return the worth of a sum over heads, of the cells that are not masked."""
        q, k, weights = map(self._floats, node.src[:3])
        if q is None or k is None or weights is None:
            return 0.0
        scores = np.maximum(q @ k[:, :, 0].swapaxes(-1, -2)[:, None], 0) * weights[:, 0][..., None]
        y = self._result(node)[:, 0]
        seen = np.isfinite(y)
        energy = float(np.sum(y[seen] ** 2))
        terms = float(np.sum(np.where(seen, np.sum(scores**2, -2), 0)))
        return scores.shape[-2] * terms / energy if energy else 0.0

    def _by_offset(self, node: Tensor) -> float:
        """Return the worth of a product by offset; a group of elements is one term."""
        weights, x = node.src[:2]
        w, values = self.of(weights), self._floats(x)
        if w is None or values is None or weights is None:
            return 0.0
        offset = quants.offsets(weights.type, w)
        if offset is None:
            return 0.0
        groups = offset.shape[-1]
        sums = values.reshape(*values.shape[:-1], groups, -1).sum(-1)
        y = self._result(node)
        if node.op == "MUL_MAT":
            second = _product(offset, sums)
        else:
            ids = self.of(node.src[2])
            if ids is None:
                return 0.0
            second = _product_id(offset, sums, ids[0, 0].astype(np.int64))[None]
        energy = float(np.sum(y * y))
        both = float(np.sum((y - second) ** 2) + np.sum(second * second))
        return groups * both / energy if energy else 0.0


def _product(offset: NDArray[np.floating], sums: F64) -> F64:
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
