"""The family `ops`: single ops over types, shapes, strides and parameters, from tables.

One module per topic, as in `ggml/ops`, declares the cases (`@cases`); `bench.py` parses an id and builds its case.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache

from conformance import shipped
from conformance.case.case import Case
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32
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
ENOUGH = 64
"""Number of elements that reveals most bugs; smoke prefers cases of this size."""
PAIRS = shipped.path("suite", "ops", "pairs.json")
"""Covering arrays, written by `ci/pairs.py`; existing rows retain their cases."""
LAID = shipped.path("suite", "ops", "layouts.json")
"""Layout cases missing from the tables (`layouts.py`), by level, written by `ci/layouts.py`."""
LONG = 2048
"""Row length in elements from which kernels split rows and accelerators accept them."""


@lru_cache(1 << 14)
def _read(case_id: str) -> OpId:
    """Parse an id, with a cache, because sorting the cases of a level parses each three times."""
    return parse(case_id, KNOWN)


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


def _traits(op_id: OpId) -> Iterator[tuple[str, ...]]:
    """Yield the traits of a case: its op, the type of each operand in its op group, keys, words.

    A number counts as its key alone; a shape also counts long rows and several matrices, with views and without; a
    layout counts each of its parts; a permute only counts if rows remain rows.

        GET_ROWS-f32+i32-a=33x7x2,n=12,va=p1023
        op         (GET_ROWS)
        types      (GET_ROWS 0 f32) (GET_ROWS 1 i32)
        a=33x7x2   (GET_ROWS a "") (GET_ROWS a several True)     True: the case has a view
        n=12       (GET_ROWS n "")
        va=p1023   (GET_ROWS va p)                               p0...: rows remain rows
    """
    yield (op_id.op,)
    example, group, keys = KNOWN[op_id.op].ops[0], op_id.op.partition(".")[0], KNOWN[op_id.op].keys
    for i, type_ in enumerate(op_id.types):
        yield example, str(i), type_.name
    for key, value in op_id.given.items():
        for part in value.split("."):
            yield group, key, "" if part[0].isdigit() or part[0] == "-" else re.sub(r"^p(0?)\d+$", r"p\1", part)
        if keys[key].is_shape and int(value.partition("x")[0]) >= LONG:
            yield group, key, "long"
        if keys[key].is_shape and value.count("x") > 1:
            yield group, key, "several", str(any(k.startswith("v") for k in op_id.given))


def _rank(case_id: str) -> tuple[bool, bool]:
    """Return a sort key: large cases first, then F32, because coarser types hide small errors."""
    return size(case_id) < ENOUGH, any(t is not F32 for t in _read(case_id).types[:1])


def _cross_section(case_ids: Sequence[str], chosen: Iterable[str]) -> tuple[str, ...]:
    """Return a small set of cases that has, together with those `chosen`, every trait.

    A greedy set cover: it takes, by rank and size, each case with a new trait. A later case may have all traits of an
    earlier one, so a second pass drops every case whose traits the others have too.
    """
    selection: dict[str, set[tuple[str, ...]]] = {}
    counts = Counter(trait for case_id in chosen for trait in set(_traits(_read(case_id))))
    for case_id in sorted(case_ids, key=_rank):
        traits = set(_traits(_read(case_id)))
        if not traits <= counts.keys():
            selection[case_id] = traits
            counts.update(traits)
    for case_id, traits in list(selection.items()):
        if all(counts[trait] > 1 for trait in traits):
            counts.subtract(traits)
            del selection[case_id]
    return tuple(case_id for case_id in case_ids if case_id in selection)


@cache
def ids(level: Level) -> Sequence[str]:
    """Return the case ids of a level, smallest first."""
    laid = _ids(
        f"{source}={layout}"
        for each in LEVELS[: LEVELS.index(level) + 1]
        for source, layouts in _laid().get(each, {}).items()
        for layout in layouts.split()
    )
    return _bysize({*tabled(level), *laid})


@cache
def tabled(level: Level) -> Sequence[str]:
    """Return the case ids that the tables of the topics list."""
    always, standard, wide, full = (
        _ids(row for table in TABLES for row in getattr(table, name)) for name in ("smoke", "standard", "wide", "full")
    )
    if level == "smoke":
        once = _ids(body for each in DISPATCH for body in each.rows(_with_new_values(_paired()[str(each)])))
        chosen = always | once
        return _bysize(chosen.union(_cross_section(_bysize(standard), chosen)))
    paired = _ids(body for each in grids() for body in each.rows(_paired()[str(each)]))
    return _bysize(always | standard | paired | wide | (full if level == "full" else set()))


def _with_new_values(table: str) -> str:
    """Return the rows that have a value of an axis which no row before them has."""
    seen: set[tuple[int, str]] = set()
    kept = []
    for row in table.split():
        if not seen.issuperset(enumerate(row)):
            seen.update(enumerate(row))
            kept.append(row)
    return " ".join(kept)


def grids() -> Iterator[Grid]:
    """Yield each grid of `OpCases.pairs`, `DISPATCH` and `FURTHER`; `PAIRS` has its rows."""
    yield from (each for table in TABLES for each in table.pairs)
    yield from (*DISPATCH, *FURTHER)


@cache
def _paired() -> dict[str, str]:
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


def _bysize(case_ids: Iterable[str]) -> tuple[str, ...]:
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
