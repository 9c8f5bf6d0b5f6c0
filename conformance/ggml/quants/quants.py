"""Values in and out of every ggml type, bit for bit as ggml's own `to_float`, `from_float_ref` and `from_float`.

Arrays are laid out as `tensor.strided` gives them: scalar types as an array of their dtype (BF16: its bits as uint16),
block types as uint8 of shape (..., ne0 / blck_size, type_size). Values have ne0 as their last axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import GraphError
from conformance.ggml.types import (
    BF16,
    F16,
    F32,
    I32,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Q8_1,
    Q8_K,
    TQ1_0,
    TQ2_0,
    GGMLType,
)

from .blocks import Blocks, F32Array, as_blocks, as_bytes
from .grid import WRITE_GRID
from .iq import WRITE_IQ
from .k import WRITE_K
from .random_blocks import random_blocks
from .read import READ
from .write import WRITE_32, WRITE_SIMD, to_int

__all__ = [
    "QUANTIZERS",
    "VEC_DOT_TYPE",
    "from_float",
    "from_float_cpu",
    "quantizer",
    "random_blocks",
    "roundtrip",
    "to_float",
    "vec_dot_type",
]

Raw = NDArray[Any]
Quantizer = Callable[[GGMLType, NDArray[Any]], Raw]

VEC_DOT_TYPE: dict[GGMLType, GGMLType] = {
    F32: F32,
    F16: F16,
    BF16: BF16,
    **dict.fromkeys((Q1_0, Q2_0, Q4_0, Q5_0, Q8_0, MXFP4, NVFP4, IQ4_NL), Q8_0),
    **dict.fromkeys((Q4_1, Q5_1, Q8_1), Q8_1),
    **dict.fromkeys((Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0), Q8_K),
    **dict.fromkeys((IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS), Q8_K),
}
"""ggml-cpu's `type_traits_cpu[].vec_dot_type`: what MUL_MAT turns `src[1]` into before it multiplies."""


def vec_dot_type(type_: GGMLType) -> GGMLType:
    """The type that ggml-cpu rounds the activations to when the weight is of `type_`.

    Raises:
        GraphError: `type_` is no weight type (integers, F64, Q8_K).
    """
    try:
        return VEC_DOT_TYPE[type_]
    except KeyError:
        raise GraphError(
            f"vec_dot_type: ggml-cpu multiplies no {type_}; one of {list(VEC_DOT_TYPE)} expected"
        ) from None


def _bf16_to_float(raw: Raw) -> F32Array:
    out = raw.astype(np.uint32)
    out <<= 16
    return out.view(np.float32)


def _f16_values() -> F32Array:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    # ggml_compute_fp16_to_fp32 multiplies, which makes every NaN quiet
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | np.uint32(0x00400000), bits).view(np.float32)


_F16 = _f16_values()
"""The value of every F16: twice as fast as a cast where NumPy has no instruction for it."""


def _f16_to_float(raw: Raw) -> F32Array:
    return _F16.take(raw.view(np.uint16))


def to_float(type_: GGMLType, raw: Raw) -> NDArray[Any]:
    """The values of a tensor: `to_float` of ggml's type_traits.

    Args:
        type_: any type.
        raw: as `tensor.strided` gives it, of any strides.

    Returns:
        float32, ne0 as the last axis, always a new array; where ggml has NaN, some NaN. Integers become the nearest
        float32; F64 stays float64: rounding it is left to whoever computes with it. Q8_1, for which ggml has no
        `to_float`, is quants times `d`.

    Raises:
        GraphError: `raw` is not laid out as `type_`.
    """
    if type_ in READ:
        blocks = as_blocks(type_, raw)
        shape = (*raw.shape[:-2], raw.shape[-2] * type_.blck_size)
        if not raw.size:
            return np.empty(shape, np.float32)
        with np.errstate(all="ignore"):
            return READ[type_](blocks).reshape(shape)
    dtype = np.dtype("<u2") if type_.dtype is None else type_.dtype
    if raw.dtype != dtype:
        raise GraphError(f"{type_}: an array of {dtype} expected, {raw.dtype} found")
    if type_ is BF16:
        return _bf16_to_float(raw)
    if type_ is F16:
        return _f16_to_float(raw)
    return raw.astype(np.float64 if dtype == np.float64 else np.float32)


