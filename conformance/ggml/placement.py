"""Placement: the kind of memory that a persistent tensor should lie in, and its buffer usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import CaseFileError
from .tensor import Tensor

USAGES = ("weights", "any")
"""`enum ggml_backend_buffer_usage` for persistent tensors: a backend may treat weights as constants, repack them, or
run the nodes that read them where they lie."""
MAX_BUFFER = 1000


@dataclass(frozen=True, slots=True)
class Placement:
    """The buffer of one tensor."""

    buffer: int = 0
    """Index into the backend's buffer types (0: its default), modulo their number: the same case runs on backends with
    one kind of memory and with three."""
    usage: str = "weights"
    """One of `USAGES`."""
    must: bool = False
    """No other buffer type will do: the backend refuses the case unless its device accepts every use. Audits set this;
    in other cases an adapter may know better than its device."""


def dump_placement(placement: Mapping[Tensor, Placement], places: Mapping[Tensor, int]) -> list[dict[str, Any]]:
    """`[{"persistent": index, "buffer": int, "usage": str}]`, by index; with `"must": true` where set."""
    by_index = {places[t]: p for t, p in placement.items()}
    return [
        {"persistent": i, "buffer": p.buffer, "usage": p.usage} | ({"must": True} if p.must else {})
        for i, p in sorted(by_index.items())
    ]


def load_placement(entries: Sequence[Any], tensors: Sequence[Tensor]) -> dict[Tensor, Placement]:
    """The inverse of `dump_placement`; CaseFileError if an entry is malformed or places a tensor twice."""
    out: dict[Tensor, Placement] = {}
    for n, entry in enumerate(entries):
        where = f"placement[{n}]"
        if not isinstance(entry, dict) or entry.keys() - {"must"} != {"persistent", "buffer", "usage"}:
            raise CaseFileError(where, "an object of persistent, buffer, usage expected, something else found")
        i = _count(entry["persistent"], len(tensors) - 1, f"{where}.persistent")
        buffer = _count(entry["buffer"], MAX_BUFFER, f"{where}.buffer")
        if type(entry["usage"]) is not str or entry["usage"] not in USAGES:
            raise CaseFileError(f"{where}.usage", f"one of {', '.join(USAGES)} expected, something else found")
        if type(entry.get("must", False)) is not bool:
            raise CaseFileError(f"{where}.must", "true or false expected, something else found")
        if tensors[i] in out:
            raise CaseFileError(f"{where}.persistent", f"persistent[{i}] is placed already")
        out[tensors[i]] = Placement(buffer, entry["usage"], entry.get("must", False))
    return out


def _count(value: Any, most: int, where: str) -> int:  # noqa: ANN401  # untrusted JSON
    if type(value) is not int or not 0 <= value <= most:
        raise CaseFileError(where, f"an integer of 0 to {most} expected, something else found")
    return value
