"""Split a case: the splits of every step as graphs, and per device a case of its splits."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.backend.interface import Backend, Support
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic, Mixed
from conformance.ggml.errors import UnavailableError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import written
from conformance.ggml.partial import Part, partial
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, computes, nbytes

from .assign import NOBODY, Assignment, Home, Memory, UnassignedError, assign, place


@dataclass(frozen=True, slots=True)
class Share:
    """One split as a separate graph."""

    device: int
    part: Part
    made: Mapping[Tensor, Tensor]
    """Node of the whole graph that this split computes -> its copy here."""
    passed: Mapping[Tensor, Tensor]
    """Node here -> root of the whole graph that a later split reads."""
    uses: Sequence[Tensor]
    """Persistent tensors that it reads or writes."""
    writes: frozenset[Tensor]
    """Persistent tensors that it writes."""
    ops: Mapping[str, int]
    """Op -> nodes that compute, in their order."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The splits of one graph of the case."""

    assignment: Assignment
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True)
class Plan:
    """The splits of a whole case."""

    home: Home
    graphs: Mapping[Graph, Shared]
    cases: Sequence[Case | None]
    """Case to open on each device, whose steps are its splits; None without a split."""
    arithmetic: Arithmetic


def refusal(node: Tensor, labels: Sequence[str], reasons: Sequence[Support], why: str = "no device supports it") -> str:
    """Return why no device can run a node: the node, its shapes, and each backend's reason."""
    src = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    said = "; ".join(f"{label}: {s.reason or 'takes it'}" for label, s in zip(labels, reasons, strict=True))
    return f"{node} of {src or 'no src'}: {why} ({said})"


def plan(case: Case, backends: Sequence[Backend], labels: Sequence[str], memory: Memory) -> Plan:
    """Split `case` over `backends`, in order of priority.

    UnavailableError if no device is left for a node; names the node, its shapes and every backend's reason.
    """
    # per graph: a device may reject a read after a write in the same graph, but accept it in the next
    each = dict.fromkeys(s.graph for s in case.steps)
    answers = [{n: a for g in each for n, a in zip(g, b.supports(g), strict=True)} for b in backends]

    def supports(b: int, t: Tensor) -> bool:
        return t not in answers[b] or bool(answers[b][t])  # views of leaves are not nodes

    home = place(case, len(backends), supports)
    graphs: dict[Graph, Shared] = {}
    for step in case.steps:
        if step.graph in graphs:
            continue
        try:
            assignment = assign(step.graph, supports, home, memory)
        except UnassignedError as e:
            reasons = [a.get(e.node, Support(True)) for a in answers]
            raise UnavailableError(f"sched: {refusal(e.node, labels, reasons, e.why)}") from None
        graphs[step.graph] = Shared(assignment, list(_shares(step.graph, assignment, case)))
    cases = [_case_of(case, graphs, b, label) for b, label in enumerate(labels)]
    return Plan(home, graphs, cases, _arithmetic(backends, labels, graphs))


def _shares(graph: Graph, assignment: Assignment, case: Case) -> Iterator[Share]:
    everything = frozenset(graph.nodes)
    parts = [partial(graph, s.first, s.last, persistent=case.persistent, outputs=everything) for s in assignment.splits]
    later: set[Tensor] = set()
    read: list[set[Tensor]] = []
    for part in reversed(parts):
        read.append(set(later))
        later.update(part.inputs.values())
    for split, part, needed in zip(assignment.splits, parts, reversed(read), strict=True):
        if not part.graph.nodes:
            continue
        uses = [t for t in part.graph.tensors() if t in case.persistent]
        writes = frozenset(t for n in part.graph for t in written(n) if t in case.persistent)
        made = {n: part.copies[n] for n in graph.nodes[split.first : split.last]}
        passed = {node: root for node, root in part.passed.items() if root in needed}
        yield Share(split.device, part, made, passed, uses, writes, Counter(n.op for n in part.graph if computes(n)))


def _case_of(case: Case, graphs: Mapping[Graph, Shared], device: int, label: str) -> Case | None:
    shares = [s for g in graphs.values() for s in g.shares if s.device == device]
    if not shares:
        return None
    used = {t for s in shares for t in s.uses}
    persistent = {t: data for t, data in case.persistent.items() if t in used}
    steps = [Step(s.part.graph, {leaf: zeros(leaf) for leaf in s.part.inputs}) for s in shares]
    return Case(
        f"{case.id}#{label}",
        persistent,
        steps,
        case.family,
        case.params,
        case.seed,
        generator=case.generator,
        placement={t: p for t, p in case.placement.items() if t in used},
    )


def zeros(t: Tensor) -> Bytes:
    """Return zeros for a leaf that no computing node reads."""
    return np.zeros(nbytes(t), np.uint8)


def _arithmetic(backends: Sequence[Backend], labels: Sequence[str], graphs: Mapping[Graph, Shared]) -> Arithmetic:
    each = [b.arithmetic() for b in backends]
    used = {s.device for g in graphs.values() for s in g.shares}
    if len(used) == 1:
        return each[used.pop()]
    nodes = {
        n: each[b] for g in graphs.values() for n, b in g.assignment.device.items() if n.op != "NONE" and b != NOBODY
    }
    spelled = " and ".join(f"{label} ({a.name})" for label, a in zip(labels, each, strict=True))
    order = bytes(b + 1 for g in graphs.values() for b in g.assignment.device.values())
    return Mixed(f"sched of {spelled}, shared out as {zlib.crc32(order):08x}", nodes=nodes)


HEADER = ("split", "device", "node", "op", "name", "shape", "copied before the split")


def rows(graph: Graph, shared: Shared, labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row per computing node, with its split and device, and copies before a split."""
    out: list[tuple[str, ...]] = []
    for k, split in enumerate(shared.assignment.splits):
        copied = ", ".join(t.name or t.op for t in split.inputs)
        for i in range(split.first, split.last):
            node = graph.nodes[i]
            if node.op in VIEW_OPS:
                continue
            shape = f"{node.type}{list(node.ne)}"
            out.append((str(k), labels[split.device], str(i), node.op, node.name, shape, copied))
            copied = ""
    return out


def summary(shared: Shared, labels: Sequence[str]) -> str:
    """Return the node ranges of the splits, such as `cpu 0-4, xdna2 5, cpu 6-11`."""
    parts = []
    for split in shared.assignment.splits:
        last = split.last - 1
        where = f"{split.first}-{last}" if last > split.first else f"{split.first}"
        parts.append(f"{labels[split.device]} {where}")
    return ", ".join(parts)
