"""Covering arrays: what a backend may choose a kernel by meets in some case of `standard`, or in no legal one."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.case.streams import Stream
from conformance.cli import main
from conformance.ggml.errors import ConformanceError
from conformance.suite import ops
from conformance.suite.family import LEVELS, with_seed
from conformance.suite.grid import DIGITS, Grid
from conformance.suite.ops import PAIRS, build, ids, size
from conformance.suite.ops.bench import TABLES
from conformance.suite.ops.dispatch import BORDERS, DISPATCH, FURTHER, LARGEST

SCRIPT = Path(__file__).parents[2] / "ci" / "pairs.py"
ROWS: dict[str, str] = json.loads(PAIRS.read_text())
GRIDS = {str(each): each for each in (*(each for t in TABLES for each in t.pairs), *DISPATCH, *FURTHER)}
TRIED = 40
"""Rows into which a missing combination is put, drawn by its name."""


def _combined(grid: Grid) -> Iterator[tuple[int, ...]]:
    yield from combinations(range(len(grid.sizes)), 2)
    for names in grid.triples:
        yield tuple(i for i, name in enumerate(grid.digits) if name in names)


def _put(row: str, parts: Mapping[int, str]) -> str:
    return "".join(parts.get(k, digit) for k, digit in enumerate(row))


def _is_refused(grid: Grid, row: str) -> bool:
    """Return whether ggml refuses the graph of a row, or it is too large."""
    (body,) = grid.rows(row)
    case_id = with_seed("ops", body)
    try:
        if size(case_id) > LARGEST:
            return True
        build(case_id).validate()
    except ConformanceError:
        return True
    return False


def _missing(grid: Grid, rows: list[str]) -> Iterator[dict[int, str]]:
    """Yield the combinations that no row has, those apart that hold a missing pair."""
    lacking: list[set[tuple[int, str]]] = []
    for axes in _combined(grid):
        met = {tuple(row[i] for i in axes) for row in rows}
        for values in product(*(DIGITS[: grid.sizes[i]] for i in axes)):
            parts = dict(zip(axes, values, strict=True))
            if values not in met and not any(pair <= parts.items() for pair in lacking):
                lacking.append(set(parts.items()))
                yield parts


@pytest.mark.parametrize("name", GRIDS, ids=[str(i) for i in range(len(GRIDS))])
def test_combinations_meet(name: str) -> None:
    """Two values of two axes (three where the grid says so) are in a row; a row with those that are not is refused."""
    grid, rows = GRIDS[name], ROWS[name].split()
    for parts in _missing(grid, rows):
        drawn = Stream(name, str(parts)).words(TRIED) % len(rows)
        assert all(_is_refused(grid, _put(rows[i], parts)) for i in dict.fromkeys(drawn.tolist())), parts


def test_the_file_has_these_grids() -> None:
    """No covering array is of a grid that is gone, none is missing."""
    assert list(ROWS) == list(GRIDS)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the file for the suite to read."""
    copy = tmp_path / PAIRS.name
    copy.write_text(json.dumps(ROWS), encoding="ascii")
    monkeypatch.setattr(ops, "PAIRS", copy)
    caches = (ops.ids, ops.tabled, ops.chosen, ops.paired)
    for cached in caches:
        cached.cache_clear()
    yield copy
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("name", [str(DISPATCH[0]), str(FURTHER[0]), next(iter(GRIDS))])
def test_a_grid_without_rows_is_named(file: Path, name: str) -> None:
    """At every level, `smoke` too, a run ends before its first case, and says what writes the rows."""
    file.write_text(json.dumps({k: v for k, v in ROWS.items() if k != name}), encoding="ascii")
    for level in LEVELS:
        ran = CliRunner().invoke(main, ["run", "--backend", "cpu", "--case", "ops/CUMSUM*", "--level", level])
        assert ran.exit_code == 2
        assert ran.output == f"conform: pairs.json has no rows of the grid {name!r}: run `python ci/pairs.py`\n"


def test_no_grid_of_the_file_is_dropped(file: Path) -> None:
    """`ci/pairs.py` leaves the file as it is, and names the grid whose cases would be lost."""
    text = json.dumps({**ROWS, "what: SCALE OTHER; types: f32 f16": "00 11"})
    file.write_text(text, encoding="ascii")
    with pytest.raises(SystemExit, match=r"no table has the grid 'what: SCALE OTHER; types: f32 f16'.* 2 cases"):
        runpy.run_path(str(SCRIPT))["main"]()
    assert file.read_text(encoding="ascii") == text


def test_smoke_has_each_value_of_each_axis() -> None:
    """What some row of a dispatch grid has, a smoke case has as well."""
    smoke = set(ids("smoke"))
    for grid in DISPATCH:
        rows = ROWS[str(grid)].split()
        here = [
            row for row, body in zip(rows, grid.rows(" ".join(rows)), strict=True) if with_seed("ops", body) in smoke
        ]
        assert {v for row in here for v in enumerate(row)} == {v for row in rows for v in enumerate(row)}


def test_borders_separate_values() -> None:
    """Between any two neighbouring borders of an axis, and outside them, some grid of the op has a size."""
    borders: dict[tuple[str, str], set[int]] = {}
    for border in BORDERS:
        assert border.below + 1 == border.above
        for op in border.ops.split():
            borders.setdefault((op, border.axis), set()).add(border.below)
    for (op, name), ends in borders.items():
        values = {
            int(value)
            for grid in (*DISPATCH, *FURTHER)
            if op in grid.heads[0].values
            for axis in (*grid.axes, *grid.free)
            if axis.name == name
            for value in axis.values
        }
        assert {sum(end < v for end in ends) for v in values} == set(range(len(ends) + 1)), (op, name)
