"""Recognise a decoder on token ids in a cgraph by structure, and follow its one sequence.

Steps of one decoder differ in how many tokens they have, which of them give logits and how many cells they see. The
common form removes these differences: every token gives logits, caches are logs without cells, and the number of tokens
is given. `NPUW_LLM` supports one causal sequence that is appended to or truncated.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backends.openvino.axes import Axis, FixedError, Span
from backends.openvino.emit.rope import POSITIONS
from backends.openvino.state.append_log import fused, logs, roles_in
from backends.openvino.translating.plan import Role
from backends.openvino.translating.template import sample_of
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import operand
from conformance.ggml.tensor import Bytes, Tensor, computes, is_contiguous, strided
from conformance.ggml.types import I32

from .axes import Spans, follow, source
from .chunks import indexed, sized

Array: TypeAlias = NDArray[np.int64]


class UnfitError(BackendError):
    """A graph that `NPUW_LLM` cannot run; the message states why."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """Inputs of a step of a decoder."""

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    cells: tuple[Tensor, ...]
    """Destinations of K and V of each token; all must be equal."""
    picks: Tensor | None
    """Tokens that give logits; None for all of them."""


@dataclass(frozen=True, slots=True)
class Form:
    """A decoder at a given number of tokens."""

    graph: Graph
    logits: Tensor
    tokens: Tensor
    positions: Tensor
    key: Hashable
    """Key that is equal for two steps exactly if the same decoder computes them."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A step's graph, analysed."""

    stored: Graph
    """Graph with all writes into caches as SET_ROWS."""
    rows: dict[Tensor, Bytes]
    """Inputs that were added to replace CPY by SET_ROWS."""
    spans: Spans
    leaves: Leaves
    """Leaves of `stored`."""
    logits: Tensor
    roles: Mapping[Tensor, Role]
    n_tokens: int

    def at(self, n: int) -> Form:
        """Return the form with `n` tokens; UnfitError if there is none."""
        spans = _with_tokens(self.spans, n)
        try:
            small = sized(self.stored, spans)
        except FixedError as e:
            raise UnfitError(str(e)) from e
        graph, end = _all_tokens(small.graph, small.twin[self.logits], self.roles)
        own_logs = logs(graph, roles_in(graph, self.roles), (end,))
        if isinstance(own_logs, str):
            raise UnfitError(f"caches are not append-only: {own_logs}")
        if len(own_logs) != 1:
            raise UnfitError(f"{len(own_logs)} masks; NPUW_LLM supports one, causal")
        graph, (logits,) = fused(graph, own_logs, (end,))
        tensors = graph.tensors()
        persistent = tuple([t if t in self.roles else None for t in tensors])
        key = sample_of(tensors, graph.nodes), persistent, tensors.index(logits)
        return Form(graph, logits, small.twin[self.leaves.tokens], small.twin[self.leaves.positions], key)


