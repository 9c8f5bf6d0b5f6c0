"""Writes `conformance/suite/ops/pairs.json`: rows of the tables' `pairs` that show each two values of two axes.

`python ci/pairs.py` after a grid is new; rows of grids that stand there are kept, so no case of theirs changes.
A row is taken only if ggml takes its graph, which the declarations say when it is built. So a package for covering
arrays (allpairspy, covertable) does not fit: their constraints judge parts of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

from conformance.case.streams import Stream
from conformance.ggml.errors import ConformanceError
from conformance.suite.family import with_seed
from conformance.suite.grid import Grid
from conformance.suite.ops import NAME, PAIRS, build
from conformance.suite.ops.bench import TABLES

Row = tuple[int, ...]
Pair = tuple[int, int, int, int]
"""Two axes and a value of each."""
TRIES = 400
"""Completions of a pair: the legal one that shows the most missing pairs becomes a row. Without one, ggml lacks it."""
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def shown(row: Row) -> set[Pair]:
    """The pairs of a row."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def cover(sizes: Sequence[int], name: str, legal: Callable[[Row], bool]) -> list[Row]:
    """Legal rows that show every pair that any of its tried completions shows; the same for the same `name`."""
    missing = {
        (i, a, j, b): None
        for i, j in combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    rows: list[Row] = []
    while missing:
        pair = next(iter(missing))
        i, a, j, b = pair
        words = Stream(name, str(pair)).words(TRIES * len(sizes)).reshape(TRIES, -1).tolist()
        completions = [tuple(int(w) % n for w, n in zip(ws, sizes, strict=True)) for ws in ([0] * len(sizes), *words)]
        completions = [tuple({i: a, j: b}.get(k, part) for k, part in enumerate(row)) for row in completions]
        completions.sort(key=lambda row: -len(shown(row) & missing.keys()))
        row = next(filter(legal, completions), None)
        for each in {pair} if row is None else shown(row):
            missing.pop(each, None)
        rows += [] if row is None else [row]
    return rows


def text(row: Row) -> str:
    """A row as the file has it: a digit per axis."""
    return "".join(DIGITS[part] for part in row)


def is_legal(grid: Grid, row: Row) -> bool:
    """Whether ggml takes the graph of a row."""
    try:
        build(with_seed(NAME, next(grid.rows(text(row))))).validate()
    except ConformanceError:
        return False
    return True


def main() -> None:
    """Write the file anew, with what it holds of the tables' grids."""
    kept = json.loads(PAIRS.read_text(encoding="ascii")) if PAIRS.is_file() else {}
    table = {}
    for grid in (each for t in TABLES for each in t.pairs):
        name = str(grid)
        if name not in kept:
            rows = cover(grid.sizes, name, partial(is_legal, grid))
            kept[name] = " ".join(map(text, rows))
            print(f"{len(rows)} rows of {name}")
        table[name] = kept[name]
    PAIRS.write_text(json.dumps(table, indent=0) + "\n", encoding="ascii", newline="\n")


if __name__ == "__main__":
    main()
