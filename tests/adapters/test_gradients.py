"""Gradients of the reference against finite differences of their forward ops, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu import TABLE
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor, new_tensor
from conformance.ggml.types import F32, I32

Array = NDArray[np.float64]
Forward = Callable[[Array], Array]
B = Builder()
STEP = 1e-5
ROWS = np.array([2, 0, 2, 4, 2, 1])
LABELS = np.random.default_rng(7).dirichlet(np.ones(9), 5)


def _held(x: NDArray[np.generic]) -> NDArray[np.generic]:
    return x.astype(np.int32 if x.dtype.kind == "i" else np.float32)


def backward(op: str, node: Tensor, *src: NDArray[np.generic]) -> Array:
    """The reference's value of `node`, shape `node.shape`."""
    dst = np.zeros(node.shape, np.float32)
    _, kernel = TABLE[op]
    pairs = zip(node.src, src, strict=True)
    kernel(EXACT, node, dst, [_held(x).reshape(t.shape) for t, x in pairs if t is not None])
    return dst.astype(np.float64)


def differences(forward: Forward, x: Array, dy: Array) -> Array:
    """The gradient of `sum(dy * forward(x))` by central differences."""
    slope = np.empty_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = STEP
        slope[i] = (dy * (forward(x + step) - forward(x - step))).sum() / (2 * STEP)
    return slope


def _leaf(a: Array, *, i32: bool = False) -> Tensor:
    return new_tensor(I32 if i32 else F32, *a.shape[::-1])


def _silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def _rms_norm(x: Array) -> Array:
    y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1)
    return y


def _soft_max(x: Array) -> Array:
    e = np.exp(0.7 * x)
    y: Array = e / e.sum(-1, keepdims=True)
    return y


def _loss(x: Array) -> Array:
    return np.array([-(LABELS * np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True))).sum() / len(x)])


def _pooled(op: OP_POOL) -> Forward:
    """Windows of 3 x 2, 2 and 1 apart, padded by 1 and 0."""

    def forward(x: Array) -> Array:
        largest = op == OP_POOL.MAX
        wide = np.pad(x, ((0, 0), (1, 1)), constant_values=-np.inf if largest else 0.0)
        rows, columns = x.shape[0] - 1, (x.shape[1] + 2 - 3) // 2 + 1
        cells = [[wide[r : r + 2, 2 * c : 2 * c + 3] for c in range(columns)] for r in range(rows)]
        return np.array([[cell.max() if largest else cell.mean() for cell in row] for row in cells])

    return forward


def _pool(op: OP_POOL) -> Callable[[Array, Array], Array]:
    return lambda x, dy: backward("POOL_2D_BACK", B.pool_2d_back(_leaf(dy), _leaf(x), op, 3, 2, 2, 1, 1, 0), dy, x)


def _unfold(x: Array) -> Array:
    """Windows of 3 x 2, 2 and 1 apart, padded by 1 and 0, dilated by 1 and 2: [OH, OW, C * KH * KW]."""
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    rows, columns = x.shape[1] - 2, (x.shape[2] + 2 - 3) // 2 + 1
    return np.array(
        [[wide[:, r : r + 3 : 2, 2 * c : 2 * c + 3].reshape(-1) for c in range(columns)] for r in range(rows)]
    )


