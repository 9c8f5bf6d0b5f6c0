"""`cpu`, the reference: float64 with one rounding at the end, on NumPy."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial

import numpy as np

from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import Kernel, KernelBackend, KernelSession, Raw, Sources
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.tensor import Tensor

from . import attention, elementwise, matmul, media, recurrent, rope, rows, training, views, windows
from .takes import Table

_TOPICS = (elementwise, rows, views, matmul, attention, rope, windows, media, recurrent, training)

TABLE: Table = {op: row for topic in _TOPICS for op, row in topic.TABLE.items()}
"""Supports all ops of ggml's CPU, and some that only other devices support."""


def _table(arithmetic: Arithmetic) -> dict[str, Kernel]:
    return {op: partial(kernel, arithmetic) for op, (_, kernel) in TABLE.items()}


def _by_node(arithmetic: Arithmetic) -> dict[str, Kernel]:
    """Return kernels that look up the arithmetic of each node."""
    tables: dict[int, tuple[Arithmetic, dict[str, Kernel]]] = {}

    def kernel(node: Tensor, dst: Raw, src: Sources) -> None:
        own = arithmetic.at(node)
        if id(own) not in tables:
            tables[id(own)] = own, _table(own)  # retained, so that no other object gets its id
        tables[id(own)][1][node.op](node, dst, src)

    return dict.fromkeys(TABLE, kernel)


class CpuBackend(KernelBackend):
    """Exact values of every op, or after rounding as another backend declares (`computing_in`)."""

    name = "cpu"

    def __init__(self) -> None:
        self._use(EXACT)

    def _use(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._kernels = _by_node(arithmetic) if arithmetic.by_node else _table(arithmetic)

    def computing_in(self, arithmetic: Arithmetic) -> CpuBackend:
        """Return a reference that rounds and stores blocks as `arithmetic`, and is exact otherwise."""
        other = CpuBackend()
        other._use(arithmetic)
        return other

    def arithmetic(self) -> Arithmetic:
        """Return EXACT, or the arithmetic given to `computing_in`."""
        return self._arithmetic

    def kernels(self) -> Mapping[str, Kernel]:
        """Return the kernel of each op by its name."""
        return self._kernels

    def refuses(self, node: Tensor) -> str:
        """Return why the kernel of `node.op` does not support a type or parameter, or ""."""
        takes, _ = TABLE[node.op]
        return takes.refusal(node)

    def open(self, case: Case) -> KernelSession:
        """Open a session whose witness names NumPy."""
        session = super().open(case)
        session.witness().libraries = [f"numpy {np.__version__}"]
        return session

    def info(self) -> DeviceInfo:
        """Return NumPy and this machine's processor."""
        return DeviceInfo(
            backend="cpu",
            device=platform.machine(),
            description=f"reference in float64, arithmetic {self._arithmetic.name}",
            versions={"numpy": np.__version__, "python": platform.python_version()},
        )
