"""Find writes outside a tensor: every tensor lies between stretches of a pattern that nothing may touch.

Each node has memory of its own, so a kernel that writes a few bytes too many cannot hide in a neighbour that is written
later. After each graph the pattern before and behind every node, weight, cache and input is checked, to the byte (also
the room that a buffer's alignment leaves), and so are the bytes of every input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.layout import USAGE_COMPUTE, InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import Bytes, Tensor, nbytes

from .context import Arena, Store
from .session import GgmlSession, Plan

PATTERN = 0xA5
"""Of every guard byte: no float of a usual size, no small integer, no NaN."""
GUARD = 64
"""Bytes between two tensors, at least."""


class Guarded:
    """A buffer whose tensors lie apart, and the stretches between them.

    Args:
        library: where it is.
        buft: its buffer type.
        tensors: case tensor -> its address; none may be a view.
        usage: `enum ggml_backend_buffer_usage`.

    Raises:
        BackendError: no memory.
    """

    def __init__(self, library: Library, buft: int, tensors: Mapping[Tensor, int], usage: int = 0) -> None:
        self._library, g = library, library.ggml
        self._gaps: list[tuple[int, int, Tensor | None, Tensor | None]] = []
        align = max(GUARD, g.backend_buft_get_alignment(buft))
        places: list[tuple[Tensor, int, int]] = []
        end = 0
        for t, pointer in tensors.items():
            start = -(-(end + GUARD) // align) * align
            end = start + max(nbytes(t), g.backend_buft_get_alloc_size(buft, pointer))
            places.append((t, start, end))
        self.size = end + GUARD
        self.buffer: int | None = g.backend_buft_alloc_buffer(buft, self.size)
        if self.buffer is None:
            raise BackendError(f"no memory for {len(places)} tensors of {self.size} bytes, with guards between them")
        if usage:
            g.backend_buffer_set_usage(self.buffer, usage)
        self._context = g.init(InitParams((len(places) + 2) * library.layout.overhead, None, True))
        base = g.backend_buffer_get_base(self.buffer)
        last: Tensor | None = None
        at = 0
        stretches: list[tuple[Tensor | None, int, int]] = [*places, (None, self.size, self.size)]
        for behind, start, stop in stretches:
            gap = g.new_tensor_1d(self._context, library.types["i8"], start - at)
            g.backend_tensor_alloc(self.buffer, gap, base + at)
            self._gaps.append((gap, start - at, last, behind))
            if behind is not None:
                g.backend_tensor_alloc(self.buffer, tensors[behind], base + start)
            last, at = behind, stop
        g.backend_buffer_clear(self.buffer, PATTERN)

    def damage(self) -> str:
        """Which guard bytes were written, in words; empty where none was."""
        for gap, size, before, behind in self._gaps:
            hit = np.flatnonzero(self._library.get(gap, size) != PATTERN)
            if not hit.size:
                continue
            first, last = int(hit[0]), int(hit[-1])
            # Nearer to the end of the one than to the start of the other.
            if before is not None and (behind is None or first <= size - 1 - last):
                return f"{hit.size} bytes behind the end of {_spell(before)} were written, the first {first} behind it"
            assert behind is not None
            return f"{hit.size} bytes before {_spell(behind)} were written, the first {size - first} before it"
        return ""

    def free(self) -> None:
        """Give the buffer back."""
        if self.buffer is not None:
            self._library.ggml.backend_buffer_free(self.buffer)
            self.buffer = None
            self._library.ggml.free(self._context)


class GuardedStore(Store):
    """Leaves of one buffer type, apart from each other."""

    guarded: Guarded

    def _allocate(self, buft: int, usage: int) -> None:
        self.guarded = Guarded(self.library, buft, self.at, usage)
        self.buffer = self.guarded.buffer

    def free(self) -> None:
        """Give buffer and tensors back."""
        self.guarded.free()
        self.context.free()


class GuardSession(GgmlSession):
    """As `GgmlSession`, every tensor in memory of its own and guarded."""

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph`, then look at every guard; see `Session.compute`.

        Raises:
            BackendError: as `GgmlSession`; or bytes outside a tensor, or of an input, were written: names the tensor.
            GraphError: a leaf has no bytes.
        """
        values = super().compute(graph, inputs, outputs)
        plan = self._plan
        assert plan is not None
        assert plan.guarded is not None
        stores = [s for s in (*self._stores, plan.inputs) if isinstance(s, GuardedStore)]
        for guarded in (plan.guarded, *(s.guarded for s in stores)):
            if damage := guarded.damage():
                raise BackendError(f"output written outside its tensor on {self._witness.device}: {damage}")
        written = {n.root for n in graph}
        for t, pointer in plan.inputs.at.items():
            if t not in written and not np.array_equal(self._library.get(pointer, nbytes(t)), inputs[t]):
                raise BackendError(f"an input was written on {self._witness.device}: {_spell(t)} has other bytes now")
        return values

    def _store(self, tensors: Iterable[Tensor], buft: int, usage: int, arena: Arena | None = None) -> Store:
        """Guarded, unless the buffer's own form of a tensor hides its bytes: such a buffer cannot be read either."""
        kind = GuardedStore if buft == self._buft else Store
        return kind(self._library, tensors, buft, usage, arena)

    def _allocate(self, plan: Plan, cgraph: int, made: Sequence[Tensor]) -> None:
        del cgraph
        owners = {t: plan.at[t] for t in made if t.view_src is None}
        plan.guarded = Guarded(self._library, self._buft, owners, USAGE_COMPUTE)
        for t in made:
            if t.view_src is not None:
                self._ggml.backend_view_init(plan.at[t])

    def _clear(self, plan: Plan) -> None:
        for t in plan.at:
            if t not in self._at and t not in plan.inputs.at and t.view_src is None and nbytes(t):
                data = np.full(nbytes(t), 0xFF, np.uint8)
                self._set(plan.at[t], t, data)


def _spell(t: Tensor) -> str:
    return f"{t.op if t.op != 'NONE' else 'leaf'} {t.name} {t.type}{list(t.ne)}".replace("  ", " ")