def _unfold_1d(x: Array) -> Array:
    """Windows of 3 elements 2 apart, 2 from one to the next, padded by 2: [OW, C * K]."""
    wide = np.pad(x, ((0, 0), (2, 2)))
    return np.array([wide[:, 2 * c : 2 * c + 5 : 2].reshape(-1) for c in range((x.shape[1] + 4 - 5) // 2 + 1)])


def _fold(
    kernel: Sequence[int], params: tuple[int, int, int, int, int, int], *, is_2d: bool
) -> Callable[[Array, Array], Array]:
    def back(x: Array, dy: Array) -> Array:
        of = np.ones(kernel)
        node = B.im2col_back(_leaf(dy), _leaf(of), (*x.shape[::-1], 1, 1, 1)[:4], *params, is_2d)
        return backward("IM2COL_BACK", node, dy, of)

    return back


CASES: dict[str, tuple[Forward, Callable[[Array, Array], Array], Sequence[int]]] = {
    "SILU_BACK": (_silu, lambda x, dy: backward("SILU_BACK", B.silu_back(_leaf(dy), _leaf(x)), dy, x), (3, 7)),
    "RMS_NORM_BACK": (
        _rms_norm,
        lambda x, dy: backward("RMS_NORM_BACK", B.rms_norm_back(_leaf(dy), _leaf(x), 0.1), dy, x),
        (3, 7),
    ),
    "SOFT_MAX_BACK": (
        _soft_max,
        lambda x, dy: backward("SOFT_MAX_BACK", B.soft_max_ext_back(_leaf(dy), _leaf(x), 0.7, 0.0), dy, _soft_max(x)),
        (3, 7),
    ),
    "REPEAT_BACK": (
        lambda x: np.tile(x, (2, 3)),
        lambda x, dy: backward("REPEAT_BACK", B.repeat_back(_leaf(dy), _leaf(x)), dy),
        (3, 7),
    ),
    "GET_ROWS_BACK": (
        lambda x: x[ROWS],
        lambda x, dy: backward("GET_ROWS_BACK", B.get_rows_back(_leaf(dy), _leaf(ROWS, i32=True), _leaf(x)), dy, ROWS),
        (5, 7),
    ),
    "CROSS_ENTROPY_LOSS_BACK": (
        _loss,
        lambda x, dy: backward(
            "CROSS_ENTROPY_LOSS_BACK", B.cross_entropy_loss_back(_leaf(dy), _leaf(x), _leaf(LABELS)), dy, x, LABELS
        ),
        (5, 9),
    ),
    "POOL_2D_BACK MAX": (_pooled(OP_POOL.MAX), _pool(OP_POOL.MAX), (6, 9)),
    "IM2COL_BACK": (_unfold, _fold((2, 2, 3), (2, 1, 1, 0, 1, 2), is_2d=True), (2, 5, 8)),
    "IM2COL_BACK 1D": (_unfold_1d, _fold((3, 3), (2, 0, 2, 0, 2, 0), is_2d=False), (3, 9)),
    "POOL_2D_BACK AVG": (_pooled(OP_POOL.AVG), _pool(OP_POOL.AVG), (6, 9)),
}
"""Name -> the forward op, the reference's gradient by its argument and by that of its result, shape of the argument."""


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_the_slope_of_its_forward_op(name: str) -> None:
    """To 1e-6 of the largest slope: what float32 leaves of the gradient, and 1e-10 of the differences."""
    forward, gradient, shape = CASES[name]
    random = np.random.default_rng(len(name))
    x = random.normal(size=shape).astype(np.float32).astype(np.float64)
    dy = random.normal(size=forward(x).shape).astype(np.float32).astype(np.float64)
    want = differences(forward, x, dy)
    got = gradient(x, dy).reshape(want.shape)
    assert abs(want).max() > 0.01
    assert abs(got - want).max() <= 1e-6 * abs(want).max()


def test_every_gradient_is_held_against_differences() -> None:
    """No op of a name that ends with _BACK is left out, but that of ROPE, which turns back (`test_cpu.py`)."""
    assert {op for op in TABLE if op.endswith("_BACK")} == {name.partition(" ")[0] for name in CASES} | {"ROPE_BACK"}


def test_adamw_steps_against_the_gradient() -> None:
    """With fresh moments and no decay the first step is alpha times the sign of the gradient; moments are kept."""
    n = 6
    g = np.array([3.0, -2.0, 0.5, -0.25, 1.0, -4.0])
    a = new_tensor(F32, n)
    B.set_param(a)
    others = [new_tensor(F32, k) for k in (n, n, n, 7)]
    node = B.opt_step_adamw(a, *others)
    m, v, w = (np.zeros((1, 1, 1, n), np.float32) for _ in range(3))
    parameters = np.array([0.125, 0.9, 0.999, 0.0, 0.0, 1 / (1 - 0.9), 1 / (1 - 0.999)], np.float32).reshape(1, 1, 1, 7)
    _, kernel = TABLE["OPT_STEP_ADAMW"]
    kernel(EXACT, node, w, [w, g.astype(np.float32).reshape(1, 1, 1, n), m, v, parameters])
    assert np.allclose(w.ravel(), -0.125 * np.sign(g), rtol=1e-5)
    assert np.allclose(m.ravel(), 0.1 * g, rtol=1e-6)
    assert np.allclose(v.ravel(), 0.001 * g * g, rtol=1e-4)
