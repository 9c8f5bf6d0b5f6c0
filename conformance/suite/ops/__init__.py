"""The family `ops`: single ops over types, shapes, strides and parameters, generated from tables, one line a case.

A module per topic, as in `ggml/ops`, declares the cases (`@cases`); `bench.py` reads an id and builds its case.
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
from conformance.suite.grid import Row, ids_of_rows

# importing a topic declares its cases, and `conform perf` times them in this order
# isort: off
from . import matmul, attention, rope, rows, elementwise, recurrent, views, windows, media, training  # noqa: F401

# isort: on
from .bench import NAME, TABLES, Bench, OpCases, OpId, Timed, parse, sources

__all__ = ["FAMILY", "NAME", "Timed", "build", "ids", "timed"]

KNOWN: dict[str, OpCases] = {op: table for table in TABLES for op in table.ops}
"""Op, with its sub-op -> its cases."""
ENOUGH = 64
"""Elements that show most faults: smoke takes a smaller case only for a trait that no larger one shows."""
PAIRS = shipped.path("suite", "ops", "pairs.json")
"""Covering arrays of strength 2, written by `ci/pairs.py` and kept: a row that stands here keeps its case."""
LAID = shipped.path("suite", "ops", "layouts.json")
"""What the tables lack of `layouts.py`, by level, written by `ci/layouts.py`."""
LONG = 2048
"""Elements of a row from which kernels split it, and accelerators take it."""


@lru_cache(1 << 14)
def _read(case_id: str) -> OpId:
    """An id, read: to order the cases of a level takes each three times."""
    return parse(case_id, KNOWN)


def size(op_id: OpId) -> int:
    """Elements in all shapes that the id names; cases are ordered by it."""
    keys = KNOWN[op_id.op].keys
    return sum(math.prod(value) for name, value in op_id.values.items() if value and keys[name].is_shape)


def _traits(op_id: OpId) -> Iterator[tuple[str, ...]]:
    """The traits of a case: its op, the type of each operand in its group of ops, each key and each word.

    A number counts as its key alone; a shape also by long rows and by several matrices, with views and without; a
    layout by each of its parts; a permute only by whether rows stay rows.
    """
    yield (op_id.op,)
    alike, group, keys = KNOWN[op_id.op].ops[0], op_id.op.partition(".")[0], KNOWN[op_id.op].keys
    for i, type_ in enumerate(op_id.types):
        yield alike, str(i), type_.name
    for key, value in op_id.given.items():
        for part in value.split("."):
            yield group, key, "" if part[0].isdigit() or part[0] == "-" else re.sub(r"^p(0?)\d+$", r"p\1", part)
        if keys[key].is_shape and int(value.partition("x")[0]) >= LONG:
            yield group, key, "long"
        if keys[key].is_shape and value.count("x") > 1:
            yield group, key, "several", str(any(k.startswith("v") for k in op_id.given))


def _rank(case_id: str) -> tuple[bool, bool]:
    """Large cases first, and F32 first: coarser types hide errors as large as their rounding."""
    op_id = _read(case_id)
    return size(op_id) < ENOUGH, any(t is not F32 for t in op_id.types[:1])


def _cross_section(case_ids: Sequence[str]) -> tuple[str, ...]:
    """Few cases that together show every trait.

    Takes, by rank and size, each case with a new trait; then drops every case whose traits the others show too.
    """
    selection: dict[str, set[tuple[str, ...]]] = {}
    counts: Counter[tuple[str, ...]] = Counter()
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
    """Case ids of a level, smallest first."""
    laid = _ids(
        f"{source}={layout}"
        for each in LEVELS[: LEVELS.index(level) + 1]
        for source, layouts in _laid().get(each, {}).items()
        for layout in layouts.split()
    )
    return _bysize({*tabled(level), *laid})


@cache
def tabled(level: Level) -> Sequence[str]:
    """Those that the tables of the topics list."""
    always, standard, wide, full = (
        _ids(row for table in TABLES for row in getattr(table, name)) for name in ("smoke", "standard", "wide", "full")
    )
    if level == "smoke":
        return _bysize(always | set(_cross_section(_bysize(standard))))
    paired = _ids(body for table in TABLES for pairs in table.pairs for body in pairs.rows(_paired()[str(pairs)]))
    return _bysize(always | standard | paired | wide | (full if level == "full" else set()))


@cache
def _paired() -> dict[str, str]:
    """Grid of `OpCases.pairs` -> the rows of it that run: `Grid.rows`."""
    kept: dict[str, str] = json.loads(PAIRS.read_text(encoding="ascii"))
    return kept


@cache
def _laid() -> dict[str, dict[str, str]]:
    """Level -> id, without seed, and the key of a source -> the layouts that no row of a table has."""
    kept: dict[str, dict[str, str]] = json.loads(LAID.read_text(encoding="ascii"))
    return kept


def _ids(table: Iterable[Row]) -> set[str]:
    return {with_seed(NAME, body) for body in ids_of_rows(table)}


def timed(level: Level) -> list[Timed]:
    """The cases that are timed at `level` and not at those below it."""
    return [case for table in TABLES for case in table.timed if case.level == level]


def _bysize(case_ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(case_ids, key=lambda case_id: (size(_read(case_id)), case_id)))


def built(op_id: OpId) -> tuple[Bench, Sequence[Tensor]]:
    """The bench of a case and what to check; UsageError if ggml would refuse its graph."""
    bench = Bench(op_id)
    try:
        outputs = bench.outputs_of(KNOWN[op_id.op].make)
        if sources(op_id):
            bench = bench.laid_out(outputs)
            outputs = bench.outputs_of(KNOWN[op_id.op].make)
    except GraphError as e:
        raise UsageError(f"case {op_id.id!r}: ggml has no such op: {e}") from None
    return bench, outputs


def build(case_id: str) -> Case:
    """The case behind an id, from its text alone; UsageError if it is unknown or ggml would refuse its graph."""
    bench, outputs = built(parse(case_id, KNOWN))
    return bench.case(outputs)


FAMILY = Family(NAME, "single ops over types, shapes, strides and parameters", ids, build)
