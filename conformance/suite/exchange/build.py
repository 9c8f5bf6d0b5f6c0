"""Build a case from a line: leaves with its strides, values by rule, and the op's node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.ops.build import Builder, build_forward_expand
from conformance.ggml.ops.matmul import OP_HINT
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import FLAG_INPUT, Bytes, Dims, Params, Tensor, contiguous_nb, new_tensor
from conformance.suite.data import (
    Fill,
    away_from_zero,
    causal,
    chosen,
    distinct,
    encode,
    hadamard,
    integers,
    normal,
    uniform,
    values,
)

from .line import Line, Source

FAMILY = "testfile"
POSITIONS = 512
"""Upper limit of ROPE positions, unless the op has its context size."""
WRITES = {"SET_ROWS": 2, "CPY": 1, "SET": 0, "ACC": 0}
"""Op -> the source into which it may write, which then is a cache."""

Rule = Callable[[Line], Fill]


def _rows(i: int, axis: int) -> Rule:
    """Return indices into an axis of a source."""
    return lambda line: integers(0, max(1, line.sources[i].ne[axis]))


def _mask(line: Line) -> Fill:
    """Return a causal mask in which the last query sees every key."""
    ne = line.sources[3 if line.op == "FLASH_ATTN_EXT" else 1].ne
    queries = line.sources[0].ne[1]
    return causal(ne[0] - min(queries, ne[1]))


def _positions(line: Line) -> Fill:
    """Return positions below the op's original context size, if it has one."""
    return integers(0, Params(line.op, line.op_params).n_ctx_orig or POSITIONS)


def _weights(line: Line) -> Fill:
    """Return weights of a product; with the Hadamard hint, the Walsh-Hadamard matrix."""
    if Params(line.op, line.op_params).hint != OP_HINT.SRC0_IS_HADAMARD:
        return values(line.sources[0].type)
    return lambda _, ne: np.broadcast_to(hadamard(ne[0]), (ne[3], ne[2], ne[1], ne[0]))


def _short(line: Line) -> Fill:
    """Return vectors of length about 1, so that a state that sums their products is bounded."""
    return normal(1 / math.sqrt(max(1, line.sources[0].ne[0])))


def _triangle(s: Stream, ne: Dims) -> NDArray[np.float32]:
    """Return matrices with bounded solutions: diagonal 1 and small numbers elsewhere."""
    x = s.normal(math.prod(ne), 0.25 / math.sqrt(ne[0])).reshape(ne[::-1])
    return x + np.eye(ne[0], dtype=np.float32)


RULES: dict[tuple[str, int], Rule] = {
    ("GET_ROWS", 1): _rows(0, 1),
    ("SET_ROWS", 1): lambda line: chosen(line.ne[1]),
    ("ROPE", 1): _positions,
    ("ROPE_BACK", 1): _positions,
    ("ROPE", 2): lambda _: uniform(0.9, 1.1),
    ("ROPE_BACK", 2): lambda _: uniform(0.9, 1.1),
    ("GET_ROWS_BACK", 1): lambda line: integers(0, max(1, line.ne[1])),
    ("MUL_MAT", 0): _weights,
    ("MUL_MAT_ID", 2): _rows(0, 2),
    ("ADD_ID", 2): _rows(1, 1),
    ("SSM_SCAN", 6): lambda line: chosen(line.sources[0].ne[3]),
    ("FLASH_ATTN_EXT", 3): _mask,
    ("SOFT_MAX", 1): _mask,
    ("SSM_SCAN", 3): lambda _: uniform(-2.0, -0.1),
    ("RWKV_WKV6", 4): lambda _: uniform(0.3, 1.0),
    ("RWKV_WKV7", 1): lambda _: uniform(0.3, 1.0),
    ("RWKV_WKV7", 4): _short,
    ("RWKV_WKV7", 5): _short,
    ("GATED_LINEAR_ATTN", 3): lambda _: uniform(0.3, 1.0),
    ("GATED_DELTA_NET", 3): lambda _: uniform(-1.0, 0.0),
    ("GATED_DELTA_NET", 4): lambda _: uniform(0.0, 1.0),
    ("SOLVE_TRI", 0): lambda _: _triangle,
    ("ARGSORT", 0): lambda _: distinct(-4.0, 4.0),
    ("TOP_K", 0): lambda _: distinct(-4.0, 4.0),
    ("ARGMAX", 0): lambda _: distinct(-4.0, 4.0),
    ("OPT_STEP_ADAMW", 3): lambda _: uniform(0.1, 2.0),
    ("OPT_STEP_ADAMW", 4): lambda _: uniform(0.05, 0.95),
    ("OPT_STEP_SGD", 2): lambda _: uniform(0.01, 0.5),
    ("DIV", 1): lambda _: away_from_zero(0.5, 2.0),
    ("LOG", 0): lambda _: uniform(0.1, 4.0),
    ("SQRT", 0): lambda _: uniform(0.0, 4.0),
}
"""Op and source -> its values; otherwise integers use the whole range, floats are around 0."""


