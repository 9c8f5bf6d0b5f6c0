"""The installed ggml with one fault: its own structs of function pointers with one pointer that leads here.

`faulty-ggml?fault=NAME`. A fault stands where the wheel's own code stands, so all between it and a person (adapter,
worker process, audit) is what a broken library meets.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from backends.ggml import GgmlBackend
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.layout import CTensor
from conformance.ggml.tensor import FLAG_OUTPUT

_P = ctypes.c_void_p
_SUPPORTS_OP, _GRAPH_COMPUTE, _ALLOC_BUFFER, _MEMSET_TENSOR = 9, 13, 1, 3
"""`ggml-backend-impl.h`: which word of a device, a backend, a buffer type and a buffer."""
_QUESTION = ctypes.CFUNCTYPE(ctypes.c_bool, _P, _P)
_COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P)
_ALLOC = ctypes.CFUNCTYPE(_P, _P, ctypes.c_size_t)
REPACK = "CPU_REPACK"
FLAGGED = 3
"""Outputs of a graph of llama.cpp, and one that is asked for."""


class FaultyGgml(GgmlBackend):
    """The wheel's CPU with a fault.

    Args:
        fault: of `FAULTS`, with spaces between them.
        guard: as the ggml adapter.
        mode: as the ggml adapter.
    """

    delegates = ("ggml",)

    def __init__(self, fault: str, guard: str = "off", mode: str = "graph") -> None:
        super().__init__(guard=guard, mode=mode)
        self.raw = ctypes.CDLL(str(self._library.path))
        for name, result, arguments in (
            ("graph_n_nodes", ctypes.c_int, (_P,)),
            ("graph_node", _P, (_P, ctypes.c_int)),
            ("get_name", ctypes.c_char_p, (_P,)),
        ):
            f = getattr(self.raw, f"ggml_{name}")
            f.restype, f.argtypes = result, arguments
        self._callbacks: list[object] = []
        for name in fault.split():
            FAULTS[name](self)

    def _put(self, struct_: int, word: int, kind: Any, make: Callable[[Any], Callable[..., Any]]) -> None:  # noqa: ANN401  # ctypes' own
        """Replace one pointer by `make(what stood there)`."""
        words = (_P * (word + 1)).from_address(struct_)
        callback = kind(make(ctypes.cast(words[word] or 0, kind)))
        self._callbacks.append(callback)
        words[word] = ctypes.cast(callback, _P).value

    def asked(self, refuses: Callable[[CTensor], bool]) -> None:
        """`supports_op` says no where `refuses` does, and asks no more of a node than this."""
        self._put(
            self._device.handle, _SUPPORTS_OP, _QUESTION,
            lambda real: lambda dev, t: not refuses(CTensor.from_address(t)) and real(dev, t),
        )  # fmt: skip

    def computed(
        self,
        before: Callable[[CTensor], None] = lambda _t: None,
        after: Callable[[CTensor, int], None] = lambda _t, _n: None,
    ) -> None:
        """What happens to each node of a graph before and after the library computes it."""

        def make(real: Callable[[int, int], int]) -> Callable[[int, int], int]:
            def compute(backend: int, cgraph: int) -> int:
                for pointer in self._nodes(cgraph):
                    before(CTensor.from_address(pointer))
                status = real(backend, cgraph)
                for pointer in self._nodes(cgraph):
                    after(CTensor.from_address(pointer), self._ggml.nbytes(pointer))
                return status

            return compute

        self._put(self._backend or 0, _GRAPH_COMPUTE, _COMPUTE, make)

    def left(self, after: Callable[[list[tuple[CTensor, int]]], None]) -> None:
        """What happens to the nodes of a graph, each with its bytes, once the library has computed all of them."""

        def make(real: Callable[[int, int], int]) -> Callable[[int, int], int]:
            def compute(backend: int, cgraph: int) -> int:
                status = real(backend, cgraph)
                after([(CTensor.from_address(p), self._ggml.nbytes(p)) for p in self._nodes(cgraph)])
                return status

            return compute

        self._put(self._backend or 0, _GRAPH_COMPUTE, _COMPUTE, make)

    def name(self, t: CTensor) -> str:
        """Its name."""
        return str(self.raw.ggml_get_name(ctypes.addressof(t)).decode())

    def _nodes(self, cgraph: int) -> Iterator[int]:
        for i in range(self.raw.ggml_graph_n_nodes(cgraph)):
            yield self.raw.ggml_graph_node(cgraph, i)

    def op(self, t: CTensor) -> str:
        """Its op by name."""
        return self._library.op(ctypes.addressof(t))

    def repacked(self, t: CTensor) -> bool:
        """Whether `t.src[0]` lies in CPU_REPACK."""
        buffer = CTensor.from_address(t.src[0]).buffer if t.src[0] else None
        return buffer is not None and self._ggml.backend_buffer_get_type(buffer) == self._bufts[REPACK]


def _batch(b: FaultyGgml) -> None:
    """As ggml's AMX of mid-2025: MUL_MAT with a repacked weight, of activations of two dimensions only."""

    def refuses(t: CTensor) -> bool:
        return b.op(t) == "MUL_MAT" and b.repacked(t) and CTensor.from_address(t.src[1]).ne[2] > 1

    b.asked(refuses)


def _past(b: FaultyGgml) -> None:
    """MUL_MAT zeroes 16 bytes behind its result."""

    def after(t: CTensor, size: int) -> None:
        if b.op(t) == "MUL_MAT":
            ctypes.memset(t.data + size, 0, 16)

    b.computed(after=after)


