"""Memory of a llama.cpp context by buffer type: weights, caches and states, compute.

`llama_memory_breakdown_print` prints whole MiB, and newer releases offer only C++: `llama_get_memory_breakdown`, which
returns a `std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>` by value. Every release logs each buffer
as it is allocated, in hundredths of a MiB.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .llama import Llama

_SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"
_MAP_WORDS, _NODE_WORDS = 6, 8
"""Words of a map and of a node in libstdc++.

Map: comparison, header colour, root, leftmost, rightmost, count. Node: colour, parent, left, right, then the key and
three sizes."""
_MOST = 64
"""Upper bound for a plausible number of buffer types in the map."""
_LINE = re.compile(r"(?P<buft>\S+) +(?P<what>model|KV|RS|compute) buffer size = +(?P<mib>[0-9.]+) MiB")
_FIELD = {"model": "model", "KV": "context", "RS": "context", "compute": "compute"}


@dataclass(slots=True)
class Parts:
    """Bytes in buffers of one type (`struct llama_memory_breakdown_data`)."""

    model: int = 0
    context: int = 0
    compute: int = 0

    @property
    def self(self) -> int:
        """Total of all three, as llama.cpp calls it."""
        return self.model + self.context + self.compute


def breakdown(library: Llama, context: int, lines: Iterable[str]) -> dict[str, Parts]:
    """Return buffer type -> bytes of `context` and its model, as llama.cpp counts them.

    `lines` is the log of loading the model and creating the context, for a library without the map.
    """
    exact = exported(library, context)
    return of_log(lines) if exact is None else exact


def of_log(lines: Iterable[str]) -> dict[str, Parts]:
    """Return the breakdown from llama.cpp's log, to 0.01 MiB; the last compute sizes count."""
    out: dict[str, Parts] = {}
    for match in filter(None, map(_LINE.search, lines)):
        parts, field = out.setdefault(match["buft"], Parts()), _FIELD[match["what"]]
        n = round(float(match["mib"]) * (1 << 20))
        setattr(parts, field, n if field == "compute" else getattr(parts, field) + n)
    return out


def exported(library: Llama, context: int) -> dict[str, Parts] | None:
    """Return the exact breakdown in bytes; None if ctypes cannot get it from the library."""
    function = library.function(_SYMBOL)
    if function is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    # A class by value: the caller passes its address first (System V, x86-64). The small map is never freed.
    function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p)
    place = (ctypes.c_uint64 * _MAP_WORDS)()
    function(ctypes.addressof(place), context)
    root, count = place[2], place[5]
    if not 0 < count <= _MOST:
        return None
    return {
        library.ggml.backend_buft_name(key).decode(): Parts(*sizes)
        for key, *sizes in _nodes(root)
    }  # fmt: skip


def _nodes(at: int) -> Iterator[tuple[int, ...]]:
    """Yield keys and sizes below a node of a red-black tree, in order."""
    if at:
        words = (ctypes.c_uint64 * _NODE_WORDS).from_address(at)
        yield from _nodes(words[2])
        yield tuple(words[4:])
        yield from _nodes(words[3])
