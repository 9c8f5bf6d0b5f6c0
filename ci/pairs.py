"""Writes `conformance/suite/ops/pairs.json`: covering arrays of the tables' grids.

Run `python ci/pairs.py` after adding a grid; grids that are in the file keep their rows, so their cases stay the same.
A grid that no table has any more is an error, because its cases would be lost.
A row is used only if ggml accepts its graph, which is known once the graph is built. So packages for covering arrays
(allpairspy, covertable) do not fit: their constraints judge parts of a row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import combinations

from conformance.ggml.errors import ConformanceError
from conformance.suite.covering import Row, cover
from conformance.suite.family import with_seed
from conformance.suite.grid import DIGITS, Grid
from conformance.suite.ops import NAME, PAIRS, build, grids, size
from conformance.suite.ops.dispatch import LARGEST


def axes_of(grid: Grid) -> list[tuple[int, ...]]:
    """Return positions whose values are combined: each two, or three if the grid says so."""
    triples = [tuple(i for i, name in enumerate(grid.digits) if name in names) for names in grid.triples]
    return [*combinations(range(len(grid.sizes)), 2), *triples]


def values_first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, first those with values of single axes that no earlier row has."""
    left, ordered = list(rows), list[Row]()
    unseen = {value for row in rows for value in enumerate(row)}
    while unseen:
        row = max(left, key=lambda row: len(unseen & set(enumerate(row))))
        unseen -= set(enumerate(row))
        left.remove(row)
        ordered.append(row)
    return ordered + left


def text(row: Row) -> str:
    """Format a row as in the file, one digit per axis."""
    return "".join(DIGITS[part] for part in row)


def is_small(grid: Grid, row: Row) -> bool:
    """Return True if the shapes in the id of a row do not have too many elements."""
    return size(with_seed(NAME, next(grid.rows(text(row))))) <= LARGEST


def is_legal(grid: Grid, row: Row) -> bool:
    """Return True if a row is small enough, and ggml accepts its graph."""
    try:
        if not is_small(grid, row):
            return False
        build(with_seed(NAME, next(grid.rows(text(row))))).validate()
    except ConformanceError:
        return False
    return True


def main() -> None:
    """Write the file again; grids that are already in it keep their rows.

    SystemExit, before anything is computed, if the tables lack a grid of the file.
    """
    kept = json.loads(PAIRS.read_text(encoding="ascii")) if PAIRS.is_file() else {}
    table = {str(grid): grid for grid in grids()}
    if lost := [name for name in kept if name not in table]:
        raise SystemExit(
            f"no table has the grid {lost[0]!r} any more, so {len(kept[lost[0]].split())} cases would be lost: leave "
            "it as it was, and give new ops, types and values a grid of their own"
        )
    for name, grid in table.items():
        if name not in kept:
            rows = values_first(cover(grid.sizes, axes_of(grid), name, cache(partial(is_legal, grid))))
            kept[name] = " ".join(map(text, rows))
            print(f"{len(rows)} rows of {name}", flush=True)
        _write(kept)
    _write({name: kept[name] for name in table})


def _write(table: Mapping[str, str]) -> None:
    PAIRS.write_text(json.dumps(table, indent=0) + "\n", encoding="ascii", newline="\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
