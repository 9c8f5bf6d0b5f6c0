"""Recipes in a case's document: written only where they give the very bytes, read only within limits."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, nbytes

from .case import JSON
from .recipe import Recipe, check, cost, digest, make
from .strictjson import Memory

_FIELDS: dict[str, tuple[type, ...]] = {
    "persistent": (int,), "stream": (str,), "tensor": (str,), "draw": (str,), "a": (int, float), "b": (int, float),
    "shared": (int,), "sha256": (str,),
}  # fmt: skip
"""Field -> JSON types."""
_LONGEST = 1024


def dump_recipe(recipe: Recipe, place: int, t: Tensor, data: Bytes) -> JSON:
    """The entry of persistent tensor number `place`; None where the recipe does not give `data`, which then stands."""
    try:
        made = make(recipe, t)
    except UsageError:
        return None
    if made.nbytes != data.nbytes or made.tobytes() != data.tobytes():
        return None
    return {
        "persistent": place,
        "stream": recipe.stream,
        "tensor": recipe.tensor,
        "draw": recipe.draw,
        "a": recipe.a,
        "b": recipe.b,
        "shared": recipe.shared,
        "sha256": digest(data),
    }


def load_recipes(
    entries: Sequence[JSON], tensors: Sequence[Tensor], memory: Memory
) -> dict[Tensor, tuple[Recipe, Bytes]]:
    """What `entries` say and make, by persistent tensor.

    Raises:
        CaseFileError: an entry is malformed, would take more than `memory` has, or makes other bytes than it says.
    """
    made: dict[Tensor, tuple[Recipe, Bytes]] = {}
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
        if t in made:
            raise CaseFileError(f"{where}.persistent", f"persistent[{entry['persistent']}] has a recipe already")
        recipe = _recipe(entry, t, where)
        memory.check(nbytes(t) + cost(t), where)
        memory.keep(nbytes(t), where)
        data = make(recipe, t)
        if digest(data) != entry["sha256"]:
            raise CaseFileError(f"{where}.sha256", f"the recipe of {t.name[:64]!a} makes other bytes than were saved")
        made[t] = recipe, data
    return made


def _recipe(entry: dict[str, JSON], t: Tensor, where: str) -> Recipe:
    try:
        recipe = Recipe(
            entry["stream"], entry["tensor"], entry["draw"], float(entry["a"]), float(entry["b"]), entry["shared"]
        )
        (entry["stream"] + entry["tensor"]).encode()
        check(recipe, t)
    except (OverflowError, UnicodeEncodeError) as e:
        raise CaseFileError(where, f"finite numbers and text in Unicode expected: {type(e).__name__}") from None
    except UsageError as e:
        raise CaseFileError(where, str(e)) from None
    return recipe
