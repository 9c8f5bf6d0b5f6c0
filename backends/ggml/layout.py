"""`struct ggml_tensor` in memory, and the proof that a library uses this layout.

The same on every 64-bit machine: what ggml.h declares, padded as C does. A tensor is written with one `pack_into`
instead of a call per field, which is what makes rebuilding a graph cheap.
"""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

from conformance.ggml.errors import UnavailableError
from conformance.ggml.tensor import FLAG_INPUT, FLAG_OUTPUT, MAX_NAME

EXPECTED = "0.26.0"
"""The ggml whose headers this layout was read from."""

TENSOR = struct.Struct(f"<i4xQ4q4Qi16ii10QQQQ{MAX_NAME}s")
"""type, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name; `extra` and padding follow."""

FLAGS = struct.Struct("<i")
POINTER = struct.Struct("<Q")
OFFSET_BUFFER = 8
OFFSET_FLAGS = 148
TENSOR_SIZE = 336
OVERHEAD = 368
"""`ggml_tensor_overhead()`: a `ggml_object` of 32 bytes and the tensor."""


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def fields(memory: ctypes.Array[ctypes.c_char], offset: int) -> dict[str, Any]:
    """The fields of the tensor at `offset` of a buffer, by their names."""
    v = TENSOR.unpack_from(memory, offset)
    return {
        "type": v[0],
        "buffer": v[1],
        "ne": v[2:6],
        "nb": v[6:10],
        "op": v[10],
        "op_params": v[11:27],
        "flags": v[27],
        "src": v[28:38],
        "view_src": v[38],
        "view_offs": v[39],
        "data": v[40],
        "name": v[41].split(b"\0", 1)[0],
    }


def verify(ggml: SimpleNamespace, found: str, op_ids: dict[str, int], f16: int) -> None:
    """Let the library itself build tensors and read them back by this layout.

    Args:
        ggml: the library's functions.
        found: what the library calls itself, for the message.
        op_ids: op name -> id in this library.
        f16: the id of type F16 in this library.

    Raises:
        UnavailableError: the library lays a tensor out in another way; names both versions.
    """
    overhead = ggml.tensor_overhead()
    if overhead != OVERHEAD:
        raise mismatch(found, f"ggml_tensor_overhead() is {OVERHEAD} bytes", f"{overhead} bytes")
    ctx = ggml.init(InitParams(16 * OVERHEAD, None, True))
    try:
        memory = (ctypes.c_char * (16 * OVERHEAD)).from_address(ggml.get_mem_buffer(ctx))
        base = ctypes.addressof(memory)
        a = ggml.new_tensor_4d(ctx, f16, 6, 5, 4, 3)
        ggml.set_name(a, b"probe")
        ggml.set_input(a)
        b = ggml.scale(ctx, a, 2.5)
        ggml.set_output(b)
        c = ggml.view_1d(ctx, a, 7, 12)
        zeros = (0,) * 16
        bits = struct.unpack("<i", struct.pack("<f", 2.5))[0]
        common = {"type": f16, "buffer": 0, "data": 0}
        whole = {"ne": (6, 5, 4, 3), "nb": (2, 12, 60, 240)}
        expected = {
            "new_tensor_4d": (a, common | whole | {"op": op_ids["NONE"], "op_params": zeros, "flags": FLAG_INPUT}
                              | {"src": (0,) * 10, "view_src": 0, "view_offs": 0, "name": b"probe"}),
            "scale": (b, common | whole | {"op": op_ids["SCALE"], "op_params": (bits, *zeros[1:])}
                      | {"flags": FLAG_OUTPUT, "src": (a, *zeros[:9]), "view_src": 0}),
            "view_1d": (c, common | {"ne": (7, 1, 1, 1), "nb": (2, 14, 14, 14), "op": op_ids["VIEW"], "flags": 0}
                        | {"src": (a, *zeros[:9]), "view_src": a, "view_offs": 12}),
        }  # fmt: skip
        for call, (pointer, want) in expected.items():
            got = fields(memory, pointer - base)
            for key, value in want.items():
                if got[key] != value:
                    raise mismatch(found, f"ggml_{call} leaves {key} {value}", f"{got[key]}")
    finally:
        ggml.free(ctx)


def mismatch(found: str, expected: str, came: str) -> UnavailableError:
    """The error of a library that is not laid out as this adapter writes it."""
    return UnavailableError(
        f"{found} does not fit this adapter, which writes struct ggml_tensor as ggml {EXPECTED} does: {expected}, "
        f"{came} found; use a library of about that version"
    )
