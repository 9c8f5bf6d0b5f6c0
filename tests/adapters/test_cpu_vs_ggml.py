"""The reference against the real ggml: whatever both compute, they agree on within the rounding of float32.

A row gives a node and how far ggml may be from the reference in ggml's own declared arithmetic, as NMSE: zero means the
same bytes, in the output and in every leaf. Where a budget is larger than rounding, its constant says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.cpu.values import load, store
from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, create
from conformance.case.case import Case, Step
from conformance.ggml import quants
from conformance.ggml.errors import UnavailableError
from conformance.ggml.ops.build import Builder, build_forward_expand
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.quants.blocks import random_blocks
from conformance.ggml.quants.write import WRITE
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, contiguous_nb, nbytes, nelements, new_tensor, strided
from conformance.ggml.types import (
    BF16,
    F16,
    F32,
    GLU_OPS,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_1,
    Q6_K,
    Q8_0,
    Q8_1,
    Q8_K,
    TYPES,
    UNARY_OPS,
    GGMLType,
)

Array = NDArray[Any]

SAME = 0.0
"""The same bytes."""
ROUNDING = 1e-12
"""Sums in float32 of up to a few thousand terms; measured 1e-16 to 2e-13."""
HALF = 1e-9
"""Results in F16 or BF16: float32 rounding that falls across a step of the type."""
ANGLE = 2e-7
"""ROPE: ggml multiplies theta up in float32; at positions near 4,096 that is 5e-10 of the energy, 4e-8 at 32,768."""
TABLE = 3e-7
"""GELU and GELU_QUICK of F32 come from a table in F16, the F16 GLUs round the activation to F16, and a float32
rounding across a step of BF16 weighs 2e-7 in so few elements."""
HALF_SUM = 5e-8
"""FLASH_ATTN_EXT with F16 V adds up in F16, which the declared arithmetic does too: what is left is that a float32
rounding now and then falls across a step of F16 (1e-13 to 9e-9 measured; 2e-6 to 6e-6 where the sum is exact)."""


class Kit(Builder):
    """A builder that makes leaves with numbers in them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.leafs: dict[Tensor, Bytes] = {}

    def of(self, type_: GGMLType, *ne: int, values: Array | None = None, scale: float = 1.0) -> Tensor:
        """A leaf of normal numbers times `scale`, or of `values`."""
        t = new_tensor(type_, *ne, name=f"leaf{len(self.leafs)}")
        if type_.is_quantized and type_ not in WRITE:
            return self._filled(t)
        x = self.random.standard_normal(t.shape) * scale if values is None else values.reshape(t.shape)
        self.leafs[t] = np.zeros(nbytes(t), np.uint8)
        store(type_, strided(self.leafs[t], t), x)
        return t

    def blocks(self, type_: GGMLType, *ne: int) -> Tensor:
        """A leaf of random blocks, which a quantiser would not all have made; numbers where there are no blocks."""
        t = self.of(type_, *ne)
        return self._filled(t) if type_.is_quantized else t

    def _filled(self, t: Tensor) -> Tensor:
        words = lambda n: self.random.integers(0, 2**64, n, np.uint64)  # noqa: E731  # said in place
        self.leafs[t] = random_blocks(t.type, words, nelements(t) // t.type.blck_size).reshape(-1)
        return t

    def index(self, type_: GGMLType, limit: int, *ne: int) -> Tensor:
        """A leaf of indices below `limit`."""
        return self.of(type_, *ne, values=self.random.integers(0, limit, ne[::-1]))

    def rows(self, type_: GGMLType, limit: int, n: int) -> Tensor:
        """A leaf of `n` different indices below `limit`."""
        return self.of(type_, n, values=self.random.permutation(limit)[:n])

    def mask(self, type_: GGMLType, *ne: int) -> Tensor:
        """A mask of normal numbers and -inf; cell 0 is seen by all tokens but the last, which sees none."""
        x = self.random.standard_normal(ne[::-1])
        x[self.random.random(x.shape) < 0.3] = -np.inf
        x[..., 0] = 0
        x[..., -1, :] = -np.inf
        return self.of(type_, *ne, values=x)

    def attention(
        self, k: GGMLType, v: GGMLType | None = None, n: int = 3, n_kv: int = 96, bias: float = 0.0, cap: float = 0.0
    ) -> Tensor:
        """Attention of 4 heads over 2, of caches laid out as llama.cpp's."""
        q = self.permute(self.of(F32, 64, 4, n), 0, 2, 1, 3)
        kt, vt = (self.permute(self.of(t, 64, 2, n_kv), 0, 2, 1, 3) for t in (k, v or k))
        return self.flash_attn_ext(q, kt, vt, self.mask(F16, n_kv, n), 0.125, bias, cap)

    def sunk(self, a: Tensor) -> Tensor:
        """`a` with one sink per head."""
        if a.op == "SOFT_MAX":
            self.soft_max_add_sinks(a, self.of(F32, a.ne[2]))
        else:
            self.flash_attn_ext_add_sinks(a, self.of(F32, a.ne[1]))
        return a

    def turned(
        self, type_: GGMLType, mode: int, n_dims: int = 64, *, limit: int = 4097, yarn: bool = False, offset: int = 0,
        sections: tuple[int, int, int, int] = (11, 7, 5, 9),
    ) -> Tensor:  # fmt: skip
        """ROPE of rows of 64; `yarn` with frequency factors."""
        a, pos = self.of(type_, 64, 3, 6, 2), self.index(I32, limit, 24 if mode & 8 else 6)
        factors = self.of(F32, 32, values=1 + self.random.random(32)) if yarn else None
        rest = (512, 10000.0, 0.25, 0.7, 1.1, 32.0, 1.0) if yarn else (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
        if mode & 8:
            return self.rope_multi(a, pos, factors, n_dims, sections, mode, *rest)
        y = self.rope_ext(a, pos, factors, n_dims, mode, *rest)
        return self.rope_set_offset(y, offset) if offset else y

    def turned_back(self, type_: GGMLType, mode: int) -> Tensor:
        """ROPE_BACK of rows of 64."""
        a, pos = self.of(type_, 64, 3, 6, 2), self.index(I32, 4097, 6)
        return self.rope_ext_back(a, pos, None, 64, mode, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


Make = Callable[[Kit], Tensor]
FLOATS = (F32, F16, BF16)
WEIGHTS = [t for t in TYPES.values() if t in quants.VEC_DOT_TYPE and t.name != "q8_1"]
STORED = [*FLOATS, *(t for t in WRITE if t.name[:3] not in {"iq2", "iq3"} and t.name not in {"q8_1", "q8_K"})]


def _given(make: Callable[..., Tensor], *args: object) -> Make:
    return lambda k: make(k, *args)


def _rows() -> Iterator[tuple[str, Make, float]]:  # noqa: C901, PLR0912  # one loop per topic of ops
    for t in WEIGHTS:
        yield f"MUL_MAT {t}", _given(lambda k, t: k.mul_mat(k.of(t, 512, 9, 2), k.of(F32, 512, 5, 4, 3)), t), ROUNDING
        yield f"MUL_MAT one token {t}", _given(lambda k, t: k.mul_mat(k.of(t, 1024, 16), k.of(F32, 1024)), t), ROUNDING
        yield f"MUL_MAT_ID {t}", _mul_mat_id(t), ROUNDING
        yield f"GET_ROWS {t}", _given(lambda k, t: k.get_rows(k.of(t, 256, 9, 3), k.index(I32, 9, 5, 3)), t), SAME
        yield f"CPY {t}->f32", _given(lambda k, t: k.cpy(k.of(t, 256, 3), k.of(F32, 256, 3)), t), SAME
    for t, dot in ((F16, F16), (BF16, BF16), (F32, BF16), (Q4_0, Q8_0), (Q4_1, Q8_1), (Q6_K, Q8_K)):
        yield (
            f"MUL_MAT {t} {dot}",
            _given(lambda k, a, b: k.mul_mat(k.of(a, 256, 9), k.blocks(b, 256, 5)), t, dot),
            ROUNDING,
        )
    for t in STORED:
        yield f"SET_ROWS f32->{t}", _set_rows(F32, I64, t), SAME
        yield f"SET_ROWS f16->{t}", _set_rows(F16, I32, t), SAME
        yield f"CPY bf16->{t}", _given(lambda k, t: k.cpy(k.of(BF16, 256, 3), k.of(t, 256, 3)), t), SAME
    for t in (Q4_0, Q5_1, Q8_0, Q6_K):
        yield f"ADD {t}", _given(lambda k, t: k.add(k.of(t, 256, 3), k.of(F32, 256, 3)), t), SAME
    for op in ("add", "sub", "mul", "div"):
        for a, b in ((F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)):
            yield f"{op.upper()} {a} {b}", _binary(op, a, b), SAME if a is F32 else HALF
    for t in FLOATS:
        for op in UNARY_OPS:
            yield f"{op} {t}", _unary(op, t), TABLE if op in {"GELU", "GELU_QUICK"} else ROUNDING if t is F32 else HALF
        for op in GLU_OPS:
            if (op, t) not in {("SWIGLU_OAI", F16), ("SWIGLU_OAI", BF16), ("SWIGLU_CLAMP", BF16)}:
                for form in ("split", "swapped", "odd"):
                    tabled = t is not F32 or op in {"GEGLU", "GEGLU_QUICK"}
                    yield f"{op} {t} {form}", _glu(op, t, form), TABLE if tabled else ROUNDING
    for op in ("norm", "rms_norm", "l2_norm"):
        yield (
            op.upper(),
            _given(lambda k, op: getattr(k, op)(k.permute(k.of(F32, 999, 3, 2), 0, 2, 1, 3), 1e-5), op),
            ROUNDING,
        )
    for op in ("sum", "sum_rows", "mean", "cumsum"):
        yield op.upper(), _given(lambda k, op: getattr(k, op)(k.of(F32, 999, 3, 2)), op), ROUNDING
    for t in (F32, F16):
        for bias in (0.0, 8.0):
            yield f"SOFT_MAX {t} {bias}", _given(_soft_max, t, bias), ROUNDING
            yield f"SOFT_MAX sinks {t} {bias}", _given(lambda k, t, b: k.sunk(_soft_max(k, t, b)), t, bias), ROUNDING
        for mode in (0, 2, 8, 40):
            yield f"ROPE {mode} {t}", _given(lambda k, t, m: k.turned(t, m), t, mode), ANGLE
            yield f"ROPE yarn {mode} {t}", _given(lambda k, t, m: k.turned(t, m, yarn=True), t, mode), ANGLE
            yield f"ROPE partial {mode} {t}", _given(lambda k, t, m: k.turned(t, m, 32), t, mode), ANGLE
        for mode in (0, 2):
            yield f"ROPE_BACK {mode} {t}", _given(lambda k, t, m: k.turned_back(t, m), t, mode), ANGLE
            yield f"ROPE offset {mode} {t}", _given(lambda k, t, m: k.turned(t, m, 32, offset=16), t, mode), ANGLE
        for s in ((16, 16, 16, 16), (8, 0, 8, 4)):
            yield f"ROPE vision {s} {t}", _given(lambda k, t, s: k.turned(t, 24, 32, sections=s), t, s), ANGLE
    for t in (F32, BF16, Q4_0, Q4_1, Q5_1, Q8_0):
        yield f"FLASH_ATTN_EXT {t}", _given(lambda k, t: k.attention(t), t), ROUNDING
    for n_kv in (96, 600):
        yield f"FLASH_ATTN_EXT f16 {n_kv}", _given(lambda k, n: k.attention(F16, n_kv=n), n_kv), HALF_SUM
    yield "FLASH_ATTN_EXT f16 q8_0", lambda k: k.attention(F16, Q8_0), ROUNDING
    yield "FLASH_ATTN_EXT alibi", lambda k: k.attention(F32, bias=8.0), ROUNDING
    yield "FLASH_ATTN_EXT softcap", lambda k: k.attention(F32, cap=30.0), ROUNDING
    yield "FLASH_ATTN_EXT sinks", lambda k: k.sunk(k.attention(F32)), ROUNDING
    yield "FLASH_ATTN_EXT f16 70 tokens", lambda k: k.sunk(k.attention(F16, n=70)), ROUNDING
    yield "FLASH_ATTN_EXT q8_0 f16", lambda k: k.attention(Q8_0, F16, n=70), HALF_SUM
    for name, make in _RECURRENT.items():
        yield name, make, ROUNDING
    yield from _OTHERS.items_with_budget()


class _Others(dict[str, Make]):
    """Rows that move or compare numbers, or round once: the same bytes."""

    def items_with_budget(self) -> Iterator[tuple[str, Make, float]]:
        """Each with the budget zero."""
        return ((name, make, SAME) for name, make in self.items())


# fmt: off
_OTHERS = _Others({
    "SET_ROWS i32": lambda k: k.set_rows(k.of(I32, 32, 9, scale=9), k.of(F32, 32, 5, scale=50), k.rows(I64, 9, 5)),
    "GET_ROWS i32": lambda k: k.get_rows(k.index(I32, 99, 32, 9), k.index(I32, 9, 5)),
    "ADD_ID": lambda k: k.add_id(k.of(F32, 32, 4, 5), k.of(F32, 32, 6), k.index(I32, 6, 4, 5)),
    "CLAMP": lambda k: k.clamp_inplace(k.of(F16, 32, 6), -0.5, 0.7),
    "SCALE": lambda k: k.scale_inplace(k.of(F32, 32, 6), 0.37),
    "SQR": lambda k: k.sqr(k.of(F32, 32, 6)),
    "SQRT": lambda k: k.sqrt(k.sqr(k.of(F32, 32, 6))),
    "CONCAT q4_0": lambda k: k.concat(k.of(Q4_0, 64, 3), k.of(Q4_0, 32, 3), 0),
    "CONCAT i64": lambda k: k.concat(k.index(I64, 99, 8, 3, 2), k.index(I64, 99, 8, 3, 5), 2),
    "REPEAT": lambda k: k.repeat_4d(k.of(F16, 8, 3, 2), 16, 9, 2, 3),
    "ARGSORT": lambda k: k.argsort(k.of(F32, 99, 3, 2), 1),
    "TOP_K": lambda k: k.top_k(k.of(F32, 99, 3, 2), 7),
    "ARGMAX": lambda k: k.argmax(k.of(F32, 99, 3)),
    "CONT": lambda k: k.cont_2d(k.permute(k.of(F32, 8, 6, 4), 0, 2, 1, 3), 32, 6),
    "CONT transposed": lambda k: k.cont(k.transpose(k.of(F16, 8, 6))),
    "CPY into a view": lambda k: k.cpy(k.of(F32, 8, 3), k.view_2d(k.of(F16, 16, 9), 8, 3, 32, 136)),
    "CPY transposed": lambda k: k.cpy(k.of(F32, 8, 6), k.transpose(k.of(F32, 6, 8))),
    "CPY f32->i32": lambda k: k.cpy(k.of(F32, 8, 6, scale=99), k.of(I32, 8, 6)),
    "CPY i32->f32": lambda k: k.cpy(k.index(I32, 2**31 - 1, 8, 6), k.of(F32, 8, 6)),
    "CPY q8_0 permuted": lambda k: k.cpy(k.permute(k.of(Q8_0, 64, 6, 3), 0, 2, 1, 3), k.of(Q8_0, 64, 3, 6)),
    "MUL in place": lambda k: k.mul_inplace(k.of(F32, 32, 6), k.of(F32, 32)),
    "ADD permuted": lambda k: k.add(k.permute(k.of(F32, 32, 6, 4), 0, 2, 1, 3), k.transpose(k.of(F32, 4, 32))),
    "PAD": lambda k: k.pad(k.of(F32, 10, 6, 2), 3, 1, 2, 0),
    "SET in place": lambda k: k.set_inplace(k.of(F32, 8, 6, 4), k.of(F32, 3, 2, 2), 32, 192, 768, 260),
    "SET i32": lambda k: k.set_1d(k.of(I32, 8, 6, scale=99), k.of(I32, 9, scale=99), 44),
    "ACC": lambda k: k.acc(k.of(F32, 8, 6, 4), k.of(F32, 3, 2, 2), 64, 192, 768, 260),
    "TRI": lambda k: k.tri(k.of(F32, 9, 9, 3), 2),
    "DIAG": lambda k: k.diag(k.of(F32, 9, 1, 3)),
    "ROLL": lambda k: k.roll(k.of(F32, 9, 5, 3), 4, -2, 1, 0),
    "WIN_PART": lambda k: k.win_part(k.of(F32, 8, 9, 5), 4),
    "WIN_UNPART": lambda k: k.win_unpart(k.of(F32, 8, 4, 4, 6), 9, 5, 4),
    "GET_REL_POS": lambda k: k.get_rel_pos(k.of(F16, 8, 13), 7, 7),
    "PAD_REFLECT_1D": lambda k: k.pad_reflect_1d(k.of(F32, 24, 5), 7, 9),
    "PAD circular": lambda k: k.pad_ext_circular(k.of(F32, 10, 6, 2), 3, 1, 2, 0, 0, 1, 0, 0),
    "IM2COL_3D": lambda k: k.im2col_3d(k.of(F16, 3, 2, 2, 6), k.of(F32, 9, 7, 5, 6), 3, 2, 1, 1, 0, 1, 2, 1, 2, 1, F16),
    "POOL_2D": lambda k: k.pool_2d(k.of(F32, 24, 5, 3), 0, 4, 1, 4, 1, 0, 0),
    "IM2COL": lambda k: k.im2col(k.of(F16, 3, 5, 4), k.of(F32, 20, 5, 2), 2, 0, 1, 0, 1, 0, False, F16),
    "ADD1": lambda k: k.add1(k.of(F32, 32, 6), k.of(F32, 1)),
    "FILL": lambda k: k.fill(k.of(F16, 32, 6), -0.3),
    "LEAKY_RELU": lambda k: k.leaky_relu(k.of(F32, 32, 6), 0.1, False),
    "DUP": lambda k: k.dup(k.permute(k.of(F16, 8, 6, 4), 0, 2, 1, 3)),
    "DIAG_MASK_INF": lambda k: k.diag_mask_inf(k.of(F32, 20, 6, 3), 3),
    "DIAG_MASK_ZERO": lambda k: k.diag_mask_zero(k.of(F32, 20, 6, 3), 3),
    "COUNT_EQUAL": lambda k: k.count_equal(k.index(I32, 3, 33, 6), k.index(I32, 3, 33, 6)),
    "ARANGE": lambda k: k.add(k.arange(0.5, 20, 0.75), k.of(F32, 1)),
})
# fmt: on


def _scan(k: Kit, d_a: int, kept: int) -> Tensor:
    """SSM_SCAN of 4 heads in 2 groups, 5 tokens of 2 sequences, that start from cells 2 and 0 of 3."""
    s, x, dt = k.of(F32, 16, 8, 4, 3), k.of(F32, 8, 4, 5, 2), k.of(F32, 4, 5, 2, scale=3)
    decay = k.of(F32, d_a, 4, values=-k.random.random((4, d_a)))
    b, c = (k.of(F32, 16, 2, 5, 2) for _ in "bc")
    return k.ssm_scan(s, x, dt, decay, b, c, k.of(I32, 2, values=np.array([2, 0])), kept)


def _linear(k: Kit, op: str) -> Tensor:
    """32 numbers by 3 heads, 3 tokens of 2 sequences."""
    r, w, key, v, a, b = (k.of(F32, 32, 3, 6, scale=0.4) for _ in range(6))
    state = k.of(F32, 32 * 32 * 3, 2)
    if op == "rwkv_wkv6":
        return k.rwkv_wkv6(key, v, r, k.of(F32, 32, 3), w, state)
    return (
        k.rwkv_wkv7(r, w, key, v, a, b, state) if op == "rwkv_wkv7" else k.gated_linear_attn(key, v, r, w, state, 0.3)
    )


def _delta(k: Kit, gates: int, kept: int) -> Tensor:
    q, key, v = k.of(F32, 16, 2, 5, 1), k.of(F32, 16, 4, 5, 2, scale=0.25), k.of(F32, 16, 4, 5, 2)
    g, beta = (k.of(F32, n, 4, 5, 2, scale=0.4) for n in (gates, 1))
    return k.gated_delta_net(q, key, v, g, beta, k.of(F32, 16, 16, 4, 2), kept)


def _solved(k: Kit) -> Tensor:
    return k.solve_tri(
        k.of(F32, 9, 9, 2, values=k.random.random((2, 9, 9)) + np.eye(9)), k.of(F32, 5, 9, 2), True, True, False
    )


def _trained(k: Kit) -> tuple[Tensor, Tensor]:
    a = k.of(F32, 33, 6)
    k.set_param(a)
    return a, k.of(F32, 33, 6)


_RECURRENT: dict[str, Make] = {
    "SSM_SCAN mamba": lambda k: _scan(k, 16, 1),
    "SSM_SCAN mamba2": lambda k: _scan(k, 1, 1),
    "SSM_SCAN states": lambda k: _scan(k, 1, 4),
    **{op.upper(): _given(_linear, op) for op in ("rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn")},
    "GATED_DELTA_NET": lambda k: _delta(k, 1, 1),
    "GATED_DELTA_NET kda": lambda k: _delta(k, 16, 5),
    "SSM_CONV": lambda k: k.ssm_conv(k.of(F32, 8, 9, 2), k.of(F32, 4, 9)),
    "GROUP_NORM": lambda k: k.group_norm(k.of(F32, 9, 5, 12, 2), 4, 1e-5),
    "SIN": lambda k: k.sin(k.of(F32, 33, 6, scale=3)),
    "COS": lambda k: k.cos(k.of(F32, 33, 6, scale=3)),
    "LOG": lambda k: k.log(k.sqr(k.of(F32, 33, 6))),
    "OPT_STEP_SGD": lambda k: k.opt_step_sgd(*_trained(k), k.of(F32, 2, values=k.random.random(2))),
    "OPT_STEP_ADAMW": lambda k: k.opt_step_adamw(
        *_trained(k),
        k.of(F32, 33, 6),
        k.of(F32, 33, 6, values=k.random.random((6, 33))),
        k.of(F32, 7, values=k.random.random(7)),
    ),
    "OUT_PROD": lambda k: k.out_prod(k.of(Q8_0, 64, 9), k.of(F32, 5, 9)),
    "CONV_2D_DW": lambda k: k.conv_2d_dw_direct(k.of(F32, 3, 2, 1, 5), k.of(F32, 9, 7, 5, 2), 2, 1, 1, 0, 1, 2),
    "CONV_2D": lambda k: k.conv_2d_direct(k.of(F32, 3, 2, 5, 7), k.of(F32, 9, 7, 5, 2), 2, 1, 1, 0, 1, 2),
    "CONV_2D f16": lambda k: k.conv_2d_direct(k.of(F16, 3, 2, 5, 7), k.of(F32, 9, 7, 5, 2), 2, 1, 1, 0, 1, 2),
    "CONV_3D": lambda k: k.conv_3d_direct(
        k.of(F32, 3, 2, 2, 15), k.of(F32, 9, 7, 5, 6), 2, 1, 1, 0, 1, 2, 1, 2, 1, 3, 2, 5
    ),
    "CONV_TRANSPOSE_1D": lambda k: k.conv_transpose_1d(k.of(F16, 5, 3, 6), k.of(F32, 9, 6), 3, 0, 1),
    "CONV_TRANSPOSE_2D": lambda k: k.conv_transpose_2d_p0(k.of(F32, 3, 2, 4, 6), k.of(F32, 9, 7, 6, 2), 2),
    "COL2IM_1D": lambda k: k.col2im_1d(k.of(F32, 12, 9), 2, 3, 1),
    "UPSCALE": lambda k: k.interpolate(k.of(F32, 9, 7, 2), 14, 20, 2, 1, 2),
    "UPSCALE antialias": lambda k: k.interpolate(k.of(F32, 19, 17, 2), 8, 5, 2, 1, 513),
    "POOL_1D": lambda k: k.pool_1d(k.of(F16, 24, 5, 3), 1, 3, 2, 1),
    "TIMESTEP_EMBEDDING": lambda k: k.timestep_embedding(k.of(F32, 5, scale=9), 33, 10000),
    "ADD_REL_POS": lambda k: k.add_rel_pos(k.of(F32, 49, 35, 3), k.of(F32, 7, 7, 5, 3), k.of(F32, 7, 7, 5, 3)),
    "REPEAT_BACK": lambda k: k.repeat_back(k.of(F32, 8, 6, 4), k.of(F32, 4, 3, 4)),
    "SILU_BACK": lambda k: k.silu_back(k.of(F32, 33, 6), k.of(F32, 33, 6, scale=3)),
    "RMS_NORM_BACK": lambda k: k.rms_norm_back(k.of(F32, 99, 6), k.of(F32, 99, 6), 1e-5),
    "GET_ROWS_BACK": lambda k: k.get_rows_back(k.of(F32, 33, 9), k.index(I32, 5, 9), k.of(F32, 33, 5)),
    "SOFT_MAX_BACK": lambda k: k.soft_max_ext_back(k.of(F32, 33, 9), k.of(F32, 33, 9, scale=0.05), 0.5, 0.0),
    "POOL_2D_BACK": lambda k: k.pool_2d_back(k.of(F32, 5, 4, 2), k.of(F32, 9, 7, 2), 0, 3, 2, 2, 2, 1, 1),
    "IM2COL_BACK": lambda k: k.im2col_back(
        k.of(F32, 18, 4, 6, 2), k.of(F16, 3, 2, 3), (9, 7, 3, 2), 2, 1, 1, 0, 2, 1, True
    ),
    "CROSS_ENTROPY_LOSS": lambda k: k.cross_entropy_loss(k.of(F32, 33, 9), k.soft_max(k.of(F32, 33, 9))),
    "CROSS_ENTROPY_LOSS_BACK": lambda k: k.cross_entropy_loss_back(
        k.of(F32, 1), k.of(F32, 33, 9), k.soft_max(k.of(F32, 33, 9))
    ),
    "SOLVE_TRI": _solved,
    "DSV4_HC_COMB": lambda k: k.dsv4_hc_comb(k.of(F32, 24, 7), k.of(F32, 3), k.of(F32, 24), 1e-6, 20),
    "DSV4_HC_PRE": lambda k: k.dsv4_hc_pre_gated(k.of(F32, 33, 4, 7), k.of(F32, 33, 4, 7), 0.5),
    "DSV4_HC_POST": lambda k: k.dsv4_hc_post(
        k.of(F32, 33, 7), k.of(F32, 33, 4, 7), k.of(F32, 4, 7), k.of(F32, 4, 4, 7)
    ),
    "LIGHTNING_INDEXER": lambda k: k.lightning_indexer(
        k.of(F32, 64, 4, 3, 2), k.of(Q8_0, 64, 1, 20, 2), k.of(F32, 4, 3, 1, 2), k.mask(F16, 20, 3, 1, 1)
    ),
}
"""Ops with a state, and other sums in float32."""


def _mul_mat_id(t: GGMLType) -> Make:
    return lambda k: k.mul_mat_id(k.of(t, 256, 12, 6), k.of(F32, 256, 2, 7), k.index(I32, 6, 4, 7))


def _set_rows(source: GGMLType, index: GGMLType, t: GGMLType) -> Make:
    return lambda k: k.set_rows(k.of(t, 512, 20), k.of(source, 512, 5), k.rows(index, 20, 5))


def _binary(op: str, a: GGMLType, b: GGMLType) -> Make:
    return lambda k: getattr(k, op)(k.of(a, 32, 6, 4, 2), k.of(b, 8, 3, 1, 2))


def _unary(op: str, t: GGMLType) -> Make:
    if op == "XIELU":
        return lambda k: k.xielu(k.of(t, 64, 7, scale=3), 0.8, 0.6, 0.5, -1e-6)
    return lambda k: k.unary(k.of(t, 64, 7, scale=3), op)


def _glu(op: str, t: GGMLType, form: str) -> Make:
    parameters = {"SWIGLU_OAI": (1.702, 2.0), "SWIGLU_CLAMP": (2.0,)}.get(op)
    if form == "odd" and parameters is not None:
        return lambda k: getattr(k, op.lower())(k.of(t, 129, 7, scale=3), None, *parameters)
    if form == "odd":
        return lambda k: k.glu(k.of(t, 129, 7, scale=3), op, True)
    if parameters is not None:
        return lambda k: getattr(k, op.lower())(
            k.of(t, 64, 7, scale=3), k.of(t, 64, 7, scale=3) if form == "split" else None, *parameters
        )
    if form == "split":
        return lambda k: k.glu_split(k.of(t, 64, 7, scale=3), k.of(t, 64, 7), op)
    return lambda k: k.glu(k.of(t, 128, 7, scale=3), op, True)


def _soft_max(k: Kit, t: GGMLType, bias: float) -> Tensor:
    return k.soft_max_ext(k.of(F32, 64, 5, 6, 2, scale=3), k.mask(t, 64, 7, 2, 1), 0.3, bias)


ROWS = {name: (make, budget) for name, make, budget in _rows()}


@pytest.fixture(scope="module")
def ggml() -> Iterator[Backend]:
    """The installed wheel's ggml."""
    try:
        backend = create(Spec("ggml"))
    except UnavailableError as e:
        pytest.skip(str(e))
    yield backend
    backend.close()


def compute(backend: Backend, kit: Kit, node: Tensor) -> tuple[Array, list[Bytes]]:
    """The value of `node`, and the bytes of all leaves after it ran."""
    graph = kit.build_forward_expand(node)
    case = Case("test/x@0", kit.leafs, [Step(graph, {}, (node,))])
    case.validate()
    refused = [s.reason for s in backend.supports(graph) if not s]
    assert not refused
    with backend.open(case) as session:
        packed = session.compute(graph, {}, (node,))[node]
        leafs = [session.read(t) for t in kit.leafs]
    return load(node.type, strided(packed, Tensor(node.type, node.ne, contiguous_nb(node.type, node.ne)))), leafs


@pytest.mark.parametrize("name", ROWS)
def test_agrees_with_ggml(name: str, ggml: Backend) -> None:
    """The same NaN and infinities in place, the rest within the row's budget of the expected energy."""
    make, budget = ROWS[name]
    kit = Kit(len(name))
    node = make(kit)
    reference = CpuBackend().computing_in(ggml.arithmetic())
    (want, kept), (got, left) = (compute(b, kit, node) for b in (reference, ggml))
    assert np.array_equal(np.isfinite(want), np.isfinite(got))
    seen = np.isfinite(want)
    assert np.array_equal(want[~seen], got[~seen], equal_nan=True)
    error = float(((want[seen] - got[seen]) ** 2).sum() / ((want[seen] ** 2).sum() or 1))
    assert error <= budget, f"{name}: NMSE {error:.2e}"
    if budget == SAME:
        assert all(map(np.array_equal, kept, left))


def test_each_op_has_a_row() -> None:
    """An op that computes, and each unary and gated function, is in some graph."""
    made = [t for make, _ in ROWS.values() for t in build_forward_expand(make(Kit(1))).nodes]
    assert {t.op for t in made} >= DECLARATIONS.keys() - VIEW_OPS
    assert {t.params.op for t in made if t.op in {"UNARY", "GLU"}} == {*UNARY_OPS, *GLU_OPS}


@pytest.mark.parametrize("n_ctx_orig", [0, 512, 4096])
@pytest.mark.parametrize("beta_fast", [1.0, 32.0])
def test_yarn_mixes_angles_as_ggml_does(n_ctx_orig: int, beta_fast: float, ggml: Backend) -> None:
    """Two angles of up to 10,000 turns are mixed with one rounding: what is left is that of sine and cosine."""
    kit = Kit(1)
    a, pos = kit.of(F32, 128, 4, 40), kit.index(I32, 65536, 40)
    node = kit.rope_ext(a, pos, None, 128, 0, n_ctx_orig, 10000.0, 1.4245, 0.7465, 1.4245, beta_fast, 1.0)
    reference = CpuBackend().computing_in(ggml.arithmetic())
    (want, _), (got, _) = (compute(b, kit, node) for b in (reference, ggml))
    assert float(((want - got) ** 2).sum() / (want**2).sum()) < 1e-13


@pytest.mark.parametrize("t", [Q4_0, Q8_0, Q4_K, F16], ids=str)
def test_exact_is_near(t: GGMLType, ggml: Backend) -> None:
    """Without ggml's rounding of activations the distance is that rounding: 2e-8 to 2e-4 of the energy, not more."""
    kit = Kit(1)
    node = kit.mul_mat(kit.of(t, 1024, 32), kit.of(F32, 1024, 4))
    (want, _), (got, _) = (compute(b, kit, node) for b in (CpuBackend(), ggml))
    assert 2e-8 < float(((want - got) ** 2).sum() / (want**2).sum()) < 2e-4
