"""float32 to the types whose groups of 4 or 8 quants are points of a grid: IQ2_S, IQ3_XXS and IQ3_S, bit for bit.

A sub-block tries some scales; at each, its groups go to the grid, those that fall beside it to the best of their
nearest points. Arrays are (element, sub-block) or (group, sub-block), as in `quants_k`. The grids come from the `gguf`
package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import gguf.quants
import numpy as np
from numpy.typing import NDArray

from conformance.ggml.types import IQ2_S, IQ3_S, IQ3_XXS, GGMLType

from .blocks import Blocks, F32Array
from .k import ZERO, U8Array, chunked, sub_blocks
from .write import ONE, empty, nearest_int, sum_in_order

Index = NDArray[np.intp]


@dataclass(frozen=True)
class _Grid:
    """The points of a grid, and where every combination of quants goes."""

    size: int
    """Quants in a point: 4 or 8."""
    bits: int
    """Bits of a quant in the number of a combination."""
    levels: int
    """Quants run from 0 to `levels` - 1; a quant q stands for 2 q + 1."""
    values: F32Array
    """(points, size): 2 q + 1."""
    point: Index
    """Number of a combination -> its point, or -1."""
    near: Index
    """(combinations, most): the points nearest to one beside the grid, in ggml's order; the first fills up the rest."""


@cache
def _grid(type_: GGMLType, nwant: int) -> _Grid:
    """As `iq2xs_init_impl` and `iq3xs_init_impl` build it: neighbours at the `nwant` least distances that occur."""
    quant = getattr(gguf.quants, type_.name.upper())
    quant.init_grid()
    levels = len(quant.grid_map)
    bits, size = (levels - 1).bit_length(), quant.grid_shape[1]
    q = np.searchsorted(np.array(quant.grid_map), quant.grid.reshape(-1, size))
    shift = bits * np.arange(size)
    point = np.full(1 << bits * size, -1, np.intp)
    point[(q << shift).sum(axis=1)] = np.arange(len(q))
    every = np.arange(len(point))
    digits = every[:, None] >> shift & ((1 << bits) - 1)
    every = every[(digits < levels).all(axis=1) & (point < 0)]
    digits = digits[every]
    # squared distances by |a|^2 - 2 a.b + |b|^2: small integers, exact in float32
    a, b = digits.astype(np.float32), q.astype(np.float32)
    distance = ((a * a).sum(axis=1)[:, None] - 2 * a @ b.T + (b * b).sum(axis=1)).astype(np.int16)
    order = distance.argsort(axis=1, kind="stable")
    distance = np.take_along_axis(distance, order, 1)
    rank = np.cumsum(np.diff(distance, axis=1, prepend=distance[:, :1]) > 0, axis=1)
    taken = rank < nwant
    most = int(taken.sum(axis=1).max())
    near = np.zeros((len(point), most), np.intp)
    near[every] = np.where(taken, order, order[:, :1])[:, :most]
    return _Grid(size, bits, levels, (2 * q + 1).astype(np.float32), point, near)


def _nearest(grid: _Grid, u: Index, x: F32Array, w: F32Array, scale: F32Array) -> Index:
    """`iq2_find_best_neighbour`, `iq3_find_best_neighbour`: the first at the least weighted distance.

    Args:
        grid: the grid.
        u: numbers of m combinations beside it.
        x: values (size, m).
        w: their weights.
        scale: of each combination (m).
    """
    near = grid.near[u]
    value = grid.values[near]
    distance = np.zeros(near.shape, np.float32)
    for i in range(grid.size):
        diff = scale[:, None] * value[:, :, i] - x[i][:, None]
        distance += w[i][:, None] * diff * diff
    return np.take_along_axis(near, distance.argmin(axis=1)[:, None], 1)[:, 0]


