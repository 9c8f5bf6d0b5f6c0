"""Where llama.cpp's scheduler computes the nodes of a graph, as its log says."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Iterable

from conformance.case.case import JSON
from conformance.ggml.lib.echo import ECHO
from conformance.ggml.lib.llama import Llama
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import new_context

_VERBOSE = "GGML_SCHED_DEBUG"
"""Variable that lets a scheduler log each node, if 2."""
_LINES = 1 << 18
_SPLIT = re.compile(r"## SPLIT #(\d+): (\S.*?) # \d+ inputs")
_NODE = re.compile(r"node #\s*\d+ \(\s*(\S+)\)")


def placed(library: Llama, model: int, request: Request) -> dict[str, int]:
    """Return the nodes of the last graph that a new context plans: `DEVICE OP` -> count.

    Empty if this version does not log them. Raises as `new_context`.
    """
    log, echoes, was = library.log, ECHO.on, os.environ.get(_VERBOSE)
    library.log, ECHO.on, os.environ[_VERBOSE] = deque(maxlen=_LINES), False, "2"
    try:
        library.llama.free(new_context(library, model, request))
        return _nodes(library.log)
    finally:
        library.log, ECHO.on = log, echoes
        if was is None:
            del os.environ[_VERBOSE]
        else:
            os.environ[_VERBOSE] = was


def _nodes(lines: Iterable[str]) -> dict[str, int]:
    found, device = Counter[str](), ""
    for line in lines:
        if split := _SPLIT.search(line):
            if split[1] == "0":
                found.clear()
            device = split[2]
        elif node := _NODE.search(line):
            found[f"{device} {node[1]}"] += 1
    return dict(found)


def witness(device: str, nodes: dict[str, int]) -> dict[str, JSON] | None:
    """Return the witness of a run of llama.cpp on a device; None if nothing is known."""
    if not nodes:
        return None
    return {"device": device, "path": "split", "nodes": sum(nodes.values()), "kernels": {**nodes}}
