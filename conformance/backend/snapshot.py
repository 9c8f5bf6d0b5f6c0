"""Snapshots of planned graphs, since callers build their next one in the same objects."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor


class Snapshot:
    """Copy of a graph's fields, since a caller may build its next graph in the same objects.

    Its tensors become `_Watched`. Comparing 700 tensors takes 0.3 ms, most of the host's time in a step of a small
    model. So they are compared only if a field of any watched tensor was set since the last comparison.
    """

    __slots__ = ("_at", "_held", "_nodes", "_tensors")

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._tensors = graph.tensors()
        for t in self._tensors:
            if type(t) is Tensor:
                t.__class__ = _Watched
        self._at = _Watched.changes[0]
        self._held = list(map(_FIELDS, self._tensors))

    def shows(self, graph: Graph) -> bool:
        """Return True if `graph` still has the same nodes and fields."""
        if self._nodes != graph.nodes:
            return False
        at = _Watched.changes[0]
        if at != self._at and self._held != list(map(_FIELDS, self._tensors)):
            return False
        self._at = at
        return True


class _Watched(Tensor):
    """A tensor that increments a common counter whenever one of its fields is set."""

    __slots__ = ()
    changes: ClassVar[list[int]] = [0]

    def __setattr__(self, name: str, value: object) -> None:
        self.changes[0] += 1
        super().__setattr__(name, value)


_FIELDS = attrgetter("src", "ne", "nb", "view_offs", "op", "op_params", "type", "flags", "view_src")
