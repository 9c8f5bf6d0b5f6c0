"""What a trajectory may cost a backend that promises a price (`Witness.promises`): a rule over its shapes, no record.

A *form* is what graphs share that differ in nothing but sizes and offsets; whether an extent is 0, 1 or more belongs to
it. Where prompts and single tokens read three blocks of 256 cells, there are two forms, both with changing sizes.

| promise | of a trajectory |
|---|---|
| `lifts` | a program for each form, as its first graph is, and one more for all others once sizes change |
| `static` | a program for each form, whatever its sizes, where all attentions of a graph see as many cells |
| `appends` | moves the cells that its nodes write, and no others |
| `fuses` | keeps caches of floats in the kernel that attends to them, where that is FLASH_ATTN_EXT without extras |

The extents of inputs vary by themselves. A view's offset is a number of the graph: the first graph that moves it shows
that it varies, and may cost `lifts` a program more.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TypeAlias

from conformance.case.case import JSON, Step, writes_in_place
from conformance.ggml.tensor import Tensor, computes, nelements
from conformance.ggml.types import BF16, F16, F32

OFFSET_PARAMS = 2
"""The first two `op_params` of a VIEW are its offset."""
MASKS = {"FLASH_ATTN_EXT": 3, "SOFT_MAX": 1}
"""Op of an attention -> which source is its mask."""
Sizes: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Of a graph's tensors `ne` and `nb`, and `view_offs`."""


def demands(steps: Sequence[Step], persistent: Collection[Tensor]) -> dict[str, JSON]:
    """`Case.demands` of a trajectory over `persistent`; none for a single step, which has nothing to use again."""
    if len(steps) < 2:
        return {}
    forms = _forms(steps, persistent)
    nodes = [n for s in steps for n in s.graph if computes(n)]
    writers = [n for n in nodes if writes_in_place(n) and n.root in persistent]
    found: dict[str, JSON] = {
        "lifts": {"compiles": f"<={sum(map(_lifted, forms.values()))}"},
        "appends": {"cache_bytes": f"<={sum(map(_written, writers))}"},
    }
    if all(len({_cells(n) for n in s.graph if n.op in MASKS}) == 1 for s in steps):
        found["static"] = {"compiles": f"<={len(forms)}"}
    if writers and _fuses(nodes, writers):
        found["fuses"] = {"state": "fused"}
    return found


def _forms(steps: Iterable[Step], persistent: Collection[Tensor]) -> dict[Hashable, list[Sizes]]:
    """Form -> sizes and offsets of each of its graphs, in order."""
    held = {t: i for i, t in enumerate(persistent)}
    forms: dict[Hashable, list[Sizes]] = {}
    for step in steps:
        tensors = step.graph.tensors()
        at: dict[Tensor | None, int] = {None: -1} | {t: i for i, t in enumerate(tensors)}
        form = tuple(
            (
                t.op,
                t.op_params[OFFSET_PARAMS if t.op == "VIEW" else 0 :],
                t.type.id,
                t.flags,
                held.get(t),
                tuple(at[s] for s in t.src),
                at[t.view_src],
                tuple(min(n, 2) for n in t.ne),
            )
            for t in tensors
        )
        sizes = tuple((*t.ne, *t.nb) for t in tensors), tuple(t.view_offs for t in tensors)
        forms.setdefault((form, tuple(at[t] for t in step.outputs)), []).append(sizes)
    return forms


def _lifted(graphs: Sequence[Sizes]) -> int:
    """Programs that graphs of one form are entitled to."""
    seen: dict[Sizes, None] = {}
    moved: set[int] = set()
    count = 0
    for graph in graphs:
        first = next(iter(seen), graph)
        now = {i for i, (a, b) in enumerate(zip(graph[1], first[1], strict=True)) if a != b}
        if graph not in seen and (len(seen) < 2 or not now <= moved):
            count += 1
        seen[graph] = None
        moved |= now
    return count


def _cells(attention: Tensor) -> int | None:
    """Cells of the cache that an attention sees, by its mask; None where it has none."""
    mask = (*attention.src, None, None, None)[MASKS[attention.op]]
    return None if mask is None else mask.ne[0]


def _fuses(nodes: Iterable[Tensor], writers: Sequence[Tensor]) -> bool:
    caches = {n.root for n in writers}
    readers = [n for n in nodes if any(s is not None and s.root in caches - {n.root} for s in n.src)]
    return (
        all(t.type in (F32, F16, BF16) for t in caches)
        and all(n.op in ("SET_ROWS", "CPY") and n.src[0] is not None and n.src[0].root is not n.root for n in writers)
        and all(n.op == "FLASH_ATTN_EXT" and _is_plain(n) for n in readers)
    )


def _is_plain(attention: Tensor) -> bool:
    """Whether it has a mask, and no sinks, ALiBi slopes or softcap."""
    mask, sinks = (*attention.src, None, None)[3:5]
    p = attention.params
    return mask is not None and sinks is None and not p.max_bias and not p.logit_softcap


def _written(node: Tensor) -> int:
    """Bytes that `node` writes into the tensor that it is a view of: of SET_ROWS its rows only."""
    rows = node.src[0] if node.op == "SET_ROWS" and node.src[0] is not None else node
    return nelements(rows) * node.type.type_size // node.type.blck_size
