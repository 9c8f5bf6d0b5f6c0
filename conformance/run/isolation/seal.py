"""Finds changes that an adapter made to a case, and undoes them.

Bytes are handed out through read-only views that nobody can make writable. Adapters compare graphs by identity, so they
get the graph itself, and notes of it tell whether it changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from conformance.case.case import Case
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor

_FIELDS = ("type", "ne", "nb", "op", "op_params", "src", "view_src", "view_offs", "flags", "name")
_HEAD = ("id", "family", "seed", "generator", "steps")
_DICTS = ("persistent", "recipes", "references", "placement")
_JSON = ("params", "tolerance", "provenance", "demands")
_Noted = tuple[Any, ...]


def read_only(data: Bytes) -> Bytes:
    """The same bytes, through a view that nobody can make writable again."""
    base: object = data.base
    if isinstance(base, memoryview) and base.readonly:
        return data
    return np.asarray(data.data.toreadonly())


def freeze(case: Case) -> None:
    """Replace the arrays of `case` by read-only views: caches, weights, inputs, recorded values."""
    for values in (case.persistent, *(v for s in case.steps for v in (s.inputs, s.expected))):
        for t, data in values.items():
            values[t] = read_only(data)


Notes = dict[Tensor, _Noted]
"""What was noted of tensors when they were first handed out."""


class GraphSeal:
    """Notes of some tensors, all that they reach included, and of the graphs' lists of nodes.

    Args:
        graphs: whose nodes.
        more: tensors beside them.
        known: notes that an earlier seal took and found unbroken; they are not taken again.
    """

    def __init__(self, graphs: Iterable[Graph], more: Iterable[Tensor] = (), known: Notes | None = None) -> None:
        known = {} if known is None else known
        self._graphs = [(g, list(g.nodes)) for g in graphs]
        reached = _reached([t for _, nodes in self._graphs for t in nodes], more)
        self._tensors = [(t, known[t] if t in known else _note(t)) for t in reached]

    def notes(self) -> Notes:
        """All of them, for another seal of the same tensors."""
        return dict(self._tensors)

    def broken(self) -> str:
        """Undo every change; the name of the first, or empty."""
        found = ""
        for t, noted in self._tensors:
            at = next((i for i, (a, b) in enumerate(zip(_note(t), noted, strict=True)) if a is not b), None)
            if at is not None:
                for name, value in zip(_FIELDS, noted, strict=True):
                    setattr(t, name, value)
                found = found or f"{_FIELDS[at]} of {t}"
        for graph, nodes in self._graphs:
            if len(graph.nodes) != len(nodes) or any(a is not b for a, b in zip(graph.nodes, nodes, strict=True)):
                graph.nodes = nodes.copy()
                found = found or "the nodes of its graph"
        return found


class CaseSeal:
    """What was noted of a whole case; `known` as of `GraphSeal`."""

    def __init__(self, case: Case, known: Notes | None = None) -> None:
        self._case = case
        self._head = [(n, getattr(case, n)) for n in _HEAD]
        self._steps = list(case.steps)
        self._dicts = [(n, getattr(case, n), dict(getattr(case, n))) for n in _DICTS]
        self._json = [(n, _copied(getattr(case, n))) for n in _JSON if getattr(case, n)]
        self._empty = [(n, getattr(case, n)) for n in _JSON if not getattr(case, n)]
        self._noted = [(s, s.graph, s.outputs, (s.inputs, dict(s.inputs)), (s.expected, dict(s.expected)))
                       for s in self._steps]  # fmt: skip
        self._graph = GraphSeal(dict.fromkeys(s.graph for s in self._steps), case.persistent, known)

    def broken(self) -> str:
        """Undo every change; the name of the first, or empty."""
        found = [self._graph.broken(), self._head_broken(), self._json_broken(), self._steps_broken()]
        return next((f for f in found if f), "")

    def _head_broken(self) -> str:
        found = ""
        case = self._case
        for name, value in self._head:
            if getattr(case, name) is not value:
                setattr(case, name, value)
                found = found or name
        if not _same(case.steps, self._steps):
            case.steps[:] = self._steps
            found = found or "steps"
        for name, held, noted in self._dicts:
            if getattr(case, name) is not held or not _same_items(held, noted):
                setattr(case, name, _restored(held, noted))
                found = found or name
        return found

    def _json_broken(self) -> str:
        found = ""
        for name, noted in self._json:
            if getattr(self._case, name) != noted:
                setattr(self._case, name, _copied(noted))
                found = found or name
        for name, held in self._empty:
            if getattr(self._case, name) is not held or held:
                held.clear()
                setattr(self._case, name, held)
                found = found or name
        return found

    def _steps_broken(self) -> str:
        found = ""
        for k, (step, graph, outputs, inputs, expected) in enumerate(self._noted):
            if step.graph is not graph or step.outputs is not outputs:
                step.graph, step.outputs = graph, outputs
                found = found or f"graph or outputs of steps[{k}]"
            if step.inputs is not inputs[0] or not _same_items(*inputs):
                step.inputs = _restored(*inputs)
                found = found or f"inputs of steps[{k}]"
            if step.expected is not expected[0] or not _same_items(*expected):
                step.expected = _restored(*expected)
                found = found or f"expected of steps[{k}]"
        return found


def _copied(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


def _note(t: Tensor) -> _Noted:
    return (t.type, t.ne, t.nb, t.op, t.op_params, t.src, t.view_src, t.view_offs, t.flags, t.name)


def _reached(nodes: Iterable[Tensor], more: Iterable[Tensor]) -> list[Tensor]:
    seen = dict.fromkeys(nodes)
    seen.update(dict.fromkeys(more))
    stack = list(seen)
    while stack:
        t = stack.pop()
        for s in (*t.src, t.view_src):
            if s is not None and s not in seen:
                seen[s] = None
                stack.append(s)
    return list(seen)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _same_items(held: dict[Any, Any], noted: dict[Any, Any]) -> bool:
    return len(held) == len(noted) and all(held.get(k) is v for k, v in noted.items())


def _restored(held: dict[Any, Any], noted: dict[Any, Any]) -> dict[Any, Any]:
    held.clear()
    held.update(noted)
    return held
