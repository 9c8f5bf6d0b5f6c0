"""Compare how two files of a model compute one prompt, node by node.

llama.cpp builds the graphs of both. The reference computes each node of the first file's graph with the values that the
second file's graph gave before it, so a node differs only by its own weights and parameters. The cost of quantising is
measured: how much storing weights in the types of both files changes their blocks, and how much noise of this size
changes the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from conformance.backend.interface import Backend
from conformance.case.case import Case, Step
from conformance.ggml.graph import Graph
from conformance.ggml.partial import like
from conformance.ggml.quants import to_float
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, new_tensor, strided
from conformance.ggml.types import F32
from conformance.run.execute import execute
from conformance.run.locate import with_nodes
from conformance.suite.batch import isolated_nodes

from . import blocks, figures
from .finding import Finding, FindingKind
from .graphs import Say
from .modelfile import ModelFile
from .recording import layer_of

DRAWS = 8
"""Draws of noise for a node that is wrong by the first."""


@dataclass(frozen=True, slots=True)
class Files:
    """Two files of one model; the second is right."""

    a: ModelFile
    b: ModelFile

    def are_equal(self, name: str) -> bool:
        """Return True if a weight has the same bytes in both."""
        x, y = self.a.tensors.get(name), self.b.tensors.get(name)
        if x is None or y is None or x.ne != y.ne or x.type is not y.type:
            return False
        return np.array_equal(self.a.raw(x, 0, x.n_blocks), self.b.raw(y, 0, y.n_blocks))

    def cost(self, name: str, values: blocks.F32, *, every: bool) -> blocks.F64 | None:
        """Return the error energy that both types cost each group of `values`; None if unknown."""
        x, y = self.a.tensors.get(name), self.b.tensors.get(name)
        if x is None or y is None or x.ne != y.ne or not blocks.comparable(x, y):
            return None
        return blocks.storing(x, y, values, every=every)


def first(files: Files, a: Case, b: Case, reference: Backend, say: Say) -> Finding | None:
    """Return the first node of `a` that differs from `b` by more than its types cost.

    Both are the first step of the same tokens, recorded by llama.cpp. BackendError if the reference fails.
    """
    nodes, others = (list(case.steps[0].graph) for case in (a, b))
    for x, y in zip(nodes, others, strict=False):
        if (x.op, x.type, x.ne, x.name) != (y.op, y.type, y.ne, y.name):
            return Finding(FindingKind.LAYER, str(y), why="another node", expected=_words(y), found=_words(x))
    if len(nodes) != len(others):
        return Finding(FindingKind.LAYER, "the graph", why="number of nodes", expected=len(others), found=len(nodes))
    say(f"layers: computing every node with {files.b.path.name}")
    given = execute(reference, b, every_node=[0]).steps[0].outputs
    same = dict(zip(others, nodes, strict=True))
    say(f"layers: computing each node with {files.a.path.name}")
    alone, original = _isolated(a, {same[t]: x for t, x in given.items()})
    found = execute(reference, alone).steps[0].outputs
    errors = {node: _nmse(copy, found[copy], alone.steps[0].expected[copy]) for copy, node in original.items()}
    right, copies = _isolated(b, given)
    for copy, other in copies.items():
        node = same[other]
        if errors[node] == 0:
            continue
        say(f"layers: what quantising costs {node.name}")
        share = _exceeded(files, with_nodes(right, [copy]), reference, errors[node])
        if share is None:
            continue
        layer = layer_of(node, a.steps[0].graph)
        where = "outside the layers" if layer is None else f"from layer {layer} on"
        why = where if node.op_params == other.op_params else f"{where}, its parameters differ"
        why = f"{why}: NMSE {errors[node]:.2g}, quantising costs {share:.2g}"
        excess = errors[node] / (blocks.SURE * share) if share else inf
        return Finding(FindingKind.LAYER, f"{node.op} {node.name}", why=why, excess=excess)
    return None


def _words(t: Tensor) -> str:
    return f"{t.op} {t.name} {list(t.ne)}"


def _isolated(case: Case, values: Mapping[Tensor, Bytes]) -> tuple[Case, dict[Tensor, Tensor]]:
    """Return the nodes of the first step, each with its inputs from `values`; copy -> node."""
    return isolated_nodes(replace(case, steps=[replace(case.steps[0], expected=dict(values))]), 0)


def _nmse(t: Tensor, found: Bytes, expected: Bytes) -> float:
    if np.array_equal(found, expected):
        return 0.0
    if t.type.dtype is not None and t.type.dtype.kind == "i":
        return 1.0
    packed = new_tensor(t.type, *t.ne)
    return figures.nmse(*(np.asarray(to_float(t.type, strided(x, packed, 0)), np.float32) for x in (found, expected)))


def _exceeded(files: Files, alone: Case, reference: Backend, error: float) -> float | None:
    """Return the NMSE that quantising costs an isolated node, if `error` is far above it.

    None if it is not, or the cost is unknown. A sample of blocks gives it, and one draw of noise. Both are rough where
    blocks differ in size and few of them make the result, so a node that is wrong by them is judged by the cost of each
    block, and the largest of `DRAWS`.
    """
    share: float | None = None
    for every in (False, True):
        share = _cost(files, alone, reference, every=every)
        if share is None or error <= blocks.SURE * share:
            return None
    return share


def _cost(files: Files, alone: Case, reference: Backend, *, every: bool) -> float | None:
    """Return the NMSE of one isolated node that quantising its weights costs; None if unknown."""
    weights: dict[Tensor, tuple[blocks.F32, blocks.F64]] = {}
    for t, data in alone.persistent.items():
        if t.name not in files.b.tensors or files.are_equal(t.name):
            continue
        values = np.asarray(to_float(t.type, strided(data, t, 0)), np.float32)
        energy = files.cost(t.name, values, every=every)
        if energy is None:
            return None
        weights[t] = values, energy
    if not weights:
        return 0.0
    if any(n.op in VIEW_OPS and n.root in weights and n.root.type is not F32 for n in alone.steps[0].graph):
        return None
    (node,) = alone.steps[0].outputs
    expected = execute(reference, alone).steps[0].outputs[node]
    found = 0.0
    for seed in range(DRAWS if every else 1):
        moved = _with_weights(alone, {t: _noisy(*w, seed) for t, w in weights.items()})
        (copy,) = moved.steps[0].outputs
        found = max(found, _nmse(node, execute(reference, moved).steps[0].outputs[copy], expected))
    return found


def _noisy(x: blocks.F32, energy: blocks.F64, seed: int) -> Bytes:
    """Add noise with an `energy` per group of values."""
    parts = x.reshape(len(energy), -1)
    size = np.sqrt(energy / parts.shape[1]).astype(np.float32)[:, None]
    noise = np.random.Generator(np.random.PCG64(seed)).standard_normal(parts.shape, np.float32)
    return np.ascontiguousarray(parts + size * noise).reshape(-1).view(np.uint8)


def _with_weights(case: Case, values: Mapping[Tensor, Bytes]) -> Case:
    """Return a one-step case with F32 weights in place of some."""
    step = case.steps[0]
    now = {t: new_tensor(F32, *t.ne, name=t.name) for t in values}
    copies: dict[Tensor, Tensor] = dict(now)
    for n in step.graph:
        copies[n] = like(n, [None if s is n else copies.get(s, s) if s else None for s in n.src],
                         copies.get(n.view_src, n.view_src) if n.view_src else None)  # fmt: skip
    persistent = {now.get(t, t): values.get(t, data) for t, data in case.persistent.items()}
    moved = Step(Graph([copies[n] for n in step.graph]), step.inputs, tuple(copies[t] for t in step.outputs))
    return replace(case, persistent=persistent, steps=[moved])
