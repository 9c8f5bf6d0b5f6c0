"""Combine small graphs: merge one-step cases, or isolate the nodes of a recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import written
from conformance.ggml.partial import below, like
from conformance.ggml.tensor import FLAG_INPUT, VIEW_OPS, Bytes, Tensor, computes, nbytes, strided

BYTES = 1 << 25
"""Size of a full group; a backend needs a multiple of it and may cache its program."""


def groups(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Group small one-step cases lazily, each trajectory alone, to limit what a kill can lose."""
    group: list[Case] = []
    size = 0
    for case in cases:
        if group and (len(case.steps) != 1 or size > BYTES):
            yield group
            group, size = [], 0
        group.append(case)
        size += case.nbytes
        if len(case.steps) != 1:
            yield group
            group, size = [], 0
    if group:
        yield group


def merge(cases: Sequence[Case]) -> Case:
    """Return a case whose only step runs the cases' graphs in turn, to save costs per graph.

    Tensors and bytes are shared with the cases, not copied: outputs, caches and expected values are found by the
    original tensors. Names may repeat, as they do in llama.cpp's graphs.

    Raises:
        GraphError: a case does not have exactly one step, or two cases share a tensor.
    """
    if not cases:
        raise GraphError("merge: at least one case expected, none given")
    persistent: dict[Tensor, Bytes] = {}
    inputs: dict[Tensor, Bytes] = {}
    expected: dict[Tensor, Bytes] = {}
    nodes: list[Tensor] = []
    outputs: list[Tensor] = []
    for case in cases:
        if len(case.steps) != 1:
            raise GraphError(f"merge: {case.id} has {len(case.steps)} steps, only cases of one step can be merged")
        step = case.steps[0]
        if not persistent.keys().isdisjoint(case.persistent) or not inputs.keys().isdisjoint(step.inputs):
            raise GraphError(f"merge: {case.id} shares tensors with a case before it")
        persistent |= case.persistent
        inputs |= step.inputs
        expected |= step.expected
        nodes += step.graph.nodes
        outputs += step.outputs
    step = Step(Graph(nodes), inputs, tuple(outputs), expected)
    return Case(
        f"batch/{len(cases)} cases", persistent, [step], family="batch", params={"cases": [c.id for c in cases]}
    )


def isolated_nodes(case: Case, step: int) -> tuple[Case, dict[Tensor, Tensor]]:
    """Return a one-step case with independent copies of the computed nodes of `step`.

    A copy reads leaves with the recorded bytes that its sources had right before the node ran; the view ops in between
    are rebuilt. Weights, caches and inputs retain their kind and name, by which backends know them; the result of an
    earlier node becomes an input. Nodes that read the same bytes share a leaf; one that writes in place has its own. So
    one `compute` tests every node separately.

    Args:
        case: `expected` of `step` has each value that a later node reads. For each cache, `expected` of the last step
            before `step` that writes it has its value.
        step: index of the step.

    Returns:
        The case, whose outputs are the copies and whose `expected` has their recorded values; and copy -> original, in
        execution order.

    Raises:
        GraphError: a required recorded value is missing.
    """
    isolation = _Isolation(case, step)
    for node in case.steps[step].graph:
        if computes(node):
            isolation.add(node)
    record = case.steps[step].expected
    expected = {copy: record[node] for copy, node in isolation.original.items() if node in record}
    alone = Case(
        f"{case.id}#{step}",
        isolation.persistent,
        [Step(Graph(isolation.nodes), isolation.inputs, tuple(isolation.original), expected)],
        family=case.family,
        params={**case.params, "isolated": step},
        seed=case.seed,
        generator=case.generator,
        provenance=case.provenance,
        placement={isolation.leaves[t]: p for t, p in case.placement.items() if t in isolation.leaves},
    )
    return alone, isolation.original


def _before(case: Case, k: int, cache: Tensor) -> Bytes:
    """Return the bytes of `cache` before step `k`: recorded, or initial if no step writes it."""
    for j in range(k - 1, -1, -1):
        step = case.steps[j]
        if cache in step.expected:
            return step.expected[cache]
        if any(writes_in_place(n) and n.root is cache for n in step.graph):
            raise GraphError(f"{case.id}: steps[{j}] has no recorded value of cache {cache}")
    return case.persistent[cache]


class _Isolation:
    """Builds the isolated case and tracks the bytes of every root through the step."""

    def __init__(self, case: Case, k: int) -> None:
        self.persistent: dict[Tensor, Bytes] = {}
        self.inputs: dict[Tensor, Bytes] = {}
        self.nodes: list[Tensor] = []
        self.original: dict[Tensor, Tensor] = {}
        self.leaves: dict[Tensor, Tensor] = {}
        """Root -> its latest leaf; a weight has only one."""
        self._persistent = frozenset(case.persistent)
        self._record = case.steps[k].expected
        self._bytes: dict[Tensor, Bytes] = {**case.persistent, **case.steps[k].inputs}
        self._shared: dict[Tensor, Tensor] = {}
        self._bytes.update((t, _before(case, k, t)) for t in case.caches())

    def add(self, node: Tensor) -> None:
        """Add a copy of `node`, then apply its recorded result."""
        own: dict[Tensor, Tensor] = {}
        target = node.view_src
        changed = written(node)
        places = [self._shared if s is None or s.root not in changed else own for s in node.src]
        src = [
            None if s is None or s is node else self._copy(s, place) for s, place in zip(node.src, places, strict=True)
        ]
        view_src = None if target is None else self._copy(target, own)
        copy = like(node, tuple(src), view_src)
        self.nodes.append(copy)
        self.original[copy] = node
        for root in changed[1:]:
            self._bytes.pop(root, None)  # no recorded value has them
        self._shared = {t: c for t, c in self._shared.items() if t.root not in changed}
        if target is None:
            if node in self._record:
                self._bytes[node] = self._record[node]
            return
        if node in self._record:
            data = self._root(target).copy()
            place = strided(data, node)
            place[...] = self._record[node].view(place.dtype).reshape(place.shape)
            self._bytes[target] = data
        else:
            self._bytes.pop(target, None)  # its bytes are unknown from now on

    def _copy(self, t: Tensor, copies: dict[Tensor, Tensor]) -> Tensor:
        """Return the copy of `t` in `copies`, adding missing leaves and view ops."""
        chain: list[Tensor] = []
        cur: Tensor | None = t
        while cur is not None and cur not in copies:
            chain.append(cur)
            cur = below(cur)
        for c in reversed(chain):
            under = below(c)
            if under is None:
                copies[c] = self._leaf(c)
            elif c.op not in VIEW_OPS:
                copies[c] = copies[under]  # right after it, an in-place node is its target
            else:
                copies[c] = like(c, (copies[under],) if c.src else (), copies[c.root])
                if c.op != "NONE":
                    self.nodes.append(copies[c])
        return copies[t]

    def _leaf(self, root: Tensor) -> Tensor:
        leaf = Tensor(root.type, root.ne, root.nb, flags=0 if root in self._persistent else FLAG_INPUT, name=root.name)
        self.leaves[root] = leaf
        (self.persistent if root in self._persistent else self.inputs)[leaf] = self._root(root)
        return leaf

    def _root(self, root: Tensor) -> Bytes:
        data = self._bytes.get(root)
        if data is None and nbytes(root):
            raise GraphError(f"no recorded value of {root}, which a later node reads")
        return np.empty(0, np.uint8) if data is None else data
