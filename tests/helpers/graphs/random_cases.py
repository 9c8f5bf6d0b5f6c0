"""Random legal cases of several steps, and what it means that two cases are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance.case.case import Case, Step
from conformance.ggml.errors import GraphError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor, nbytes, new_tensor, packed_nbytes
from conformance.ggml.types import F16, F32, I64, TYPES

_B = Builder()
_MAKE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _B.add,
    _B.mul_mat,
    lambda a, _: _B.view_2d(a, a.ne[0] // 2, a.ne[1], a.nb[1], a.ne[0] // 2 * a.nb[0]),
    lambda a, _: _B.transpose(a),
    lambda a, _: _B.permute(a, 2, 0, 1, 3),
    lambda a, _: _B.cont(a),
    lambda a, _: _B.scale(a, 0.5),
    lambda a, _: _B.rms_norm(a, 1e-5),
    lambda a, _: _B.reshape_1d(a, a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3]),
    _B.cpy,
    lambda a, _: _B.cast(a, F16),
    lambda a, _: _B.silu_inplace(a),
)

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_names = st.text(st.characters(codec="utf-8"), max_size=15)
_letters = st.text("abcdefghijk/=-_,é", min_size=1, max_size=30)


def _bytes(rng: np.random.Generator, n: int) -> Bytes:
    return rng.integers(0, 256, n, dtype=np.uint8)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Weights of any type, a cache that steps write through SET_ROWS, one to three steps of a few random nodes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    persistent: dict[Tensor, Bytes] = {}
    for type_ in draw(st.lists(st.sampled_from(list(TYPES.values())), max_size=3)):
        t = new_tensor(type_, type_.blck_size * draw(st.integers(0, 2)), draw(st.integers(0, 3)), name=draw(_names))
        persistent[t] = _bytes(rng, nbytes(t))
    cache = new_tensor(F32, 4, 8, name="cache_k_l0")
    persistent[cache] = _bytes(rng, nbytes(cache))
    steps = [_step(draw, rng, cache) for _ in range(draw(st.integers(1, 3)))]
    case = Case(
        id=f"random/{draw(_letters)}@{draw(st.integers(0, 9))}",
        persistent=persistent,
        steps=steps,
        family=draw(st.sampled_from(["", "random"])),
        params=draw(st.dictionaries(st.text(max_size=5), _json, max_size=3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        generator=draw(st.integers(1, 3)),
        tolerance=draw(st.sampled_from([{}, {"nmse": 5e-4}])),
        provenance=draw(st.sampled_from([{}, {"source": "ggml", "n": [1, {"a": None}]}])),
        demands=draw(st.sampled_from([{}, {"path": "cached"}])),
    )
    case.validate()
    return case


def _step(draw: st.DrawFn, rng: np.random.Generator, cache: Tensor) -> Step:
    a = new_tensor(F32, 4, draw(st.integers(1, 2)), name=draw(_names))
    ids = new_tensor(I64, a.ne[1], name="idxs")
    pool = [a, cache]
    for _ in range(draw(st.integers(1, 6))):
        make = draw(st.sampled_from(_MAKE))
        try:
            pool.append(make(draw(st.sampled_from(pool)), draw(st.sampled_from(pool))))
        except GraphError:
            continue  # what ggml refuses, too
    results = [pool[-1], _B.set_rows(cache, a, ids)] if pool[-1].op != "NONE" else [_B.set_rows(cache, a, ids)]
    graph = _B.build_forward_expand(*results)
    tensors = graph.tensors()
    inputs = {t: _bytes(rng, nbytes(t)) for t in (ids, a) if t in tensors}
    known = draw(st.lists(st.sampled_from([*graph.nodes, cache]), unique_by=id))
    return Step(
        graph,
        inputs,
        tuple(draw(st.lists(st.sampled_from(graph.nodes), unique_by=id, max_size=2))),
        {t: _bytes(rng, packed_nbytes(t)) for t in known},
        draw(_json),
    )


_FIELDS = ("type", "ne", "nb", "op", "op_params", "view_offs", "flags", "name")
_FACTS = ("id", "family", "params", "seed", "generator", "tolerance", "provenance", "demands")


def assert_same(a: Case, b: Case) -> None:
    """Every field equal; and the same tensors shared, compared by walking both in step."""
    for name in _FACTS:
        assert getattr(a, name) == getattr(b, name), name
    pairs: dict[Tensor, Tensor] = {}
    assert len(a.persistent) == len(b.persistent)
    for (s, left), (t, right) in zip(a.persistent.items(), b.persistent.items(), strict=True):
        _pair(s, t, pairs)
        _same_bytes(left, right)
    assert len(a.steps) == len(b.steps)
    for p, q in zip(a.steps, b.steps, strict=True):
        assert p.note == q.note
        _same_step(p, q, pairs)
    assert len(set(pairs.values())) == len(pairs)


def _same_step(p: Step, q: Step, pairs: dict[Tensor, Tensor]) -> None:
    assert len(p.graph) == len(q.graph)
    for s, t in zip(p.graph, q.graph, strict=True):
        _pair(s, t, pairs)
    assert [pairs[t] for t in p.outputs] == list(q.outputs)
    for x, y in ((p.inputs, q.inputs), (p.expected, q.expected)):
        assert {pairs[t] for t in x} == set(y)
        for t, data in x.items():
            _same_bytes(data, y[pairs[t]])


def _pair(s: Tensor | None, t: Tensor | None, pairs: dict[Tensor, Tensor]) -> None:
    if s is None or t is None:
        assert s is t
        return
    if s in pairs:
        assert pairs[s] is t
        return
    assert {f: getattr(s, f) for f in _FIELDS} == {f: getattr(t, f) for f in _FIELDS}
    assert len(s.src) == len(t.src)
    pairs[s] = t  # first: a CPY that ggml_cast made is its own src
    for x, y in zip((*s.src, s.view_src), (*t.src, t.view_src), strict=True):
        _pair(x, y, pairs)


def _same_bytes(a: Bytes, b: Bytes) -> None:
    assert b.dtype == np.uint8
    assert b.ndim == 1
    assert np.array_equal(a, b)


def small_case(name: str = "small/cache@0") -> Case:
    """A cache written in two steps, with a weight, a view, recorded values and a note: each field of a document."""
    w = new_tensor(TYPES["q8_0"], 32, 4, name="blk.0.attn_k.weight")
    cache = new_tensor(F32, 4, 8, name="cache_k_l0")
    persistent = {w: np.arange(nbytes(w), dtype=np.uint8), cache: np.zeros(nbytes(cache), np.uint8)}
    steps = []
    for k in range(2):
        x = new_tensor(F32, 32, 2, name="x", flags=1)
        ids = new_tensor(I64, 2, name="idxs", flags=1)
        stored = _B.set_rows(cache, _B.mul_mat(w, x), ids)
        view = _B.scale(_B.view_2d(cache, 4, 4, cache.nb[1], cache.nb[1]), 2.0)
        view.name = "out"
        graph = _B.build_forward_expand(stored, view)
        steps.append(
            Step(
                graph,
                {x: np.full(nbytes(x), k, np.uint8), ids: np.array([k, k + 2], "<i8").view(np.uint8)},
                (view,),
                {view: np.full(packed_nbytes(view), 7, np.uint8), cache: np.full(nbytes(cache), 7 + k, np.uint8)},
                {"tokens": [[k, 0, 0, 1]]},
            )
        )
    facts: dict[str, Any] = {"tolerance": {"nmse": 5e-4}, "provenance": {"source": "test"}, "demands": {"path": "x"}}
    case = Case(name, persistent, steps, family="small", params={"k": 1}, seed=3, generator=2, **facts)
    case.validate()
    return case
