"""Ways `quantize-TYPE`: `ggml_quantize_chunk`, with and without an importance matrix.

Values are compared as `to_float` of the bytes, since ggml leaves bytes of empty blocks unwritten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.library import Library
from conformance.ggml.quants import from_float, to_float
from conformance.ggml.quants.write import WRITE
from conformance.ggml.types import TYPES, GGMLType
from conformance.llama.live.ways import Mismatch, bound

QUANTIZE = "quantize-"
NMSE: Mapping[str, float] = {
    "q1_0": 0.362, "q2_0": 0.554, "q4_0": 0.0075, "q4_1": 0.0067, "q5_0": 0.002, "q5_1": 0.0015, "q8_0": 3e-5,
    "q2_K": 0.087, "q3_K": 0.0227, "q4_K": 0.0056, "q5_K": 0.00135, "q6_K": 3.3e-4, "tq1_0": 0.683, "tq2_0": 0.683,
    "iq1_s": 0.279, "iq1_m": 0.342, "iq2_xxs": 0.128, "iq2_xs": 0.095, "iq2_s": 0.068, "iq3_xxs": 0.044,
    "iq3_s": 0.029, "iq4_nl": 0.0058, "iq4_xs": 0.0058, "mxfp4": 0.0137, "nvfp4": 0.0093,
}  # fmt: skip
"""Type -> NMSE of normal values in ggml 0.26.0, with or without importance matrix."""
MARGIN = 1.25
"""Largest factor of `NMSE`."""
OTHER_TRIES = frozenset({"iq4_nl"})
"""Types whose `ggml_quantize_chunk` looks for a better scale than `from_float_ref`."""
WAYS = tuple(QUANTIZE + name for name in NMSE)
ROWS, WIDTH = 3, 256
GUARD = 64
"""Bytes behind the last row, which must not be written."""

F32 = NDArray[np.float32]
_P, _I64 = ctypes.c_void_p, ctypes.c_int64


def _sparse(x: F32) -> F32:
    """Set groups of 8 to 256 values to 0 or to almost nothing."""
    out = x.copy()
    for k, size in enumerate((8, 16, 32, 64, 128)):
        out[k % ROWS].reshape(-1, size)[k % 2 :: 2] *= np.float32(0 if k % 3 else 1e-20)
    return out


DATA: Mapping[str, Callable[[F32], F32]] = {
    "normal": lambda x: x,
    "large": lambda x: x * np.float32(8),
    "small": lambda x: x / np.float32(8),
    "sparse": _sparse,
    "one": np.ones_like,
    "negative": lambda x: -np.abs(x),
    "single": lambda x: x * (np.arange(WIDTH) == WIDTH - 1),
    "tiny": lambda x: x * np.float32(1e-25),
    "zeros": np.zeros_like,
}
"""Name -> values, made of normal ones."""
JUDGED = ("normal", "large", "small")
"""Values whose error is that of normal ones."""


class Quantiser:
    """`ggml_quantize_chunk` of one type."""

    def __init__(self, library: Library, type_: GGMLType) -> None:
        """Find the functions; UnavailableError if the library lacks them, or the type."""
        if reason := library.lacks(type_):
            raise UnavailableError(reason)
        self.type, self._id = type_, library.types[type_.name]
        kinds = ctypes.c_int, _P, _P, *(_I64,) * 3, _P
        self._quantize = bound(library, "ggml_quantize_chunk", ctypes.c_size_t, *kinds)
        self._requires = bound(library, "ggml_quantize_requires_imatrix", ctypes.c_bool, ctypes.c_int)
        self.row = WIDTH // type_.blck_size * type_.type_size
        """Bytes of a row."""

    @property
    def needs_weights(self) -> bool:
        """True if the type needs an importance matrix."""
        return bool(self._requires(self._id))

    def __call__(self, x: F32, weights: F32 | None, what: str, *, before: int = 0xA5, chunk: int = ROWS) -> F32:
        """Return the values of quantised rows; Mismatch for a wrong size or a byte behind the end.

        `before`: byte of the memory before. `chunk`: rows of a call.
        """
        room = np.full(ROWS * self.row + GUARD, before, np.uint8)
        x = np.ascontiguousarray(x, np.float32)
        for start in range(0, ROWS, chunk):
            given = None if weights is None else weights.ctypes.data
            size = self._quantize(self._id, x.ctypes.data, room.ctypes.data, start * WIDTH, chunk, WIDTH, given)
            if size != chunk * self.row:
                raise Mismatch(f"{what}: {chunk * self.row} bytes expected, {size} returned")
        if (room[-GUARD:] != before).any():
            raise Mismatch(f"{what}: bytes behind the last row were written")
        return to_float(self.type, room[:-GUARD].reshape(ROWS, -1, self.type.type_size)).reshape(ROWS, WIDTH)


def play(library: Library, way: str, seed: int) -> None:
    """Quantise all kinds of values."""
    type_ = TYPES[way.removeprefix(QUANTIZE)]
    quantiser = Quantiser(library, type_)
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    weights = np.abs(random.standard_normal(WIDTH)).astype(np.float32) + np.float32(0.1)
    some = weights * (np.arange(WIDTH) // 32 % 2 == 0)
    for name, make in DATA.items():
        for given, how in ((None, "without"), (weights, "with"), (some, "with zeros in")):
            if given is not None or not quantiser.needs_weights:
                what = f"{name} values as {type_} {how} an importance matrix"
                _check(quantiser, make(x).astype(np.float32), given, what, judged=name in JUDGED and given is not some)


def _check(quantiser: Quantiser, x: F32, weights: F32 | None, what: str, *, judged: bool) -> None:
    type_ = quantiser.type
    found = quantiser(x, weights, what)
    if not np.isfinite(found).all():
        raise Mismatch(f"{what}: {int((~np.isfinite(found)).sum())} values are not finite")
    quantiser(np.flip(x) + np.float32(1), weights, what)  # other values, which may stay in memory
    for how, other in (
        ("again, over other bytes", quantiser(x, weights, what, before=0x5A)),
        ("row by row", quantiser(x, weights, what, chunk=1)),
    ):
        _same(other, found, f"{what}, {how}")
    if weights is None and type_ in WRITE and type_.name not in OTHER_TRIES:
        _same(found, to_float(type_, from_float(type_, x)).reshape(x.shape), what)
    if not x.any():
        _same(found, x, what)
    if judged:
        error = float(((found - x).astype(np.float64) ** 2).mean() / (x.astype(np.float64) ** 2).mean())
        if error > MARGIN * NMSE[type_.name]:
            raise Mismatch(f"{what}: an NMSE of {error:.2g}, at most {MARGIN * NMSE[type_.name]:.2g} expected")


def _same(found: F32, expected: F32, what: str) -> None:
    wrong = np.flatnonzero(found.ravel() != expected.ravel())
    if wrong.size:
        at = int(wrong[0])
        raise Mismatch(
            f"{what}: {wrong.size} values differ, {expected.ravel()[at]:.6g} expected at {at}, "
            f"{found.ravel()[at]:.6g} found"
        )
