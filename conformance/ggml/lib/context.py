"""Tensors rebuilt in a library, field by field: memory for them, ids of sub-ops, refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import MAX_SRC, Tensor

from .layout import InitParams
from .library import Library

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
