"""Cost limits of a trajectory, by its shapes, for a backend with `Witness.promises`.

Graphs of one *form* differ only in sizes and offsets; whether an extent is 0, 1 or more is part of the form. If prompts
and single tokens read three blocks of 256 cells, there are two forms, both with changing sizes.

| `promises` | limit for a trajectory |
|---|---|
| `lifts` | a program per form, for its first graph, and one more for all others once sizes change |
| `static` | a program per form, whatever its sizes: attentions share a mask, no other caches, no experts |
| `appends` | moves the cells that its nodes write, and no others |
| `fuses` | float caches stay in the attention kernel: FLASH_ATTN_EXT without extras, of one head size; so many layers |
| `resumes` | if `fuses` applies and all steps attend to the same sequences: continues with its cache |
| `packs` | constants of a program have 12 bits per number of a weight that a product reads, scales included |
| `layers` | a layer per RMS_NORM, and per ROPE of neighbours or halves, in each program |

Whatever it declares, a device with kernels `K=… TILE_N=…` runs products of up to 64 rows of activations on the tile of
64 (decoding) and all others on that of 256; with `max_n=1`, only those of one row (`launches`).

Extents that were equal in all earlier graphs look like one number, and a view offset that did not change looks like a
constant. The first graph in which they differ takes one more program under `lifts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from conformance.case.case import JSON, Step, writes_in_place
from conformance.ggml.ops.matmul import AT_ONCE
from conformance.ggml.ops.op import optional
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor, computes, nelements, nrows
from conformance.ggml.types import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

OFFSET_PARAMS = 2
"""Number of leading `op_params` of a VIEW that are its offset."""
MASKS = {"FLASH_ATTN_EXT": 3, "SOFT_MAX": 1}
"""Attention op -> index of its mask source."""
GRIDS = frozenset({Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K})
"""Block types of integers times a scale, which devices with 4 and 8 bits can store."""
PACKED_BITS, FLOAT_BITS = 12, 32
"""Maximum bits of a number on a grid (8, and a float32 scale for 16), and of any other."""
_TABLES = 4096
"""Bytes of a program's other constants, such as frequencies and shapes."""
EXPERTS = ("MUL_MAT_ID", "ADD_ID")
LAYERS: Mapping[str, Callable[[Tensor], bool]] = {
    "RMS": lambda n: n.op == "RMS_NORM",
    "RoPE": lambda n: n.op == "ROPE" and n.params.mode in (ROPE_TYPE.NORMAL, ROPE_TYPE.NEOX),
}
"""Layer -> the nodes that are one each, unless they compute the same."""
DECODE_N, PREFILL_N = TILES = (64, 256)
"""TILE_N of the kernels of decoding, for up to as many rows of activations, and of prompts."""
ONE_ROW = ("*max_n=1", "*max_n=1[!0-9]*")
"""Backends that were asked to leave all but one row of activations to another device."""
WORN = 256
"""Overwritten cells after which an appending backend may rebuild a cache."""
Sizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Every `ne` and `nb`, every `ne`, and every `view_offs` of a graph."""


def demands(steps: Sequence[Step], persistent: Collection[Tensor]) -> dict[str, JSON]:
    """Return `Case.demands` of a trajectory; none for a single step, which reuses nothing."""
    if len(steps) < 2:
        return {}
    forms = _forms(steps, persistent)
    nodes = [[n for n in s.graph if computes(n)] for s in steps]
    writers = [[n for n in each if writes_in_place(n) and n.root in persistent] for each in nodes]
    found: dict[str, JSON] = {
        "lifts": {"compiles": f"<={sum(map(_lifted, forms.values()))}"},
        "appends": {"cache_bytes": f"<={sum(_written(n) for each in writers for n in each)}"},
    }
    if all(map(_shares_mask, nodes, writers)):
        found["static"] = {"compiles": f"<={len(forms)}"}
    if all(map(_fuses, nodes, writers)):
        least = min(sum(n.op == "FLASH_ATTN_EXT" for n in each) for each in nodes)
        found["fuses"] = {"state": "fused", "kernels": {"ScaledDotProductAttention": f">={least}*programs"}}
        if len({*map(_sequences, nodes)}) == 1:
            found["resumes"] = {"cache_bytes": f"<={_resumed(nodes, writers)}"}
    written = {n.root for each in writers for n in each}
    weights = {t for t in persistent if t not in written}
    packed = {n.src[0] for each in nodes for n in each if n.op == "MUL_MAT" and n.src[0] and n.src[0].type in GRIDS}
    if packed := packed & weights:
        most = _TABLES + sum(nelements(t) * (PACKED_BITS if t in packed else FLOAT_BITS) // 8 for t in weights)
        found["packs"] = {"bytes": {"constants": f"<={most}*programs"}}
    layers = {name: min(len({_origin(n) for n in each if of(n)}) for each in nodes) for name, of in LAYERS.items()}
    if any(layers.values()):
        found["layers"] = {"kernels": {name: f">={least}*programs" for name, least in layers.items() if least}}
    return found | launches([n for each in nodes for n in each], persistent)


def _origin(node: Tensor) -> Hashable:
    """Return a key that nodes with equal values share: Q and K of equal size have equal weights."""
    t = node
    while t.op != "MUL_MAT" and t.src and t.src[0] is not None:
        t = t.src[0]
    return node.op, node.op_params, node.ne, t.src[1] if t.op == "MUL_MAT" else t


def launches(nodes: Iterable[Tensor], persistent: Collection[Tensor], how: str = "<=") -> dict[str, JSON]:
    """Return demands on kernel runs by K and tile, for any device and for `max_n=1`.

    A product with a weight in `persistent` is one run, or one per `AT_ONCE` numbers of the weight. `how` is `<=` if
    another device may run it instead, else `==`.
    """
    runs: Counter[tuple[int, int, bool]] = Counter()
    for n in nodes:
        w, x = (*n.src, None, None)[:2]
        if n.op == "MUL_MAT" and w is not None and x is not None and w.root in persistent:
            k, rows = w.ne[0], nrows(x)
            runs[k, DECODE_N if rows <= DECODE_N else PREFILL_N, rows == 1] += -(-w.ne[1] // max(1, AT_ONCE // k))
    lengths = sorted({k for k, _, _ in runs})
    if not lengths:
        return {}

    def kernels(*one: bool) -> dict[str, JSON]:
        kinds = [(k, tile) for k in lengths for tile in TILES]
        return {"kernels": {f"*K={k} TILE_N={t}": f"{how}{sum(runs[k, t, o] for o in one)}" for k, t in kinds}}

    return {**kernels(True, False), **dict.fromkeys(ONE_ROW, kernels(True))}


def _forms(steps: Iterable[Step], persistent: Collection[Tensor]) -> dict[Hashable, list[Sizes]]:
    """Return form -> sizes and offsets of each of its graphs, in order."""
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
        forms.setdefault((form, tuple(at[t] for t in step.outputs)), []).append(
            (
                tuple(n for t in tensors for n in (*t.ne, *t.nb)),
                tuple(n for t in tensors for n in t.ne),
                tuple(t.view_offs for t in tensors),
            )
        )
    return forms


def _lifted(graphs: Sequence[Sizes]) -> int:
    """Return the number of programs allowed for graphs of one form."""
    known, count = 0, 0
    seen: list[Sizes] = []
    for graph in dict.fromkeys(graphs):
        seen.append(graph)
        extents, offsets = ({*zip(*(g[i] for g in seen), strict=True)} for i in (1, 2))
        now = len(extents) + len([o for o in offsets if len({*o}) > 1])
        count += len(seen) < 3 or now > known
        known = now
    return count


def _shares_mask(nodes: Sequence[Tensor], writers: Sequence[Tensor]) -> bool:
    """Return True if attentions share a mask, only they write caches, and there are no experts."""
    masks = [m for n in nodes if n.op in MASKS and (m := optional(n, MASKS[n.op])) is not None]
    return len(set(masks)) == 1 and len(writers) == 2 * len(masks) and not any(n.op in EXPERTS for n in nodes)


def _fuses(nodes: Iterable[Tensor], writers: Sequence[Tensor]) -> bool:
    """Return True if a step appends once to float caches that only plain attentions read."""
    caches = {n.root for n in writers}
    readers = [n for n in nodes if any(s is not None and s.root in caches - {n.root} for s in n.src)]
    return (
        0 < len(caches) == len(writers)
        and all(t.type in (F32, F16, BF16) for t in caches)
        and all(n.op in ("SET_ROWS", "CPY") and n.src[0] is not None and n.src[0].root is not n.root for n in writers)
        and all(n.op == "FLASH_ATTN_EXT" and _is_plain(n) for n in readers)
    )


def _read(nodes: Iterable[Tensor]) -> list[Tensor]:
    """Return the K and V that attentions read."""
    return [t for n in nodes if n.op == "FLASH_ATTN_EXT" for t in n.src[1:3] if t is not None]


def _sequences(nodes: Iterable[Tensor]) -> Hashable:
    """Return the cache parts that attentions read, independently of n_kv."""
    return frozenset((t.root, t.view_offs, t.ne[3]) for t in _read(nodes))


def _resumed(nodes: Sequence[Sequence[Tensor]], writers: Sequence[Sequence[Tensor]]) -> int:
    """Return bytes written, and all cells read, once plus once per `WORN` overwritten cells."""
    written: Counter[Tensor] = Counter()
    for n in (n for each in writers for n in each):
        written[n.root] += _written(n)
    cells = {t: max(k.ne[1] * k.ne[3] for each in nodes for k in _read(each) if k.root is t) for t in written}
    return sum(n + cells[t] * t.nb[1] * (1 + n // t.nb[1] // WORN) for t, n in written.items())


def _is_plain(attention: Tensor) -> bool:
    """Return True for a mask, K and V of one head size, and no sinks, ALiBi slopes or softcap."""
    _, k, v, mask, sinks = (*attention.src, None, None)[:5]
    p = attention.params
    same_heads = k is not None and v is not None and k.ne[0] == v.ne[0]
    return same_heads and mask is not None and sinks is None and not p.max_bias and not p.logit_softcap


def _written(node: Tensor) -> int:
    """Return the bytes that `node` writes into its root; for SET_ROWS only its rows."""
    rows = node.src[0] if node.op == "SET_ROWS" and node.src[0] is not None else node
    return nelements(rows) * node.type.type_size // node.type.blck_size
