"""What a plan did with a graph, for people."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import VIEW_OPS

from .plan import Shared

HEADER = ("split", "device", "node", "op", "name", "shape", "copied before the split")


def rows(graph: Graph, shared: Shared, labels: Sequence[str]) -> list[tuple[str, ...]]:
    """One row per node that computes: its split and device, and with the first of a split what is copied there."""
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
    """`cpu 0-4, xdna2 5, cpu 6-11`: the nodes of each split by their place in the graph."""
    parts = []
    for split in shared.assignment.splits:
        last = split.last - 1
        where = f"{split.first}-{last}" if last > split.first else f"{split.first}"
        parts.append(f"{labels[split.device]} {where}")
    return ", ".join(parts)
