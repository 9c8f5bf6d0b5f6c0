"""Snapshot: a graph that its caller builds anew in the same objects is not taken for the old one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from conformance.backend.snapshot import Snapshot
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder, build_forward_expand
from conformance.ggml.tensor import Tensor, new_tensor
from conformance.ggml.types import F16, F32

CHANGES: list[Callable[[Tensor], object]] = [
    lambda t: setattr(t, "ne", (2, 2, 1, 1)),
    lambda t: setattr(t, "nb", (4, 32, 32, 32)),
    lambda t: setattr(t, "view_offs", t.view_offs + 4),
    lambda t: setattr(t, "op_params", (1, *t.op_params[1:])),
    lambda t: setattr(t, "type", F16),
    lambda t: setattr(t, "flags", t.flags ^ 1),
    lambda t: setattr(t, "op", "SQRT"),
    lambda t: setattr(t, "src", t.src[:0]),
    lambda t: setattr(t, "view_src", t),
]


def _graph() -> Graph:
    b = Builder()
    return build_forward_expand(b.neg(b.sqr(new_tensor(F32, 4, 1))))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shown", [False, True], ids=["never", "before"])
def test_a_field_that_was_set_is_seen(change: Callable[[Tensor], object], *, shown: bool) -> None:
    """Of any node, whether or not the graph was compared before."""
    for k in range(2):
        graph = _graph()
        snapshot = Snapshot(graph)
        assert not shown or snapshot.shows(graph)
        change(graph.nodes[k])
        assert not snapshot.shows(graph)


def test_a_leaf_that_was_set_is_seen_by_each_snapshot_of_it() -> None:
    """Two graphs over one leaf, of which one was compared since."""
    leaf = new_tensor(F32, 4)
    graphs = [build_forward_expand(Builder().sqr(leaf)) for _ in range(2)]
    snapshots = [Snapshot(g) for g in graphs]
    leaf.flags |= 1
    assert [s.shows(g) for s, g in zip(snapshots, graphs, strict=True)] == [False, False]
    leaf.flags ^= 1
    assert [s.shows(g) for s, g in zip(snapshots, graphs, strict=True)] == [True, True]


def test_other_nodes_are_seen() -> None:
    """A list of nodes that was cut, over the same tensors."""
    graph = _graph()
    snapshot = Snapshot(graph)
    del graph.nodes[-1]
    assert not snapshot.shows(graph)


def test_a_copy_is_another_tensor() -> None:
    """What is set in a copy of a tensor leaves its snapshot as it is."""
    graph = _graph()
    snapshot = Snapshot(graph)
    copy.copy(graph.nodes[0]).flags ^= 1
    assert snapshot.shows(graph)
