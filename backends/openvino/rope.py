"""ROPE: normal, neox, mrope, imrope and vision, with YaRN, frequency factors and channels left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Type

from conformance.backend.plan import Emitter
from conformance.cgraph.tensor import Tensor

from .nodes import Constants, Value, reshape
from .sources import optional, src
from .walk import Walk

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40


@dataclass(frozen=True, slots=True)
class Angles:
    """What of a ROPE node decides its angles."""

    n_dims: int
    mode: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    sections: tuple[int, int, int, int]
    pairs: int

    @classmethod
    def of(cls, node: Tensor) -> Angles:
        """From op_params 1, 2, 4 to 14, as `ggml_rope_impl` writes them."""
        n_dims, mode = node.param_i32(1), node.param_i32(2)
        pairs = (int(node.ne[0]) if mode == VISION else n_dims) // 2
        a, b, c, d = (node.param_i32(i) for i in range(11, 15))
        base, scale, ext, attn, fast, slow = (node.param_f32(i) for i in range(5, 11))
        return cls(n_dims, mode, node.param_i32(4), base, scale, ext, attn, fast, slow, (a, b, c, d), pairs)

    def steps(self) -> list[tuple[int, int]]:
        """Per pair: which of the four positions it turns by, and how often the frequency was scaled."""
        if not self.mode & MROPE:
            return [(0, i) for i in range(self.pairs)]
        found, since = [], [0, 0, 0, 0]
        s0, s1, s2, _ = self.sections
        starts = [0, s0, s0 + s1, s0 + s1 + s2]
        for i in range(self.pairs):
            sector = i % sum(self.sections)
            if self.mode == VISION and sector in starts:
                # an empty section's start is another's too; ggml resets the first that matches
                since[starts.index(sector)] = i
            kind = self._kind(sector, starts)
            found.append((kind, i - since[kind]))
        return found

    def _kind(self, sector: int, starts: list[int]) -> int:
        if self.mode == IMROPE:
            kind = sector % 3
            return kind if sector < 3 * self.sections[kind] else 3
        return 3 if sector >= starts[3] else 2 if sector >= starts[2] else 1 if sector >= starts[1] else 0

    def yarn(self, i: int) -> float:
        """What pair `i`'s angle is multiplied with: `rope_yarn` of ggml, which is linear in the angle."""
        if self.ext_factor == 0.0:
            return self.freq_scale
        low, high = (self._corr_dim(b) for b in (self.beta_fast, self.beta_slow))
        low, high = max(0.0, _whole(math.floor, low)), min(self.n_dims - 1.0, _whole(math.ceil, high))
        ramp = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
        mix = ramp * self.ext_factor
        return self.freq_scale * (1.0 - mix) + mix

    def _corr_dim(self, beta: float) -> float:
        if self.n_ctx_orig <= 0:
            return -math.inf  # what logf(0) gives in ggml
        return self.n_dims * math.log(self.n_ctx_orig / (beta * 2 * math.pi)) / (2 * math.log(self.freq_base))

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied with."""
        return self.attn_factor * (1.0 + 0.1 * math.log(1.0 / self.freq_scale) if self.ext_factor else 1.0)

    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position, per pair."""
        power = np.array([n for _, n in self.steps()])
        yarn = np.array([self.yarn(i) for i in range(self.pairs)])
        return np.asarray(self.freq_base ** (-2.0 * power / self.n_dims) * yarn, np.float64)


def _whole(rounded: Callable[[float], int], x: float) -> float:
    return rounded(x) if math.isfinite(x) else x


