"""Covering arrays: few rows that contain every combination of values of some axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product

from conformance.case.streams import Stream

Row = tuple[int, ...]
"""Index of a value per axis."""
Cell = tuple[tuple[int, int], ...]
"""Axes, by their position in a row, and a value of each."""
TRIES = 400
"""Number of completions to try; the legal one with most missing cells becomes a row.

If there is none, the cell is impossible."""


def cells(sizes: Sequence[int], axes: Iterable[Sequence[int]]) -> dict[Cell, None]:
    """Return each combination of values of each combination of axes."""
    return {
        tuple(zip(each, values, strict=True)): None
        for each in axes
        for values in product(*(range(sizes[i]) for i in each))
    }


def shown(row: Row, axes: Iterable[Sequence[int]]) -> set[Cell]:
    """Return the cells of a row."""
    return {tuple((i, row[i]) for i in each) for each in axes}


def completions(sizes: Sequence[int], name: str, cell: Cell, tries: int = TRIES) -> list[Row]:
    """Return rows that contain `cell`; always the same for the same `name`."""
    given = dict(cell)
    words = Stream(name, str(tuple(chain.from_iterable(cell)))).words(tries * len(sizes)).reshape(tries, -1).tolist()
    rows = ([0] * len(sizes), *([int(w) % n for w, n in zip(ws, sizes, strict=True)] for ws in words))
    return [tuple(given.get(i, part) for i, part in enumerate(row)) for row in rows]


def cover(
    sizes: Sequence[int],
    axes: Sequence[Sequence[int]],
    name: str,
    legal: Callable[[Row], bool] = lambda _: True,
    tries: int = TRIES,
) -> list[Row]:
    """Return legal rows that contain every cell of which a tried completion is legal."""
    missing = cells(sizes, axes)
    rows: list[Row] = []
    while missing:
        cell = next(iter(missing))
        ranked = sorted(completions(sizes, name, cell, tries), key=lambda row: -len(shown(row, axes) & missing.keys()))
        row = next(filter(legal, ranked), None)
        if row is None:  # nor is there one for what holds it
            missing = {each: None for each in missing if not set(cell) <= set(each)}
        else:
            seen = shown(row, axes)
            missing = {each: None for each in missing if each not in seen}
        rows += [] if row is None else [row]
    return rows
