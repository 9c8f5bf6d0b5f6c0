"""The family `tbo`: the cases of llama.cpp's test-backend-ops under the names it prints.

    tbo/SOFT_MAX_BACK(type=f32,ne=[16,16,1,1],scale=1.000000,max_bias=0.000000)@0

`cases.txt.xz` has a line per case: name, bytes, why no level has it (the declarations reject it, or it is too large for
most machines and runs only by name), and as JSON the index of the result and the tensors (`FIELDS`). `ci/tbo.py` writes
it. Lines that the program runs repeatedly are one case; `~2` marks the second case with the same name. Values are drawn
by the rules of `suite/exchange`, because the program's own come from an unrecorded random device.
"""

from __future__ import annotations

import json
import lzma
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from conformance import shipped
from conformance.case.case import Case, Step, writes_in_place
from conformance.case.streams import Stream
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import build_forward_expand
from conformance.ggml.ops.op import check_node, written
from conformance.ggml.tensor import FLAG_INPUT, VIEW_OPS, Bytes, Tensor, contiguous_nb, nbytes, strided
from conformance.ggml.types import type_named
from conformance.suite.data import Fill, encode, values
from conformance.suite.exchange.build import RULES
from conformance.suite.exchange.line import line_of
from conformance.suite.family import Family, Level, split_id

NAME = "tbo"
CASES = shipped.path("suite", "tbo", "cases.txt.xz")
FIELDS = ("name", "op", "type", "ne", "nb", "flags", "view_src", "view_offs", "src", "op_params")
"""Fields of a tensor; `view_src` may be -1, `op_params` omits trailing zeros."""
SMALL = 1 << 20
"""Maximum bytes of a case in level `standard`, unless `fusions` has no smaller one."""


class Row(NamedTuple):
    """A line of the file."""

    name: str
    size: int
    why: str
    text: str


@cache
def rows() -> dict[str, Row]:
    """Return name -> row, smallest first."""
    text = lzma.decompress(CASES.read_bytes()).decode("ascii")
    found = (Row(name, int(size), why, rest) for name, size, why, rest in (x.split("\t") for x in text.splitlines()))
    return {row.name: row for row in found}