def decoder(
    graph: Graph, persistent: Mapping[Tensor, Role], outputs: tuple[Tensor, ...], inputs: AbstractSet[Tensor]
) -> Decoder:
    """Analyse `graph` as a decoder step; UnfitError if `NPUW_LLM` cannot run it."""
    if len(outputs) > 1:
        raise UnfitError(f"{len(outputs)} outputs requested; NPUW_LLM returns only logits")
    stored, rows = indexed(graph, persistent.keys())
    try:
        spans = follow(stored, persistent.keys(), 2)
    except FixedError as e:
        raise UnfitError(str(e)) from e
    live = set(spans.axes)
    roles = roles_in(stored, persistent)
    caches = [t for t, r in persistent.items() if r == "cache" and t in live]
    if not caches:
        raise UnfitError("no cache is written")
    streams = max(t.ne[2] * t.ne[3] for t in caches)
    if streams > 1:
        raise UnfitError(f"a cache of {streams} streams, one per sequence; NPUW_LLM supports one sequence")
    if outputs and outputs[0] not in live:
        raise UnfitError(f"the graph does not compute the output {outputs[0]}")
    nodes = [n for n in stored if computes(n)]
    end = outputs[0] if outputs else nodes[-1]
    if (
        end.op != "MUL_MAT"
        or end.src[0] is None
        or persistent.get(end.src[0]) != "weight"
        or any(end in n.src for n in nodes)
    ):
        raise UnfitError(f"output {end} requested; NPUW_LLM returns only logits, a final product with a weight")
    leaves = _leaves(nodes, roles)
    read = {t for t in (leaves.tokens, leaves.positions, leaves.mask, *leaves.cells, leaves.picks) if t is not None}
    other = [t for t, r in roles.items() if r == "input" and t in live and t not in read and t in {*inputs, *rows}]
    if other:
        raise UnfitError(f"input {other[0]}; NPUW_LLM takes only token ids, positions and a causal mask")
    return Decoder(stored, rows, spans, leaves, end, persistent, spans.tokens.size)


def _leaves(nodes: Sequence[Tensor], roles: Mapping[Tensor, Role]) -> Leaves:
    """Find each leaf by the op that reads it."""
    tokens = {n.src[1] for n in nodes if n.op == "GET_ROWS" and roles.get(operand(n, 0)) == "weight"}
    positions = {n.src[POSITIONS[n.op]] for n in nodes if n.op in POSITIONS}
    masks = {source(n, "mask") for n in nodes if n.op == "FLASH_ATTN_EXT"}
    cells = {n.src[1]: None for n in nodes if n.op == "SET_ROWS" and roles.get(n.root) == "cache"}
    picks = {operand(n, 1) for n in nodes if _picks(n, roles)}
    if not masks:
        other = next(n.op for n in nodes if source(n, "mask") is not None)  # `follow` has found one
        raise UnfitError(f"attention by {other}; NPUW_LLM's append-only caches are read by FLASH_ATTN_EXT only")
    return Leaves(
        _one(tokens, roles, "GET_ROWS of an embedding by token ids"),
        _one(positions, roles, f"{' or '.join(POSITIONS)} by positions"),
        _one(masks, roles, "FLASH_ATTN_EXT with a mask"),
        tuple(_one({t}, roles, "SET_ROWS by cells") for t in cells),
        _one(picks, roles, "GET_ROWS of tokens") if picks else None,
    )


def _one(leaves: AbstractSet[Tensor | None], roles: Mapping[Tensor, Role], what: str) -> Tensor:
    only = next(iter(leaves)) if len(leaves) == 1 else None
    if only is None or roles.get(only) != "input":
        raise UnfitError(f"{what}: indices from one input expected, {len(leaves)} leaves or other values found")
    return only


def _picks(node: Tensor, roles: Mapping[Tensor, Role]) -> bool:
    """Return True if `node` picks, among values computed for tokens, those that give logits."""
    if node.op != "GET_ROWS":
        return False
    a, ids = operand(node, 0), operand(node, 1)
    return a.root not in roles and roles.get(ids) == "input" and ids.type is I32


def _with_tokens(spans: Spans, n: int) -> Spans:
    """Return the spans for `n` tokens, each of which is an output."""

    def resized(axis: Axis | None) -> Axis | None:
        if axis is None or axis.span.kind == "cells":
            return axis
        return Axis(Span(axis.span.kind, axis.span.size, n), axis.times)

    axes = {t: tuple(map(resized, a)) for t, a in spans.axes.items()}
    return replace(spans, axes=axes, tokens=Span("tokens", spans.tokens.size, n))


