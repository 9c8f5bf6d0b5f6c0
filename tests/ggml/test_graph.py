"""Graphs: order, leaves and everything that validate must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from build_program import Program
from build_programs import programs
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS, check_node
from conformance.ggml.tensor import Dims, Tensor, new_tensor
from conformance.ggml.types import F16, F32, F64, I8, I32, Q4_0

B = Builder()


def x(*ne: int) -> Tensor:
    """A fresh F32 leaf."""
    return new_tensor(F32, *ne)


def refuses(t: Tensor, match: str) -> None:
    """`t`'s graph is refused with a text like this."""
    with pytest.raises(GraphError, match=match):
        Graph([t]).validate()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12), st.booleans())
def test_tensors_come_after_what_they_need(edges: list[tuple[int, int]], keep_all: bool) -> None:
    """In tensors() every src and view_src stands before its user, and nodes keep the order they run in."""
    pool = [x(4, 3), x(4, 3)]
    for i, j in edges:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        pool.append(B.add(a, b) if i % 2 else B.reshape_2d(a, 4, 3) if i % 3 else B.add_inplace(a, b))
    g = B.build_forward_expand(*(pool[2:] if keep_all else pool[-1:]))
    g.validate()
    at = {t: k for k, t in enumerate(g.tensors())}
    for t, k in at.items():
        assert all(at[s] < k for s in (*t.src, t.view_src) if s is not None)
    assert all(at[a] < at[b] for a, b in pairwise(g.nodes))
    assert set(g.leafs()) == set(at) - set(g.nodes)


def test_a_node_may_not_use_a_later_one() -> None:
    """Directly, or through a view that is no node itself."""
    a = x(4)
    late = B.silu(a)
    with pytest.raises(GraphError, match="before it is computed"):
        Graph([B.neg(late), late]).validate()
    with pytest.raises(GraphError, match="before it is computed"):
        Graph([B.neg(B.view_1d(late, 4, 0)), late]).validate()


def test_a_node_stands_once() -> None:
    """The same tensor twice is refused."""
    t = B.silu(x(4))
    with pytest.raises(GraphError, match="twice"):
        Graph([t, t]).validate()


def test_cycles_are_refused() -> None:
    """A tensor that is its own src through others neither hangs nor overflows the stack; a cast's own src is ggml's."""
    a = x(4)
    v = B.view_1d(a, 4, 0)
    w = B.view_1d(v, 4, 0)
    v.src = (w,)
    with pytest.raises(GraphError, match="cycle"):
        Graph([B.neg(w)]).validate()
    Graph([B.cast(a, F16)]).validate()


def test_only_a_cast_is_its_own_src() -> None:
    """Any other op, or a cast of itself alone, would read what nothing wrote."""
    for node, at in ((B.add(x(4), x(4)), 1), (B.silu(x(4)), 0), (B.cast(x(4), F32), 0)):
        node.src = (*node.src[:at], node, *node.src[at + 1 :])
        refuses(node, "its own src")


def test_long_chains_do_not_recurse() -> None:
    """100,000 views over one another that are no nodes are walked without recursion."""
    t = x(4)
    for _ in range(100_000):
        t = replace(t, op="VIEW", src=(t,), view_src=t.root)
    assert len(Graph([B.neg(t)]).tensors()) == 100_002


