"""The ops that only rename bytes, NONE VIEW RESHAPE PERMUTE TRANSPOSE: seen through an op that reads the view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Tensor

from .bench import Bench
from .data import normal, values
from .grammar import FLOATS, Key, OpCases, numbers, opt_shape, shape, text, word
from .memory import ELEMENTS, EVERY


def _read_through(bench: Bench, t: Tensor) -> Tensor:
    """An op that computes, so that the view is seen: `use`."""
    use = bench.v["use"]
    if use == "cont":
        return bench.b.cont(t)
    other = bench.leaf("other", bench.types[0], t.ne, normal())
    return bench.b.add(other, t) if use == "add" else bench.b.mul(t, other)


def _view(bench: Bench) -> Sequence[Tensor]:
    v, b, (type_,) = bench.v, bench.b, bench.types
    a = bench.operand("a", type_, v["a"], values(type_), v["va"])
    out = _read_through(bench, _VIEWS[bench.id.op](b, a, v))
    # ggml's allocator must meet the tensor behind a view as a src too, which a NONE view does not name
    return (b.cont(a), out) if bench.id.op == "NONE" else (out,)


def _window(b: Builder, a: Tensor, v: Mapping[str, Any]) -> Tensor:
    ne, at = v["ne"] or a.ne, (*v["at"], 0, 0, 0, 0)
    offset = at[0] // a.type.blck_size * a.nb[0] + sum(i * nb for i, nb in zip(at[1:4], a.nb[1:], strict=True))
    (n0, n1, n2, n3), (_, nb1, nb2, nb3) = ne, a.nb
    return {
        1: lambda: b.view_1d(a, n0, offset),
        2: lambda: b.view_2d(a, n0, n1, nb1, offset),
        3: lambda: b.view_3d(a, n0, n1, n2, nb1, nb2, offset),
        4: lambda: b.view_4d(a, n0, n1, n2, n3, nb1, nb2, nb3, offset),
    }[int(v["rank"])]()


def _permute(b: Builder, a: Tensor, v: Mapping[str, Any]) -> Tensor:
    if sorted(v["axes"]) != [0, 1, 2, 3]:
        raise UsageError(f"axes: 0 to 3 in any order, joined by x, expected, {v['axes']} found")
    return b.permute(a, *v["axes"])


_VIEWS: dict[str, Callable[[Builder, Tensor, Mapping[str, Any]], Tensor]] = {
    "NONE": lambda b, a, _v: b.view_tensor(a),
    "VIEW": _window,
    "RESHAPE": lambda b, a, v: b.reshape_4d(a, *(v["ne"] or a.ne)),
    "PERMUTE": _permute,
    "TRANSPOSE": lambda b, a, _v: b.transpose(a),
}

_VIEW_KEYS: dict[str, Key] = {
    "a": shape(),
    "ne": opt_shape(),
    "at": numbers(),
    "rank": word("4", "3", "2", "1"),
    "axes": numbers(),
    "va": text(),
    "use": word("cont", "add", "mul"),
}

VIEWS = OpCases(
    ops=tuple(_VIEWS),
    types=("a",),
    keys=_VIEW_KEYS,
    make=_view,
    standard=(
        f"NONE-{EVERY}-a=256x3x2",
        f"NONE-{{{FLOATS}}}-a=17x3x2,use={{add|mul}}",
        f"VIEW-{EVERY}-a=512x5x4x2,ne=256x3x2x1,at=256x1x2x1",
        f"VIEW-{EVERY}-a=256x6x3,{{ne=256x2x3,at=0x3x0,rank=3|ne=256x4,at=0x1x1,rank=2|ne=512,at=0x2x1,rank=1}}",
        f"VIEW-{{{FLOATS}}}-a=20x6x4x2,ne=7x3x2x2,at=9x2x1x0,use={{add|mul}}",
        f"VIEW-{ELEMENTS}-a=20x6x4x2,ne=7x3x2x2,at=9x2x1x0,va={{p0213|pad|p0321}}",
        f"RESHAPE-{EVERY}-a=256x6x4,ne={{512x3x4|256x2x3x4|6144}}",
        f"RESHAPE-{{{FLOATS}}}-a=18x6x4,ne={{6x9x8|432}},use={{add|mul}}",
        f"RESHAPE-{EVERY}-a=256x6x4,ne=768x8,va=off",
        f"PERMUTE-{EVERY}-a=256x3x4x2,axes={{0x2x1x3|0x3x1x2}}",
        f"PERMUTE-{ELEMENTS}-a=10x3x4x2,axes={{1x0x2x3|2x0x1x3|3x2x1x0|1x2x3x0|2x3x0x1|0x1x2x3}}",
        f"PERMUTE-{ELEMENTS}-a=10x3x4x2,axes={{1x0x2x3|2x0x3x1}},va={{pad|slab|p0213}}",
        f"PERMUTE-{{{FLOATS}}}-a=10x3x4x2,axes=0x2x1x3,use={{add|mul}}",
        f"TRANSPOSE-{ELEMENTS}-a={{10x3|1x7|9x4x3|5x4x3x2}}",
        f"TRANSPOSE-{ELEMENTS}-a=9x4x3,va={{pad|rows|off|p0213}}",
        f"TRANSPOSE-{{{FLOATS}}}-a=9x4x3,use=add",
    ),
    full=(f"TRANSPOSE-{ELEMENTS}-a=512x129x3", f"PERMUTE-{EVERY}-a=256x64x32,axes=0x2x1x3"),
)

CASES = (VIEWS,)
