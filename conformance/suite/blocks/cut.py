"""Cuts a sublayer out of a decoder's graph, by the weights and caches that its nodes read."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.partial import Part, partial
from conformance.ggml.tensor import Bytes, Tensor, nelements
from conformance.ggml.types import F32
from conformance.suite.data import random_bytes

_OWNER = re.compile(r"(?:(?:enc|dec)\.)?blk\.(?P<layer>[0-9]+)\.(?P<role>.+?)(?:\.(?:weight|bias|scale))?", re.ASCII)
_CACHE = re.compile(r"cache_(?P<role>[kvrs])_l(?P<layer>[0-9]+)", re.ASCII)
_NORM = re.compile(r"(attn|ffn|post_attention|post_ffw|attn_post|ffn_post|attn_output|layer_output)_norm(_[0-9])?")

BLOCKS: dict[str, tuple[str, ...]] = {
    "attention": ("attn_", "cross_attn_", "indexer"),
    "feedforward": ("ffn_", "exp_probs", "channel_mix_"),
    "recurrent": ("ssm_", "time_mix_", "shortconv"),
}
"""Block -> how the roles of its weights begin; a norm between blocks is a block called as its role."""
HEAD = "head"
"""Block after all layers, listed as of layer 0."""
_HEAD = re.compile(r"(output|cls)(_norm)?\b.*")
_NORM_OPS = frozenset({"NORM", "RMS_NORM"})


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """A sublayer."""

    layer: int
    name: str


def block_of(name: str) -> Block | None:
    """The block of a weight or cache; None for one without, such as an embedding."""
    cache, owner = _CACHE.fullmatch(name), _OWNER.fullmatch(name)
    if cache is not None:
        return Block(int(cache["layer"]), "recurrent" if cache["role"] in "rs" else "attention")
    if owner is None:
        return Block(0, HEAD) if _HEAD.fullmatch(name) else None
    layer, role = int(owner["layer"]), owner["role"]
    if _NORM.fullmatch(role):
        return Block(layer, role)
    return next((Block(layer, b) for b, heads in BLOCKS.items() if role.startswith(heads)), None)


def blocks(graph: Graph, persistent: Collection[Tensor]) -> dict[Block, tuple[int, int]]:
    """Every block of a graph -> its first node's index, and that after its last node.

    A block reaches from the first to the last node that reads its weights or caches, and on to where the next begins.
    The norm op before a norm's weight and the sum before that, the residual, belong to the norm. Blocks whose nodes
    mix, such as attention and a recurrence side by side, are one, named after the first of them that is no norm.
    """
    own = frozenset(persistent)
    spans: dict[Block, tuple[int, int]] = {}
    for i, node in enumerate(graph):
        for s in node.src:
            block = block_of(s.root.name) if s is not None and s.root in own else None
            if block is not None:
                spans[block] = (spans.get(block, (i, i))[0], i + 1)
    merged: list[tuple[Block, int, int]] = []
    for block, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if merged and first < merged[-1][2]:
            before, start, end = merged[-1]
            merged[-1] = (block if _is_norm(before) else before, start, max(end, last))
        else:
            merged.append((block, first, last))
    starts = [_start(graph, first) if _is_norm(block) else first for block, first, _ in merged]
    ends = [*starts[1:], len(graph)]
    return {block: (start, end) for (block, _, _), start, end in zip(merged, starts, ends, strict=True)}


def states_last(graph: Graph, persistent: Collection[Tensor]) -> Graph:
    """The same nodes; those that fetch a layer's recurrent state stand right before the first node that needs it.

    llama.cpp puts them where it begins to build a layer, which may be among the nodes of the layer before.
    """
    own = frozenset(persistent)
    layer: dict[Tensor, int] = {}
    for t in own:
        match = _CACHE.fullmatch(t.name)
        if match is not None and match["role"] in "rs":
            layer[t] = int(match["layer"])
    waiting: dict[int, list[Tensor]] = {}
    for node in graph:
        states = {layer[t] for s in node.src if s is not None for t in (s, s.root) if t in layer}
        if len(states) == 1 and all(s is None or s.op == "NONE" or s in layer for s in node.src):
            layer[node] = states.pop()
            waiting.setdefault(layer[node], []).append(node)
    nodes: list[Tensor] = []
    for node in graph:
        if node not in layer:
            for needed in {layer[s]: None for s in node.src if s is not None and s in layer}:
                nodes += waiting.pop(needed, [])
            nodes.append(node)
    return Graph([*nodes, *(t for left in waiting.values() for t in left)])


def _is_norm(block: Block) -> bool:
    return block.name == HEAD or _NORM.fullmatch(block.name) is not None


def _start(graph: Graph, first: int) -> int:
    if first and graph.nodes[first - 1].op in _NORM_OPS:
        first -= 1
        if first and graph.nodes[first - 1].op == "ADD" and graph.nodes[first - 1] in graph.nodes[first].src:
            first -= 1
    return first


def alone(case_id: str, whole: Case, block: Block) -> Case:
    """The block in every step of `whole` that has it. Values from outside the block are drawn anew, of order 1.

    Inputs of the whole keep their bytes, and so do recorded values that are no plain numbers: indices, masks.

    Raises:
        UsageError: no step has this block, or one reads what must have been recorded and was not.
    """
    steps = []
    known: dict[Block, None] = {}
    for k, step in enumerate(whole.steps):
        graph = states_last(step.graph, whole.persistent)
        spans = blocks(graph, whole.persistent)
        known |= dict.fromkeys(spans)
        if block in spans:
            first, last = spans[block]
            part = partial(graph, first, last, persistent=whole.persistent, outputs=step.outputs)
            if part.outputs:
                steps.append(Step(part.graph, _inputs(case_id, k, step, part), part.outputs, note=step.note))
    if not steps:
        names = ", ".join(f"{b.name} of layer {b.layer}" for b in sorted(known))
        raise UsageError(f"case {case_id!r}: it has no {block.name} of layer {block.layer}; it has {names}")
    used = {t for step in steps for t in step.graph.tensors()}
    persistent = {t: data for t, data in whole.persistent.items() if t in used}
    recipes = {t: recipe for t, recipe in whole.recipes.items() if t in used}
    return Case(
        case_id, persistent, steps, family=whole.family, params=dict(whole.params), seed=whole.seed,
        generator=whole.generator, recipes=recipes,
    )  # fmt: skip


def _inputs(case_id: str, k: int, step: Step, part: Part) -> dict[Tensor, Bytes]:
    used = set(part.graph.tensors())
    inputs = {}
    for i, (leaf, root) in enumerate(part.inputs.items()):
        if leaf not in used:
            continue
        record = step.inputs.get(root, step.expected.get(root))
        if root in step.inputs or (record is not None and not _is_plain(root, record)):
            inputs[leaf] = np.asarray(record)
        elif root.type is F32:
            inputs[leaf] = random_bytes(F32, Stream(case_id, f"step {k} input {i}"), nelements(root), 1.0)
        else:
            raise UsageError(f"case {case_id!r}: step {k} reads {root}, a {root.type} that was not recorded")
    return inputs


def _is_plain(t: Tensor, data: Bytes) -> bool:
    """Whether the record is plain numbers, which others may replace."""
    return t.type is F32 and bool(np.isfinite(data.view(np.float32)).all())
