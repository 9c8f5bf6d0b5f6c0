"""The family `random`: legal graphs grown at random from the builder's own rules, the same template in several sizes.

`random/nodes=24,steps=3,d=32,w=q8_0,cache=f16@7`: `nodes` of each step's graph, `steps` of the trajectory, rows of `d`
elements, weights of type `w`, caches of type `cache`, with `rare=1` also ops that few backends take. Id and seed
together are the graph: another seed grows another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.ggml.types import TYPES
from conformance.suite.family import LEVELS, Family, Level, keys, read_keys, split_id, with_seed

from .moves import MOVES, RARE, Growth

NAME = "random"
GENERATOR = 1
"""Raise it when any id's bytes change."""

NODES = (2, 60)
STEPS = (1, 8)
ROWS = (8, 16, 32, 64)
WEIGHTS = ("f32", "f16", "bf16", "q8_0", "q4_0")
CACHES = ("f32", "f16", "bf16", "q8_0", "q4_0")

KEYS = keys(f"nodes=12 steps=3 d=32|{'|'.join(map(str, ROWS))} w={'|'.join(WEIGHTS)} cache={'|'.join(CACHES)} rare=0|1")


def build(case_id: str) -> Case:
    """The case behind an id, from its text alone.

    Raises:
        UsageError: the id cannot be read.
    """
    body, seed = split_id(case_id, NAME, "key=value,key=value")
    values, given = read_keys(case_id, body, KEYS)
    for key, (low, high) in (("nodes", NODES), ("steps", STEPS)):
        if not low <= values[key] <= high:
            raise UsageError(f"case {case_id!r}: {key}: {low} to {high} expected, {values[key]} found")
    row = int(values["d"])
    growth = Growth(case_id, values["steps"], row, TYPES[values["w"]], TYPES[values["cache"]])
    growth.grow({**MOVES, **RARE} if values["rare"] == "1" else MOVES, values["nodes"])
    return growth.case(NAME, given, seed, GENERATOR)


def _rows() -> Iterator[str]:
    """Ids without family and seed, without end: sizes and types go round at different speeds."""
    i = 0
    while True:
        nodes = NODES[0] + (i * 7) % (NODES[1] - NODES[0] + 1)
        steps = 1 + (i * 3) % 4
        cache = CACHES[i // 3 % (5 if ROWS[i % 4] >= 32 else 3)]
        rare = ",rare=1" if i % 6 == 5 else ""
        yield f"nodes={nodes},steps={steps},d={ROWS[i % 4]},w={WEIGHTS[i // 2 % 5]},cache={cache}{rare}"
        i += 1


COUNTS: dict[Level, int] = {"smoke": 12, "standard": 150, "full": 600}
"""Level -> how many cases it has, those of the levels below included."""


@cache
def ids(level: Level) -> Sequence[str]:
    """Case ids of a level: the pinned part of an endless family."""
    rows_so_far: list[str] = []
    for name in LEVELS[: LEVELS.index(level) + 1]:
        rows = _rows()
        everything = [next(rows) for _ in range(COUNTS[name])]
        rows_so_far += sorted(everything[len(rows_so_far) :], key=lambda row: int(row.split(",")[0].split("=")[1]))
    return tuple(with_seed(NAME, row, f"{i} {row}") for i, row in enumerate(rows_so_far))


FAMILY = Family(NAME, "legal graphs grown at random, run in several sizes over living caches", ids, build)
