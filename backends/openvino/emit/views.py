"""Ops that move elements: CPY CONT DUP CONCAT REPEAT SET ACC."""

from __future__ import annotations

import openvino.opset15 as o
from openvino import Type

from backends.openvino.forms import NUMBERS, parts
from backends.openvino.nodes import shape_of, tile
from backends.openvino.views import Region, read, write
from backends.openvino.walk import Walk, src
from conformance.backend.translating.plan import Emitter
from conformance.ggml.ops.views import part
from conformance.ggml.tensor import Tensor, is_empty, nelements
from conformance.ggml.types import I32


def _copy(e: Walk, node: Tensor) -> None:
    """`ggml_compute_forward_dup`: elements in order, whatever the two shapes; equal types keep their bytes."""
    a = src(node, 0)
    if a.type is node.type:
        if a.type in NUMBERS:
            e.store(node, e.number(a), exact=True)
        else:
            e.store_parts(node, e.parts(a))
        return
    x = e.number(a)
    if node.type is I32:
        x = o.convert(x, Type.i32)
    elif a.type is I32:
        x = o.convert(x, Type.f32)
    e.store(node, x)


def _concat(e: Walk, node: Tensor) -> None:
    axis = 3 - node.params.dim
    full = [s for s in (src(node, 0), src(node, 1)) if not is_empty(s)]
    if node.type in NUMBERS:
        xs = [e.number(s) for s in full]
        e.store(node, o.concat(xs, axis) if len(xs) > 1 else xs[0], exact=True)
        return
    sources = [e.parts(s) for s in full]
    e.store_parts(node, {p.name: o.concat([f[p.name] for f in sources], axis) for p in parts(node.type)})


def _repeat(e: Walk, node: Tensor) -> None:
    a = src(node, 0)
    if node.type in NUMBERS:
        e.store(node, tile(e.c, e.number(a), node.shape), exact=True)
        return
    shape = (*node.ne[:0:-1], node.ne[0] // node.type.blck_size)
    e.store_parts(node, {n: tile(e.c, x, (*shape, shape_of(e.c, x)[-1])) for n, x in e.parts(a).items()})


def _part(*, add: bool) -> Emitter:
    """In place: write only the part, through a view. Otherwise: a new value, `src[0]` with the part replaced."""

    def emit(e: Walk, node: Tensor) -> None:
        a, b = src(node, 0), src(node, 1)
        ne, nb, offset = part(node)
        new = e.number(b)
        if node.view_src is not None:
            window = Tensor(node.type, ne, nb, "VIEW", view_src=node.root, view_offs=node.view_offs + offset)
            e.store(window, o.add(e.number(window), new) if add else new, exact=True)
            return
        size, whole = a.type.type_size, e.number(a)
        region = Region(nelements(a), ne[::-1], tuple(n // size for n in nb[::-1]), offset // size)
        if add:
            new = o.add(read(e.c, whole, region)[0], new)
        e.store(node, write(e.c, whole, region, e.c.shaped(new, ne[::-1]))[0], exact=True)

    return emit


EMITTERS: dict[str, Emitter] = {
    "ACC": _part(add=True),
    "CONCAT": _concat,
    "CONT": _copy,
    "CPY": _copy,
    "DUP": _copy,
    "REPEAT": _repeat,
    "SET": _part(add=False),
}
