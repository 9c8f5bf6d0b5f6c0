"""One-dimensional signals: pooling, reflection, and a diffusion model's timestep embedding."""

from __future__ import annotations

from dataclasses import replace

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.fields import enum, i32, i32s, swap
from conformance.ggml.ops.op import LOOP, SUMS, Layout, Op, Rounding, Work, check, fresh, operand
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor, nelements
from conformance.ggml.types import F32


def _pool_1d(t: Tensor) -> Layout:
    """Lay out `ggml_pool_1d`: windows of k0 in each row."""
    a, p = operand(t), t.params
    if p.s0 < 1:
        raise GraphError(f"strides must be positive, {p.s0} found")
    n = (a.ne[0] + 2 * p.p0 - p.k0) // p.s0 + 1
    check(t, (n > 0, "ne[0] > 0"), kernel=p.k0)
    return fresh(F32, (n, *a.ne[1:]))


def _pad_reflect_1d(t: Tensor) -> Layout:
    """Lay out `ggml_pad_reflect_1d`: p0 elements mirrored before each row, p1 after it."""
    a, p = operand(t), t.params
    return fresh(a.type, (a.ne[0] + p.p0 + p.p1, *a.ne[1:]))


def _timestep_embedding(t: Tensor) -> Layout:
    """Lay out `ggml_timestep_embedding`: [dim, N], cosines, sines, and a zero if `dim` is odd."""
    return fresh(F32, (t.params.dim, operand(t).ne[0], 1, 1))


def _width(t: Tensor) -> int:
    n: int = t.params.k0
    return n


POOL_1D = Op(
    "POOL_1D",
    src="a",
    layout=_pool_1d,
    runs="a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16; k0 > 0; p0 >= 0",
    rounding=replace(SUMS, terms=_width),
    params=(enum("op", OP_POOL, swap("MAX", "AVG"), always=True), *i32s("k0 s0 p0")),
    work=Work(lambda t: 2 * nelements(operand(t)) + 2 * nelements(t), lambda t: _width(t) * (LOOP + 3 * nelements(t))),
)
PAD_REFLECT_1D = Op(
    "PAD_REFLECT_1D",
    src="a",
    layout=_pad_reflect_1d,
    asserts="""
        p0 >= 0; p1 >= 0; p0 < a->ne[0]; p1 < a->ne[0]; ggml_is_contiguous(a); a->type == GGML_TYPE_F32
    """,
    params=tuple(i32s("p0 p1")),
)
TIMESTEP_EMBEDDING = Op(
    "TIMESTEP_EMBEDDING",
    src="timesteps",
    layout=_timestep_embedding,
    runs="""
        timesteps->type == GGML_TYPE_F32; dim >= 2; max_period >= 1;
        timesteps->ne[1] == 1 && timesteps->ne[2] == 1 && timesteps->ne[3] == 1
    """,
    rounding=Rounding(2.0**20, why="a float32 angle of up to 1000 is off by 1000 roundings"),
    params=(i32("dim"), i32("max_period", lambda _, period: 2 * period)),
    work=Work(lambda t: 2 * nelements(t)),
)


class Signals:
    """Constructors of the ops over signals."""

    @POOL_1D.constructor
    def pool_1d(self, a: Tensor, op: int, k0: int, s0: int, p0: int) -> None:
        """Pool each window of a row to maximum or mean (`OP_POOL`), ignoring padding."""

    @PAD_REFLECT_1D.constructor
    def pad_reflect_1d(self, a: Tensor, p0: int, p1: int) -> None:
        """Mirror `p0` elements before each row and `p1` after it."""

    @TIMESTEP_EMBEDDING.constructor
    def timestep_embedding(self, timesteps: Tensor, dim: int, max_period: int) -> None:
        """Embed `timesteps` [N] at dim / 2 frequencies from 1 to 1 / `max_period`: [dim, N]."""