def _channels(c: Constants, node: Tensor, pairs: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per channel of a row: its partner, its pair, and the direction it turns in: 1, -1, or 0 for one left alone."""
    mode, first = node.param_i32(2), 0 if node.param_i32(2) == VISION else node.param_i32(15)
    partner = np.arange(c.fixed(node.ne[0]))
    pair, sign = np.zeros_like(partner), np.zeros_like(partner)
    i = np.arange(pairs)
    a, b = (first + 2 * i, first + 2 * i + 1) if mode == NORMAL else (first + i, first + pairs + i)
    partner[a], partner[b] = b, a
    pair[a] = pair[b] = i
    sign[a], sign[b] = -1, 1
    return partner, pair, sign


def _theta(e: Walk, node: Tensor, angles: Angles, positions: Value, factors: Value | None) -> Value:
    """Radians per token and channel, shape (1, ne2, 1, ne0): negative where the sine is subtracted."""
    n, (_, pair, sign) = node.ne[2], _channels(e.c, node, angles.pairs)
    p: Value = o.convert(positions, Type.f32)
    if angles.mode & MROPE:
        kinds = np.array([k for k, _ in angles.steps()])[pair]
        rows = o.gather(reshape(e.c, p, (4, n)), o.constant(kinds), e.c.axis(0))
        p = reshape(e.c, o.transpose(rows, e.c.i64(1, 0)), (1, n, 1, len(pair)))
    else:
        p = reshape(e.c, p, (1, n, 1, 1))
    radians = (angles.frequencies()[pair] * sign).reshape(1, 1, 1, -1)
    if factors is None:
        return _reduced(e, p, radians / (2 * np.pi))
    ff = o.gather(factors, o.constant(pair), e.c.axis(3))
    return o.multiply(p, o.divide(o.constant(radians.astype(np.float32)), ff))


def _reduced(e: Walk, p: Value, turns: NDArray[np.float64]) -> Value:
    """2 pi times p * turns, less most of the whole turns, in which float32 would lose the fraction.

    `turns` is split in 6 bits, 6 bits and the rest, so that p up to 2^18 times the first two is exact.
    """
    parts, rest = [], turns - np.round(turns)
    for scale in (2.0**6, 2.0**12):
        parts.append(np.round(rest * scale) / scale)
        rest = rest - parts[-1]
    one = e.c.f32(1.0)
    whole, fine = (o.floor_mod(o.multiply(p, o.constant(x.astype(np.float32))), one) for x in parts)
    total = o.add(o.add(whole, fine), o.multiply(p, o.constant(rest.astype(np.float32))))
    return o.multiply(total, e.c.f32(2 * math.pi))


def _turns(e: Walk, node: Tensor, angles: Angles) -> tuple[Value, Value]:
    """Cosine and sine, shape (1, ne2, 1, ne0), shared between nodes of equal positions and parameters."""
    frequency_factors = optional(node, 2)
    positions, factors = e.number(src(node, 1)), frequency_factors and e.number(frequency_factors)
    key = (angles, int(node.ne[0]), node.param_i32(15), id(positions), id(factors))
    if (key, "cos") not in e.shared:
        theta, m = _theta(e, node, angles, positions, factors), angles.magnitude
        _, _, sign = _channels(e.c, node, angles.pairs)
        for name, f in (("cos", o.cos), ("sin", o.sin)):
            x = f(theta)
            if m != 1.0:
                x = o.multiply(x, o.constant(np.where(sign, m, 1.0).astype(np.float32)))
            e.shared[key, name] = x
        e.shared[key, "ids"] = (positions, factors)  # alive, so that no other value can have their ids
    return e.shared[key, "cos"], e.shared[key, "sin"]


def _rope(e: Walk, node: Tensor) -> None:
    """Each channel times its cosine, plus its partner times the signed sine."""
    x, angles = e.number(src(node, 0)), Angles.of(node)
    partner, _, _ = _channels(e.c, node, angles.pairs)
    cos, sin = _turns(e, node, angles)
    swapped = o.gather(x, o.constant(partner), e.c.axis(3))
    e.store(node, o.add(o.multiply(x, cos), o.multiply(swapped, sin)))


EMITTERS: dict[str, Emitter] = {"ROPE": _rope}