def _to_f16(x: F32Array) -> Raw:
    out = x.astype(np.float16)
    # ggml_compute_fp32_to_fp16 has one NaN per sign
    nan = np.isnan(x)
    if nan.any():
        bits = out.view(np.uint16)
        bits[nan] = bits[nan] & 0x8000 | 0x7E00
    return out


def _to_bf16(x: F32Array) -> Raw:
    bits = np.ascontiguousarray(x).view(np.uint32)
    out = ((bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(64)
    return out


_SCALAR: dict[GGMLType, Callable[[F32Array], Raw]] = {F32: np.array, F16: _to_f16, BF16: _to_bf16, I32: to_int}


WRITE: dict[GGMLType, Callable[[F32Array], Blocks]] = {**WRITE_32, **WRITE_K, **WRITE_IQ, **WRITE_GRID}


def _store(type_: GGMLType, x: NDArray[Any], table: dict[GGMLType, Callable[[F32Array], Blocks]]) -> Raw:
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float32)
        if type_ in _SCALAR:
            return _SCALAR[type_](x)
        write = table.get(type_) or WRITE.get(type_)
        if write is None:
            raise GraphError(
                f"from_float: ggml has no reference quantiser for {type_}; one of {[*_SCALAR, *WRITE]} expected."
                " Make its blocks with random_blocks"
            )
        if x.ndim == 0 or x.shape[-1] % type_.blck_size:
            raise GraphError(
                f"GGML_ASSERT(ne % ggml_blck_size(type) == 0): {type_} has {type_.blck_size}, shape {x.shape} came"
            )
        shape = (*x.shape[:-1], x.shape[-1] // type_.blck_size, type_.type_size)
        if not x.size:
            return np.empty(shape, np.uint8)
        blocks = write(np.ascontiguousarray(x).reshape(-1, type_.blck_size))
    return as_bytes(type_, blocks).reshape(shape)


def from_float(type_: GGMLType, x: NDArray[Any]) -> Raw:
    """Store values in a type: `from_float_ref` of ggml's type_traits (I32, F32: ggml-cpu's `from_float`).

    Args:
        type_: a type that ggml can store into.
        x: float32, ne0 as the last axis; float64 is rounded to float32 first. Finite in block types: what ggml makes of
            NaN and infinity there is up to the compiler. In IQ2_S, IQ3_XXS and IQ3_S below 1e10, as ggml aborts where
            a squared error overflows.

    Returns:
        A new array, laid out as `tensor.strided` does. Bytes that ggml leaves unwritten, the quants of a block of zeros
        in IQ4_NL and the sums of one in Q8_K, are those of zeros.

    Raises:
        GraphError: ggml has no reference quantiser for `type_`, or the last axis is no whole number of blocks.
    """
    return _store(type_, x, WRITE)


def from_float_cpu(type_: GGMLType, x: NDArray[Any]) -> Raw:
    """As `from_float`, with what ggml-cpu's x86 code (AVX and AVX2) stores: `from_float` of its type_traits_cpu.

    It differs in Q8_0 and Q8_1 only: they multiply with 127 / amax (the reference with 1 / (amax / 127)) and round
    halves to even (the reference away from zero). A NaN in F16 keeps its payload there and does not here.
    """
    return _store(type_, x, WRITE_SIMD)


QUANTIZERS: dict[str, Quantizer] = {"reference": from_float, "simd": from_float_cpu}


def quantizer(name: str) -> Quantizer:
    """`from_float` or `from_float_cpu` by the name that `Arithmetic.quantize` has for it.

    Raises:
        GraphError: another name.
    """
    try:
        return QUANTIZERS[name]
    except KeyError:
        raise GraphError(f"quantize: one of {list(QUANTIZERS)} expected, {name!r} found") from None


def roundtrip(type_: GGMLType, x: NDArray[Any], *, simd: bool = False) -> F32Array:
    """`x` after it was stored in `type_` and read back, float32 of the same shape.

    Args:
        type_: as for `from_float`.
        x: as for `from_float`.
        simd: store as `from_float_cpu`.
    """
    return to_float(type_, (from_float_cpu if simd else from_float)(type_, x))
