"""The family `ops`: single ops over types, shapes, strides and parameters, from tables.

One module per topic, as in `ggml/ops`, declares the cases (`@cases`); `bench.py` parses an id and builds its case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from conformance import shipped
from conformance.case.case import Case
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.tensor import Tensor
from conformance.suite.family import LEVELS, Family, Level, with_seed
from conformance.suite.grid import Grid, Row, ids_of_rows

# importing a topic declares its cases, which `conform perf` times in this order
# isort: off
from . import matmul, attention, rope, rows, elementwise, recurrent, views, windows, media, training  # noqa: F401

# isort: on
from .bench import DST, NAME, TABLES, Bench, OpCases, OpId, Timed, parse, sources
from .dispatch import DISPATCH, FURTHER

__all__ = ["FAMILY", "NAME", "Timed", "build", "ids", "timed"]

KNOWN: dict[str, OpCases] = {op: table for table in TABLES for op in table.ops}
"""Op, including its sub-op -> its cases."""
PAIRS = shipped.path("suite", "ops", "pairs.json")
"""Covering arrays, written by `ci/pairs.py`; existing rows retain their cases."""
LAID = shipped.path("suite", "ops", "layouts.json")
"""Layout cases missing from the tables (`layouts.py`), by level, written by `ci/layouts.py`."""
CHOSEN = shipped.path("suite", "ops", "smoke.json")
"""Bodies of the ids of `smoke`, in order, written by `python -m tests.trust choose`."""


@cache
def _shapes(op: str) -> frozenset[str]:
    """Return the keys of an op that are shapes."""
    return frozenset(name for name, key in KNOWN[op].keys.items() if key.is_shape)


def size(case_id: str) -> int:
    """Return the number of elements in all shapes of a legal id; cases are sorted by it.

    It only reads the text, because parsing every id takes longer than a small run.
    """
    op, _, rest = case_id.removeprefix(f"{NAME}/").rpartition("@")[0].partition("-")
    shapes, items = _shapes(op), rest.partition("-")[2].split(",")
    given = (value for key, _, value in (item.partition("=") for item in items) if key in shapes)
    return sum(math.prod(map(int, value.split("x"))) for value in given)


@cache
def ids(level: Level) -> Sequence[str]:
    """Return the case ids of a level: those of `smoke` as chosen, then smallest first."""
    if level == "smoke":
        return chosen()
    laid = _ids(
        f"{source}={layout}"
        for each in LEVELS[: LEVELS.index(level) + 1]
        for source, layouts in _laid().get(each, {}).items()
        for layout in layouts.split()
    )
    return tuple(dict.fromkeys((*chosen(), *by_size({*tabled(level), *laid}))))


@cache
def tabled(level: Level) -> Sequence[str]:
    """Return the case ids that the tables of the topics list, smallest first."""
    listed = ("smoke", "standard", "wide", *(["full"] if level == "full" else []))
    own = _ids(row for table in TABLES for name in listed for row in getattr(table, name))
    return by_size(own | _ids(body for each in grids() for body in each.rows(paired()[str(each)])))


@cache
def chosen() -> Sequence[str]:
    """Return the ids of level `smoke`, first those that notice most faults per second."""
    paired()  # a grid without rows is an error at every level
    kept: list[str] = json.loads(CHOSEN.read_text(encoding="ascii"))
    return tuple(with_seed(NAME, body) for body in kept)


def grids() -> Iterator[Grid]:
    """Yield each grid of `OpCases.pairs`, `DISPATCH` and `FURTHER`; `PAIRS` has its rows."""
    yield from (each for table in TABLES for each in table.pairs)
    yield from (*DISPATCH, *FURTHER)


@cache
def paired() -> dict[str, str]:
    """Map each of `grids` to its rows that run; UsageError if a grid has none yet."""
    kept: dict[str, str] = json.loads(PAIRS.read_text(encoding="ascii"))
    new = [each for each in map(str, grids()) if each not in kept]
    if new:
        raise UsageError(f"{PAIRS.name} has no rows of the grid {new[0]!r}: run `python ci/pairs.py`")
    return kept


@cache
def _laid() -> dict[str, dict[str, str]]:
    """Map level -> id without seed and source key -> layouts that no table row has."""
    kept: dict[str, dict[str, str]] = json.loads(LAID.read_text(encoding="ascii"))
    return kept


def _ids(table: Iterable[Row]) -> set[str]:
    return {with_seed(NAME, body) for body in ids_of_rows(table)}


def timed(level: Level) -> list[Timed]:
    """Return the cases that are timed at `level` and at no lower one."""
    return [case for table in TABLES for case in table.timed if case.level == level]


def by_size(case_ids: Iterable[str]) -> tuple[str, ...]:
    """Return ids in order of `size`, then of their text."""
    return tuple(sorted(case_ids, key=lambda case_id: (size(case_id), case_id)))


def built(op_id: OpId) -> tuple[Bench, Sequence[Tensor]]:
    """Return the bench of a case and its outputs; UsageError if ggml would reject the graph."""
    bench = Bench(op_id)
    try:
        outputs = bench.outputs_of(KNOWN[op_id.op].make)
        if sources(op_id):
            bench = bench.laid_out(outputs)
            outputs = bench.outputs_of(KNOWN[op_id.op].make)
        if op_id.values[DST]:
            outputs = bench.between(outputs)
    except GraphError as e:
        raise UsageError(f"case {op_id.id!r}: ggml has no such op: {e}") from None
    return bench, outputs


def build(case_id: str) -> Case:
    """Build the case of an id; UsageError if it is unknown or ggml would reject its graph."""
    bench, outputs = built(parse(case_id, KNOWN))
    return bench.case(outputs)


FAMILY = Family(NAME, "single ops over types, shapes, strides and parameters", ids, build)
