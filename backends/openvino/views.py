"""Views: which elements of a root a tensor shows, read and written with as few OpenVINO nodes as its strides allow."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray

from conformance.cgraph.errors import BackendError
from conformance.cgraph.tensor import Tensor, nelements

from .nodes import Constants, Shape, Value, cut, reshape, shape_of, transpose


@dataclass(frozen=True, slots=True)
class Region:
    """Where a tensor's units lie in its root, counted in units: elements, or blocks of a block type."""

    total: int
    """Units of the root."""
    shape: Shape
    """The NumPy shape, in units."""
    strides: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Units of the tensor."""
        return int(np.prod(self.shape))

    @property
    def contiguous(self) -> bool:
        """Whether the units follow one another."""
        step = 1
        for n, s in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if n != 1 and s != step:
                return False
            step *= n
        return True

    def indices(self) -> NDArray[np.int32]:
        """The unit in the root of every unit of the tensor."""
        at = np.full(self.shape, self.offset, np.int32)
        for axis, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
            step = np.arange(n, dtype=np.int32) * s
            at += step.reshape(-1, *[1] * (len(self.shape) - 1 - axis))
        return at


def region(t: Tensor, *, blocks: bool) -> Region:
    """Where `t` lies in its root, in blocks or in elements (a root of a block type held as numbers has no blocks).

    Raises:
        BackendError: the strides are no whole number of units.
    """
    size, blck = t.type.type_size, t.type.blck_size
    if any(x % size for x in (*t.nb[1:], t.view_offs)) or (blck == 1 and t.nb[0] % size):
        raise BackendError(f"{t}: strides {t.nb} at {t.view_offs} are no multiples of the type's {size} bytes")
    unit = 1 if blocks else blck
    ne0 = t.ne[0] // blck if blocks else t.ne[0]
    nb0 = t.nb[0] // size if blck == 1 else 1
    strides = (*(nb // size * unit for nb in t.nb[:0:-1]), nb0)
    total = nelements(t.root) // (blck if blocks else 1)
    return Region(total, (*t.ne[:0:-1], ne0), strides, t.view_offs // size * unit)


def read(c: Constants, x: Value, r: Region, width: int = 0) -> tuple[Value, str]:
    """The units of `r` out of `x`, which holds the whole root in order.

    Args:
        c: the model's constants.
        x: any shape of `total` units, times `width` entries each where that is not 0.
        r: what to read.
        width: entries per unit, a last axis.

    Returns:
        The value, of shape `r.shape` and `width`; and how it was read: whole, slice or gather.
    """
    tail = (width,) if width else ()
    if r.size == r.total and r.contiguous and not r.offset:
        return reshape(c, x, (*r.shape, *tail)), "whole"
    if r.contiguous:
        flat = reshape(c, x, (r.total, *tail))
        return reshape(c, cut(c, flat, [r.offset], [r.offset + r.size], [0]), (*r.shape, *tail)), "slice"
    factored = _factor(r)
    if factored is None:
        flat = reshape(c, x, (r.total, *tail))
        return o.gather(flat, o.constant(r.indices()), c.axis(0)), "gather"
    extents, starts, counts, order = factored
    x = reshape(c, x, (*extents, *tail))
    x = cut(c, x, starts, [s + n for s, n in zip(starts, counts, strict=True)], range(len(starts)))
    x = transpose(c, x, (*order, *range(len(extents), len(extents) + len(tail))))
    return reshape(c, x, (*r.shape, *tail)), "slice"


def _factor(r: Region) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """`r` as one reshape, one slice and one transposition of its root, or None where no such three exist.

    Returns:
        The root's shape, per axis of it the first unit and how many, and the axes in the order of `r.shape`.
    """
    axes = sorted((a for a, n in enumerate(r.shape) if n != 1), key=lambda a: -r.strides[a])
    steps = [r.strides[a] for a in axes]
    if not axes or 0 in steps or len(set(steps)) < len(steps):
        return None
    counts = [r.shape[a] for a in axes]
    if steps[-1] != 1:
        steps.append(1)
        counts.append(1)
    if r.total % steps[0] or any(a % b for a, b in pairwise(steps)):
        return None
    extents = [r.total // steps[0], *(a // b for a, b in pairwise(steps))]
    starts, rest = [], r.offset
    for step in steps:
        starts.append(rest // step)
        rest %= step
    if any(s + n > e for s, n, e in zip(starts, counts, extents, strict=True)):
        return None
    rank = {a: i for i, a in enumerate(axes)}
    order = [rank[a] for a in sorted(axes)]
    return extents, starts, counts, [*order, *range(len(axes), len(steps))]


def write(c: Constants, x: Value | None, r: Region, new: Value, width: int = 0) -> tuple[Value, str]:
    """The root's units with those of `r` replaced.

    Args:
        c: the model's constants.
        x: the root as it was; None where nothing of it is left.
        r: where to write.
        new: the units of `r` in order, of any shape.
        width: entries per unit.

    Returns:
        The root as it is now, and how it was written: whole, concat or scatter.
    """
    tail = (width,) if width else ()
    if r.size == r.total and r.contiguous and not r.offset:
        return new, "whole"
    if x is None:
        msg = "a tensor is written in part before it holds anything"
        raise BackendError(msg)
    flat = reshape(c, x, (r.total, *tail))
    new = reshape(c, new, (r.size, *tail))
    if r.contiguous:
        end = r.offset + r.size
        pieces = [cut(c, flat, [0], [r.offset], [0])] if r.offset else []
        pieces.append(new)
        pieces += [cut(c, flat, [end], [r.total], [0])] if end < r.total else []
        done = o.concat(pieces, 0)
    else:
        done = o.scatter_update(flat, o.constant(r.indices().reshape(-1)), new, c.axis(0))
    return reshape(c, done, shape_of(x)), "concat" if r.contiguous else "scatter"
