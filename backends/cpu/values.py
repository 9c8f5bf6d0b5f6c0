"""Bytes and numbers: every type to float64, and float64 to every type with one rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Raw, Sources
from conformance.ggml import quants
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError
from conformance.ggml.quants.requant import requantised, weight_form
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import BF16, F32, I32, TYPES, GGMLType, type_named

Values = NDArray[np.float64]
"""Elements of a tensor as float64, NumPy shape `ne[::-1]`."""
Formula = Callable[..., NDArray[Any]]
"""`f(node, *src)` over float64 arrays, `None` for an absent source."""
RoundingKernel = Callable[[Arithmetic, Tensor, Raw, Sources], None]
"""A kernel that rounds as an arithmetic declares."""

_BLOCK = 1 << 15
"""Elements of a block."""
_I32_MIN = -(2.0**31)


def load(type_: GGMLType, raw: Raw) -> Values:
    """Return the elements of `raw` as a new C-ordered float64 array; I64 is exact up to 2^53."""
    if type_.dtype is not None:
        return np.array(raw, np.float64, order="C")
    return quants.to_float(type_, raw).astype(np.float64)


def store(type_: GGMLType, dst: Raw, values: NDArray[Any], quantize: str = "reference") -> None:
    """Write `values` into `dst`, rounded once: floats to nearest even, integers toward zero.

    Block types convert the values to float32 first, as ggml's quantisers do; `quantize` is `Arithmetic.quantize`.
    """
    if type_ is F32:
        dst[...] = values
    elif type_ is BF16:
        dst[...] = to_bf16(values)
    elif type_ is I32:
        inside = (values > _I32_MIN - 1) & (values < -_I32_MIN)
        dst[...] = np.where(inside, values, _I32_MIN)  # x86's cvttss2si result for the rest
    elif type_.dtype is not None:
        dst[...] = values
    else:
        encode = quants.quantizer(quantize)
        dst[...] = encode(type_, values.astype(np.float32)).reshape(dst.shape)


def convert(from_: GGMLType, raw: Raw, to: GGMLType, dst: Raw, quantize: str) -> None:
    """Convert `raw` into `dst` of another type; copy bytes between equal types."""
    if from_ is to:
        dst[...] = raw
    else:
        store(to, dst, load(from_, raw), quantize)


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round once to nearest even BF16 bits; a NaN becomes quiet, as in `ggml_fp32_to_bf16`.

    The intermediate float32 is rounded to odd, so that the second rounding sees every lost bit.
    """
    x = np.asarray(values, np.float64)
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    back = near.astype(np.float64)
    inexact = back != x
    if inexact.any():
        bits = np.where(inexact, (bits - (np.abs(back) > np.abs(x))) | 1, bits).astype(np.uint32)
    even = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (near.view(np.uint32) >> 16) | 64, even).astype(np.uint16)


def rounded(x: Values, to: str, quantize: str = "reference") -> Values:
    """Store `x` in the type, or the form of `requant.FORMS`, named `to`, and read it back."""
    if to not in TYPES:
        return requantised(to, x).astype(np.float64)
    return quants.roundtrip(type_named(to), x, quantize).astype(np.float64)


def operand(node: Tensor, src: Sources, i: int) -> tuple[Tensor, Raw]:
    """Return `node.src[i]` and its elements; BackendError if it is absent."""
    t, raw = (node.src[i], src[i]) if i < len(src) else (None, None)
    if t is None or raw is None:
        raise BackendError(f"src[{i}] expected, none found")
    return t, raw


def weight(arithmetic: Arithmetic, node: Tensor, src: Sources) -> tuple[GGMLType, Raw]:
    """Return type and elements of `src[0]`, stored in another form first if `arithmetic` asks."""
    w, raw = operand(node, src, 0)
    form = weight_form(node, arithmetic.weights, arithmetic.rows)
    return (F32, requantised(form, quants.to_float(w.type, raw))) if form else (w.type, raw)


def optional(node: Tensor, src: Sources, i: int) -> Values | None:
    """Return the values of `node.src[i]`, if there is one."""
    t, raw = (node.src[i], src[i]) if i < len(src) else (None, None)
    return None if t is None or raw is None else load(t.type, raw)


def in_float64(formula: Formula) -> RoundingKernel:
    """Return the kernel that computes `formula` on float64 and rounds its result once."""

    def kernel(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
        values = [None if t is None or raw is None else load(t.type, raw) for t, raw in zip(node.src, src, strict=True)]
        store(node.type, dst, formula(node, *values), arithmetic.quantize)

    return kernel


def repeated(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Repeat `x` to `shape` as in `ggml_can_repeat`: index i reads `i % ne`.

    If every dimension is whole or one, nothing is copied: the caller's arithmetic broadcasts.
    """
    if all(have in (1, want) for have, want in zip(x.shape, shape, strict=True)):
        return x
    return np.tile(x, [want // have for have, want in zip(x.shape, shape, strict=True)])


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield indices of parts of an array, of whole rows, that fit a core's cache."""
    inner = math.prod(shape[1:])
    step = max(1, _BLOCK // max(1, inner))
    for i in range(0, shape[0], step):
        at = (slice(i, i + step),)
        yield from [at] if inner <= _BLOCK or len(shape) == 2 else ((*at, *rest) for rest in blocks(shape[1:]))


def checked_index(indices: NDArray[Any], limit: int, what: str, bound: str) -> NDArray[np.int64]:
    """Return `indices` as int64; BackendError outside `0 <= i < limit`, where ggml would abort."""
    whole = indices.astype(np.int64)
    if whole.size and not (whole.min() >= 0 and whole.max() < limit):
        bad = whole[(whole < 0) | (whole >= limit)].flat[0]
        raise BackendError(f"{what}: 0 <= i < {limit} ({bound}) expected, {bad} found")
    return whole


def alibi_slopes(max_bias: float, n_head: int) -> Values:
    """Return slopes, `(n_head,)`, as in `ggml_compute_forward_soft_max_f32`; ones if no bias."""
    if max_bias <= 0:
        return np.ones(n_head)
    pow2 = 1 << (n_head.bit_length() - 1)
    head = np.arange(n_head)
    exponent = np.where(head < pow2, (head + 1) * max_bias, (2 * (head - pow2) + 1) * max_bias / 2)
    return np.exp2(-exponent / pow2)
