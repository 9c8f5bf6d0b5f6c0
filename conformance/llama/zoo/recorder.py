"""Record llama.cpp through its eval callback: whole graphs, or choices of MoE routers.

llama.cpp asks about the nodes of a graph before it computes them. If the callback wants no data it asks about all at
once: at the first question every input is filled and nothing is computed. `Recorder` then wants results only. If the
callback wants the data of all nodes, llama.cpp computes each node by itself and fuses nothing.

A leaf in a buffer of usage WEIGHTS is a weight; one in a buffer of usage COMPUTE, or flagged INPUT, is an input of the
step; every other leaf is a cache or a recurrent state and persists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from conformance.case.case import Step, writes_in_place
from conformance.case.reference import Reference
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.layout import EVAL_CALLBACK, USAGE_COMPUTE, USAGE_WEIGHTS
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, FLAG_OUTPUT, Bytes, Tensor, computes, nbytes, pack
from conformance.ggml.types import F32, TYPES


@dataclass(eq=False, slots=True)
class GraphRecord:
    """One graph, its inputs and values."""

    nodes: list[Tensor] = field(default_factory=list)
    inputs: dict[Tensor, Bytes] = field(default_factory=dict)
    values: dict[Tensor, Bytes] = field(default_factory=dict)
    """Node or cache -> packed bytes: results, or everything."""


class Recorder:
    """A recorder of graphs; set `callback` as `llama_context_params.cb_eval`.

    It records every node of the first `whole` graphs, results only of the others. Weights are not copied: the model
    must outlive the recording.
    """

    def __init__(self, library: Llama, *, whole: int = 0) -> None:
        self._library = library
        self._whole = whole
        self._count = 0
        self.persistent: dict[Tensor, Bytes] = {}
        """Weights, caches and states in order of appearance -> their bytes when first seen."""
        self.is_weight: set[Tensor] = set()
        self.graphs: list[GraphRecord] = []
        self.error: Exception | None = None
        """Exception in the callback, which must not raise; `flush` raises it."""
        self._lasting: dict[int, Tensor] = {}
        self._pointers: dict[Tensor, int] = {}
        self._tensors: dict[int, Tensor] = {}
        self._first: dict[str, list[str]] = {}
        """Function of llama.cpp -> names of its graph's first node and of that node's sources."""
        self._function = ""
        self.callback = EVAL_CALLBACK(self._called)

    def begin(self, function: str) -> None:
        """Record the next call; after the first one, a graph that shifts K may run before its own."""
        self._function = function

    def flush(self) -> None:
        """Complete the last graph of a call; GraphError if a tensor could not be read."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self._end()

    def _called(self, pointer: int, ask: bool, _data: int | None) -> bool:  # C's signature
        try:
            if self.error is None:
                return self._expect(pointer) if ask else self._keep(pointer)
        except Exception as e:  # noqa: BLE001  # a callback must not raise
            self.error = e
        return False

    def _expect(self, pointer: int) -> bool:
        struct = self._library.struct
        names = [struct(p).name.decode(errors="replace") for p in (pointer, *struct(pointer).src) if p]
        first = self._first.setdefault(self._function, names)
        if self._tensors and (pointer in self._tensors or names == first):
            self._end()
        if not self._tensors:
            self.graphs.append(GraphRecord())
            self._count += 1
        node = self._tensor(pointer)
        self.graphs[-1].nodes.append(node)
        return computes(node) and (self._count <= self._whole or bool(node.flags & FLAG_OUTPUT))

    def _keep(self, pointer: int) -> bool:
        node = self._tensors[pointer]
        self.graphs[-1].values[node] = self._packed(pointer, node)
        return True

    def _end(self) -> None:
        """Complete the current graph, which has run: add the caches that it wrote."""
        if self._tensors:
            record = self.graphs[-1]
            written = {n.view_src: None for n in record.nodes if writes_in_place(n)}
            alone = not record.values
            for t in written:
                if t in self.persistent and (self._count <= self._whole or alone):
                    record.values[t] = self._library.get(self._pointers[t], nbytes(t))
        self._tensors = {}

    def _tensor(self, pointer: int) -> Tensor:
        """Return the tensor at an address, converted after its sources."""
        if pointer in self._tensors:
            return self._tensors[pointer]
        c, t = self._library.struct(pointer), self._library.leaf(pointer)
        t.op = self._library.op(pointer)
        is_leaf = t.op == "NONE" and not c.view_src
        if is_leaf and pointer in self._lasting:
            self._tensors[pointer] = self._lasting[pointer]
            return self._lasting[pointer]
        t.op_params, t.flags, t.view_offs = tuple(c.op_params), c.flags, c.view_offs
        if t.op in self._library.sub_ops:
            t.op_params = (self._library.sub_op(t.op, t.op_params[0]), *t.op_params[1:])
        pointers = list(c.src)
        while pointers and not pointers[-1]:
            pointers.pop()
        if pointer in pointers:  # as ggml_cast makes it
            self._tensors[pointer] = t
        t.src = tuple(self._tensor(p) if p else None for p in pointers)
        t.view_src = self._tensor(c.view_src) if c.view_src else None
        self._tensors[pointer] = t
        if is_leaf:
            self._leaf(pointer, c.buffer, t)
        return t

    def _leaf(self, pointer: int, buffer: int | None, t: Tensor) -> None:
        usage = self._library.ggml.backend_buffer_get_usage(buffer) if buffer else USAGE_COMPUTE
        read = self._library.mapped if usage == USAGE_WEIGHTS else self._library.get
        data = read(pointer, nbytes(t)) if buffer else np.zeros(nbytes(t), np.uint8)
        if usage != USAGE_WEIGHTS and (usage == USAGE_COMPUTE or t.flags & FLAG_INPUT):
            self.graphs[-1].inputs[t] = data
            return
        self._lasting[pointer] = t
        self._pointers[t] = pointer
        self.persistent[t] = data
        if usage == USAGE_WEIGHTS:
            self.is_weight.add(t)

    def _packed(self, pointer: int, t: Tensor) -> Bytes:
        size, actual = nbytes(t), self._library.ggml.nbytes(pointer)
        if size != actual:
            raise GraphError(f"{t}: {size} bytes by these strides, {actual} by ggml_nbytes")
        return pack(self._library.get(pointer, size), t, 0)


