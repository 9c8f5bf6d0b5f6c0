"""Recipes: bytes that are made again and not stored, from files that may be a stranger's."""

from __future__ import annotations

import copy
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.case import casefile, codec
from conformance.case.case import JSON, Case, Step
from conformance.case.recipe import DRAWS, MAKEABLE, MAX_BYTES, Recipe, check, make
from conformance.case.strict import Memory
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, new_tensor
from conformance.ggml.types import F32, TYPES, GGMLType

NORMAL = Recipe("case", "w", "normal", 0.0, 1.0)


def made_case(type_: GGMLType = F32, recipe: Recipe = NORMAL) -> Case:
    """A case that multiplies one made weight with an input."""
    w, x = new_tensor(type_, 256, 3, name="w"), new_tensor(F32, 256, 2, name="x")
    y = Builder().mul_mat(w, x)
    y.flags = 16
    ones = np.ones(512, np.float32).view(np.uint8)
    return Case("f/x@0", {w: make(recipe, w)}, [Step(Graph([y]), {x: ones}, (y,))], recipes={w: recipe})


@pytest.mark.parametrize("name", sorted(MAKEABLE))
@pytest.mark.parametrize("draw", sorted(DRAWS))
def test_round_trip(tmp_path: Path, name: str, draw: str) -> None:
    """A file with a recipe holds no weight, and gives the same bytes and the same recipe."""
    recipe = Recipe("case", "w", draw, 0.25, 0.5, shared=256 // 2)
    case = made_case(TYPES[name], recipe)
    casefile.write(tmp_path / "a.gguf", case)
    doc, blobs = codec.dump(case)
    assert "p0" not in blobs
    assert len(doc["recipes"]) == 1
    read = casefile.read_one(tmp_path / "a.gguf")
    (found,), (data,) = read.recipes.values(), read.persistent.values()
    assert found == recipe
    assert data.tobytes() == next(iter(case.persistent.values())).tobytes()


def test_bytes_that_the_recipe_does_not_give_are_stored(tmp_path: Path) -> None:
    """A weight that was changed after it was made travels as it is, without its recipe."""
    case = made_case()
    (w,) = case.persistent
    case.persistent[w] = case.persistent[w].copy()
    case.persistent[w][0] ^= 1
    casefile.write(tmp_path / "a.gguf", case)
    read = casefile.read_one(tmp_path / "a.gguf")
    assert not read.recipes
    assert next(iter(read.persistent.values())).tobytes() == case.persistent[w].tobytes()


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 4), shared=st.integers(0, 8), a=st.floats(-4, 4), b=st.floats(0, 4))
def test_shared_elements_are_the_first_row_s(rows: int, shared: int, a: float, b: float) -> None:
    """The leading elements of each row are those of the first; the others are what they are without sharing."""
    t = new_tensor(F32, 8, rows)
    plain = make(Recipe("c", "t", "normal", a, b), t).view(np.float32).reshape(rows, 8)
    values = make(Recipe("c", "t", "normal", a, b, shared), t).view(np.float32).reshape(rows, 8)
    assert (values[:, :shared] == plain[0, :shared]).all()
    assert (values[:, shared:] == plain[:, shared:]).all()


def _entry(**changes: JSON) -> tuple[dict[str, JSON], dict[str, Bytes]]:
    doc, blobs = codec.dump(made_case())
    doc = copy.deepcopy(doc)
    doc["recipes"][0].update(changes)
    return doc, blobs


HOSTILE: dict[str, tuple[dict[str, JSON], str]] = {
    "digest": ({"sha256": "0" * 64}, "recipes[0].sha256"),
    "draw": ({"draw": "eval"}, "recipes[0]"),
    "draw type": ({"draw": 3}, "recipes[0].draw"),
    "infinite": ({"a": 1e300}, "recipes[0]"),
    "huge integer": ({"b": 10**400}, "recipes[0]"),
    "flag for a number": ({"a": True}, "recipes[0].a"),
    "place": ({"persistent": 1}, "recipes[0].persistent"),
    "negative place": ({"persistent": -1}, "recipes[0].persistent"),
    "shared": ({"shared": 257}, "recipes[0]"),
    "long text": ({"stream": "x" * 5000}, "recipes[0].stream"),
    "surrogate": ({"tensor": "\ud800"}, "recipes[0]"),
    "more": ({"path": "/etc/passwd"}, "recipes[0]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_field_is_checked(name: str) -> None:
    """One wrong field gives one error that names it."""
    changes, where = HOSTILE[name]
    doc, blobs = _entry(**changes)
    with pytest.raises(CaseFileError) as e:
        codec.load(doc, blobs)
    assert e.value.field == where
    assert str(e.value).isprintable()


def test_two_recipes_of_one_tensor_are_refused() -> None:
    """A tensor has one recipe."""
    doc, blobs = _entry()
    doc["recipes"] *= 2
    with pytest.raises(CaseFileError, match="already"):
        codec.load(doc, blobs)


def test_what_recipes_take_is_limited() -> None:
    """A document of a few bytes that asks for more than the cap is refused at once, before anything is made."""
    doc, blobs = _entry()
    doc["persistent"][0]["ne"] = [1 << 20, 1 << 12]
    tracemalloc.start()
    try:
        with pytest.raises(CaseFileError, match="memory") as e:
            codec.load(doc, blobs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert e.value.field == "recipes[0]"
    assert peak < 1 << 20


def test_recipes_of_a_file_count_together() -> None:
    """What one recipe took is gone for the next."""
    doc, blobs = _entry()
    with pytest.raises(CaseFileError, match="memory"):
        codec.load_head({k: v for k, v in doc.items() if k != "steps"}, blobs, Memory(MAX_BYTES, MAX_BYTES - 3000))


@pytest.mark.parametrize("recipe", [Recipe("c", "t", "normal", math.nan, 1.0), Recipe("c", "t", "no", 0.0, 1.0)])
def test_check_refuses(recipe: Recipe) -> None:
    """What cannot be made is refused by name."""
    with pytest.raises(UsageError):
        check(recipe, new_tensor(F32, 8))
