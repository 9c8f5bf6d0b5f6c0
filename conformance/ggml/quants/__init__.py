"""Read and store values of every ggml type, bit for bit as ggml does.

Arrays are laid out as by `tensor.strided`: scalar types as an array of their dtype (BF16: its bits as uint16), block
types as uint8 of shape (..., ne0 / blck_size, type_size). Values have ne0 as their last axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.errors import GraphError
from conformance.ggml.types import TYPES, GGMLType

from .blocks import F32Array, as_blocks, as_bytes
from .read import READ
from .read import offsets as offsets
from .write import WRITE, WRITE_EVEN, WRITE_FUSED, WRITE_SIMD, Fill, to_int, written

Raw = NDArray[Any]
Quantizer = Callable[[GGMLType, NDArray[Any]], Raw]

_VEC_DOT = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q1_0 q2_0 q4_0 q5_0 q8_0 mxfp4 nvfp4 iq4_nl",
    "q8_1": "q4_1 q5_1 q8_1",
    "q8_K": "q2_K q3_K q4_K q5_K q6_K tq1_0 tq2_0 iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs",
}
VEC_DOT_TYPE = {TYPES[name]: TYPES[to] for to, names in _VEC_DOT.items() for name in names.split()}
"""ggml-cpu's `vec_dot_type`, to which MUL_MAT converts `src[1]`."""


def vec_dot_type(type_: GGMLType) -> GGMLType:
    """Return the type that ggml-cpu rounds activations to for weights of `type_`.

    GraphError for integers, F64 and Q8_K.
    """
    try:
        return VEC_DOT_TYPE[type_]
    except KeyError:
        raise GraphError(
            f"vec_dot_type: ggml-cpu has no product for {type_}; one of {list(VEC_DOT_TYPE)} expected"
        ) from None


def _f16_values() -> F32Array:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    # ggml_compute_fp16_to_fp32 multiplies, which makes every NaN quiet
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | np.uint32(0x00400000), bits).view(np.float32)


_F16 = _f16_values()
"""Value of every F16: twice as fast as a cast where NumPy has no instruction for it."""


def to_float(type_: GGMLType, raw: Raw) -> NDArray[Any]:
    """Return the values of a tensor: `to_float` of ggml's type_traits.

    `raw` is laid out as by `tensor.strided`, with any strides. The result is a new float32 array with ne0 as its last
    axis; F64 stays float64. NaN payloads may differ from ggml's. Q8_1, for which ggml has no `to_float`, is quants
    times `d`. GraphError if `raw` is not laid out as `type_`.
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
    if type_ is types.BF16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if type_ is types.F16:
        return _F16.take(raw.view(np.uint16))
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


_SCALAR: dict[GGMLType, Callable[[F32Array], Raw]] = {
    types.F32: np.array,
    types.F16: _to_f16,
    types.BF16: _to_bf16,
    types.I32: to_int,
}


def _store(type_: GGMLType, x: NDArray[Any], table: dict[GGMLType, Fill]) -> Raw:
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float32)
        if type_ in _SCALAR:
            return _SCALAR[type_](x)
        fill = table.get(type_) or WRITE.get(type_)
        if fill is None:
            raise GraphError(
                f"from_float: there is no quantiser for {type_}; one of {[*_SCALAR, *WRITE]} expected."
                " Make its blocks with random_blocks"
            )
        if x.ndim == 0 or x.shape[-1] % type_.blck_size:
            raise GraphError(
                f"GGML_ASSERT(ne % ggml_blck_size(type) == 0): {type_} has {type_.blck_size}, shape {x.shape} came"
            )
        shape = (*x.shape[:-1], x.shape[-1] // type_.blck_size, type_.type_size)
        if not x.size:
            return np.empty(shape, np.uint8)
        blocks = written(type_, np.ascontiguousarray(x).reshape(-1, type_.blck_size), fill)
    return as_bytes(type_, blocks).reshape(shape)


def from_float(type_: GGMLType, x: NDArray[Any]) -> Raw:
    """Store values in a type: `from_float_ref` of ggml's type_traits.

    `x` is float32 with ne0 as the last axis; float64 is rounded to float32 first. It must be finite for block types, as
    ggml's result for NaN and infinity depends on the compiler. The result is a new array, laid out as by
    `tensor.strided`. Bytes that ggml leaves unwritten (for a block of zeros: the quants of IQ4_NL, the sums of Q8_K)
    are those of zeros. GraphError if there is no quantiser for `type_` (ggml's IQ2_S, IQ3_XXS and IQ3_S are not
    implemented here), or the last axis is not a whole number of blocks.
    """
    return _store(type_, x, WRITE)


def from_float_cpu(type_: GGMLType, x: NDArray[Any]) -> Raw:
    """Store values in a type as ggml-cpu's x86 code: `from_float` of its type_traits_cpu.

    Only Q8_0 and Q8_1 differ from `from_float`: they multiply by 127 / amax (the reference by 1 / (amax / 127)) and
    round halves to even (the reference away from zero). ggml keeps the payload of a NaN in F16, which this function
    does not.
    """
    return _store(type_, x, WRITE_SIMD)


QUANTIZERS: dict[str, Quantizer] = {
    "reference": from_float,
    "simd": from_float_cpu,
    "even": lambda type_, x: _store(type_, x, WRITE_EVEN),
    "fused": lambda type_, x: _store(type_, x, WRITE_FUSED),
}
"""By the names of `Arithmetic.quantize`."""


def quantizer(name: str) -> Quantizer:
    """Return the quantiser that `Arithmetic.quantize` names; GraphError for another name."""
    try:
        return QUANTIZERS[name]
    except KeyError:
        raise GraphError(f"quantize: one of {list(QUANTIZERS)} expected, {name!r} found") from None


def roundtrip(type_: GGMLType, x: NDArray[Any], how: str = "reference") -> F32Array:
    """Store `x` in `type_` as `quantizer(how)` does and read it back: float32 of the same shape."""
    return to_float(type_, quantizer(how)(type_, x))
