"""An adapter with one known bug in ADD, and a second one that a later version adds: `broken?also=HOW`.

The known bug: 1 % too much wherever `src[1]` is broadcast. It computes by kernels of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend
from conformance.ggml.tensor import Tensor

ALSO = ("", "wide", "zeros", "nan", "every", "refuses", "fixed")
"""The added bug: rows of 100 elements and more are wrong, too; broadcast gives zeros; it gives NaN; every ADD is wrong.
Or no bug: operands of another type than before are refused; the known bug is mended.
"""
FACTOR = 1.01
WIDE = 100
"""Elements of a row from which on `wide` is wrong."""


def _repeated(b: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401  # arrays
    return np.tile(b, [n // m for n, m in zip(shape, b.shape, strict=True)])


class Broken(KernelBackend):
    """Sums and products of F32, with the known bug and another.

    Args:
        also: of `ALSO`.
    """

    name = "broken"

    def __init__(self, also: str = "") -> None:
        assert also in ALSO
        self._also = also

    def kernels(self) -> Any:  # noqa: ANN401  # a table
        """Of four ops."""
        return {"ADD": self._add, "SUB": _sub, "MUL": _mul, "SCALE": _scale}

    def refuses(self, node: Tensor) -> str:
        """What is not F32; products, if it is told so."""
        if self._also == "refuses" and node.op == "MUL":
            return "no products today"
        return "" if all(t is None or t.type.name == "f32" for t in (node, *node.src)) else "F32 only"

    def info(self) -> DeviceInfo:
        """A made-up device."""
        return DeviceInfo("broken", "CPU", "sums and products")

    def _add(self, node: Tensor, dst: Any, src: Any) -> None:  # noqa: ANN401  # arrays
        a, b = node.src[:2]
        assert a is not None
        assert b is not None
        right = src[0] + _repeated(src[1], dst.shape)
        if a.ne != b.ne and self._also != "fixed":
            right = {"zeros": 0 * right, "nan": np.nan * right}.get(self._also, FACTOR * right)
        elif self._also == "every" or (self._also == "wide" and node.ne[0] >= WIDE):
            right = FACTOR * right
        dst[...] = right


def _sub(_node: object, dst: Any, src: Any) -> None:  # noqa: ANN401  # arrays
    dst[...] = src[0] - _repeated(src[1], dst.shape)


def _mul(_node: object, dst: Any, src: Any) -> None:  # noqa: ANN401  # arrays
    dst[...] = src[0] * _repeated(src[1], dst.shape)


def _scale(node: Tensor, dst: Any, src: Any) -> None:  # noqa: ANN401  # arrays
    dst[...] = np.float32(node.params.s) * src[0] + np.float32(node.params.b)
