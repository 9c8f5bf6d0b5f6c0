"""Tensors rebuilt in a library: contexts, stores of leaves, a case's persistent tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import numpy as np

from conformance.ggml.errors import BackendError, GraphError
from conformance.ggml.lib.layout import InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import MAX_SRC, Bytes, Tensor, nbytes

NO_SRC = (0,) * MAX_SRC
ALIGNMENT = 64
"""Alignment of an arena: at least `GGML_MEM_ALIGN`."""


class Arena:
    """Memory that successive contexts reuse, as llama.cpp's `buf_compute_meta`."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * 0)()

    def room(self, size: int) -> int:
        """Return the address of `size` bytes: the same as before, unless they do not fit."""
        if len(self._memory) < size + ALIGNMENT:
            self._memory = (ctypes.c_char * (2 * size + ALIGNMENT))()
        return -(-ctypes.addressof(self._memory) // ALIGNMENT) * ALIGNMENT


class Context:
    """A `ggml_context` for `n` tensors and `graphs` graphs of `graph_size` nodes.

    Its memory is in `arena`, whose previous context must have been freed; without an arena ggml allocates it.
    """

    def __init__(
        self, library: Library, n: int, graph_size: int = 0, graphs: int = 0, arena: Arena | None = None
    ) -> None:
        self.library = library
        size = (n + 1) * library.layout.overhead + graphs * library.ggml.graph_overhead_custom(graph_size, False)
        room = None if arena is None else arena.room(size)
        self.pointer: int | None = library.ggml.init(InitParams(size, room, True))
        self.base: int = library.ggml.get_mem_buffer(self.pointer)
        self.memory = (ctypes.c_char * size).from_address(self.base)

    def add(self, t: Tensor, at: Mapping[Tensor, int]) -> int:
        """Rebuild `t`, with `src` and `view_src` from `at`; BackendError for an unknown op or type."""
        lib = self.library
        params = t.op_params
        if t.op in lib.sub_ops:
            params = (sub_op(lib, t), *params[1:])
        try:
            head = (lib.types[t.type.name], 0, *t.ne, *t.nb, lib.ops[t.op], *params, t.flags)
        except KeyError:
            raise BackendError(f"{t}: {refusal(lib, t)}") from None
        view_src = 0 if t.view_src is None else at[t.view_src]
        pointer: int = lib.ggml.new_tensor_1d(self.pointer, 0, 1)
        # ggml_cast makes a CPY its own second src
        src = tuple([0 if s is None else pointer if s is t else at[s] for s in t.src])
        lib.layout.packer.pack_into(
            self.memory, pointer - self.base, *head, *src, *NO_SRC[len(src) :], view_src, t.view_offs, 0,
            t.name.encode(),
        )  # fmt: skip
        return pointer

    def free(self) -> None:
        """Call `ggml_free`."""
        if self.pointer is not None:
            self.library.ggml.free(self.pointer)
            self.pointer = None


def sub_op(library: Library, t: Tensor) -> int:
    """Return the library's id of a UNARY's or GLU's sub-op, by name; else BackendError."""
    reason = refusal(library, t)
    if reason:
        raise BackendError(f"{t}: {reason}")
    known, ids = library.sub_ops[t.op]
    return ids[known[t.op_params[0]]]


def refusal(library: Library, t: Tensor) -> str:
    """Return why `t` cannot be rebuilt in this library, or ""."""
    if t.op not in library.ops:
        return f"op {t.op} is not in ggml {library.version}"
    if t.op in library.sub_ops:
        known, ids = library.sub_ops[t.op]
        i = t.op_params[0]
        if not 0 <= i < len(known):
            return f"op_params[0] of {t.op} is one of {len(known)} sub-ops, {i} found"
        if known[i] not in ids:
            return f"{t.op} {known[i]} is not in ggml {library.version}"
    return library.lacks(t.type)


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
