"""What llama.cpp computes, node by node, through its eval callback: graphs, inputs, caches and results.

llama.cpp asks about the nodes of a graph before it computes them: all at once where nobody wants their data, so that
at the first question every input is filled and nothing is computed. Only results are then asked for. Where the data of
all nodes is wanted, each node is computed by itself (and nothing is fused).

What a leaf is: a weight lies in a buffer of usage WEIGHTS; a leaf in a buffer of usage COMPUTE, or flagged INPUT, is an
input of the step; every other leaf is a cache or a recurrent state, and lives on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from conformance.case.case import Step, writes_in_place
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.tensor import FLAG_INPUT, FLAG_OUTPUT, Bytes, Tensor, computes, nbytes, pack

from .layout import EVAL_CALLBACK, TENSOR
from .library import Library

_USAGE_WEIGHTS, _USAGE_COMPUTE = 1, 2
"""`enum ggml_backend_buffer_usage`."""


@dataclass(eq=False, slots=True)
class Recorded:
    """One graph as it ran."""

    nodes: list[Tensor] = field(default_factory=list)
    inputs: dict[Tensor, Bytes] = field(default_factory=dict)
    values: dict[Tensor, Bytes] = field(default_factory=dict)
    """Node or cache -> packed bytes: results, or everything."""


class Recorder:
    """Its `callback` goes into `llama_context_params.cb_eval`.

    Args:
        library: whose tensors these are.
        whole: of this many graphs, from the first on, every node's value and every cache is recorded.
    """

    def __init__(self, library: Library, *, whole: int = 0) -> None:
        self._c = library.c
        self._library = library
        self._whole = whole
        self._count = 0
        self.persistent: dict[Tensor, Bytes] = {}
        """Weights, caches and states in order of appearance -> their bytes when first seen."""
        self.is_weight: set[Tensor] = set()
        self.graphs: list[Recorded] = []
        self.error: Exception | None = None
        """What went wrong in the callback, where it cannot be raised."""
        self._kept: dict[int, Tensor] = {}
        self._places: dict[Tensor, int] = {}
        self._seen: dict[int, Tensor] = {}
        self._first: dict[str, str] = {}
        """Function of llama.cpp -> name of its graph's first node."""
        self._function = ""
        self.callback = EVAL_CALLBACK(self._called)

    def begin(self, function: str) -> None:
        """A call of `function` comes. Its first call runs one kind of graph; later ones may move the cache first."""
        self._function = function

    def flush(self) -> None:
        """No more node of the last graph comes: the decode has returned.

        Raises:
            GraphError: a tensor could not be read.
        """
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self._end()

    def _called(self, pointer: int, ask: bool, _data: int | None) -> bool:  # C's signature
        try:
            if self.error is None:
                return self._asked(pointer) if ask else self._computed(pointer)
        except Exception as e:  # noqa: BLE001  # nothing may leave a callback
            self.error = e
        return False

    def _asked(self, pointer: int) -> bool:
        name = ctypes.string_at(pointer + TENSOR.size - 64).decode(errors="replace")
        first = self._first.setdefault(self._function, name)
        if self._seen and (pointer in self._seen or name == first):
            self._end()
        if not self._seen:
            self.graphs.append(Recorded())
            self._count += 1
        node = self._tensor(pointer)
        self.graphs[-1].nodes.append(node)
        return computes(node) and (self._count <= self._whole or bool(node.flags & FLAG_OUTPUT))

    def _computed(self, pointer: int) -> bool:
        node = self._seen[pointer]
        self.graphs[-1].values[node] = self._packed(pointer, node)
        return True

    def _end(self) -> None:
        """The graph is complete and has run."""
        if self._seen:
            recorded = self.graphs[-1]
            written = {n.view_src: None for n in recorded.nodes if writes_in_place(n)}
            alone = not recorded.values
            for t in written:
                if t in self.persistent and (self._count <= self._whole or alone):
                    recorded.values[t] = self._bytes(self._places[t], nbytes(t))
        self._seen = {}

    def _tensor(self, pointer: int) -> Tensor:
        """The tensor at an address, its sources before it."""
        found = self._seen.get(pointer)
        if found is not None:
            return found
        raw = TENSOR.unpack(ctypes.string_at(pointer, TENSOR.size))
        type_id, buffer, op_id, flags, view_src = raw[0], raw[1], raw[10], raw[27], raw[38]
        op = self._library.ops[op_id]
        is_leaf = op == "NONE" and not view_src
        if is_leaf and pointer in self._kept:
            self._seen[pointer] = self._kept[pointer]
            return self._kept[pointer]
        params = raw[11:27]
        if op in self._library.sub_ops:
            names = self._library.sub_ops[op]
            params = (_position(op, names[params[0]]), *params[1:])
        if type_id not in self._library.types:
            raise GraphError(f"a tensor of type id {type_id}, which is unknown here")
        pointers = raw[28:38]
        while pointers and not pointers[-1]:
            pointers = pointers[:-1]
        t = Tensor(
            self._library.types[type_id],
            raw[2:6],
            raw[6:10],
            op,
            params,
            view_offs=raw[39],
            flags=flags,
            name=raw[41].split(b"\0", 1)[0].decode(errors="replace"),
        )
        if pointer in pointers:  # as ggml_cast makes it
            self._seen[pointer] = t
        t.src = tuple(self._tensor(p) if p else None for p in pointers)
        t.view_src = self._tensor(view_src) if view_src else None
        self._seen[pointer] = t
        if is_leaf:
            self._leaf(pointer, buffer, t)
        return t

    def _leaf(self, pointer: int, buffer: int, t: Tensor) -> None:
        usage = self._c.ggml_backend_buffer_get_usage(buffer) if buffer else _USAGE_COMPUTE
        data = self._bytes(pointer, nbytes(t)) if buffer else np.zeros(nbytes(t), np.uint8)
        if usage != _USAGE_WEIGHTS and (usage == _USAGE_COMPUTE or t.flags & FLAG_INPUT):
            self.graphs[-1].inputs[t] = data
            return
        self._kept[pointer] = t
        self._places[t] = pointer
        self.persistent[t] = data
        if usage == _USAGE_WEIGHTS:
            self.is_weight.add(t)

    def _bytes(self, pointer: int, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        if size:
            self._c.ggml_backend_tensor_get(pointer, data.ctypes.data, 0, size)
        return data

    def _packed(self, pointer: int, t: Tensor) -> Bytes:
        size = nbytes(t)
        if size != self._c.ggml_nbytes(pointer):
            raise GraphError(f"{t}: {size} bytes by these strides, {self._c.ggml_nbytes(pointer)} by ggml_nbytes")
        return pack(self._bytes(pointer, size), t, 0)


def step(recorded: Recorded) -> Step:
    """A recorded graph as a step; its outputs are results that no node reads."""
    graph = Graph(recorded.nodes)
    read = {s for n in graph for s in n.src if s is not n}
    results = tuple(
        n for n in graph if computes(n) and n.flags & FLAG_OUTPUT and n in recorded.values and n not in read
    )
    used = set(graph.tensors())
    inputs = {t: data for t, data in recorded.inputs.items() if t in used}
    return Step(graph, inputs, results, recorded.values)


def _position(op: str, name: str) -> int:
    known = UNARY_OPS if op == "UNARY" else GLU_OPS
    return known.index(name)
