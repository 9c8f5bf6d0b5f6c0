"""Random numbers with equal bytes on any machine: one stream per (case id, tensor name).

A stream is SplitMix64 (Steele, Lea, Flood 2014: `mix(key + i * golden)`) keyed by BLAKE2b of the two texts, so it does
not depend on any library's algorithm. Everything above the 64-bit words is integer arithmetic or one correctly rounded
IEEE operation per step: no libm, no fused multiply-add.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError

T = TypeVar("T", bound=np.generic)
F32Array = NDArray[np.float32]
Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_S16, _S27, _S30, _S31 = (np.uint64(s) for s in (16, 27, 30, 31))
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

_TABLE = 1 << 14
_COUNTER: Words = np.arange(1, _TABLE + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
"""`i * golden` of the first counters, for batches of words that fit a core's cache."""

_IRWIN_HALL_MEAN = np.float32(131070.0)
_IRWIN_HALL_UNIT = np.float32(1.0 / 37837.22537)
"""Mean `4 * 65535 / 2` and 1 / deviation of the sum of four 16-bit integers.

The latter is `1 / sqrt(4 * (2**32 - 1) / 12)`."""


def _parts(x: NDArray[T], most: int = _TABLE) -> Iterator[NDArray[T]]:
    """Yield consecutive views of a flat `x`, of at most `most` elements each."""
    return (x[i : i + most] for i in range(0, x.size, most))


class Stream:
    """Random words of one tensor of one case; each draw continues after the last one."""

    __slots__ = ("_key",)

    def __init__(self, case: str, tensor: str = "") -> None:
        digest = hashlib.blake2b(f"{len(case)} {case} {tensor}".encode(), digest_size=8).digest()
        self._key: int = struct.unpack("<Q", digest)[0]

    def words(self, n: int) -> Words:
        """Draw `n` uniform 64-bit words."""
        out = np.empty(n, np.uint64)
        spare = np.empty(min(n, _TABLE), np.uint64)
        for part in _parts(out):
            self._draw(part, spare[: part.size])
        return out

    def _draw(self, x: Words, spare: Words) -> None:
        """Fill `x` with at most `_TABLE` words; `spare` has its size."""
        np.add(_COUNTER[: x.size], np.uint64(self._key), out=x)
        self._key = (self._key + x.size * _GOLDEN) & _MASK
        for shift, factor in ((_S30, _MIX1), (_S27, _MIX2)):
            x ^= np.right_shift(x, shift, out=spare)
            x *= factor
        x ^= np.right_shift(x, _S31, out=spare)

    def words32(self, n: int) -> NDArray[np.uint32]:
        """Draw `n` uniform 32-bit words, the low half of each 64-bit word first."""
        return self.words((n + 1) // 2).astype("<u8", copy=False).view("<u4")[:n]

    def bytes(self, n: int) -> NDArray[np.uint8]:
        """Draw `n` uniform bytes."""
        return self.words((n + 7) // 8).astype("<u8", copy=False).view(np.uint8)[:n]

    def unit(self, n: int) -> F32Array:
        """Draw `n` float32 in [0, 1), multiples of 2**-24."""
        out = np.empty(n, np.float32)
        for part in _parts(out, 2 * _TABLE):
            part[...] = _unit(self.words32(part.size))
        return out

    def uniform(self, n: int, lo: float, hi: float) -> F32Array:
        """Draw `n` float32 in [lo, hi]."""
        return _scaled(self.unit(n), hi - lo, lo)

    def normal(self, n: int, scale: float = 1.0, mean: float = 0.0) -> F32Array:
        """Draw `n` float32 with deviation `scale`: Irwin-Hall of four, within 3.47 `scale`."""
        out = np.empty(n, np.float32)
        words, spare = np.empty((2, min(n, _TABLE)), "<u8")
        for part in _parts(out):
            x, pairs = words[: part.size], spare[: part.size]
            self._draw(x, pairs)
            np.right_shift(x, _S16, out=pairs)
            pairs &= _PAIRS
            x &= _PAIRS
            pairs += x
            halves = pairs.view("<u4").reshape(-1, 2)
            part[...] = np.add(halves[:, 0], halves[:, 1], out=x.view("<u4")[: part.size])
            np.subtract(part, _IRWIN_HALL_MEAN, out=part)
            np.multiply(part, _IRWIN_HALL_UNIT, out=part)
            if scale != 1.0:
                np.multiply(part, np.float32(scale), out=part)
            if mean != 0.0:
                np.add(part, np.float32(mean), out=part)
        return out

    def away_from_zero(self, n: int, lo: float, hi: float) -> F32Array:
        """Draw `n` float32 of either sign with magnitude in [lo, hi], for divisors."""
        x = self.words32(n)
        out = _scaled(_unit(x), hi - lo, lo)
        np.negative(out, out=out, where=(x & np.uint32(1)).astype(np.bool_))
        return out

    def integers(self, n: int, lo: int, hi: int) -> NDArray[np.int64]:
        """Draw `n` integers in [lo, hi) by multiply and shift; `hi - lo` is at most 2**32."""
        if not 0 < hi - lo <= 2**32:
            raise UsageError(f"integers: 0 < hi - lo <= 2**32 expected, lo={lo} and hi={hi} found")
        x = self.words32(n).astype(np.uint64)
        return ((x * np.uint64(hi - lo)) >> np.uint64(32)).astype(np.int64) + lo

    def permutations(self, rows: int, n: int) -> NDArray[np.int64]:
        """Draw `rows` independent permutations of 0..n-1, shape (rows, n)."""
        return np.argsort(self.words(rows * n).reshape(rows, n), axis=1, kind="stable")

    def distinct(self, rows: int, n: int, lo: float, hi: float) -> F32Array:
        """Draw float32 (rows, n) in [lo, hi); values of a row differ by (hi - lo) / n / 2 or more."""
        x = self.permutations(rows, n).astype(np.float32)
        x += self.unit(rows * n).reshape(rows, n) * np.float32(0.5)
        return _scaled(x, (hi - lo) / n, lo)

    def choice(self, rows: int, n: int, k: int) -> NDArray[np.int64]:
        """Draw `k` distinct numbers of 0..n-1 in random order per row, shape (rows, k)."""
        if k > n:
            raise UsageError(f"choice: {k} distinct numbers of {n} requested")
        return self.permutations(rows, n)[:, :k]

    def sprinkle(self, x: NDArray[Any], values: Sequence[float]) -> None:
        """Overwrite about one in 8 elements of the flat array `x` with `values` in turn, in place."""
        count = max(min(len(values), x.size), x.size // 8)
        places = np.sort(self.permutations(1, x.size)[0, :count])
        x[places] = np.resize(np.asarray(values, dtype=x.dtype), count)


def _unit(words: NDArray[np.uint32]) -> F32Array:
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def _scaled(x: F32Array, times: float, plus: float) -> F32Array:
    x *= np.float32(times)
    x += np.float32(plus)
    return x
