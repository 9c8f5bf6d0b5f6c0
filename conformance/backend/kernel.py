"""Base of backends that run node by node from a table op -> kernel.

A kernel is `f(node, dst, src)` over arrays from `tensor.strided`: any stride, block types as raw blocks. It writes
`node`'s value into `dst`; it never sees a buffer, a session or another node.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case
from conformance.ggml.errors import BackendError, ConformanceError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import written
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, computes, nbytes, pack, strided

from .interface import YES, Backend, Session, Support, Witness, no

Raw = NDArray[Any]
"""Elements of a tensor in place, as from `tensor.strided`."""
Sources = Sequence[Raw | None]
"""Elements of `node.src`; None where ggml has NULL."""
Kernel = Callable[[Tensor, Raw, Sources], None]


class KernelBackend(Backend):
    """A backend with a table of kernels; an adapter only provides `name` and `kernels`."""

    name: str = "kernel"
    """Device in a witness."""

    @abstractmethod
    def kernels(self) -> Mapping[str, Kernel]:
        """Return op -> its kernel; view ops need none."""

    def refuses(self, node: Tensor) -> str:
        """Return why the kernel of `node.op` cannot run `node`; empty if it can."""
        del node
        return ""

    def supports_op(self, node: Tensor) -> Support:
        """Accept view ops and ops of the table unless `refuses` gives a reason."""
        if node.op in VIEW_OPS:
            return YES
        reason = self.refuses(node) if node.op in self.kernels() else f"{self.name} has no kernel for it"
        return no(f"{node.op}: {reason}") if reason else YES

    def open(self, case: Case) -> KernelSession:
        """Copy the case's persistent tensors to host memory."""
        return KernelSession(self.name, self.kernels(), case)


class KernelSession(Session):
    """Runs graphs over byte buffers: persistent ones, and zeroed ones per step for other roots."""

    def __init__(self, device: str, kernels: Mapping[str, Kernel], case: Case) -> None:
        self._kernels = kernels
        self._persistent = {t: data.copy() for t, data in case.persistent.items()}
        self._witness = Witness(device, "eager", bytes={"host": sum(b.nbytes for b in self._persistent.values())})

    def _held(self, tensor: Tensor) -> Bytes:
        try:
            return self._persistent[tensor]
        except KeyError:
            raise UsageError(f"{tensor}: a persistent tensor of the session's case expected") from None

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor; UsageError for another tensor or size."""
        held = self._held(tensor)
        if data.shape != held.shape:
            raise UsageError(f"{tensor}: {held.nbytes} bytes expected, {data.nbytes} given")
        held[:] = data

    def read(self, tensor: Tensor) -> Bytes:
        """Return a copy of the bytes of a persistent tensor."""
        return self._held(tensor).copy()

    def witness(self) -> Witness:
        """Return counts of computed nodes and executed kernels."""
        return self._witness

    def close(self) -> None:
        """Free the buffers."""
        self._persistent.clear()

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run the nodes in order without writing to `inputs`; BackendError if a kernel fails."""
        buffers: dict[Tensor, Bytes] = {**self._persistent, **inputs}
        untouched = set(inputs)
        wanted = set(outputs)
        values: dict[Tensor, Bytes] = {}
        counts = self._witness.kernels
        with np.errstate(all="ignore"):
            for node in graph.nodes:
                if computes(node):
                    for root in untouched.intersection(written(node)):
                        untouched.discard(root)
                        buffers[root] = buffers[root].copy()
                    self._run(node, buffers)
                    counts[node.op] = counts.get(node.op, 0) + 1
                    self._witness.nodes += 1
                if node in wanted:
                    values[node] = pack(_buffer(node.root, buffers), node).copy()
        return values

    def _run(self, node: Tensor, buffers: dict[Tensor, Bytes]) -> None:
        kernel = self._kernels.get(node.op)
        if kernel is None:
            raise BackendError(f"{node}: there is no kernel for {node.op}; ask supports_op first")
        try:
            src = [None if s is None else strided(_buffer(s.root, buffers), s) for s in node.src]
            kernel(node, strided(_buffer(node.root, buffers), node), src)
        except ConformanceError as e:
            raise BackendError(f"{node}: {e}", words=str(e)) from None
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as e:
            shapes = ", ".join("absent" if s is None else f"{s.type}{list(s.ne)}" for s in node.src)
            words = f"{type(e).__name__}: {e}"
            raise BackendError(f"{node}: its kernel failed on src {shapes}: {words}", words=words) from e


def _buffer(root: Tensor, buffers: dict[Tensor, Bytes]) -> Bytes:
    """Return the bytes of `root`, zeroed at first use for reproducible uncomputed values."""
    buffer = buffers.get(root)
    if buffer is None:
        buffer = buffers[root] = np.zeros(nbytes(root), np.uint8)
    return buffer
