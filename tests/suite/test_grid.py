"""The notation of case tables: which ids a grid stands for, in which order, and what of it can be read."""

from __future__ import annotations

import pytest

from conformance.suite.grid import grid, ids_of_rows, operands, points, shapes


def test_a_grid_is_every_combination() -> None:
    """The last axis changes fastest; `-` leaves a key out."""
    assert list(grid("A B", "f32", x=4, y="- 1")) == ["A-f32-x=4", "A-f32-x=4,y=1", "B-f32-x=4", "B-f32-x=4,y=1"]
    assert list(grid(differs="eps edge")) == ["differs=eps", "differs=edge"]
    assert list(grid("A B")) == ["A", "B"]
    assert list(grid("A", x="1 2", from_=3)) == ["A-x=1,from=3", "A-x=2,from=3"]


def test_values_have_parts() -> None:
    """Types are joined by `+`, numbers by `x`; texts of several keys stand as they are."""
    assert list(grid("A", operands("f32 f16", "i32"))) == ["A-f32+i32", "A-f16+i32"]
    assert list(grid("A", x=shapes("64", "1 3", "4"))) == ["A-x=64x1x4", "A-x=64x3x4"]
    assert list(grid("A", z=points("- x=1", "y=2,x=3"), u=5)) == ["A-u=5", "A-x=1,u=5", "A-y=2,x=3,u=5"]


def test_rows_pick_values() -> None:
    """A digit per part that has alternatives, to the base of 36."""
    letters = "0 1 2 3 4 5 6 7 8 9 10"
    assert list(grid("A B", "f32", x=shapes("1 2", "3", letters)).rows("01a 110")) == [
        "A-f32-x=2x3x10",
        "B-f32-x=2x3x0",
    ]


def test_axes_can_be_read() -> None:
    """Each has a name and its values; the text of a grid tells it from all others."""
    example = grid("A", "f32 f16", x=shapes("1 2", "3"), layout=points("- va=pad"))
    assert [(axis.name, axis.values) for axis in (*example.heads, *example.axes)] == [
        ("what", ("A",)),
        ("types", ("f32", "f16")),
        ("x", ("1x3", "2x3")),
        ("layout", ("", "va=pad")),
    ]
    assert str(example) == "what: A; types: f32 f16; x: 1 2 x 3; layout: - va=pad"


def test_a_row_is_an_id_or_a_grid() -> None:
    """In their order."""
    assert list(ids_of_rows(("A-x=1", grid("B", x="2 3")))) == ["A-x=1", "B-x=2", "B-x=3"]


def test_a_grid_of_no_id_is_an_error() -> None:
    """So is one of more heads than an id has."""
    with pytest.raises(ValueError, match="x: at least one value"):
        grid("A", x="")
    with pytest.raises(ValueError, match="zip"):
        grid("A", "f32", "f16")
