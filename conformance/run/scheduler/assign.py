"""Assign nodes to devices and split the graph, as `ggml_backend_sched_split_graph` does.

This module knows no backends: support is a yes/no table, memory a table of which device reads which buffers. Devices
are numbers; 0 has the highest priority, the last takes inputs and is not expanded, like the CPU in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case.case import Case, writes_in_place
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import FLAG_INPUT, VIEW_OPS, Tensor

MAX_DEVICES = 16
"""`GGML_SCHED_MAX_BACKENDS`."""

DECLARED, APART = "declared", "apart"
MEMORIES = (DECLARED, APART)


@dataclass(frozen=True, slots=True)
class Memory:
    """Which device reads which buffer types; index b is the default buffer type of device b."""

    reads: tuple[tuple[bool, ...], ...]
    """`reads[b][a]`: device b can use the buffer type of a (`ggml_backend_supports_buft`)."""
    same: tuple[tuple[bool, ...], ...]
    """`same[b][a]`: both have the same buffer type."""


def memory_of(backends: Sequence[Backend], how: str) -> Memory:
    """Return which of `backends`, in order of priority, read whose default buffer type.

    If `how` is `declared`, devices whose default buffer types are host memory share it, as a BLAS or NPU backend on
    host pointers does with the CPU; if `apart`, each has its own memory. UsageError for any other value.
    """
    if how not in MEMORIES:
        raise UsageError(f"sched: buffers: one of {', '.join(MEMORIES)} expected, {how!r} found")
    host = [how == DECLARED and b.buffer_types()[0].is_host for b in backends]
    n = range(len(backends))
    shared = tuple(tuple(a == b or (host[a] and host[b]) for a in n) for b in n)
    return Memory(shared, shared)


def read_devices(text: str) -> list[Spec]:
    """Parse devices such as `xdna2:k=64+128:max_n=1,cpu`: comma-separated, options after colons.

    Commas, colons and percent signs in values are percent-encoded (twice on a command line, where the whole spec is
    encoded too: `%252C`). UsageError for an invalid spec, no device, or too many.
    """
    specs = []
    for part in text.split(","):
        name, *options = part.split(":")
        pairs = [option.partition("=") for option in options]
        if not name or any(not key or not sign for key, sign, _ in pairs):
            raise UsageError(f"sched: devices: NAME[:KEY=VALUE…],NAME… expected, {text!r} found")
        specs.append(Spec(unquote(name), tuple((unquote(k), unquote(v)) for k, _, v in pairs)))
    if len(specs) > MAX_DEVICES:
        raise UsageError(f"sched: devices: at most {MAX_DEVICES} expected, {len(specs)} found")
    return specs


def labels(specs: Sequence[Spec]) -> list[str]:
    """Return a short name per device: its adapter's, numbered if several share it."""
    names = [s.name for s in specs]
    return [n if names.count(n) == 1 else f"{n}#{names[: i + 1].count(n)}" for i, n in enumerate(names)]


NOBODY = -1


class UnassignedError(Exception):
    """No device is left for a node."""

    def __init__(self, node: Tensor, why: str) -> None:
        super().__init__(why)
        self.node = node
        self.why = why


@dataclass(frozen=True, slots=True)
class Home:
    """Tensors allocated in a device's buffer before the graph runs."""

    device_of: Mapping[Tensor, int]
    """Persistent tensor -> device."""
    weights: frozenset[Tensor]
    """Tensors whose buffer has usage WEIGHTS."""


@dataclass(slots=True)
class Split:
    """Nodes from `first` up to `last` (exclusive) on one device."""

    device: int
    first: int
    last: int
    inputs: list[Tensor] = field(default_factory=list)
    """Tensors to copy to the device before the split runs, unless an earlier split did."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The devices and splits of a graph."""

    device: Mapping[Tensor, int]
    """Node or leaf -> device; NOBODY for a leaf that no node reads."""
    splits: Sequence[Split]


Supports = Callable[[int, Tensor], bool]


