"""Tensors rebuilt in a library: stores of leaves, a case's persistent tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from conformance.ggml.errors import BackendError, GraphError
from conformance.ggml.lib.context import Arena, Context
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import Bytes, Tensor, nbytes


class Store:
    """Leaves of one buffer type, in their own buffer."""

    def __init__(
        self, library: Library, tensors: Iterable[Tensor], buft: int, usage: int = 0, arena: Arena | None = None
    ) -> None:
        self.library = library
        leaves = list(tensors)
        self.context = Context(library, len(leaves), arena=arena)
        self.at = {t: self.context.add(t, {}) for t in leaves}
        self.buffer: int | None = None
        self._allocate(buft, usage)

    def _allocate(self, buft: int, usage: int) -> None:
        g = self.library.ggml
        self.buffer = g.backend_alloc_ctx_tensors_from_buft(self.context.pointer, buft)
        size = sum(nbytes(t) for t in self.at)
        if self.buffer is None and size:
            self.free()
            raise BackendError(f"no memory for {len(self.at)} tensors of {size} bytes together")
        if self.buffer is not None and usage:
            g.backend_buffer_set_usage(self.buffer, usage)

    def buffer_size(self) -> tuple[str, int]:
        """Return name and bytes of the buffer."""
        g = self.library.ggml
        return (g.backend_buffer_name(self.buffer).decode(), g.backend_buffer_get_size(self.buffer))

    def free(self) -> None:
        """Free buffer and tensors."""
        if self.buffer is not None:
            self.library.ggml.backend_buffer_free(self.buffer)
            self.buffer = None
        self.context.free()


class Persistent:
    """The persistent tensors of a case, in one store for each buffer type and usage.

    A tensor that is `hidden` lies in a layout of the device's own, which a read would return: what was written is kept.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.stores: list[Store] = []
        self.at: dict[Tensor, int] = {}
        """Tensor -> its address in the library."""
        self._hidden: dict[Tensor, Bytes] = {}
        """Hidden tensor -> the bytes last written."""

    def add(self, store: Store) -> None:
        """Add the tensors of a store, which belongs to this one from now on."""
        self.stores.append(store)
        self.at |= store.at

    def hide(self, tensors: Mapping[Tensor, Bytes]) -> None:
        """Declare tensors, with their bytes, hidden."""
        self._hidden |= tensors

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set all bytes of a tensor; GraphError for another tensor, or `data` of another size."""
        set_bytes(self._library, self._pointer(tensor), tensor, data)
        if tensor in self._hidden:
            self._hidden[tensor] = data.copy()

    def read(self, tensor: Tensor) -> Bytes:
        """Return all bytes of a tensor; GraphError for another tensor."""
        pointer = self._pointer(tensor)
        if tensor in self._hidden:
            return self._hidden[tensor].copy()
        return self._library.get(pointer, nbytes(tensor))

    def sizes(self) -> dict[str, int]:
        """Return bytes by name of buffer type."""
        sizes: dict[str, int] = {}
        for store in self.stores:
            if store.buffer is not None:
                name, size = store.buffer_size()
                sizes[name] = sizes.get(name, 0) + size
        return sizes

    def free(self) -> None:
        """Free the buffers and tensors."""
        while self.stores:
            self.stores.pop().free()

    def _pointer(self, tensor: Tensor) -> int:
        try:
            return self.at[tensor]
        except KeyError:
            raise GraphError(f"{tensor} is not a persistent tensor of the case that this session opened") from None


def set_bytes(library: Library, pointer: int, t: Tensor, data: Bytes) -> None:
    """Set all bytes of the tensor at an address; GraphError if `data` has another size."""
    size = nbytes(t)
    if data.dtype != np.uint8 or data.nbytes != size:
        raise GraphError(f"{t} takes {size} bytes, {data.nbytes} of {data.dtype} given")
    library.set(pointer, data)