def step(record: GraphRecord) -> Step:
    """Convert a graph to a step; its outputs are the results that no node reads."""
    graph = Graph(record.nodes)
    read = {s for n in graph for s in n.src if s is not n}
    results = tuple(n for n in graph if computes(n) and n.flags & FLAG_OUTPUT and n in record.values and n not in read)
    used = set(graph.tensors())
    inputs = {t: data for t, data in record.inputs.items() if t in used}
    return Step(graph, inputs, results, record.values)


def references(model: Path, weights: Mapping[Tensor, Bytes]) -> dict[Tensor, Reference]:
    """Return weight -> its place in the GGUF file, if the bytes there equal those in use."""
    stored = {t.name: t for t in GGUFReader(model).tensors}
    places = {}
    for t, data in weights.items():
        there = stored.get(t.name)
        if there is not None and there.n_bytes == data.nbytes and there.data.tobytes() == data.tobytes():
            places[t] = Reference(model.name, int(there.data_offset))
    return places


ROUTERS = frozenset({"ARGSORT", "TOP_K"})
"""Ops that choose experts."""
_FLOATS = (F32, TYPES["f16"], TYPES["bf16"])


class Watch:
    """A recorder of router choices; set `callback` as `llama_context_params.cb_eval`.

    Args:
        library: the library that owns the tensors.
        forced: choices that replace the run's own, in order; None replaces none.
        values: also search for the first node with a NaN.
    """

    def __init__(self, library: Llama, forced: Sequence[Choice] | None = None, *, values: bool = False) -> None:
        self._library = library
        self._forced = forced
        self._values = values
        self._at: dict[int, Choice] = {}
        self.batch = 0
        self.choices: list[Choice] = []
        self.spoilt = ""
        """The first node with a NaN, and whether a state that it reads contained NaN before."""
        self.callback = EVAL_CALLBACK(self._called)

    def _called(self, pointer: int, ask: bool, _data: int | None) -> bool:  # C's signature
        try:
            op = self._library.op(pointer)
            if ask:
                return self._wants(pointer, op)
            if op in ROUTERS:
                self._choose(pointer, op)
            elif self._values and not self.spoilt:
                self._look(pointer, op)
        except Exception as e:  # noqa: BLE001  # a callback must not raise
            self.spoilt = self.spoilt or f"{type(e).__name__}: {e}"
        return True

    def _wants(self, pointer: int, op: str) -> bool:
        c = self._library.struct(pointer)
        choice = self._at.get(c.view_src)
        if choice is not None and op == "VIEW":
            choice.k = c.ne[0]
        return op in ROUTERS or (self._values and not self.spoilt and bool(c.flags & FLAG_COMPUTE) and op != "NONE")

    def _choose(self, pointer: int, op: str) -> None:
        c = self._library.struct(pointer)
        rows = self._numbers(pointer)
        scores = self._numbers(c.src[0])
        if op == "ARGSORT" and not c.op_params[0]:  # ascending
            scores = -scores
        chosen = rows.reshape(-1, rows.shape[-1]).astype(np.int32)
        scores = scores.reshape(-1, scores.shape[-1])
        choice = Choice(self._library.leaf(pointer).name, self.batch, int(chosen.shape[1]), scores, chosen)
        self._at[pointer] = choice
        self.choices.append(choice)
        if self._forced is not None:
            other = self._forced[len(self.choices) - 1].chosen
            if other.shape == chosen.shape:
                self._library.set(pointer, np.ascontiguousarray(other).reshape(-1).view(np.uint8))

    def _look(self, pointer: int, op: str) -> None:
        if not np.isnan(self._numbers(pointer)).any():  # -Inf is right in masks
            return
        c, leaf = self._library.struct(pointer), self._library.leaf
        states = (p for p in c.src if p and self._is_state(p, c.view_src))
        source = next((leaf(p).name for p in states if np.isnan(self._numbers(p)).any()), None)
        why = "no source contained NaN" if source is None else f"it reads {source}, which contained NaN before"
        self.spoilt = f"batch {self.batch}: {op} {leaf(pointer).name} is the first value with NaN; {why}"

    def _is_state(self, pointer: int, target: int | None) -> bool:
        """Return True if a source is a float leaf, or a view of one, other than `target`."""
        root = self._library.struct(pointer).view_src or pointer
        return self._library.leaf(pointer).type in _FLOATS and root != target and self._library.op(root) == "NONE"

    def _numbers(self, pointer: int) -> NDArray[np.float64]:
        t = self._library.leaf(pointer)
        packed = pack(self._library.get(pointer, nbytes(t)), t, 0)
        if t.type is TYPES["bf16"]:
            return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(t.shape).astype(np.float64)
        if t.type.dtype is None:
            return np.zeros(t.shape)
        return packed.view(t.type.dtype).reshape(t.shape).astype(np.float64)


