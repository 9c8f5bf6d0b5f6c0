"""Worker service of the family `access` (`ways`): transfers bytes and checks all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.layout import InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import Bytes

from .ways import Mismatch, reply, serve

NE = (64, 9)
"""`ne` of each tensor, of F32."""
ROW, SIZE = 4 * NE[0], 4 * NE[0] * NE[1]
"""Bytes of a row and of a tensor."""
AT, LENGTH = 132, 1500
"""Bytes that a partial transfer skips, and transfers: neither begins or ends with a row."""
BLOCK = {"offset": 20, "size": 100, "copies": 7, "in_tensor": ROW, "on_host": 112}
"""A two-dimensional transfer: 7 pieces of 100 bytes."""


class Owner:
    """A buffer with tensors, and the bytes that they must have."""

    def __init__(self, library: Library, buft: int, name: str, random: np.random.Generator, n: int = 3) -> None:
        g = library.ggml
        self.library, self.name = library, name
        self._context = g.init(InitParams((n + 1) * library.layout.overhead, None, True))
        self.tensors = [g.new_tensor_4d(self._context, library.types["f32"], *NE, 1, 1) for _ in range(n)]
        self.buffer = g.backend_alloc_ctx_tensors_from_buft(self._context, buft)
        if not self.buffer:
            raise UnavailableError(f"the {name} buffer type cannot allocate {n * SIZE} bytes")
        self.expected = [random.integers(0, 256, SIZE, np.uint8) for _ in range(n)]
        for tensor, data in zip(self.tensors, self.expected, strict=True):
            library.set(tensor, data)

    def check(self) -> None:
        """Compare every byte; Mismatch names the first that is wrong."""
        for i, (tensor, data) in enumerate(zip(self.tensors, self.expected, strict=True)):
            same(self.library.get(tensor, SIZE), data, f"tensor {i} of the {self.name} buffer")

    def free(self) -> None:
        """Free buffer and tensors."""
        self.library.ggml.backend_buffer_free(self.buffer)
        self.library.ggml.free(self._context)


def same(found: Bytes, expected: Bytes, what: str) -> None:
    """Compare bytes; Mismatch names the first that is wrong."""
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        at = int(wrong[0])
        raise Mismatch(f"{what}: {wrong.size} bytes wrong, byte {at} is {found[at]}, {expected[at]} expected")


def address(data: Bytes) -> int:
    """Return the address of an array's bytes."""
    place: int = data.__array_interface__["data"][0]
    return place


def block(data: Bytes, offset: int, stride: int) -> Bytes:
    """Return the pieces of a two-dimensional transfer as rows of a view."""
    shape = (BLOCK["copies"], BLOCK["size"])
    return np.lib.stride_tricks.as_strided(data[offset:], shape, (stride, 1))


class Harness:
    """A device with two streams and a buffer, and a buffer of the CPU."""

    def __init__(self, library: Library, device: str, seed: int) -> None:
        self.g = library.ggml
        self.device = library.devices.by_name(device)
        self.random = np.random.default_rng(seed)
        self.streams = [self.device.start() for _ in range(2)]
        own = self.device.buffer_type
        cpu = self.g.backend_dev_buffer_type(self.g.backend_dev_by_name(b"CPU"))
        bufts = {"first": own, "second": own, "CPU": cpu}
        self.owners = {name: Owner(library, buft, name, self.random) for name, buft in bufts.items()}
        self.first, self.second, self.cpu = self.owners.values()

    def data(self, size: int) -> Bytes:
        """Return random bytes."""
        return self.random.integers(0, 256, size, np.uint8)

    def call(self, name: str, *arguments: object) -> int | None:
        """Call a function of ggml; UnavailableError if the library lacks it."""
        function: Callable[..., int | None] | None = getattr(self.g, name)
        if function is None:
            raise UnavailableError(f"this ggml exports no ggml_{name}")
        return function(*arguments)

    def wait(self) -> None:
        """Wait for both streams."""
        for stream in self.streams:
            self.call("backend_synchronize", stream)

    def close(self) -> None:
        """Free buffers and streams."""
        for owner in self.owners.values():
            owner.free()
        for stream in self.streams:
            self.g.backend_free(stream)


def _set(h: Harness) -> None:
    data = h.data(LENGTH)
    h.call("backend_tensor_set", h.first.tensors[1], address(data), AT, LENGTH)
    h.first.expected[1][AT : AT + LENGTH] = data


def _get(h: Harness) -> None:
    data = h.data(LENGTH)
    h.call("backend_tensor_get", h.first.tensors[1], address(data), AT, LENGTH)
    same(data, h.first.expected[1][AT : AT + LENGTH], "what was read")


def _memset(h: Harness) -> None:
    h.call("backend_tensor_memset", h.first.tensors[1], 0xA5, AT, LENGTH)
    h.first.expected[1][AT : AT + LENGTH] = 0xA5


