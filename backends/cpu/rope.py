"""ROPE in all of ggml's modes, with YaRN, frequency factors, partial and offset dims.

ggml computes theta by multiplying with theta_scale once per pair, in float32, so its angles drift: by up to 3e-4 rad at
position 4,096 and 3e-3 rad at 32,768. Here, unless an `Arithmetic` requires ggml's, theta is position * freq_base^(-2 i
/ n_dims) in float64, from the float32 parameters. The corners of YaRN's ramp pass through floor and ceil, so they are
float32 as in ggml.

YaRN mixes two angles, `a * (1 - ramp) + b * ramp`. Compilers fuse that sum (a multiply-add rounds once) if the
processor can, as in ggml builds for x86-64 with AVX2 and for ARM; ggml's arithmetic here does the same. Without fusion,
one angle in three differs in the last bit, which at 700 rad is 6e-5 rad.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor

from .takes import FLOAT, ONLY_F32, ONLY_I32, Table, Takes
from .values import Values, blocks, in_float64

Channels = tuple[NDArray[np.intp], Values]


@lru_cache(maxsize=256)
def _channels(mode: int, sections: tuple[int, int, int, int], n_pairs: int) -> Channels:
    """Return each pair's position index (0 to 3) and exponent: `ggml_mrope_cache_init`.

    The exponent is that of theta_scale. Vision restarts a channel's exponent where its section begins. ggml tests the
    sections with else-ifs, so an empty section prevents a later one from restarting.
    """
    which = np.zeros(n_pairs, np.intp)
    power = np.zeros(n_pairs)
    if not mode & ROPE_TYPE.MROPE:
        return which, np.arange(n_pairs, dtype=np.float64)
    ends = np.cumsum(sections)
    starts = (0, int(ends[0]), int(ends[1]), int(ends[2]))
    running = [0, 0, 0, 0]
    for pair in range(n_pairs):
        sector = pair % int(ends[3])
        if mode == ROPE_TYPE.VISION and sector in starts:
            running[starts.index(sector)] = 0
        if mode == ROPE_TYPE.IMROPE:
            channel = sector % 3 if sector < 3 * sections[sector % 3] else 3
        else:
            channel = int(np.searchsorted(ends[:3], sector, side="right"))
        which[pair] = channel
        power[pair] = running[channel]
        running = [p + 1 for p in running]
    return which, power


@lru_cache(maxsize=256)
def _yarn_ramp(
    n_dims: int, n_ctx_orig: int, base: float, beta_fast: float, beta_slow: float, n_pairs: int, dtype: str
) -> NDArray[Any]:
    """Return the extrapolated share of each pair, 1 to 0: `rope_yarn_ramp`."""
    f32 = np.float32

    def corner(n_rot: float) -> np.float32:
        turns = f32(n_ctx_orig) / (f32(n_rot) * f32(2) * f32(np.pi))
        dim: np.float32 = f32(n_dims) * np.log(turns) / (f32(2) * np.log(f32(base)))
        return dim

    low = max(0.0, float(np.floor(corner(beta_fast))))
    high = min(n_dims - 1.0, float(np.ceil(corner(beta_slow))))
    pairs = np.arange(n_pairs, dtype=dtype)
    ramp: NDArray[Any] = 1 - np.clip((pairs - pairs.dtype.type(low)) / pairs.dtype.type(max(0.001, high - low)), 0, 1)
    return ramp


def _mixed(turned: NDArray[Any], theta: NDArray[Any], ramp: NDArray[Any]) -> NDArray[Any]:
    """Compute `turned (1 - ramp) + theta ramp` in float32 with fused multiply-add."""
    first = turned.astype(np.float64) * (1 - ramp).astype(np.float64)
    mixed: NDArray[Any] = (first + (theta * ramp).astype(np.float64)).astype(theta.dtype)
    return mixed


def _theta(node: Tensor, positions: NDArray[Any], n_pairs: int, *, exact: bool) -> NDArray[Any]:
    """Return angles before YaRN, `(ne2, n_pairs)`: float64, or float32 as in ggml's cache."""
    n_dims, base = node.params.n_dims, node.params.freq_base
    which, power = _channels(node.params.mode, node.params.sections, n_pairs)
    per_channel = positions.reshape(-1, node.ne[2])
    if exact:
        scale: Values = np.float64(base) ** (-2.0 * power / n_dims)
        return per_channel[which].T * scale
    steps = np.full((*per_channel.shape, int(power.max(initial=0)) + 1), base ** float(np.float32(-2 / n_dims)), "f4")
    steps[..., 0] = per_channel
    theta: NDArray[Any] = np.multiply.accumulate(steps, axis=-1)[which, :, power.astype(np.intp)].T
    return theta