def assign(graph: Graph, supports: Supports, home: Home, memory: Memory) -> Assignment:
    """Assign a device to every node of `graph`; UnassignedError if none is left for a node.

    `supports` is `ggml_backend_supports_op`; it is not called for leaves.
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
        """Run pass 1: buffers go to their devices, inputs to the last one, nodes to their weights."""
        for t in self.device:
            self.device[t] = self._by_buffers_and_weights(t)

    def _by_buffers_and_weights(self, t: Tensor) -> int:
        if t.root in self._home.device_of:
            b = self._of_buffer(t.root, t)
            if b == NOBODY:
                raise UnassignedError(t, "its buffer's device does not support it")
            return b
        if t.flags & FLAG_INPUT:
            return self._n - 1
        if t.op not in DECLARATIONS[t.op].not_by_weights:
            for s in t.src:
                if s is not None and s in self._home.weights:
                    return self._of_buffer(s, t)
        return NOBODY

    def _of_buffer(self, root: Tensor, t: Tensor) -> int:
        """Return the first device that reads the buffer of `root` and supports `t`."""
        a = self._home.device_of[root]
        return next((b for b in range(self._n) if self._memory.reads[b][a] and self._takes(b, t)), NOBODY)

    def expand(self, nodes: Iterable[Tensor], skip: int) -> None:
        """Run pass 2: Expand assigned devices to adjacent nodes that they support, except `skip`."""
        current = NOBODY
        for node in self._computing(nodes):
            if self.device[node] != NOBODY:
                current = NOBODY if self.device[node] == skip else self.device[node]
            elif current != NOBODY and self._takes(current, node):
                self.device[node] = current

    def upgrade(self) -> None:
        """Run pass 3: open nodes go where most sources are readable, others to a better device.

        Better is a device of higher priority with the same memory.
        """
        for node in self._computing(self._graph.nodes):
            at = self.device[node]
            if at == NOBODY:
                most = -1
                for b in range(self._n):
                    # if a node is its own src, as in ggml_cast, its current device counts
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
        """Return the result of `ggml_backend_sched_buffer_supported`."""
        a = self._home.device_of.get(t.root, self.device[t])
        if a == NOBODY and t.view_src is not None:
            a = self.device[t.view_src]
        return a != NOBODY and self._memory.reads[b][a]

    def rest(self) -> None:
        """Run pass 4: Views go to the devices of their roots, leaves to those that read them first."""
        for node in self._graph.nodes:
            if node.view_src is not None and self.device[node] == NOBODY:
                self.device[node] = self.device[node.view_src]
            for s in node.src:
                if s is not None and self.device[s] == NOBODY:
                    self.device[s] = self.device[node if s.view_src is None else s.view_src]
            if self.device[node] == NOBODY:
                self.device[node] = next((b for b in range(self._n) if self._takes(b, node)), NOBODY)
            if self.device[node] == NOBODY:
                raise UnassignedError(node, "no device supports it")

    def split(self) -> list[Split]:
        """Run pass 5: Split where the device changes or a copied weight may replace another."""
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


def place(case: Case, n: int, supports: Supports) -> Home:
    """Return the homes of the persistent tensors of `case` on `n` devices.

    A weight goes to the first device that supports every node that reads it; a cache to the first that supports every
    node that reads or writes it, else to the first that supports every writer. Otherwise the tensor goes to the last
    device, from where it is copied as ggml copies weights.
    """
    uses: dict[Tensor, list[Tensor]] = {t: [] for t in case.persistent}
    for step in case.steps:
        for node in step.graph:
            if node.op not in VIEW_OPS:  # including nodes that are not computed
                for root in {s.root for s in (*node.src, node.view_src) if s is not None} & uses.keys():
                    uses[root].append(node)
    caches = frozenset(case.caches())

    def first(nodes: Sequence[Tensor]) -> int | None:
        return next((b for b in range(n) if all(supports(b, node) for node in nodes)), None)

    device_of: dict[Tensor, int] = {}
    for t, nodes in uses.items():
        b = first(nodes)
        if b is None and t in caches:
            b = first([node for node in nodes if writes_in_place(node) and node.root is t])
        device_of[t] = n - 1 if b is None else b
    return Home(device_of, frozenset(t for t in uses if t not in caches))
