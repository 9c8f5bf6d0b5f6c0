"""Choose `smoke` of `ops`, and its order: the cases that notice most faults per second of processor time.

A greedy weighted set cover of pairs of traits (`traits.py`). Each kind of pairs has a weight, learned from mutants by
`weights.py`, which all pairs of the kind share equally. An unseen fault is noticed if it depends on a covered pair.
`smoke` must also have the rows that the tables name
(`OpCases.smoke`), every trait of the tables' rows, each op in F32 with a view, every value of an axis of a dispatch
grid, and the cases that known faults name. A case that ggml refuses, which checks the reference, runs on no backend:
it is never chosen.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from backends.ggml import GgmlBackend
from conformance import shipped
from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.types import F32
from conformance.judge.waivers import parse as parse_waivers
from conformance.run import cost
from conformance.run.contiguous import contiguous
from conformance.suite.family import with_seed
from conformance.suite.grid import Row, ids_of_rows
from conformance.suite.ops import CHOSEN, KNOWN, NAME, build, by_size, ids, paired
from conformance.suite.ops.bench import TABLES, OpCases, parse
from conformance.suite.ops.dispatch import DISPATCH

from .faults import FOLDER, read
from .traits import Pair, pairs

WEIGHTS = Path(__file__).with_name("tables") / "weights.json"
"""Kinds of a pair, separated by a space -> share of the doubt about a mutant that they explain."""
CASES = 1070
"""Cases of `ops` in `smoke`: OpenVINO compiles their graphs, so that their number decides its time."""
SMALL = 1e7
"""Operations that take as long as all else of a case: building it, the answer of a process, comparing."""
AGAIN = 40
"""Price of a case that ggml is known to fail, in small cases: it runs again, and its first wrong node is located."""
KNOWN_WRONG = shipped.path("waivers", "ggml.toml")
NEEDED = 4
"""Weight of what `smoke` must have, in weights of the heaviest pair."""
LONG = 2048
"""Row length in elements from which kernels split rows and accelerators accept them."""
_UNIT = 10**7
"""Weights are integers, whose sums do not depend on their order."""

Item = Pair | tuple[str, ...]
"""A pair, or something that `smoke` must have."""


def choose(n: int = CASES) -> list[str]:
    """Return the `n` ids of level `smoke`, those that notice most per second first."""
    cases = {i: build(i) for i in by_size(ids("standard"))}
    ggml = GgmlBackend()
    cases = {i: case for i, case in cases.items() if checks(ggml, case)}
    needed = _needed(cases)
    items: dict[str, set[Item]] = {i: {*pairs(i), *needed.get(i, ())} for i in cases}
    waivers = parse_waivers(KNOWN_WRONG.read_text(encoding="utf-8"), KNOWN_WRONG.name).entries
    prices = {i: 1 + cost.total(case, EXACT) / SMALL for i, case in cases.items()}
    prices |= {i: prices[i] + AGAIN for i in cases if any(w.covers(i) for w in waivers)}
    weights = _weights(items)
    named = _ids(table.smoke for table in TABLES)
    order = _cover(items, weights, prices, named)[: n - len(named)]
    while True:
        have = {item for i in (*named, *order) for item in items[i]}
        lacking = {i: own - have for i, own in needed.items()}
        added = _cover(lacking, Counter(item for own in lacking.values() for item in own), prices)
        excess = len(named) + len(order) + len(added) - n
        if excess <= 0:
            break
        del order[-max(1, excess // 2) :]
    chosen = {i: items[i] for i in (*named, *order, *added)}
    return list(dict.fromkeys((*_cover(chosen, weights, prices), *chosen)))


def checks(ggml: Backend, case: Case) -> bool:
    """Return True if ggml accepts every node of a case or, as it checks a strided op, of its copy without strides."""
    copied = contiguous(case)
    return any(all(all(ggml.supports(s.graph)) for s in each.steps) for each in (case, *(copied or ())[:1]))


def write() -> Sequence[str]:
    """Write the file of `smoke` and return its ids."""
    chosen = choose()
    bodies = [i.partition("/")[2].rpartition("@")[0] for i in chosen]
    CHOSEN.write_text(json.dumps(bodies, indent=0) + "\n", encoding="ascii", newline="\n")
    return chosen


def _cover(
    items: Mapping[str, Collection[Item]],
    weights: Mapping[Item, int],
    prices: Mapping[str, float],
    given: Collection[str] = (),
) -> list[str]:
    """Return ids whose items cover all that `given` lack, always the one with most new weight for its price.

    What an id adds only becomes less, so only the first of the heap is weighed again.
    """
    have = {item for i in given for item in items[i]}
    heap = [(-sum(weights[item] for item in own) / prices[i], i) for i, own in items.items()]
    heapq.heapify(heap)
    found = []
    while heap:
        i = heap[0][1]
        new = -sum(weights[item] for item in items[i] if item not in have) / prices[i]
        if new == 0:
            heapq.heappop(heap)
        elif new > heap[0][0]:
            heapq.heapreplace(heap, (new, i))
        else:
            heapq.heappop(heap)
            found.append(i)
            have.update(items[i])
    return found


def _weights(items: Mapping[str, Collection[Item]]) -> dict[Item, int]:
    shares: dict[str, float] = json.loads(WEIGHTS.read_text(encoding="ascii"))
    every = {item for own in items.values() for item in own}
    number = Counter(item.kind for item in every if isinstance(item, Pair))
    weight = {kind: round(_UNIT * shares.get(" ".join(kind), 0.0) / n) for kind, n in number.items()}
    most = NEEDED * max(weight.values())
    return {item: weight[item.kind] if isinstance(item, Pair) else most for item in every}


def _needed(among: Collection[str]) -> dict[str, set[Item]]:
    """Return id -> what it has of all that `smoke` must have; ids with nothing of it are left out."""
    found: dict[str, set[Item]] = {}
    listed = _ids([*table.smoke, *table.standard] for table in TABLES)
    wanted = {item for i in listed for item in _kinds(i)}
    for i in ids("standard"):
        found[i] = {item for item in _kinds(i) if item in wanted}
    for grid in DISPATCH:
        rows = paired()[str(grid)].split()
        for row, body in zip(rows, grid.rows(" ".join(rows)), strict=True):
            found[with_seed(NAME, body)].update((str(grid), str(k), value) for k, value in enumerate(row))
    for fault in read([FOLDER]):
        if fault.level == "smoke" and fault.case.startswith(f"{NAME}/"):
            found[fault.case].add(("fault", fault.name))
    return {i: own for i, own in found.items() if own and i in among}


def _kinds(case_id: str) -> Iterator[tuple[str, ...]]:
    """Yield what `smoke` shows of an op: itself, also in F32 with a view, the type of each operand, keys with words.

    A number counts as its key alone; a shape also counts long rows and several matrices, with views and without; a
    permute only counts if rows remain rows.
    """
    op_id = parse(case_id, KNOWN)
    table: OpCases = KNOWN[op_id.op]
    yield (op_id.op,)
    if op_id.types[:1] == (F32,) and any(key.startswith("v") for key in op_id.given):
        yield op_id.op, "f32", "view"
    yield from ((table.ops[0], str(i), t.name) for i, t in enumerate(op_id.types))
    group = op_id.op.partition(".")[0]
    for key, value in op_id.given.items():
        for part in value.split("."):
            yield group, key, "" if re.match("[0-9-]|$", part) else re.sub(r"^p(0?)\d+$", r"p\1", part)
        if table.keys[key].is_shape and int(value.partition("x")[0]) >= LONG:
            yield group, key, "long"
        if table.keys[key].is_shape and value.count("x") > 1:
            yield group, key, "several", str(any(k.startswith("v") for k in op_id.given))


def _ids(tables: Iterable[Sequence[Row]]) -> list[str]:
    return list(dict.fromkeys(with_seed(NAME, body) for rows in tables for body in ids_of_rows(rows)))
