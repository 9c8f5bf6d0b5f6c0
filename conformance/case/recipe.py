"""Recipes: a persistent tensor's bytes as a seeded stream instead of data.

A case file with recipes in place of weights is small, and still exact: the stream (`streams`) and the rounding to the
tensor's type (`quants`) are the same on any machine, and a digest beside the recipe verifies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import numpy as np

from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.quants import from_float
from conformance.ggml.tensor import Bytes, Tensor, nbytes, nelements

from .streams import F32Array, Stream
from .strict import JSON, Memory

MAX_BYTES = 1 << 30
"""Maximum bytes for the recipes of a file, including working memory for one of them."""

MAKEABLE = frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_K", "q5_K", "q6_K", "mxfp4"})
"""Types to which recipe values can be rounded."""
_LIMIT = 2.0**64


@dataclass(frozen=True, slots=True)
class Recipe:
    """Values of one tensor: drawn as F32 in element order, then rounded to its type."""

    stream: str
    """First text of `Stream`: the case."""
    tensor: str
    """Second text of `Stream`: the tensor."""
    draw: str
    """Key of `DRAWS`."""
    a: float
    b: float
    """Parameters of the draw, with `a`."""
    shared: int = 0
    """Number of leading elements of each row that equal those of the first row."""


DRAWS: dict[str, Callable[[Stream, int, float, float], F32Array]] = {
    "normal": lambda s, n, mean, deviation: s.normal(n, deviation, mean),
    "uniform": lambda s, n, lo, hi: s.uniform(n, lo, hi),
    "away_from_zero": lambda s, n, lo, hi: s.away_from_zero(n, lo, hi),
}
"""Name -> a draw of `n` values with parameters `a` and `b`."""


def check(recipe: Recipe, t: Tensor) -> None:
    """Raise UsageError if `recipe` cannot generate `t`."""
    if recipe.draw not in DRAWS:
        raise UsageError(f"draw: one of {', '.join(DRAWS)} expected, {recipe.draw[:40]!a} found")
    if not all(math.isfinite(x) and abs(x) <= _LIMIT for x in (recipe.a, recipe.b)):
        raise UsageError(f"parameters of magnitude up to 2**64 expected, {recipe.a} and {recipe.b} found")
    if t.type.name not in MAKEABLE:
        raise UsageError(f"a type of {', '.join(sorted(MAKEABLE))} expected, {t.type} found")
    if not 0 <= recipe.shared <= t.ne[0]:
        raise UsageError(f"shared: 0 to {t.ne[0]} elements of a row expected, {recipe.shared} found")


def make(recipe: Recipe, t: Tensor) -> Bytes:
    """Generate the bytes of `t`; UsageError if the recipe does not fit it."""
    check(recipe, t)
    values = DRAWS[recipe.draw](Stream(recipe.stream, recipe.tensor), nelements(t), recipe.a, recipe.b)
    if recipe.shared:
        rows = values.reshape(-1, t.ne[0])
        rows[:, : recipe.shared] = rows[0, : recipe.shared]
    if t.type.name == "f32":
        return values.astype("<f4", copy=False).view(np.uint8)
    return from_float(t.type, values).view(np.uint8).reshape(-1)


def digest(data: Bytes) -> str:
    """Return the hexadecimal SHA-256 of a recipe's bytes, stored in case files beside it."""
    return sha256(data.data).hexdigest()


_FIELDS: dict[str, tuple[type, ...]] = {
    "persistent": (int,), "stream": (str,), "tensor": (str,), "draw": (str,), "a": (int, float), "b": (int, float),
    "shared": (int,), "sha256": (str,),
}  # fmt: skip
"""Field -> JSON types."""
_COST = 24
"""Working memory for generating a tensor, in bytes per element."""
_LONGEST = 1024


def dump_recipe(recipe: Recipe, place: int, t: Tensor, data: Bytes) -> JSON:
    """Encode the recipe of persistent tensor `place`; None if it does not give exactly `data`."""
    try:
        values = make(recipe, t)
    except UsageError:
        return None
    if values.nbytes != data.nbytes or values.tobytes() != data.tobytes():
        return None
    return {"persistent": place, **asdict(recipe), "sha256": digest(data)}


def load_recipes(
    entries: Sequence[JSON], tensors: Sequence[Tensor], memory: Memory
) -> dict[Tensor, tuple[Recipe, Bytes]]:
    """Decode entries: persistent tensor -> recipe and bytes.

    CaseFileError if an entry is malformed, exceeds `memory`, or its bytes do not match its digest.
    """
    recipes: dict[Tensor, tuple[Recipe, Bytes]] = {}
    for i, entry in enumerate(entries):
        where = f"recipes[{i}]"
        if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
            raise CaseFileError(where, f"an object of {', '.join(_FIELDS)} expected, something else found")
        for key, kinds in _FIELDS.items():
            if type(entry[key]) not in kinds or (type(entry[key]) is str and len(entry[key]) > _LONGEST):
                words = " or ".join(kind.__name__ for kind in kinds)
                raise CaseFileError(f"{where}.{key}", f"{words} of at most {_LONGEST} characters expected")
        if not 0 <= entry["persistent"] < len(tensors):
            raise CaseFileError(f"{where}.persistent", f"the number of one of {len(tensors)} tensors expected")
        t = tensors[entry["persistent"]]
        if t in recipes:
            raise CaseFileError(f"{where}.persistent", f"persistent[{entry['persistent']}] has a recipe already")
        recipe = Recipe(**{key: value for key, value in entry.items() if key not in {"persistent", "sha256"}})
        try:
            recipe = replace(recipe, a=float(recipe.a), b=float(recipe.b))
            (recipe.stream + recipe.tensor).encode()
            check(recipe, t)
        except (OverflowError, UnicodeEncodeError) as e:
            raise CaseFileError(where, f"finite numbers and text in Unicode expected: {type(e).__name__}") from None
        except UsageError as e:
            raise CaseFileError(where, str(e)) from None
        memory.check(nbytes(t) + _COST * nelements(t), where)
        memory.keep(nbytes(t), where)
        data = make(recipe, t)
        if digest(data) != entry["sha256"]:
            raise CaseFileError(f"{where}.sha256", f"the recipe of {t.name[:64]!a} gives other bytes than were saved")
        recipes[t] = recipe, data
    return recipes
