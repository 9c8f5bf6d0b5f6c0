"""How the bytes of a persistent tensor are made, where they are made and not measured: a seeded stream, no bytes.

A case file with a recipe in place of a weight is small, and still exact: the stream is the same on any machine
(`streams`), so is the rounding to the tensor's type (`quants`), and a digest beside the recipe proves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.ggml.quants import from_float
from conformance.ggml.tensor import Bytes, Tensor, nelements

from .streams import F32Array, Stream

MAX_BYTES = 1 << 30
"""Bytes of tensors, and of what making one of them takes on the way, that the recipes of one file may ask for."""

MAKEABLE = frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_K", "q5_K", "q6_K", "mxfp4"})
"""Types that a recipe's values are rounded to."""
_LIMIT = 2.0**64


@dataclass(frozen=True, slots=True)
class Recipe:
    """Values of one tensor: drawn as F32 in the order of its elements, then rounded to its type."""

    stream: str
    """First text of `Stream`: the case."""
    tensor: str
    """Second text of `Stream`: the tensor."""
    draw: str
    """Key of `DRAWS`."""
    a: float
    b: float
    """Its parameters."""
    shared: int = 0
    """This many leading elements of each row are those of the first row."""


DRAWS: dict[str, Callable[[Stream, int, float, float], F32Array]] = {
    "normal": lambda s, n, mean, deviation: s.normal(n, deviation, mean),
    "uniform": lambda s, n, lo, hi: s.uniform(n, lo, hi),
    "away_from_zero": lambda s, n, lo, hi: s.away_from_zero(n, lo, hi),
}
"""Name -> a draw of `n` values with parameters `a` and `b`."""


def check(recipe: Recipe, t: Tensor) -> None:
    """Whether `recipe` can make `t`.

    Raises:
        UsageError: says what does not fit.
    """
    if recipe.draw not in DRAWS:
        raise UsageError(f"draw: one of {', '.join(DRAWS)} expected, {recipe.draw[:40]!a} found")
    if not all(math.isfinite(x) and abs(x) <= _LIMIT for x in (recipe.a, recipe.b)):
        raise UsageError(f"parameters of magnitude up to 2**64 expected, {recipe.a} and {recipe.b} found")
    if t.type.name not in MAKEABLE:
        raise UsageError(f"a type of {', '.join(sorted(MAKEABLE))} expected, {t.type} found")
    if not 0 <= recipe.shared <= t.ne[0]:
        raise UsageError(f"shared: 0 to {t.ne[0]} elements of a row expected, {recipe.shared} found")


def make(recipe: Recipe, t: Tensor) -> Bytes:
    """The bytes of `t`.

    Raises:
        UsageError: the recipe does not fit `t`.
    """
    check(recipe, t)
    values = DRAWS[recipe.draw](Stream(recipe.stream, recipe.tensor), nelements(t), recipe.a, recipe.b)
    if recipe.shared:
        rows = values.reshape(-1, t.ne[0])
        rows[:, : recipe.shared] = rows[0, : recipe.shared]
    if t.type.name == "f32":
        return values.astype("<f4", copy=False).view(np.uint8)
    return from_float(t.type, values).view(np.uint8).reshape(-1)


def cost(t: Tensor) -> int:
    """Bytes that making `t` takes on the way, beside its own."""
    return 24 * nelements(t)


def digest(data: Bytes) -> str:
    """What stands beside a recipe: SHA-256 of the bytes it makes, in hexadecimal."""
    return sha256(data.data).hexdigest()
