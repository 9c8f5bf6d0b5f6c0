"""Where llama.cpp's scheduler computes the nodes of a graph, as its log says."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Iterable
from typing import TypeAlias

from conformance.case.case import JSON
from conformance.ggml.lib.echo import ECHO
from conformance.ggml.lib.llama import Llama
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import new_context

Placed: TypeAlias = dict[str, dict[str, int]]
"""Device -> op -> nodes, in their order."""
_VERBOSE = "GGML_SCHED_DEBUG"
"""Variable that lets a scheduler log each node, if 2."""
_LINES = 1 << 18
_SPLIT = re.compile(r"## SPLIT #(\d+): (\S.*?) # \d+ inputs")
_NODE = re.compile(r"node #\s*\d+ \(\s*(\S+)\)")


def placed(library: Llama, model: int, request: Request) -> Placed:
    """Return the nodes of the last graph that a new context plans: device -> op -> count.

    Empty if this version does not log them. Raises as `new_context`.
    """
    lines, echoes, was = library.log.lines, ECHO.on, os.environ.get(_VERBOSE)
    library.log.lines, ECHO.on, os.environ[_VERBOSE] = deque(maxlen=_LINES), False, "2"
    try:
        library.llama.free(new_context(library, model, request))
        return _nodes(library.log.lines)
    finally:
        library.log.lines, ECHO.on = lines, echoes
        if was is None:
            del os.environ[_VERBOSE]
        else:
            os.environ[_VERBOSE] = was


def _nodes(lines: Iterable[str]) -> Placed:
    found: dict[str, Counter[str]] = {}
    device = ""
    for line in lines:
        if split := _SPLIT.search(line):
            if split[1] == "0":
                found.clear()
            device = split[2]
        elif node := _NODE.search(line):
            found.setdefault(device, Counter())[node[1]] += 1
    return {device: dict(ops) for device, ops in found.items()}


def witness(device: str, nodes: Placed) -> dict[str, JSON] | None:
    """Return the witness of a run of llama.cpp on a device; None if nothing is known."""
    if not nodes:
        return None
    whole = sum(sum(ops.values()) for ops in nodes.values())
    return {"device": device, "path": "split", "nodes": whole, "placed": {name: {**ops} for name, ops in nodes.items()}}
