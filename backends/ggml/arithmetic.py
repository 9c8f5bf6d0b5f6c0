"""How ggml's CPU device rounds, asked of the library's own tables and functions."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from conformance.ggml.arithmetic import GGML_CPU, Arithmetic
from conformance.ggml.types import F32, Q8_0

from .library import CType, Library


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


class _CpuTraits(ctypes.Structure):
    """`struct ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def cpu_arithmetic(library: Library) -> Arithmetic:
    """The arithmetic of this library's CPU device.

    MUL_MAT rounds activations to `vec_dot_type` of the weights, FLASH_ATTN_EXT rounds Q to that of K, and quantising
    is `simd` where the library's `from_float` and its `from_float_ref` disagree about a value between two steps.
    """
    read = _traits_cpu(library)
    if read is None:
        return replace(GGML_CPU, quantize="reference")
    by_id = {i: name for name, i in library.types.items()}
    vec_dot: dict[str, str] = {}
    for name, i in library.types.items():
        traits = _CpuTraits.from_address(read(i))
        to = by_id.get(traits.vec_dot_type)
        if traits.vec_dot and to is not None and to != F32.name:
            vec_dot[name] = to
    return replace(GGML_CPU, mul_mat=vec_dot, flash_attn=vec_dot, quantize=_quantize(library, read))


def _quantize(library: Library, read: CType) -> str:
    if library.ggml.get_type_traits is None or Q8_0.name not in library.types:
        return "reference"
    i = library.types[Q8_0.name]
    ways = (
        _CpuTraits.from_address(read(i)).from_float,
        _Traits.from_address(library.ggml.get_type_traits(i)).from_float_ref,
    )
    # A scale of exactly 1, and halves between two steps: roundf goes away from zero, SIMD to the even neighbour.
    row = np.array([127.0, *(k + 0.5 for k in range(31))], dtype="<f4")
    blocks: list[bytes] = []
    for address in ways:
        if not address:
            return "reference"
        block = np.zeros(Q8_0.type_size, np.uint8)
        _FROM_FLOAT(address)(row.ctypes.data, block.ctypes.data, row.size)
        blocks.append(block.tobytes())
    return "reference" if blocks[0] == blocks[1] else "simd"


def _traits_cpu(library: Library) -> CType:
    """`ggml_get_type_traits_cpu`, also out of a CPU library that ggml loaded itself."""
    found = library.ggml.get_type_traits_cpu
    if found is None and hasattr(os, "RTLD_NOLOAD"):
        for path in sorted(library.folder.glob("libggml-cpu*.so")):
            found = _loaded(path)
            if found is not None:
                break
    if found is None:
        return None
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_int,)
    return found


def _loaded(path: Path) -> CType:
    try:
        handle = ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return getattr(handle, "ggml_get_type_traits_cpu", None)