# A router chooses the few experts with the highest scores. If two scores are closer than a device's rounding, it may
# choose the other expert, and all later values then differ without a bug. So the CPU repeats the run with the device's
# experts, and other differences are judged as usual. The flip is judged by its scores: the device's must be near the
# CPU's, and the margin within their difference.

NEAR = 5e-4
"""Maximum NMSE of a token's scores between two runs, as for logits."""


@dataclass(slots=True)
class Choice:
    """One routing node in one batch."""

    name: str
    batch: int
    k: int
    """Experts used per row."""
    scores: NDArray[np.float64]
    """`[tokens, experts]`, the highest chosen first."""
    chosen: NDArray[np.int32]
    """`[tokens, k or more]`."""


def flips(device: Sequence[Choice], cpu: Sequence[Choice]) -> tuple[list[str], str]:
    """Compare the chosen experts row by row.

    Return notes on near-ties, and the first difference that rounding does not explain, or "". `cpu` are the CPU's own
    choices, each computed with the device's earlier ones.
    """
    notes: list[str] = []
    if [(c.name, c.scores.shape) for c in device] != [(c.name, c.scores.shape) for c in cpu]:
        return notes, "the two runs choose from different scores"
    for d, c in zip(device, cpu, strict=True):
        k = min(d.k, c.k)
        for row in range(len(d.scores)):
            ours, theirs = (set(x.chosen[row, :k].tolist()) for x in (d, c))
            if ours == theirs:
                continue
            note, wrong = _judge(d, c, row, sorted(ours - theirs), sorted(theirs - ours))
            if wrong:
                return notes, f"{note}: {wrong}"
            notes.append(note)
    return notes, ""


def _judge(device: Choice, cpu: Choice, row: int, ours: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """Describe one row's flip; return it and why rounding does not explain it, or ""."""
    a, b = device.scores[row], cpu.scores[row]
    both = np.isfinite(a) & np.isfinite(b)
    margin = float(b[theirs].max() - b[ours].min())
    difference = float(np.abs(a - b)[both].max(initial=0.0))
    experts = f"expert {' and '.join(map(str, ours))} for {' and '.join(map(str, theirs))}"
    where = f"{experts} at {device.name}, batch {device.batch}, token {row}"
    note = f"{where}: margin {margin:.2g}, scores differ by {difference:.2g}"
    if not both[[*ours, *theirs]].all() or float(np.sum((a - b)[both] ** 2)) > NEAR * float(np.sum(b[both] ** 2)):
        return note, "its scores are wrong already"
    if margin > 2 * difference:
        return note, "no rounding of scores explains it, so the choice itself is wrong"
    return note, ""


def save_choices(path: Path, choices: Sequence[Choice]) -> None:
    """Write choices to a file."""
    arrays: dict[str, Any] = {}
    for i, c in enumerate(choices):
        arrays |= {f"s{i}": c.scores, f"c{i}": c.chosen, f"f{i}": np.array([c.batch, c.k])}
    names = np.array([c.name for c in choices], dtype=np.str_)
    np.savez(path, names=names, **arrays)


def load_choices(path: Path) -> list[Choice]:
    """Read choices that `save_choices` wrote."""
    with np.load(path) as file:
        facts = [file[f"f{i}"].tolist() for i in range(len(file["names"]))]
        return [
            Choice(str(name), facts[i][0], facts[i][1], file[f"s{i}"], file[f"c{i}"])
            for i, name in enumerate(file["names"])
        ]