def _asserts(b: FaultyGgml) -> None:
    """A buffer of CPU_REPACK that holds anything aborts."""

    def make(real: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def alloc(buft: int, size: int) -> int:
            if size:
                b.raw.ggml_abort(b"repack.cpp", 7, b"GGML_ASSERT(%s) failed", b"there is room")
            return real(buft, size)

        return alloc

    b._put(b._bufts[REPACK], _ALLOC_BUFFER, _ALLOC, make)


def _no_memset(b: FaultyGgml) -> None:
    """Its buffers have no `memset_tensor`, which ggml lets a backend leave out: RPC had none for long."""

    def make(real: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def alloc(buft: int, size: int) -> int:
            buffer = real(buft, size)
            if buffer:
                (_P * (_MEMSET_TENSOR + 1)).from_address(buffer)[_MEMSET_TENSOR] = None
            return buffer

        return alloc

    b._put(b._buft, _ALLOC_BUFFER, _ALLOC, make)


def _hoards(b: FaultyGgml) -> None:
    """A buffer of CPU_REPACK that holds anything takes memory without end."""

    def make(real: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def alloc(buft: int, size: int) -> int:
            held = []
            while size:
                held.append(b"x" * (16 << 20))
                time.sleep(0.01)
            return real(buft, size)

        return alloc

    b._put(b._bufts[REPACK], _ALLOC_BUFFER, _ALLOC, make)


def _hangs(b: FaultyGgml) -> None:
    """Asked of a product with a repacked weight, it does not answer."""

    def refuses(t: CTensor) -> bool:
        if b.op(t) == "MUL_MAT" and b.repacked(t):
            time.sleep(600)
        return False

    b.asked(refuses)


def _whim(b: FaultyGgml) -> None:
    """Takes K's projection into CPU_REPACK, and not V's, which is the same work."""

    def refuses(t: CTensor) -> bool:
        return b.op(t) == "MUL_MAT" and b.repacked(t) and b"attn_v" in b.raw.ggml_get_name(t.src[0])

    b.asked(refuses)


def _ignores(op: str, position: int, value: float) -> Callable[[FaultyGgml], None]:
    """One op_param has a value of the library's own."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))

    def fault(b: FaultyGgml) -> None:
        def before(t: CTensor) -> None:
            if b.op(t) == op:
                t.op_params[position] = bits

        b.computed(before=before)

    return fault


def _loses(b: FaultyGgml) -> None:
    """Of more outputs than llama.cpp itself flags, all but the last are NaN, as ggml-openvino loses them."""

    def after(nodes: list[tuple[CTensor, int]]) -> None:
        outputs = [(t, size) for t, size in nodes if t.flags & FLAG_OUTPUT and not t.view_src]
        for t, size in outputs[:-1] if len(outputs) > FLAGGED else ():
            ctypes.memset(t.data, 0xFF, size)

    b.left(after)


def _forgets(b: FaultyGgml) -> None:
    """A whole graph leaves zeros in layer 0's K; one that ends earlier does not."""

    def after(nodes: list[tuple[CTensor, int]]) -> None:
        if b.name(nodes[-1][0]) == "result_output":
            for t, size in nodes:
                if b.op(t) == "SET_ROWS" and b.name(t).startswith("cache_k_l0"):
                    ctypes.memset(t.data, 0, size)

    b.left(after)


class Gpu(Device):
    """A device that calls itself a GPU."""

    @property
    def type(self) -> str:
        """The device type."""
        return "GPU"


def _gpu(b: FaultyGgml) -> None:
    """No fault: the device calls itself a GPU, whose rounding is unknown."""
    b._device = Gpu(b._device.devices, b._device.handle)


def _coarse(error: float) -> Callable[[FaultyGgml], None]:
    """FLASH_ATTN_EXT is off by a relative error, of either sign in turn."""

    def fault(b: FaultyGgml) -> None:
        def after(t: CTensor, size: int) -> None:
            if b.op(t) == "FLASH_ATTN_EXT":
                values = np.frombuffer(memoryview((ctypes.c_char * size).from_address(t.data)), np.float32)
                values[::2] *= np.float32(1 + error)
                values[1::2] *= np.float32(1 - error)

        b.computed(after=after)

    return fault


def _scales(op: str, name: str, bits: int) -> Callable[[FaultyGgml], None]:
    """Nodes of one op and name read Q4_1 weights in whose scales (F16) these bits are set."""

    def fault(b: FaultyGgml) -> None:
        def before(t: CTensor) -> None:
            if b.op(t) != op or not b.name(t).startswith(name):
                return
            weight = CTensor.from_address(t.src[0])
            size = b._ggml.nbytes(t.src[0])
            blocks = np.frombuffer(memoryview((ctypes.c_char * size).from_address(weight.data)), np.uint16)
            blocks.reshape(-1, 10)[:, 0] |= np.uint16(bits)

        b.computed(before=before)

    return fault


FAULTS: dict[str, Callable[[FaultyGgml], None]] = {
    "none": lambda _b: None,
    "batch": _batch,
    "past": _past,
    "no_memset": _no_memset,
    "asserts": _asserts,
    "hangs": _hangs,
    "hoards": _hoards,
    "whim": _whim,
    "freq_base": _ignores("ROPE", 5, 10000.0),
    "eps": _ignores("RMS_NORM", 0, 1e-5),
    "large-eps": _ignores("RMS_NORM", 0, 0.5),
    "embedding": _scales("GET_ROWS", "embd", 0xF),
    "products": _scales("MUL_MAT", "Vcur", 0x200),
    "loses": _loses,
    "gpu": _gpu,
    "rounds": _coarse(1e-3),
    "errs": _coarse(5e-2),
    "forgets": _forgets,
    "softcap": _ignores("FLASH_ATTN_EXT", 2, 0.0),
    "max_bias": _ignores("FLASH_ATTN_EXT", 1, 0.0),
}
"""Name -> what makes the library do it."""