@cache
def ids(level: Level) -> Sequence[str]:
    """Return the case ids of a level.

    `full` has all that the declarations and the run limits allow, `standard` the smallest, a middle and the largest
    small case of each op and all of `fusions`, `smoke` the smallest of three ops.
    """
    legal = [row for row in rows().values() if not row.why]
    if level == "full":
        return tuple(_id(row) for row in legal)
    of_op = _small()
    if level == "smoke":
        return tuple(_id(of_op[op][0]) for op in ("COUNT_EQUAL", "CONV_2D", "RMS_NORM_BACK"))
    chosen = {row.name for own in of_op.values() for row in (own[0], own[len(own) // 2], own[-1])}
    chosen |= {row.name for row in fusions("standard")} | {_name(i) for i in ids("smoke")}
    return tuple(_id(row) for row in legal if row.name in chosen)


def smallest() -> Sequence[Row]:
    """Return the smallest row of each name that a level has."""
    return [own[0] for own in _small().values()]


@cache
def fusions(level: Level) -> Sequence[Row]:
    """Return graphs with several computing nodes (not counting copies), which a device may fuse.

    At `full` all of them, at `standard` a middle one of each name and the smallest of each op sequence, at `smoke` the
    first.
    """
    fused = [row for row in rows().values() if not row.why and sum(n not in _NO_FUSION for n in _nodes(row)) > 1]
    if level == "full":
        return [row for own in _of_op(fused).values() for row in own]
    chosen: dict[Row, None] = {}
    for named in _of_op(fused).values():
        own = [row for row in named if row.size <= SMALL] or named[:1]
        sequences = {tuple(_nodes(row)): row for row in reversed(own)}
        chosen |= dict.fromkeys([own[0], own[len(own) // 2], *reversed(sequences.values())])
    return list(chosen)[:1] if level == "smoke" else list(chosen)


def largest(row: Row) -> int:
    """Return the number of elements of the largest tensor."""
    sizes: list[int] = [math.prod(ne) for ne in _each(row, "ne")]
    return max(sizes)


def leaf_flags(row: Row) -> list[int]:
    """Return the flags of each leaf."""
    return [flags for op, flags in zip(_each(row, "op"), _each(row, "flags"), strict=True) if op == "NONE"]


def _each(row: Row, field: str) -> list[Any]:
    return [entry[FIELDS.index(field)] for entry in json.loads(row.text)[1]]


@cache
def _small() -> dict[str, list[Row]]:
    return _of_op(row for row in rows().values() if not row.why and row.size <= SMALL)


def _of_op(of: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in of:
        found.setdefault(row.name.partition("(")[0], []).append(row)
    return found


def _nodes(row: Row) -> list[str]:
    return _NODE.findall(row.text)


_NODE = re.compile(r'\["[^"]*","([A-Z0-9_]+)"')
"""Name and op of a tensor."""
_NO_FUSION = frozenset({"NONE", "CONT", "CPY", "DUP"}) | VIEW_OPS


def _id(row: Row) -> str:
    return f"{NAME}/{row.name}@0"


def _name(case_id: str) -> str:
    return split_id(case_id, NAME, "OP(name=value,…)")[0]


def graph_of(row: Row) -> tuple[Graph, Tensor]:
    """Return the graph of a row and its result; GraphError if the declarations reject a node."""
    out, entries = json.loads(row.text)
    tensors: list[Tensor] = []
    for entry in entries:
        e = dict(zip(FIELDS, entry, strict=True))
        view_src = tensors[e["view_src"]] if e["view_src"] >= 0 else None
        t = Tensor(
            type_named(e["type"]), tuple(e["ne"]), tuple(e["nb"]), e["op"],
            (*e["op_params"], *(0,) * (16 - len(e["op_params"]))),
            (), view_src, e["view_offs"], e["flags"], e["name"],
        )  # fmt: skip
        tensors.append(t)
        t.src = tuple(tensors[i] if i >= 0 else None for i in e["src"])  # a cast reads itself
        if t.op != "NONE":
            check_node(t)
    result = tensors[out]
    return build_forward_expand(result), result


def build(case_id: str) -> Case:
    """Build the case of an id; UsageError if the name is unknown or the declarations reject it."""
    row = rows().get(_name(case_id))
    if row is None:
        raise UsageError(f"case {case_id!r}: test-backend-ops has no such case; `conform list cases` lists them")
    try:
        graph, result = graph_of(row)
    except GraphError as e:
        raise UsageError(f"case {case_id!r}: {e}") from None
    leaves = [t for t in graph.tensors() if t.op == "NONE" and t.view_src is None]
    for t in leaves:
        t.flags |= FLAG_INPUT
    persistent, inputs = fill(case_id, graph, leaves)
    return Case(case_id, persistent, [Step(graph, inputs, (result,))], family=NAME, params={"op": row.name})


FAMILY = Family(NAME, "the cases of test-backend-ops under the names that it prints", ids, build)


def fill(case_id: str, graph: Graph, leaves: Sequence[Tensor]) -> tuple[dict[Tensor, Bytes], dict[Tensor, Bytes]]:
    """Return persistent tensors (written or quantised leaves) and inputs, with their bytes.

    A leaf has its type's usual values. If the first node that reads it needs other values, they are placed where that
    node reads, also through a view.
    """
    changed = {n.view_src for n in graph if writes_in_place(n)} | {t for n in graph for t in written(n)}
    persistent: dict[Tensor, Bytes] = {}
    inputs: dict[Tensor, Bytes] = {}
    for i, t in enumerate(leaves):
        own = persistent if t in changed or t.type.is_quantized else inputs
        own[t] = _bytes(case_id, f"{i} {t.name}", t, graph)
    return persistent, inputs


def _bytes(case_id: str, name: str, leaf: Tensor, graph: Graph) -> Bytes:
    found = _rule(leaf, graph)
    if found is not None and found[0] is leaf:
        return encode(leaf.type, Stream(case_id, name), leaf.ne, found[1])
    data = encode(leaf.type, Stream(case_id, name), leaf.ne, values(leaf.type))
    if found is not None:
        seen, rule = found
        packed = encode(seen.type, Stream(case_id, f"{name}, seen"), seen.ne, rule)
        whole = Tensor(seen.type, seen.ne, contiguous_nb(seen.type, seen.ne))
        data = data if data.flags.writeable else data.copy()
        strided(data, seen)[...] = strided(packed, whole)
    assert data.nbytes == nbytes(leaf)
    return np.ascontiguousarray(data)


def _rule(leaf: Tensor, graph: Graph) -> tuple[Tensor, Fill] | None:
    """Return the first operand in the bytes of `leaf` that has a rule, and the rule's fill."""
    for node in graph:
        for i, s in enumerate(node.src):
            if s is not None and s.root is leaf and (node.op, i) in RULES:
                return s, RULES[node.op, i](line_of(node))
    return None