def case_of(line: Line) -> Case:
    """Return the case of a line; its id is a hash of the line's content.

    UsageError if ggml would not build such a node, or if no view of a leaf has the strides of a source.
    """
    what = f"{FAMILY}/{line.op}-{sha256(repr(line.unnamed()).encode()).hexdigest()[:12]}@0"
    persistent: dict[Tensor, Bytes] = {}
    inputs: dict[Tensor, Bytes] = {}
    try:
        src = tuple(_source(what, line, i, persistent, inputs) for i in range(len(line.sources)))
        node = _node(line, src)
        graph = build_forward_expand(node)
    except GraphError as e:
        raise UsageError(f"{line.op} {line.name}: {e}") from None
    return Case(what, persistent, [Step(graph, inputs, (node,))], family=FAMILY, params={"op": line.op})


def _node(line: Line, src: tuple[Tensor, ...]) -> Tensor:
    declared = DECLARATIONS.get(line.op)
    if declared is None:
        raise GraphError(f"the framework does not support {line.op} yet")
    nb = contiguous_nb(line.type, line.ne)
    node = Tensor(line.type, line.ne, nb, op=line.op, op_params=line.op_params, src=src, name=line.name)
    type_, ne, nb, view_src, offset = declared.layout(node)
    if (type_, ne) != (line.type, line.ne):
        raise GraphError(f"ggml makes {type_}{list(ne)} of these sources, the line says {line.type}{list(line.ne)}")
    node = replace(node, nb=nb, view_src=view_src, view_offs=offset)
    declared.check_run(node)
    return node


def _source(what: str, line: Line, i: int, persistent: dict[Tensor, Bytes], inputs: dict[Tensor, Bytes]) -> Tensor:
    s, name = line.sources[i], f"src{i}"
    rule = RULES.get((line.op, i))
    fill = values(s.type) if rule is None else rule(line)
    packed = encode(s.type, Stream(what, name), s.ne, fill)
    cache = line.op in WRITES and i == WRITES[line.op]
    own = persistent if cache else inputs
    flags = 0 if cache else FLAG_INPUT
    if s.nb == contiguous_nb(s.type, s.ne):
        leaf = new_tensor(s.type, *s.ne, name=name, flags=flags)
        own[leaf] = packed
        return leaf
    ne = (_elements(s), 1, 1, 1)
    leaf = new_tensor(s.type, *ne, name=name, flags=flags)
    own[leaf] = _spread(encode(s.type, Stream(what, f"{name}, gaps"), ne, values(s.type)), packed, s)
    return _strided(leaf, s, i)


def _spread(leaf: Bytes, packed: Bytes, s: Source) -> Bytes:
    """Return the bytes of a leaf with a source's elements, or blocks, at its strides."""
    n = (s.ne[0] // s.type.blck_size, *s.ne[1:])
    at = sum(np.arange(n[d]).reshape([-1 if k == d else 1 for k in (3, 2, 1, 0)]) * s.nb[d] for d in range(4))
    places = np.asarray(at).reshape(-1, 1) + np.arange(s.type.type_size)
    leaf[places] = packed.reshape(-1, s.type.type_size)
    return leaf


def _elements(s: Source) -> int:
    """Return the number of elements of a leaf with all bytes of a source, in whole blocks."""
    if 0 in s.ne:
        return 0
    blck = s.type.blck_size
    first = s.type.type_size + (s.ne[0] - 1) * s.nb[0] if blck == 1 else s.ne[0] * s.nb[0] // blck
    size = first + sum((n - 1) * nb for n, nb in zip(s.ne[1:], s.nb[1:], strict=True))
    return -(-size // s.type.type_size) * blck


def _strided(leaf: Tensor, s: Source, i: int) -> Tensor:
    """Return a view with the source's strides: spaced rows, then permuted."""
    order = sorted(range(4), key=lambda d: (s.nb[d], d))
    ne: Dims = tuple(s.ne[d] for d in order)  # type: ignore[assignment]  # four
    nb = [s.nb[d] for d in order]
    b = Builder()
    view = b.view_4d(leaf, *ne, nb[1], nb[2], nb[3], 0)
    if order != [0, 1, 2, 3]:
        view = b.permute(view, *order)
    if view.ne != s.ne or any(n > 1 and a != c for n, a, c in zip(s.ne, view.nb, s.nb, strict=True)):
        raise GraphError(f"src[{i}]: no view of a leaf has ne {list(s.ne)} and nb {list(s.nb)}")
    return view