def _to_grid(
    grid: _Grid, x: F32Array, w: F32Array, iscale: F32Array, scale: F32Array
) -> tuple[Index, NDArray[np.bool_]]:
    """Points of all groups at one scale, (groups, sub-blocks); and which groups fell on the grid.

    Args:
        grid: the grid.
        x: values (elements, sub-blocks).
        w: the roots of their weights.
        iscale: what values are multiplied with (sub-blocks).
        scale: what points are multiplied with to be compared to values (sub-blocks).
    """
    q = np.clip(nearest_int(np.float32(0.5) * (iscale * x - ONE)), 0, grid.levels - 1)
    shift = grid.bits * np.arange(grid.size)[:, None]
    u = (q.reshape(-1, grid.size, x.shape[1]).astype(np.intp) << shift).sum(axis=1)
    point = grid.point[u]
    group, column = np.nonzero(point < 0)
    if len(group):
        xg, wg = (a.reshape(-1, grid.size, a.shape[1])[group, :, column].T for a in (x, w))
        point[group, column] = _nearest(grid, u[group, column], xg, wg, scale[column])
    on_grid = np.ones(point.shape, np.bool_)
    on_grid[group, column] = False
    return point, on_grid


@dataclass(frozen=True)
class _Recipe:
    """What tells the three quantisers apart."""

    nwant: int
    sub: int
    """Elements in a sub-block."""
    tries: F32Array
    """What the largest value of a sub-block is mapped to, one per try."""
    least: np.float32
    """A sub-block whose largest value is below this is zero."""
    even_signs: bool
    """Eight signs are stored as seven: their number is even, at the cost of the least important value."""
    polish_all: bool
    """Whether all groups go to the grid once more at the end, or only those that fell beside it."""
    fudge: np.float32


def _tries(top: int, step: float, n: int) -> F32Array:
    return np.float32(top) + np.arange(-n, n + 1, dtype=np.float32) * np.float32(step)


_RECIPES = {
    IQ2_S: _Recipe(1, 16, _tries(5, 0.1, 9), np.float32(1e-8), False, False, np.float32(0.9875)),
    IQ3_XXS: _Recipe(2, 32, _tries(15, 0.2, 15), np.float32(1e-8), True, False, np.float32(1.0125)),
    IQ3_S: _Recipe(3, 32, _tries(15, 0.2, 9), np.finfo(np.float32).smallest_subnormal, False, True, np.float32(1.033)),
}


def _signs(x: F32Array, w: F32Array, *, even: bool) -> tuple[F32Array, U8Array]:
    """Magnitudes (elements, sub-blocks), and a byte of signs for each 8 of them (elements / 8, sub-blocks)."""
    xval = np.where(x >= 0, x, -x)
    negative = ~(x >= 0).reshape(-1, 8, x.shape[1])
    if even:
        odd = negative.sum(axis=1) % 2 == 1
        least = (w * x * x).reshape(-1, 8, x.shape[1]).argmin(axis=1)[:, None]
        flip = (np.arange(8)[:, None] == least) & odd[:, None]
        negative ^= flip
        xval = np.where(flip.reshape(x.shape), -xval, xval)
    return xval, np.packbits(negative, axis=1, bitorder="little")[:, 0]


def _sums(grid: _Grid, x: F32Array, w: F32Array, point: Index) -> tuple[F32Array, F32Array]:
    q = grid.values[point].swapaxes(1, 2).reshape(x.shape)
    return sum_in_order(w * x * q), sum_in_order(w * q * q)


