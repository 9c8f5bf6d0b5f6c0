"""Images: resizing, windows, relative positions."""

from __future__ import annotations

import numpy as np

from backends.cpu.takes import MATRIX, ONLY_F32, Table, Takes
from backends.cpu.values import Values, in_float64
from conformance.ggml.ops.media.images import taps
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16


def _upscale(node: Tensor, x: Values) -> Values:
    """Multiply by the weights (`taps`) of elements along each dimension."""
    for dim in (0, 1):
        x = np.moveaxis(np.moveaxis(x, 3 - dim, -1) @ taps(node, dim).T, -1, 3 - dim)
    nearest = [taps(node, dim).argmax(1) for dim in (3, 2)]
    y: Values = x[nearest[0]][:, nearest[1]]
    return y


def _win_part(node: Tensor, x: Values) -> Values:
    p = node.params
    _, h, w, channels = x.shape
    x = np.pad(x[0], ((0, p.npy * p.w - h), (0, p.npx * p.w - w), (0, 0)))
    return x.reshape(p.npy, p.w, p.npx, p.w, channels).transpose(0, 2, 1, 3, 4).reshape(node.shape)


def _win_unpart(node: Tensor, x: Values) -> Values:
    w, (width, height) = node.params.w, node.ne[1:3]
    nx, ny, channels = -(-width // w), -(-height // w), x.shape[-1]
    whole = x.reshape(ny, nx, w, w, channels).transpose(0, 2, 1, 3, 4).reshape(ny * w, nx * w, channels)
    return whole[None, :height, :width]


def _get_rel_pos(node: Tensor, x: Values) -> Values:
    n = node.ne[1]
    query, key = np.mgrid[:n, :n]
    return x[:, 0, n - 1 - key + query]


def _add_rel_pos(node: Tensor, a: Values, pw: Values, ph: Values) -> Values:
    """Add `pw` by column and `ph` by row to the keys of a query, a square of n rows."""
    n = pw.shape[-1]
    square = a.reshape(*pw.shape[:3], n, n)
    return (square + pw[..., None, :] + ph[..., :, None]).reshape(node.shape)


TABLE: Table = {
    "UPSCALE": (MATRIX, in_float64(_upscale)),
    "WIN_PART": (MATRIX, in_float64(_win_part)),
    "WIN_UNPART": (MATRIX, in_float64(_win_unpart)),
    "GET_REL_POS": (Takes((frozenset({F16}),), frozenset({F16})), in_float64(_get_rel_pos)),
    "ADD_REL_POS": (Takes((ONLY_F32,) * 3, ONLY_F32), in_float64(_add_rel_pos)),
}