BROKEN: dict[str, tuple[dict[str, object], str]] = {
    "negative ne": ({"ne": (-1, 1, 1, 1)}, "non-negative"),
    "negative nb": ({"nb": (4, -4, 4, 4)}, "non-negative"),
    "unknown op": ({"op": "FROBNICATE"}, "ggml has no op"),
    "params too few": ({"op_params": (0,) * 15}, "16 int32"),
    "params too large": ({"op_params": (2**31, *(0,) * 15)}, "16 int32"),
    "too many src": ({"src": (None,) * 11}, "room for 10"),
    "name too long": ({"name": "é" * 32}, "63 bytes"),
    "offset of an owner": ({"view_offs": 4}, "without a view_src"),
    "gaps in an owner": ({"nb": (4, 32, 32, 32)}, "owns its bytes"),
    "another order in a leaf": ({"ne": (4, 3, 1, 1), "nb": (12, 4, 48, 48)}, "owns its bytes"),
    "broken block": ({"type": Q4_0, "ne": (33, 1, 1, 1)}, "multiple of q4_0's block"),
    "stride of blocks": ({"type": Q4_0, "ne": (32, 1, 1, 1), "nb": (4, 18, 18, 18)}, "nb\\[0\\] of a block type"),
    "view of a view": ({"view_src": B.view_1d(x(4), 4, 0)}, "itself a view"),
    "view past the end": ({"view_src": x(4), "view_offs": 4}, "data_size \\+ view_offs"),
    "view before the start": ({"view_src": x(4), "view_offs": -4}, "data_size \\+ view_offs"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_broken_tensors_are_refused(change: str) -> None:
    """Each rule that holds for a tensor alone, broken once."""
    fields, match = BROKEN[change]
    node = B.neg(x(4))
    node.src = (replace(x(4), **fields),)  # type: ignore[arg-type]  # broken on purpose
    refuses(node, match)


MUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "type": lambda t: replace(t, type=F32 if t.type is F64 else F64),
    "ne": lambda t: replace(t, ne=(t.ne[0] + t.type.blck_size, *t.ne[1:])),
    "nb": lambda t: replace(t, nb=(*t.nb[:2], t.nb[2] + t.type.type_size, t.nb[3])),
    "view_offs": lambda t: replace(t, view_offs=t.view_offs + 4),
    "view_src": lambda t: replace(t, view_src=new_tensor(I8, 4096)),
    "op_params": lambda t: replace(t, op_params=(*t.op_params[:15], 1)),
    "no src": lambda t: replace(t, src=()),
    "no first src": lambda t: replace(t, src=(None, *t.src[1:])),
    "more src": lambda t: replace(t, src=(*t.src, *(None,) * (5 - len(t.src)), t.src[0])),
}
FREE = {"ne": {"VIEW"}, "nb": {"VIEW"}}
"""What a constructor leaves to its caller, so that another value is as legal."""


def test_no_field_of_a_built_node_is_free_to_change() -> None:
    """check_node refuses every node of which one field is not what the constructor gave it; a case file cannot lie."""
    refused = 0
    for f, p in programs():
        t = p.made[-1] if p.made else None
        if p.error or not isinstance(t, Tensor) or not t.src or f == "cast" or not _passes(t):
            continue
        for what, mutate in MUTATIONS.items():
            if t.op not in FREE.get(what, ()):
                changed = mutate(t)
                assert not _passes(changed), (what, p.calls)
                refused += 1
    assert refused > 20_000


def _passes(t: Tensor) -> bool:
    try:
        check_node(t)
    except GraphError:
        return False
    return True


def _set(t: Tensor, i: int, value: int) -> Tensor:
    t.op_params = (*t.op_params[:i], value, *t.op_params[i + 1 :])
    return t


def _rope(n_dims: int = 4, mode: int = 0, sections: tuple[int, ...] = (1, 1, 0, 0)) -> Tensor:
    pos = new_tensor(I32, 3 * (4 if mode & 8 else 1))
    return B.rope_multi(x(8, 2, 3), pos, None, n_dims, sections, mode, 0, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)


def _attention(kv: int = 5, dims: Dims = (5, 3, 1, 1)) -> Tensor:
    return B.flash_attn_ext(x(8, 3, 4), x(8, 5, 2), x(8, kv, 2), new_tensor(F16, *dims), 1.0, 0.0, 0.0)


INSANE: dict[str, tuple[Tensor, str]] = {
    "unary sub-op": (_set(B.silu(x(4)), 0, 22), "not one of the 22 sub-ops"),
    "negative unary sub-op": (_set(B.silu(x(4)), 0, -1), "not one of the 22 sub-ops"),
    "unary parameters": (_set(B.silu(x(4)), 1, 5), "only XIELU has parameters"),
    "glu sub-op": (_set(B.swiglu(x(4)), 0, 7), "not one of the 7 sub-ops"),
    "glu swapped": (_set(B.swiglu(x(4)), 1, 2), "swapped must be 0 or 1"),
    "glu swapped with two src": (_set(B.swiglu_split(x(4), x(4)), 1, 1), "swapped is 0 with two src"),
    "glu parameters": (_set(B.swiglu(x(4)), 2, 9), "has no op_params alpha"),
    "negative eps": (B.rms_norm(x(4), -1.0), "eps >= 0.0f"),
    "NaN eps": (B.norm(x(4), float("nan")), "eps >= 0.0f"),
    "no groups": (B.group_norm(x(4, 4, 4), 0, 1e-6), "n_groups"),
    "sort order": (B.argsort(x(4), 2), "not a ggml_sort_order"),
    "precision": (_set(B.mul_mat(x(4), x(4)), 0, 11), "not a ggml_prec"),
    "hint": (_set(B.mul_mat(x(4), x(4)), 1, 2), "not a ggml_op_hint \\("),
    "hint, no square": (
        _set(B.mul_mat(x(4, 3), x(4)), 1, 1),
        "of a src\\[0\\] of 4 x 3",
    ),
    "rope dims": (_rope(10), "n_dims <= ne0"),
    "negative rope dims": (_rope(-2), "n_dims <= ne0"),
    "odd rope dims": (_rope(3), "n_dims % 2"),
    "rope mode": (_rope(4, 4), "not a ggml_rope_type"),
    "rope offset": (B.rope_set_offset(_rope(4), 6), "n_offs \\+ n_dims <= ne0"),
    "odd rope offset": (B.rope_set_offset(_rope(4), 3), "n_offs % 2"),
    "mrope without sections": (_rope(4, 8, (0, 0, 0, 4)), "sections\\[0\\] > 0"),
    "negative section": (_rope(4, 8, (4, -1, 0, 0)), "sections\\[0\\] > 0"),
    "sections without mrope": (_set(_rope(4), 11, 1), "belong to mrope"),
    "vision rope dims": (_rope(8, 24), "n_dims == ne0/2"),
    "keys without values": (_attention(kv=4), "k->ne\\[1\\] == v->ne\\[1\\]"),
    "mask too narrow": (_attention(dims=(4, 3, 1, 1)), "mask->ne\\[0\\] >= k->ne\\[1\\]"),
    "mask too short": (_attention(dims=(5, 2, 1, 1)), "mask->ne\\[1\\] >= q->ne\\[1\\]"),
    "attention precision": (_set(_attention(), 3, 1), "not a ggml_prec"),
    "negative n_kv_max": (_set(_attention(), 4, -1), "n_kv_max >= 0"),
    "negative padding": (B.pad(x(4), -1, 0, 0, 0), "must not be negative"),
    "circular": (_set(B.pad(x(4), 1, 0, 0, 0), 8, 2), "circular must be 0 or 1"),
    "unknown rule": (replace(B.silu(x(4)), op="FLASH_ATTN_BACK"), "does not support FLASH_ATTN_BACK yet"),
}


@pytest.mark.parametrize("node", INSANE)
def test_parameters_that_ggml_would_not_run_are_refused(node: str) -> None:
    """What ggml accepts when it builds and asserts when it computes, refused before anything runs."""
    refuses(*INSANE[node])


def test_every_op_of_the_rules_was_built() -> None:
    """The programs of the builder's tests reach every rule."""
    built = {t.op for _, p in programs() for t in p.made if isinstance(t, Tensor)}
    assert DECLARATIONS.keys() == built


def test_programs_do_not_depend_on_hash_order() -> None:
    """The same seed draws the same program."""
    p, q = Program("x"), Program("x")
    assert [p.any() for _ in range(9)] == [q.any() for _ in range(9)]
    assert p.calls == q.calls
