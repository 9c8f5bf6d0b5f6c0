"""Memory of a llama.cpp context by buffer type: weights, caches and states, compute.

Every release logs each buffer as it is allocated, in hundredths of a MiB. `llama_memory_breakdown_print` prints whole
MiB, and `llama_get_memory_breakdown` is a function of C++.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
        """Sum of the three; llama.cpp prints it as `self`."""
        return self.model + self.context + self.compute


def of_log(lines: Iterable[str]) -> dict[str, Parts]:
    """Return the breakdown from llama.cpp's log, to 0.01 MiB; the last compute sizes count."""
    out: dict[str, Parts] = {}
    for match in filter(None, map(_LINE.search, lines)):
        parts, field = out.setdefault(match["buft"], Parts()), _FIELD[match["what"]]
        n = round(float(match["mib"]) * (1 << 20))
        setattr(parts, field, n if field == "compute" else getattr(parts, field) + n)
    return out