def _clear(h: Harness) -> None:
    h.call("backend_buffer_clear", h.first.buffer, 0x5A)
    for data in h.first.expected:
        data[:] = 0x5A


def _reset(h: Harness) -> None:
    h.call("backend_buffer_reset", h.first.buffer)
    for i, tensor in enumerate(h.first.tensors):
        h.call("backend_buffer_init_tensor", h.first.buffer, tensor)
        h.first.expected[i] = h.data(SIZE)
        h.first.library.set(tensor, h.first.expected[i])


def _block(h: Harness) -> tuple[Bytes, tuple[int, ...]]:
    """Return random bytes for a two-dimensional transfer, and its arguments after the tensor."""
    data = h.data(BLOCK["copies"] * BLOCK["on_host"])
    order = (BLOCK["offset"], BLOCK["size"], BLOCK["copies"], BLOCK["in_tensor"], BLOCK["on_host"])
    return data, (address(data), *order)


def _set_2d(h: Harness, function: str = "backend_tensor_set_2d", *stream: int) -> None:
    data, arguments = _block(h)
    h.call(function, *stream, h.first.tensors[1], *arguments)
    h.wait()
    block(h.first.expected[1], BLOCK["offset"], ROW)[:] = block(data, 0, BLOCK["on_host"])


def _get_2d(h: Harness, function: str = "backend_tensor_get_2d", *stream: int) -> None:
    data, arguments = _block(h)
    expected = data.copy()
    block(expected, 0, BLOCK["on_host"])[:] = block(h.first.expected[1], BLOCK["offset"], ROW)
    h.call(function, *stream, h.first.tensors[1], *arguments)
    h.wait()
    same(data, expected, "what was read, and the gaps between")


def _set_async(h: Harness) -> None:
    data = h.data(LENGTH)
    h.call("backend_tensor_set_async", h.streams[0], h.first.tensors[1], address(data), AT, LENGTH)
    h.wait()
    h.first.expected[1][AT : AT + LENGTH] = data


def _get_async(h: Harness) -> None:
    data = h.data(LENGTH)
    h.call("backend_tensor_get_async", h.streams[0], h.first.tensors[1], address(data), AT, LENGTH)
    h.wait()
    same(data, h.first.expected[1][AT : AT + LENGTH], "what was read")


def _copy(h: Harness) -> None:
    for source, target in ((h.first, h.first), (h.first, h.second), (h.cpu, h.first), (h.first, h.cpu)):
        h.call("backend_tensor_copy", source.tensors[0], target.tensors[1])
        target.expected[1][:] = source.expected[0]
        target.check()


def _copy_async(h: Harness) -> None:
    a, b = h.streams
    for source, target in ((h.first, h.second), (h.cpu, h.first), (h.first, h.cpu)):
        h.call("backend_tensor_copy_async", a, b, source.tensors[0], target.tensors[1])
        h.wait()
        target.expected[1][:] = source.expected[0]
        target.check()


def _event(h: Harness) -> None:
    event = h.call("backend_event_new", h.device.handle)
    if not event:
        raise UnavailableError("the device has no events")
    a, b = h.streams
    data, found = h.data(SIZE), h.data(SIZE)
    h.call("backend_tensor_set_async", a, h.first.tensors[1], address(data), 0, SIZE)
    h.call("backend_event_record", event, a)
    h.call("backend_event_wait", b, event)
    h.call("backend_tensor_get_async", b, h.first.tensors[1], address(found), 0, SIZE)
    h.call("backend_synchronize", b)
    h.call("backend_event_synchronize", event)
    h.call("backend_event_free", event)
    same(found, data, "what the second stream read after the first stream's event")
    h.first.expected[1][:] = data


WAYS: Mapping[str, Callable[[Harness], None]] = {
    "set": _set,
    "get": _get,
    "memset": _memset,
    "clear": _clear,
    "reset": _reset,
    "set-2d": _set_2d,
    "get-2d": _get_2d,
    "set-async": _set_async,
    "get-async": _get_async,
    "set-2d-async": lambda h: _set_2d(h, "backend_tensor_set_2d_async", h.streams[0]),
    "get-2d-async": lambda h: _get_2d(h, "backend_tensor_get_2d_async", h.streams[0]),
    "copy": _copy,
    "copy-async": _copy_async,
    "event": _event,
}
"""Name of a kind of transfer -> the function that does it."""


def play(library: Library, device: str, way: str, seed: int) -> dict[str, Any]:
    """Transfer bytes and compare all of them."""

    def transfer() -> None:
        harness = Harness(library, device, seed)
        try:
            WAYS[way](harness)
            for owner in harness.owners.values():
                owner.check()
        finally:
            harness.close()

    return reply(transfer)


if __name__ == "__main__":
    serve(play)
