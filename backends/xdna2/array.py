"""The array of AI engines as a kernel sees it: int8 in, int32 out, one loaded context per K, four of them at a time.

`dispatch` is the seam: a real XRT run of a compiled kernel goes there, and nothing else of this adapter would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

COLUMNS = 16
"""Columns of the array."""
CONTEXT_COLUMNS = 4
"""Columns that one context takes, so four contexts are loaded at most."""
MAX_SLOTS = 8
"""Kernels that can be prepared, one per K."""

LEAST_N = 16
"""Fewest activation rows that the array takes."""
DECODE_N = 64
"""TILE_N of the decode kernel."""
PREFILL_N = 256
"""TILE_N of the prefill kernel."""


def padded(n: int) -> int:
    """Rows that the array computes for `n` rows of activations: a decode tile cut to 16 or whole, or prefill tiles."""
    if n <= DECODE_N:
        return LEAST_N if n <= LEAST_N else DECODE_N
    return -(-n // PREFILL_N) * PREFILL_N


def tile(n: int) -> int:
    """TILE_N of the kernel that takes `n` rows of activations."""
    return DECODE_N if n <= DECODE_N else PREFILL_N


def dispatch(weights: NDArray[np.int8], activations: NDArray[np.int8]) -> NDArray[np.int32]:
    """`activations @ weights^T`, summed in int32: what one run of a kernel gives.

    A product of float64 is exact here: K at most 2^16 terms of at most 2^14 each stay far below 2^53, and K up to 2^17
    below int32.

    Args:
        weights: shape (m, k).
        activations: shape (n, k), n a multiple of the tile or `LEAST_N`.

    Returns:
        Shape (n, m).
    """
    out = np.zeros((len(activations), len(weights)), np.int32)
    filled = int(np.flatnonzero(activations.any(axis=1)).max(initial=-1)) + 1  # padding is zeros and stays so
    out[:filled] = activations[:filled].astype(np.float64) @ weights.astype(np.float64).T
    return out


@dataclass(slots=True)
class Array:
    """Which contexts are loaded, and what was done."""

    slots: Sequence[int]
    """K of each kernel."""
    loaded: list[int] = field(default_factory=list)
    """K of the loaded contexts, the one used last at the end."""
    switches: int = 0
    """How often a context had to make room for another."""
    runs: dict[str, int] = field(default_factory=dict)
    """`K=2048 TILE_N=64` -> runs."""
    rows: int = 0
    """Rows of activations asked for."""
    padding: int = 0
    """Rows computed beside those."""

    def run(self, weights: NDArray[np.int8], activations: NDArray[np.int8]) -> NDArray[np.int32]:
        """The product, padded to the tile on the way; the context of its K is loaded first where it is not."""
        n, k = activations.shape
        self._load(k)
        whole = padded(n)
        name = f"K={k} TILE_N={tile(n)}"
        self.runs[name] = self.runs.get(name, 0) + 1
        self.rows += n
        self.padding += whole - n
        rows = np.zeros((whole, k), np.int8)
        rows[:n] = activations
        return dispatch(weights, rows)[:n]

    def _load(self, k: int) -> None:
        if k in self.loaded:
            self.loaded.remove(k)
        elif len(self.loaded) == COLUMNS // CONTEXT_COLUMNS:
            self.loaded.pop(0)
            self.switches += 1
        self.loaded.append(k)
