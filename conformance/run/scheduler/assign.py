"""Which device computes which node, and where the graph is cut: the passes of `ggml_backend_sched_split_graph`.

Nothing here knows a backend: support is a table of yes and no, memory a table of who reads whose. Devices are numbers,
0 the first in priority; the last takes inputs and is not expanded, as ggml does with the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_INPUT, VIEW_OPS, Tensor

from .devices import Memory

NOBODY = -1
_NOT_BY_WEIGHTS = frozenset({"ROPE", "FLASH_ATTN_EXT"})
"""Frequency factors and sinks are too small to decide where an op runs."""


class UnassignedError(Exception):
    """No device is left for a node."""

    def __init__(self, node: Tensor, why: str) -> None:
        super().__init__(why)
        self.node = node
        self.why = why


@dataclass(frozen=True, slots=True)
class Home:
    """Tensors that live in a device's buffer before the graph runs."""

    of: Mapping[Tensor, int]
    """Persistent tensor -> device."""
    weights: frozenset[Tensor]
    """Those whose buffer has usage WEIGHTS."""


@dataclass(slots=True)
class Split:
    """Nodes `first` to `last` (not included), all of one device."""

    device: int
    first: int
    last: int
    inputs: list[Tensor] = field(default_factory=list)
    """What is copied to the device before the split runs; not again for a later split of the same device."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A graph shared out."""

    device: Mapping[Tensor, int]
    """Node or leaf -> device; NOBODY for a leaf that no node reads."""
    splits: Sequence[Split]


Supports = Callable[[int, Tensor], bool]


def assign(graph: Graph, supports: Supports, home: Home, memory: Memory) -> Assignment:
    """Share out `graph`.

    Args:
        graph: the whole.
        supports: whether a device takes a node (`ggml_backend_supports_op`); leaves are not asked about.
        home: where persistent tensors live.
        memory: of the devices, in order of priority.

    Raises:
        UnassignedError: no device is left for a node.
    """
    passes = _Passes(graph, supports, home, memory)
    passes.by_buffers_and_weights()
    last = len(memory.reads) - 1
    for skip in (last, NOBODY):
        passes.expand(graph.nodes, skip)
        passes.expand(reversed(graph.nodes), skip)
    passes.upgrade()
    passes.rest()
    return Assignment(passes.device, passes.split())


class _Passes:
    def __init__(self, graph: Graph, supports: Supports, home: Home, memory: Memory) -> None:
        self._graph = graph
        self._supports, self._home, self._memory = supports, home, memory
        self._n = len(memory.reads)
        self.device: dict[Tensor, int] = dict.fromkeys(graph.tensors(), NOBODY)

    def _takes(self, b: int, t: Tensor) -> bool:
        return t.op == "NONE" or self._supports(b, t)

    def _computing(self, nodes: Iterable[Tensor]) -> Iterable[Tensor]:
        return (n for n in nodes if n.op not in VIEW_OPS)

    def by_buffers_and_weights(self) -> None:
        """Pass 1: what lives in a buffer runs there; inputs go to the last device; nodes go to their weights."""
        for t in self.device:
            self.device[t] = self._by_buffers_and_weights(t)

    def _by_buffers_and_weights(self, t: Tensor) -> int:
        if t.root in self._home.of:
            b = self._of_buffer(t.root, t)
            if b == NOBODY:
                raise UnassignedError(t, "its bytes live in a buffer whose device does not take it")
            return b
        if t.flags & FLAG_INPUT:
            return self._n - 1
        if t.op not in _NOT_BY_WEIGHTS:
            for s in t.src:
                if s is not None and s in self._home.weights:
                    return self._of_buffer(s, t)
        return NOBODY

    def _of_buffer(self, root: Tensor, t: Tensor) -> int:
        """The first device that reads the buffer of `root` and takes `t`."""
        a = self._home.of[root]
        return next((b for b in range(self._n) if self._memory.reads[b][a] and self._takes(b, t)), NOBODY)

    def expand(self, nodes: Iterable[Tensor], skip: int) -> None:
        """Pass 2: neighbours of an assigned node follow it where its device takes them, but not that of `skip`."""
        current = NOBODY
        for node in self._computing(nodes):
            if self.device[node] != NOBODY:
                current = NOBODY if self.device[node] == skip else self.device[node]
            elif current != NOBODY and self._takes(current, node):
                self.device[node] = current

    def upgrade(self) -> None:
        """Pass 3: a node without a device goes where most of its sources can be read; others to a better device with
        the same memory.
        """
        for node in self._computing(self._graph.nodes):
            at = self.device[node]
            if at == NOBODY:
                most = -1
                for b in range(self._n):
                    # where a node is its own src, as ggml_cast makes it, the device it has so far counts
                    if self._takes(b, node) and (read := self._sources_read(node, b)) > most:
                        most, self.device[node] = read, b
                continue
            for b in range(at):
                if (
                    self._memory.same[b][at]
                    and self._takes(b, node)
                    and all(self._readable(s, b) for s in node.src if s is not None)
                ):
                    self.device[node] = b
                    break

    def _sources_read(self, node: Tensor, b: int) -> int:
        return sum(self._readable(s, b) for s in node.src if s is not None)

    def _readable(self, t: Tensor, b: int) -> bool:
        """`ggml_backend_sched_buffer_supported`."""
        a = self._home.of.get(t.root, self.device[t])
        if a == NOBODY and t.view_src is not None:
            a = self.device[t.view_src]
        return a != NOBODY and self._memory.reads[b][a]

    def rest(self) -> None:
        """Pass 4: views go where their roots are, leaves where they are read first."""
        for node in self._graph.nodes:
            if node.view_src is not None and self.device[node] == NOBODY:
                self.device[node] = self.device[node.view_src]
            for s in node.src:
                if s is not None and self.device[s] == NOBODY:
                    self.device[s] = self.device[node if s.view_src is None else s.view_src]
            if self.device[node] == NOBODY:
                self.device[node] = next((b for b in range(self._n) if self._takes(b, node)), NOBODY)
            if self.device[node] == NOBODY:
                raise UnassignedError(node, "no device takes it")

    def split(self) -> list[Split]:
        """Pass 5: a new split where the device changes, or where a weight from elsewhere may take another's room."""
        nodes = self._graph.nodes
        start = next((i for i, n in enumerate(nodes) if n.op not in VIEW_OPS), len(nodes))
        splits = [Split(self.device[nodes[start]] if start < len(nodes) else self._n - 1, 0, len(nodes))]
        copied: set[tuple[Tensor, int]] = set()
        for i, node in enumerate(nodes):
            if i < start or node.op in VIEW_OPS:
                continue
            now, b = splits[-1], self.device[node]
            if b != now.device or (now.inputs and self._brings_weight(node, b)):
                now.last = i
                splits.append(Split(b, i, len(nodes)))
            for s in node.src:
                if s is not None and self._foreign(s, b) and (s, b) not in copied:
                    copied.add((s, b))
                    splits[-1].inputs.append(s)
        return splits

    def _foreign(self, t: Tensor, b: int) -> bool:
        return self.device[t] != b and not self._readable(t, b)

    def _brings_weight(self, node: Tensor, b: int) -> bool:
        return any(s is not None and s in self._home.weights and self._foreign(s, b) for s in node.src)