def _all_tokens(graph: Graph, end: Tensor, persistent: Mapping[Tensor, Role]) -> tuple[Graph, Tensor]:
    """Return `graph` without the GET_ROWS that picks tokens (all are picked), and its `end`."""
    roles = roles_in(graph, persistent)
    copies: dict[Tensor, Tensor] = {}
    for t in graph:
        if _picks(t, roles):
            a = copies.get(operand(t, 0), operand(t, 0))
            if a.ne != t.ne or not is_contiguous(a) or a.type is not t.type:
                raise UnfitError(f"{t}: gathers rows other than tokens")
            copies[t] = a
            continue
        src = tuple(s if s is None else copies.get(s, s) for s in t.src)
        root = t.view_src and copies.get(t.view_src, t.view_src)
        if src != t.src or root is not t.view_src:
            copies[t] = replace(t, src=src, view_src=None if root is None else root.root)
    nodes = dict.fromkeys(copies.get(t, t) for t in graph)
    return Graph(nodes), copies.get(end, end)


# -- the sequence -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Run:
    """A step of one sequence."""

    tokens: Array
    first: int
    """Position of the first token: the number of tokens before it."""
    wanted: Array
    """Tokens whose logits are requested, as indices into `tokens`."""
    cells: Array
    """Cells of the tokens of the sequence after this step, in the order of their positions."""

    @property
    def past(self) -> int:
        """Number of tokens of the sequence after this step."""
        return self.first + len(self.tokens)


def follow_step(decoder: Decoder, inputs: Mapping[Tensor, Bytes], before: Array) -> Run:
    """Read a step's inputs; `before` are the cells of the previous step.

    UnfitError if it does not append to or truncate one causal sequence.
    """
    leaves, values = decoder.leaves, {**inputs, **decoder.rows}
    n = decoder.n_tokens
    tokens, positions = _vector(leaves.tokens, values, n), _vector(leaves.positions, values, n)
    places = [_vector(t, values, n) for t in leaves.cells]
    first = int(positions[0])
    if (positions != np.arange(first, first + n)).any():
        raise UnfitError("positions are not consecutive; NPUW_LLM supports one sequence")
    if not 0 <= first <= len(before):
        raise UnfitError(
            f"begins at position {first} with {len(before)} tokens before it; NPUW_LLM's caches cannot be set"
        )
    if any((p != places[0]).any() for p in places):
        raise UnfitError("K and V of a token go to different cells")
    cells = np.concatenate([before[:first], places[0]])
    if len(set(cells.tolist())) < len(cells):
        raise UnfitError("a cell of the sequence is overwritten while later tokens still see it")
    _check_mask(leaves, values[leaves.mask], cells, first)
    return Run(tokens, first, _wanted(decoder, values), cells)


def _vector(t: Tensor, values: Mapping[Tensor, Bytes], n: int) -> Array:
    x = strided(values[t], t).astype(np.int64).reshape(-1)
    if len(x) != n:
        raise UnfitError(f"{t}: one number for each of {n} tokens expected")
    return x


def _wanted(decoder: Decoder, values: Mapping[Tensor, Bytes]) -> Array:
    picks = decoder.leaves.picks
    if picks is None:
        return np.arange(decoder.n_tokens)
    tokens = strided(values[picks], picks).astype(np.int64).reshape(-1)
    if ((tokens < 0) | (tokens >= decoder.n_tokens)).any():
        raise UnfitError(f"{picks}: token index out of range")
    return tokens


def _check_mask(leaves: Leaves, data: Bytes, cells: Array, first: int) -> None:
    """Check that a token sees itself and all before it, as in NPUW_LLM's own mask."""
    mask = strided(data, leaves.mask)[0, 0].astype(np.float32)
    n, seen = len(cells) - first, mask.shape[1]
    if cells.max() >= seen:
        raise UnfitError(f"a token's cell is beyond the mask's {seen}")
    want = np.full((n, seen), -np.inf, np.float32)
    for i in range(n):
        want[i, cells[: first + i + 1]] = 0.0
    if not np.array_equal(mask[:n], want):
        raise UnfitError("the mask is not causal over one sequence, as NPUW_LLM's own is")