def _angles(
    node: Tensor, positions: NDArray[Any], factors: Values | None, n_pairs: int, *, exact: bool
) -> tuple[Values, Values]:
    """Return cosine and sine per token and pair, `(ne2, n_pairs)`, times the magnitude."""
    p = node.params
    freq_scale, ext_factor, magnitude = p.freq_scale, p.ext_factor, p.attn_factor
    theta = _theta(node, positions, n_pairs, exact=exact)
    if factors is not None:
        theta /= factors[:n_pairs].astype(theta.dtype)
    turned = theta * theta.dtype.type(freq_scale)
    if ext_factor != 0:
        corners = (p.n_dims, p.n_ctx_orig, p.freq_base, p.beta_fast, p.beta_slow)
        ramp = _yarn_ramp(*corners, n_pairs, theta.dtype.str)
        turned = _mixed(turned, theta, ramp * theta.dtype.type(ext_factor))
        magnitude *= 1 + 0.1 * np.log(1 / freq_scale)
    angle = turned.astype(np.float64)
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


def _turned(exact: bool, node: Tensor, x: Values, positions: Values, factors: Values | None = None) -> Values:
    """Rotate pairs of each row of `x` by its token's position (ne[2]); copy other channels.

    `factors` divides theta per pair (`freq_factors`). Normal pairs are adjacent channels, the others `n_dims / 2`
    apart, vision `n_dims` apart over the whole row. ROPE_BACK rotates in reverse: every angle is a multiple of the
    position.
    """
    positions = -positions if node.op == "ROPE_BACK" else positions
    n_dims, mode, offset = node.params.n_dims, node.params.mode, node.params.n_offs
    span = 2 * n_dims if mode == ROPE_TYPE.VISION else n_dims
    n_pairs = span // 2
    row = None if factors is None else factors.reshape(-1)
    cos, sin = (t[None, :, None] for t in _angles(node, positions.reshape(-1), row, n_pairs, exact=exact))
    part = x[..., offset : offset + span]
    if mode == ROPE_TYPE.NORMAL:
        left, right = part[..., 0::2], part[..., 1::2]
    else:
        left, right = part[..., :n_pairs], part[..., n_pairs:]
    cos, sin = (np.broadcast_to(t, left.shape) for t in (cos, sin))
    for at in blocks(left.shape):
        a, b, c, s = left[at], right[at], cos[at], sin[at]
        a[...], b[...] = a * c - b * s, a * s + b * c
    return x


def _rope(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    in_float64(partial(_turned, arithmetic.rope == "exact"))(arithmetic, node, dst, src)


def _rotates(node: Tensor) -> str:
    """Return the assertion of `ggml_compute_forward_rope_flt` that `node` breaks, or ""."""
    p, modes = node.params, list(ROPE_TYPE)
    if p.mode not in modes:
        return f"mode must be one of {', '.join(f'{m.value} ({m.name.lower()})' for m in modes)}; {p.mode} found"
    if p.mode & ROPE_TYPE.MROPE and sum(p.sections) <= 0:
        return f"sections must have a positive sum, {p.sections} found"
    if p.mode == ROPE_TYPE.VISION and 2 * p.n_dims != node.ne[0]:
        return f"n_dims must be ne[0] / 2 in vision mode, {p.n_dims} of {node.ne[0]} found"
    if p.n_dims <= 0 or p.n_dims % 2 or p.n_offs < 0 or p.n_offs + p.n_dims > node.ne[0]:
        return f"n_dims {p.n_dims} from offset {p.n_offs} must be even and lie within ne[0] = {node.ne[0]}"
    return ""


TABLE: Table = dict.fromkeys(("ROPE", "ROPE_BACK"), (Takes((FLOAT, ONLY_I32, ONLY_F32), FLOAT, _rotates), _rope))
