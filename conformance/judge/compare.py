"""Measure the difference between a tensor's bytes and the expected ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isnan, nan, sqrt
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import quants
from conformance.ggml.ops.op import DECLARATIONS, operand
from conformance.ggml.tensor import Bytes, Tensor, nelements
from conformance.ggml.types import GGMLType

from .wrong import Kind

BLOCK = 1 << 14
"""Number of elements measured at a time."""
_SLACK = 1 + 1e-12
"""Factor for the rounding of a bound."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Error of one tensor."""

    nmse: float = 0.0
    """Energy of the error / energy of the *expected* finite values; `inf` if these are all 0."""
    element: float = 0.0
    """Largest |error| / (|expected| + root mean square of the nonzero expected values).

    Zeros are excluded because a cache may be mostly empty."""
    special: int = 0
    """Number of elements where one side is NaN, +Inf or -Inf and the other side is not the same."""
    raw: int = 0
    """Number of elements (for block types: blocks) whose bytes differ."""
    count: int = 0
    """Elements compared."""
    index: tuple[int, ...] = ()
    """Worst element, in `ne` order (fastest first).

    The first whose bytes differ if all numbers are equal."""
    expected: float = nan
    found: float = nan
    kind: Kind = "numbers"
    """Kind of error, if there is one."""

    def __str__(self) -> str:
        if not self.raw:
            return "bit-identical"
        where = f"at {list(self.index)}: {self.expected:.9g} expected, {self.found:.9g} found"
        special = f", {self.special} NaN/Inf out of place" if self.special else ""
        return f"{where} (NMSE {self.nmse:.2g}{special})"


def values(t: Tensor, packed: Bytes) -> NDArray[Any]:
    """Decode packed bytes of `t` to shape `ne[::-1]`: float64, or int64 for integers."""
    return _numbers(t.type, _stored(t.type, t.shape, packed))


