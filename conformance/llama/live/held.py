"""Measures memory of a model and a context: as llama.cpp reports it, and of the process."""

from __future__ import annotations

import ctypes
import gc
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from conformance.backend.measure import Peak, held
from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.breakdown import of_log
from conformance.ggml.lib.llama import Llama
from conformance.llama.zoo.family import Request
from conformance.llama.zoo.load import load_model
from conformance.process.memory import virtual

from .scenarios.harness import Context, Harness

_LINES, _LAST_LINES = 1 << 16, 16
"""Kept lines of the log: all for the sizes of buffers, then too few to grow."""
_PROMPT, _STEPS = 32, 2
"""Tokens of the prompt, and further single tokens, so that a backend compiles its graphs."""
STEPS, ROUNDS = 200, 5
"""Decoded tokens of a round, and rounds that are measured after one to warm up."""
LOADS = 20
"""Loads that are measured after one to warm up."""
_THP_DISABLE = 41
"""`PR_SET_THP_DISABLE`: huge pages would make resident memory depend on addresses."""


def measure(library: Llama, request: Request, device: str, *, grows: bool = False) -> dict[str, Any]:
    """Load a model, decode a prompt and a few tokens, and return the bytes in use.

    The model is read without mmap, except on several devices: a meta device of CPUs fails to read it.

    Returns:
        `parts`: buffer type -> llama.cpp's figures. `held`: growth of the process's own memory, without file pages;
        `peak`: its maximum, `loading`: its maximum while the model is loaded. `device`: decrease of the device's free
        memory; None if the device uses this machine's memory, or does not report it. With `grows` also `step`
        and `cycle`: growth per decoded token, and per load of model and context with mmap.

    Raises:
        UnavailableError: the system does not report a process's memory.
        UsageError: as `load_model` and `new_context`.
    """
    _without_huge_pages()
    library.log.lines = deque(maxlen=_LINES)
    before, free = held(), _free(library, device)
    with Peak() as peak:
        with Peak() as loading:
            model = load_model(library, request, device, mapped="+" in device)
        harness = Harness(library, model, request, Path())
        lines = list(library.log.lines)
        harness.kind  # noqa: B018  # which a context is made for
        library.log.lines.clear()
        context = harness.context()
        lines += library.log.lines
        _decode(context, _STEPS)
        after = held()
    now = _free(library, device)
    if before is None or after is None or peak.bytes is None or loading.bytes is None:
        raise UnavailableError("the memory of a process is read from /proc/self/status, which does not have it here")
    found = {
        "parts": {name: asdict(p) for name, p in of_log(lines).items()},
        "held": after - before,
        "peak": peak.bytes,
        "loading": loading.bytes,
        "device": None if free is None or now is None else free - now,
    }
    if grows:
        library.log.lines = deque(maxlen=_LAST_LINES)
        owned = _owned(library, device)
        found["step"] = growth(owned, lambda: _decode(context, STEPS), ROUNDS) / STEPS
        _free_all(harness)
        found["cycle"] = growth(owned, lambda: _load_and_free(library, request, device), LOADS)
    return found


def growth(owned: Callable[[], int], repeat: Callable[[], object], rounds: int) -> int:
    """Return the bytes by which `owned` grows with each call of `repeat`, after a first one.

    It is the least growth, except a tenth of the rounds: a leak is in each, while Python allocates in few of them.
    """
    sizes = []
    for _ in range(rounds + 1):
        repeat()
        sizes.append(owned())
    return sorted(b - a for a, b in pairwise(sizes))[rounds // 10]


def _owned(library: Llama, device: str) -> Callable[[], int]:
    """Return a function that counts bytes of process and device, less malloc's free bytes.

    UnavailableError if the C library does not count them.
    """
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None or virtual() is None:
        raise UnavailableError("growth is measured with mallinfo2 of glibc 2.33 or later, which this machine lacks")
    count.restype = _MallInfo

    def owned() -> int:
        gc.collect()
        return (virtual() or 0) - int(count().fordblks) - (_free(library, device) or 0)

    return owned


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def _without_huge_pages() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_THP_DISABLE, 1, 0, 0, 0)


def _decode(context: Context, steps: int) -> None:
    """Decode a prompt and single tokens from an empty memory; an encoder encodes the prompt."""
    harness = context.harness
    if context.kind == "encoder":
        context.feed((0, harness.tokens(_PROMPT)))
        return
    context.clear()
    context.decode((0, harness.tokens(_PROMPT)))
    tokens = harness.tokens(steps, "after")
    for i in range(steps):
        context.decode((0, tokens[i : i + 1]))


def _load_and_free(library: Llama, request: Request, device: str) -> None:
    harness = Harness(library, load_model(library, request, device), request, Path())
    _decode(harness.context(), 1)
    _free_all(harness)


def _free_all(harness: Harness) -> None:
    """Free contexts, then the model; LacksError if this library cannot."""
    harness.call("model_free")
    harness.models.append(harness.model)
    with harness.clean():
        pass


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
    whole = psutil.virtual_memory().total
    return abs(total - whole) <= whole // 16
