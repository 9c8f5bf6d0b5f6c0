"""Measures memory of a model and a context: as llama.cpp reports it, and of the process."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.backend.measure import trim
from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.breakdown import breakdown
from conformance.ggml.lib.llama import Llama
from conformance.process.memory import physical
from conformance.suite.zoo.family import Request
from conformance.suite.zoo.load import load_model

from .scenarios.harness import Harness

_STATUS = Path("/proc/self/status")
_LINES = 1 << 16
_PROMPT, _STEPS = 32, 2
"""Tokens of the prompt, and further single tokens, so that a backend compiles its graphs."""


def measure(library: Llama, request: Request, device: str) -> dict[str, Any]:
    """Load a model without mmap, decode a prompt and a few tokens, and return the bytes in use.

    Returns:
        `parts`: buffer type -> llama.cpp's figures. `held`: growth of the process's own memory, without file pages;
        `peak`: its maximum. `device`: decrease of the device's free memory; None if the device uses
        this machine's memory, or does not report it.

    Raises:
        UnavailableError: the system does not report a process's memory.
        UsageError: as `load_model` and `new_context`.
    """
    library.log = deque(maxlen=_LINES)
    before, free = _own(), _free(library, device)
    harness = Harness(library, load_model(library, request, device, mapped=False), request, Path())
    loading = list(library.log)
    encodes = harness.kind == "encoder"  # which a context is made for
    library.log.clear()
    context = harness.context()
    lines = [*loading, *library.log]
    if encodes:
        context.feed((0, harness.tokens(_PROMPT)))
    else:
        context.decode((0, harness.tokens(_PROMPT)))
        for i in range(_STEPS):
            context.decode((0, harness.tokens(_STEPS, "after")[i : i + 1]))
    parts = breakdown(library, context.pointer, lines)
    trim()
    held, after = _own(), _free(library, device)
    return {
        "parts": {name: asdict(p) for name, p in parts.items()},
        "held": held["now"] - before["now"],
        "peak": held["peak"] - before["all"],
        "device": None if free is None or after is None else free - after,
    }


def _own() -> dict[str, int]:
    """Return bytes of this process: `now` private, `all` resident, `peak` largest resident."""
    try:
        text = _STATUS.read_text(encoding="ascii")
    except OSError:
        raise UnavailableError(f"the memory of a process is read from {_STATUS}, which does not exist here") from None
    rows = {k: v.split() for k, _, v in (line.partition(":") for line in text.splitlines())}
    kib = {k: int(v[0]) << 10 for k, v in rows.items() if v[1:] == ["kB"]}
    return {"now": kib["RssAnon"] + kib["RssShmem"], "all": kib["VmRSS"], "peak": kib["VmHWM"]}


def _free(library: Llama, name: str) -> int | None:
    """Return the free bytes of a device with its own memory; None otherwise."""
    handle = library.ggml.backend_dev_by_name(name.encode()) if name else None
    ask = library.ggml.backend_dev_memory
    if not handle or ask is None:
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ask(handle, ctypes.byref(free), ctypes.byref(total))
    return None if not total.value or _is_physical(total.value) else free.value


def _is_physical(total: int) -> bool:
    """Return True if a size is the machine's physical memory, within 1/16."""
    whole = physical()
    return abs(total - whole) <= whole // 16