def compare(t: Tensor, expected: Bytes, found: Bytes, *, unordered: bool = False) -> Difference:
    """Compare packed bytes of `t`; bytes of another size are entirely wrong.

    Outputs and states that one tensor holds may differ in size, so each has its own measures; the larger count.
    `unordered` ignores the order within a row (TOP_K).
    """
    n = int(np.prod(t.ne))
    if expected.nbytes != found.nbytes:
        return Difference(inf, inf, n, n, n, (0, 0, 0, 0), nan, nan)
    want = _stored(t.type, t.shape, expected)
    got = _stored(t.type, t.shape, found)
    if unordered:
        want, got = np.sort(want, axis=-1), np.sort(got, axis=-1)
    differ = _bits_differ(want, got)
    raw = int(np.count_nonzero(differ))
    if not raw:
        return Difference(count=n)
    with np.errstate(invalid="ignore"):  # converting a signalling NaN raises a floating-point flag
        numbers = _plain(t.type, want).reshape(-1), _plain(t.type, got).reshape(-1)
        measured = _measured(t, *numbers)
    if not measured.element:  # equal numbers in other bytes, such as -0
        place = int(np.argmax(differ)) * (n // differ.size)
        measured = replace(measured, index=(place,), expected=float(numbers[0][place]), found=float(numbers[1][place]))
    index = tuple(int(i) for i in np.unravel_index(measured.index[0], t.shape)[::-1])
    return replace(measured, raw=raw, count=n, index=index)


def _measured(t: Tensor, want: NDArray[Any], got: NDArray[Any]) -> Difference:
    """Measure flat numbers of `t`, outputs and states apart; the index is flat, too."""
    declared = DECLARATIONS.get(t.op)
    if declared is None or declared.outputs is None:
        return _measure(want, got, 0, want.size)
    outputs = nelements(operand(t, declared.outputs))
    parts = _measure(want, got, 0, outputs), _measure(want, got, outputs, want.size)
    worse = max(parts, key=attrgetter("element"))
    return replace(worse, nmse=max(p.nmse for p in parts), special=sum(p.special for p in parts))


def in_order(indices: Bytes, keys: NDArray[Any]) -> Bytes:
    """Return ARGSORT's indices with equal keys ascending, whose order ggml leaves open.

    `keys` are the elements that were sorted; indices outside their rows are returned unchanged.
    """
    rows = keys.reshape(-1, keys.shape[-1])
    found = indices.view("<i4").reshape(rows.shape)
    if found.min() < 0 or found.max() >= rows.shape[-1]:
        return indices
    picked = np.take_along_axis(rows, found, -1)
    run = np.cumsum(picked != np.roll(picked, 1, -1), axis=-1)
    return np.take_along_axis(found, np.lexsort((found, run), axis=-1), -1).reshape(-1).view(np.uint8)


def _stored(type_: GGMLType, shape: tuple[int, ...], packed: Bytes) -> NDArray[Any]:
    if type_.blck_size > 1:
        return packed.reshape(*shape[:-1], shape[-1] // type_.blck_size, type_.type_size)
    return packed.view(type_.dtype if type_.dtype is not None else "<u2").reshape(shape)


def _bits_differ(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    if a.dtype == np.uint8:
        return np.asarray((a != b).any(axis=-1))
    as_int = f"<u{a.dtype.itemsize}"
    return np.asarray(a.view(as_int) != b.view(as_int))


def _numbers(type_: GGMLType, stored: NDArray[Any]) -> NDArray[Any]:
    plain = _plain(type_, stored)
    with np.errstate(invalid="ignore"):  # a device may store a signalling NaN
        return plain.astype(np.int64 if plain.dtype.kind == "i" else np.float64)


def _plain(type_: GGMLType, stored: NDArray[Any]) -> NDArray[Any]:
    """Convert to a NumPy type."""
    return stored if type_.dtype is not None else quants.to_float(type_, stored)


def _measure(all_want: NDArray[Any], all_got: NDArray[Any], first: int, end: int) -> Difference:
    """Measure a range of flat numbers: energies, and elements relative to the energy so far.

    These bound the final ones, so that only blocks that may have the worst element are measured again.
    """
    flat = all_want[first:end], all_got[first:end]
    energy = error_energy = rms = 0.0
    nonzero = n_special = 0
    peaks = []
    for start in range(0, flat[0].size, BLOCK):
        part = _part(*flat, start)
        energy += float(np.sum(np.square(part.clean)))
        error_energy += float(np.sum(np.square(part.error)))
        nonzero += part.clean.size if part.clean.all() else int(np.count_nonzero(part.clean))
        n_special += 0 if part.special is None else int(np.count_nonzero(part.special))
        rms = sqrt(energy / max(1, nonzero))
        relative = _relative(part, rms)
        peaks.append((_worst(relative)[0], rms, start))
    bounds = sorted(((peak * max(1.0, had / rms if rms else 1.0), start) for peak, had, start in peaks), reverse=True)
    nmse = error_energy / energy if energy else (inf if error_energy else 0.0)
    worst, place = -inf, 0
    for bound, start in bounds:
        if bound * _SLACK < worst:
            break
        value, at = _worst(relative if start == part.start else _relative(_part(*flat, start), rms))
        if (value, -start) > (worst, -place):
            worst, place = value, start + at
    found = float(flat[0][place]), float(flat[1][place])
    kind = _kind(*flat) if n_special or nmse == 1 else "numbers"  # NMSE of zeros is 1
    return Difference(inf if n_special else nmse, worst, n_special, 0, 0, (first + place,), *found, kind)


def _kind(want: NDArray[Any], got: NDArray[Any]) -> Kind:
    if (np.isfinite(want) & ~np.isfinite(got)).any():
        return "not finite"
    return "zeros" if want.any() and not got.any() else "numbers"


@dataclass(slots=True)
class _Part:
    """Number of elements that fit a core's cache while they are measured, in float64."""

    start: int
    clean: NDArray[np.float64]
    """Expected values, 0 if not finite."""
    error: NDArray[np.float64]
    """Errors, 0 where one side is not finite."""
    special: NDArray[np.bool_] | None
    """True where one side is NaN or Inf and the other differs; None if all are finite."""


def _part(all_want: NDArray[Any], all_got: NDArray[Any], start: int) -> _Part:
    want, got = (a[start : start + BLOCK].astype(np.float64) for a in (all_want, all_got))
    error = np.subtract(got, want)
    if np.isfinite(error).all():  # then both sides are finite
        return _Part(start, want, error, None)
    finite = np.isfinite(want)
    both = finite & np.isfinite(got)
    special = ~both & ~((want == got) | (np.isnan(want) & np.isnan(got)))
    return _Part(start, np.where(finite, want, 0.0), np.where(both, error, 0.0), special)


def _relative(part: _Part, rms: float) -> NDArray[np.float64]:
    """Compute |error| / (|expected| + rms); `inf` if divided by 0 or special values differ."""
    scale = np.abs(part.clean)
    scale += rms
    error = np.abs(part.error)
    if rms or scale.all():
        relative = np.divide(error, scale, out=scale)
    else:
        relative = np.divide(error, scale, where=scale > 0, out=np.where(error != 0, inf, 0.0))
    if part.special is not None:
        relative[part.special] = inf
    return relative


def _worst(relative: NDArray[np.float64]) -> tuple[float, int]:
    at = int(np.argmax(relative))
    value = float(relative[at])
    return inf if isnan(value) else value, at
