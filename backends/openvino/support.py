"""What the OpenVINO translation refuses, and why: judged by op, types and layout, never by data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conformance.case.case import writes_in_place
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor, computes
from conformance.ggml.types import BF16, F16, F32, I32

from .forms import BLOCKS

MOVES = frozenset({"CPY", "CONT", "DUP", "CONCAT", "REPEAT"})
STORED = frozenset({F32, F16, BF16, I32, *BLOCKS})
"""Types that the translation can round values to."""


def refusal(node: Tensor) -> str:
    """Why `node` cannot be translated; empty where it can."""
    return next(filter(None, (rule(node) for rule in RULES)), "")


def _strides(node: Tensor) -> str:
    for t in (node, *node.src):
        if t is None:
            continue
        size = t.type.type_size
        if any(x % size for x in (*t.nb[1:], t.view_offs)) or (t.type.blck_size == 1 and t.nb[0] % size):
            return f"strides {t.nb} at offset {t.view_offs} of {t} are no multiples of its type's {size} bytes"
    return ""


def _stores(node: Tensor) -> str:
    """Values can be rounded only to types that OpenVINO's arithmetic can build; bytes of any type can be moved."""
    a = node.src[0] if node.src else None
    moved = node.op in MOVES and a is not None and a.type is node.type
    if node.type in STORED or moved:
        return ""
    return f"values cannot be stored in {node.type}: its quantiser searches for scales, which this translation does not"


def _reads(node: Tensor) -> str:
    """Numbers of these types come from the host; what the graph itself wrote never was there."""
    return next((_unread(s) for s in _read(node) if s.root.op != "NONE"), "")


def overwritten(graph: Graph) -> Iterator[str]:
    """For each node of `graph`, why it cannot read what an earlier one wrote into a leaf; empty where it can."""
    written: set[Tensor] = set()
    for node in graph:
        yield next((_unread(s) for s in _read(node) if s.root in written), "") if computes(node) else ""
        if writes_in_place(node) and computes(node) and node.root.op == "NONE":
            written.add(node.root)


def _read(node: Tensor) -> Iterator[Tensor]:
    """What `node` computes with, of types that the translation knows from the host alone."""
    for s in node.src:
        if s is not None and s.type not in STORED and not (node.op in MOVES and s.type is node.type):
            yield s


def _unread(s: Tensor) -> str:
    return f"reads values of {s.type} that {s.root} of the same graph wrote; only leaves of that type can be read"


RULES: tuple[Callable[[Tensor], str], ...] = (_strides, _stores, _reads)
