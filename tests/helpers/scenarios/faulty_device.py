"""llama.cpp's CPU device with a fault: its eval callback sees each node before and after it is computed.

Where llama.cpp asks about a node, it has filled all inputs and not computed the node, so a fault may change inputs,
op_params and where views point. A node whose result a fault changes is computed by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.lib.layout import EVAL_CALLBACK
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import nbytes

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Node:
    """A tensor of a graph, in place."""

    library: Llama
    pointer: int

    @property
    def c(self) -> Any:  # noqa: ANN401  # a ctypes structure
        """`struct ggml_tensor`."""
        return self.library.struct(self.pointer)

    @property
    def op(self) -> str:
        """Its op."""
        return self.library.op(self.pointer)

    @property
    def name(self) -> str:
        """Its name; a result without one is called by its place in the graph."""
        return str(self.c.name.decode())

    @property
    def ne(self) -> tuple[int, ...]:
        """Elements per dimension."""
        return tuple(self.c.ne)

    @property
    def src(self) -> list[Node]:
        """Its sources."""
        return [Node(self.library, p) for p in self.c.src if p]

    @property
    def root(self) -> Node:
        """The tensor that owns its bytes."""
        return Node(self.library, self.c.view_src or self.pointer)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All its bytes, from the first to the last, writable."""
        size = nbytes(self.library.leaf(self.pointer))
        if not size:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.c.data))

    @property
    def rows(self) -> Array:
        """A dense matrix of 4 bytes or 2 an element: `[ne1 * ne2 * ne3, ne0]`."""
        width = nbytes(self.library.leaf(self.pointer)) // max(1, int(np.prod(self.ne)))
        kind = {2: np.float16, 4: np.float32, 8: np.int64}[width]
        return self.bytes.view(kind).reshape(-1, self.ne[0])


@dataclass(frozen=True)
class Fault:
    """What a device does wrong, in one context."""

    before: Callable[[Node], object] = lambda _: False
    """Sees each node before it is computed; true if `after` shall see it too."""
    after: Callable[[Node], None] = lambda _: None


Device = Callable[[Any], "Fault | None"]
"""`llama_context_params` -> the fault of that context; None where there is none."""


@dataclass
class Contexts:
    """`llama_init_from_model` of a device with a fault."""

    library: Llama
    make: Callable[[int, Any], int | None]
    """The true one."""
    device: Device
    error: Exception | None = None
    """What a fault raised: nothing may leave a callback."""
    _alive: list[Any] = field(default_factory=list)

    def __call__(self, model: int, params: Any) -> int | None:  # noqa: ANN401  # ctypes' own
        """A context."""
        fault = self.device(params)
        if fault is not None:
            callback = self._callback(fault, params.cb_eval)
            self._alive.append(callback)
            params.cb_eval = ctypes.cast(callback, ctypes.c_void_p).value
        return self.make(model, params)

    def _callback(self, fault: Fault, own: int | None) -> Any:  # noqa: ANN401
        """The callback of a fault, before that of the context."""
        watches = EVAL_CALLBACK(own) if own else None
        asked: set[int] = set()

        def called(pointer: int, ask: bool, data: int | None) -> bool:  # C's signature
            try:
                node = Node(self.library, pointer)
                if not ask and pointer in asked:
                    fault.after(node)
                elif ask:
                    (asked.add if fault.before(node) else asked.discard)(pointer)
            except Exception as e:  # noqa: BLE001
                self.error = self.error or e
            watched = watches(pointer, ask, data) if watches else False
            return not ask or watched or pointer in asked

        return EVAL_CALLBACK(called)
