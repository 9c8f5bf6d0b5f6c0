"""Measure how far one tensor's bytes are from the expected ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import quants
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.types import GGMLType


@dataclass(frozen=True, slots=True)
class Difference:
    """The error of one tensor."""

    nmse: float = 0.0
    """Energy of the error / energy of the *expected* finite values; `inf` if these are all 0."""
    element: float = 0.0
    """Largest |error| / (|expected| + root mean square of the nonzero expected values). Zeros do not count, because a
    cache may be mostly empty."""
    special: int = 0
    """Elements where only one side is NaN, +Inf or -Inf, or they differ in which."""
    raw: int = 0
    """Elements (blocks, for block types) whose bytes differ."""
    count: int = 0
    """Elements compared."""
    index: tuple[int, ...] = ()
    """The worst element, by `ne` order (fastest first)."""
    expected: float = nan
    found: float = nan

    def __str__(self) -> str:
        if not self.raw:
            return "equal to the bit"
        where = f"at {list(self.index)}: {self.expected:.9g} expected, {self.found:.9g} found"
        special = f", {self.special} NaN/Inf out of place" if self.special else ""
        return f"{where} (NMSE {self.nmse:.2g}{special})"


def values(t: Tensor, packed: Bytes) -> NDArray[Any]:
    """Packed bytes of `t` as numbers of shape `ne[::-1]`: float64 for floats and block types, int64 for integers."""
    return _numbers(t.type, _stored(t.type, t.shape, packed))


def compare(t: Tensor, expected: Bytes, found: Bytes, *, unordered: bool = False) -> Difference:
    """Compare packed bytes of `t`; those of another size are entirely wrong.

    `unordered` ignores the order within a row (TOP_K).
    """
    n = int(np.prod(t.ne))
    if expected.nbytes != found.nbytes:
        return Difference(inf, inf, n, n, n, (0, 0, 0, 0), nan, nan)
    if np.array_equal(expected, found):
        return Difference(count=n)
    want = _stored(t.type, t.shape, expected)
    got = _stored(t.type, t.shape, found)
    if unordered:
        want, got = np.sort(want, axis=-1), np.sort(got, axis=-1)
    raw = int(np.count_nonzero(_bits_differ(want, got)))
    if not raw:
        return Difference(count=n)
    with np.errstate(invalid="ignore"):  # a NaN that signals does so when it becomes another type
        return _measure(_numbers(t.type, want), _numbers(t.type, got), raw)


def _stored(type_: GGMLType, shape: tuple[int, ...], packed: Bytes) -> NDArray[Any]:
    if type_.blck_size > 1:
        return packed.reshape(*shape[:-1], shape[-1] // type_.blck_size, type_.type_size)
    return packed.view(type_.dtype if type_.dtype is not None else "<u2").reshape(shape)


def _bits_differ(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    if a.dtype == np.uint8 and a.ndim == 5:
        return np.asarray((a != b).any(axis=-1))
    as_int = f"<u{a.dtype.itemsize}"
    return np.asarray(a.view(as_int) != b.view(as_int))


def _numbers(type_: GGMLType, stored: NDArray[Any]) -> NDArray[Any]:
    if type_.dtype is not None and type_.dtype.kind == "i":
        return stored.astype(np.int64)
    if type_.dtype is not None:
        return stored.astype(np.float64)
    return quants.to_float(type_, stored).astype(np.float64)


def _measure(want: NDArray[Any], got: NDArray[Any], raw: int) -> Difference:
    count = want.size
    want, got = want.astype(np.float64, copy=False), got.astype(np.float64, copy=False)
    clean, special = want, None
    finite = np.isfinite(want)
    both = finite & np.isfinite(got)
    if not both.all():
        special = ~both & ~((want == got) | (np.isnan(want) & np.isnan(got)))
        clean = np.where(finite, want, 0.0)
        error = np.subtract(got, want, where=both, out=np.zeros_like(want))
    else:
        error = got - want
    energy, error_energy = (float(np.sum(np.square(x))) for x in (clean, error))
    nmse = error_energy / energy if energy else (inf if error_energy else 0.0)
    scale = np.abs(clean)
    scale += np.sqrt(energy / max(1, int(np.count_nonzero(clean))))
    np.abs(error, out=error)
    relative = np.divide(error, scale, where=scale > 0, out=np.where(error != 0, inf, 0.0))
    n_special = 0 if special is None else int(np.count_nonzero(special))
    if n_special:
        nmse = inf
        relative[special] = inf
    at = np.unravel_index(int(np.argmax(relative)), want.shape)
    index = tuple(int(i) for i in at[::-1])
    return Difference(nmse, float(relative[at]), n_special, raw, count, index, float(want[at]), float(got[at]))
