"""Tiny cases with obvious values, on which `check_adapter` tries an adapter first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder, build_forward_expand
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import F16, F32, Q8_0, GGMLType

Values = NDArray[np.float32]
BUILD = Builder()


@dataclass(frozen=True, slots=True)
class Shape:
    """The weight has `ne` [k, m], the activations [k, n]; `k` is a multiple of 32, `m` at least 4."""

    k: int = 64
    m: int = 32
    n: int = 16


TOMORROW = "OP_OF_TOMORROW"
"""An op that no ggml has."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One op over a weight `w` [k, m] and activations `x` [k, n]."""

    op: str
    make: Callable[[Tensor, Tensor], Tensor]
    """(w, x) -> the node."""
    value: Callable[[Values, Values], NDArray[Any]]
    """(w, x) as (m, k) and (n, k) -> the node's value."""
    weight: GGMLType = F32


SAMPLES: tuple[Sample, ...] = (
    Sample("ADD", lambda _, x: BUILD.add(x, x), lambda _, x: x + x),
    Sample("MUL", lambda _, x: BUILD.mul(x, x), lambda _, x: x * x),
    Sample("SCALE", lambda _, x: BUILD.scale(x, 2.0), lambda _, x: 2 * x),
    Sample("MUL_MAT", BUILD.mul_mat, lambda w, x: x @ w.T),
    Sample("MUL_MAT", BUILD.mul_mat, lambda w, x: x @ w.T, F16),
    Sample("MUL_MAT", BUILD.mul_mat, lambda w, x: x @ w.T, Q8_0),
    Sample("CONT", lambda _, x: BUILD.cont(x), lambda _, x: x),
    Sample("UNARY", lambda _, x: BUILD.neg(x), lambda _, x: -x),
    Sample(
        "RMS_NORM",
        lambda _, x: BUILD.rms_norm(x, 1e-6),
        lambda _, x: x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(1e-6)),
    ),
)
"""Most backends support at least one of these."""
TOLERANCE = 2e-2
"""Largest error relative to the largest value: a backend may round to F16 or 8 bits. Errors of layout are larger."""


def activations(shape: Shape, seed: int = 0) -> Values:
    """Values (n, k) that F16 and Q8_0 nearly hold; no two rows or columns are alike."""
    i = np.arange(shape.n * shape.k, dtype=np.int64).reshape(shape.n, shape.k)
    return (((i * 37 + seed * 11 + i // shape.k * 5) % 61 - 30) / 32).astype(np.float32)


def weights(shape: Shape) -> Values:
    """Whole numbers (m, k) that Q8_0 holds exactly: 127 is in each block."""
    i = np.arange(shape.m * shape.k, dtype=np.int64).reshape(shape.m, shape.k)
    w = ((i * 29 + i // shape.k * 3) % 255 - 127).astype(np.float32)
    w[:, ::32] = 127
    return w


def encode(values: Values, type_: GGMLType) -> Bytes:
    """`values` as read-only bytes of a leaf."""
    if type_ is Q8_0:
        blocks = np.zeros((*values.shape[:-1], values.shape[-1] // 32), [("d", "<f2"), ("qs", "i1", 32)])
        blocks["d"], blocks["qs"] = 1, values.reshape(*values.shape[:-1], -1, 32)
        return read_only(blocks)
    return read_only(values.astype(type_.dtype))


def read_only(values: NDArray[Any]) -> Bytes:
    """The bytes of `values`, read-only."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy()
    data.flags.writeable = False
    return data


@dataclass(frozen=True, slots=True)
class Trial:
    """A sample as a case."""

    sample: Sample
    shape: Shape
    case: Case
    weight: Tensor
    input: Tensor
    node: Tensor

    @property
    def graph(self) -> Graph:
        """Its one graph."""
        return self.case.steps[0].graph

    def expected(self, seed: int = 0) -> NDArray[Any]:
        """The node's value on `activations(seed)`."""
        return self.sample.value(weights(self.shape), activations(self.shape, seed))


def trial(sample: Sample, shape: Shape, wrap: Callable[[Tensor], Tensor] | None = None) -> Trial:
    """The case of a sample; `wrap` adds a node behind it, which becomes the output."""
    w = new_tensor(sample.weight, shape.k, shape.m, name="w")
    x = new_tensor(F32, shape.k, shape.n, name="x")
    node = sample.make(w, x)
    out = wrap(node) if wrap else node
    step = Step(build_forward_expand(out), {x: encode(activations(shape), F32)}, (out,))
    # a weight that the node does not read is needed too: `read` and `write` are checked on it
    persistent = {w: encode(weights(shape), sample.weight)}
    case = Case(f"contract/{sample.op}@1", persistent, [step], family="contract")
    return Trial(sample, shape, case, w, x, out)


def nodes_of_many_ops(shape: Shape) -> Sequence[Tensor]:
    """A node of each of many ops, and one of an op that no ggml has."""
    w, x = new_tensor(F32, shape.k, shape.m, name="w"), new_tensor(F32, shape.k, shape.n, name="x")
    nodes = [s.make(w, x) for s in SAMPLES if s.weight is F32]
    nodes += [f(x) for f in (BUILD.sqr, BUILD.silu, BUILD.swiglu, BUILD.sum_rows, BUILD.soft_max, BUILD.argmax)]
    nodes += [BUILD.transpose(x), BUILD.reshape_1d(x, shape.k * shape.n), BUILD.view_1d(w, shape.k, 0)]
    tomorrow = BUILD.cont(x)
    tomorrow.op = TOMORROW
    nodes.append(tomorrow)
    for node in nodes:
        node.name = f"a {node.op}"
    return nodes