def _search(grid: _Grid, recipe: _Recipe, x: F32Array, w: F32Array) -> tuple[F32Array, Index, NDArray[np.bool_]]:
    """The scale of each sub-block (negative ones included), its points, and whether it is more than zero."""
    root = np.sqrt(w)
    top = x.max(axis=0)
    nonzero = ~(top < recipe.least)
    scale, best = top / np.float32(2 * grid.levels - 1), np.zeros_like(top)
    point = np.full((len(x) // grid.size, x.shape[1]), grid.point[0])
    on_grid = np.full(point.shape, not recipe.polish_all)
    for value in recipe.tries:
        iscale = value / top
        p, on = _to_grid(grid, x, root, iscale, ONE / iscale)
        sumqx, sumq2 = _sums(grid, x, w, p)
        wins = (sumq2 > 0) & (sumqx * sumqx > best * sumq2)
        scale = np.where(wins, sumqx / sumq2, scale)
        best = np.where(wins, scale * sumqx, best)
        point, on_grid = np.where(wins, p, point), np.where(wins, on, on_grid)
    polish = ~on_grid.all(axis=0) & (scale > 0)
    p, _ = _to_grid(grid, x, root, ONE / scale, scale)
    point = np.where(polish & (~on_grid | recipe.polish_all), p, point)
    sumqx, sumq2 = _sums(grid, x, w, point)
    scale = np.where(polish & (sumq2 > 0), sumqx / sumq2, scale)
    return np.where(nonzero, scale, ZERO), np.where(nonzero, point, 0), nonzero


def _row(a: NDArray[Any]) -> NDArray[Any]:
    """(groups, n * sub-blocks) to (n, groups in order)."""
    return np.ascontiguousarray(a.T)


def _write(type_: GGMLType, x: F32Array) -> Blocks:
    recipe = _RECIPES[type_]
    grid = _grid(type_, recipe.nwant)
    y = empty(type_, len(x))
    n, per = len(x), 256 // recipe.sub
    xs = sub_blocks(x, recipe.sub)
    w = xs * xs
    if type_ is IQ2_S:
        sigma2 = np.float32(2) * sum_in_order(np.ascontiguousarray((x * x).T)) / np.float32(256)
        w = np.repeat(np.float32(0.25) * sigma2, per) + w
    xval, signs = _signs(xs, w, even=recipe.even_signs)
    scale, point, nonzero = _search(grid, recipe, xval, w)
    # a scale is stored without sign: a negative one turns all the signs instead
    signs = np.where(nonzero, np.where(scale < 0, ~signs, signs), 0).astype(np.uint8)
    scale = np.abs(scale).reshape(n, per)
    top = scale.max(axis=1)
    d = top / np.float32(31)
    y["d"] = d * recipe.fudge
    exact = nearest_int(np.float32(0.5) * ((ONE / d)[:, None] * scale - ONE))
    level = np.where(top[:, None] != 0, np.clip(exact, 0, 15), 0).astype(np.uint8)
    points, sign_bytes = _row(point).reshape(n, -1), _row(signs).reshape(n, -1)
    _PACK[type_](y, points, sign_bytes, level, nonzero.reshape(n, per))
    return y


def _pack_iq2_s(y: Blocks, point: Index, signs: U8Array, level: U8Array, _: NDArray[np.bool_]) -> None:
    y["qs"], y["signs"] = point & 255, signs
    y["qh"] = np.bitwise_or.reduce((point >> 8).reshape(-1, 8, 4) << np.array([0, 2, 4, 6]), axis=2)
    y["scales"] = level[:, 0::2] | level[:, 1::2] << 4


def _pack_iq3_xxs(y: Blocks, point: Index, signs: U8Array, level: U8Array, _: NDArray[np.bool_]) -> None:
    y["qs"] = point
    seven = (signs & 127).astype(np.uint32).reshape(-1, 8, 4) << np.array([0, 7, 14, 21], np.uint32)
    y["scales_and_signs"] = np.bitwise_or.reduce(seven, axis=2) | level.astype(np.uint32) << np.uint32(28)
    y[(y["d"] == 0) & (level == 0).all(axis=1)] = 0


def _pack_iq3_s(y: Blocks, point: Index, signs: U8Array, level: U8Array, nonzero: NDArray[np.bool_]) -> None:
    y["qh"] = np.packbits((point >> 8).reshape(-1, 8, 8).astype(np.bool_), axis=2, bitorder="little")[:, :, 0]
    y["scales"] = level[:, 0::2] | level[:, 1::2] << 4
    # ggml's write position stands still at a sub-block of zeros, so what follows it moves up; `qh` and `scales` do not
    order = (~nonzero).argsort(axis=1, kind="stable")[:, :, None]
    y["qs"] = np.take_along_axis((point & 255).reshape(-1, 8, 8), order, 1).reshape(-1, 64)
    y["signs"] = np.take_along_axis(signs.reshape(-1, 8, 4), order, 1).reshape(-1, 32)


_PACK = {IQ2_S: _pack_iq2_s, IQ3_XXS: _pack_iq3_xxs, IQ3_S: _pack_iq3_s}

WRITE_GRID: dict[GGMLType, Callable[[F32Array], Blocks]] = {t: chunked(partial(_write, t)) for t in _RECIPES}
