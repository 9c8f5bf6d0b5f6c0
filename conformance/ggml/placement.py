"""Where a case wants a persistent tensor to lie: the kind of memory, and what the backend is told it is used for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import CaseFileError
from .tensor import Tensor

USAGES = ("weights", "any")
"""`enum ggml_backend_buffer_usage` of tensors that live across graphs: a backend may treat what it is told are weights
as constants, pack them otherwise, or run the nodes that read them where they lie."""
MAX_BUFFER = 1000


@dataclass(frozen=True, slots=True)
class Placement:
    """A buffer of a tensor's own kind."""

    buffer: int = 0
    """Which of the buffer types that the backend offers, counted from its default, modulo their number: the same case
    runs on a backend with one kind of memory and on one with three."""
    usage: str = "weights"
    """One of `USAGES`."""
    must: bool = False
    """Whether no other buffer type will do: the backend puts it there if its device says that it takes every use, and
    refuses the case otherwise. What an audit runs; in other cases an adapter may know better than its device."""


def dump_placement(placement: Mapping[Tensor, Placement], places: Mapping[Tensor, int]) -> list[dict[str, Any]]:
    """`[{"persistent": index, "buffer": int, "usage": str}]`, in the order of the tensors; and `must` where true."""
    found = {places[t]: p for t, p in placement.items()}
    return [
        {"persistent": i, "buffer": p.buffer, "usage": p.usage} | ({"must": True} if p.must else {})
        for i, p in sorted(found.items())
    ]


def load_placement(entries: Sequence[Any], tensors: Sequence[Tensor]) -> dict[Tensor, Placement]:
    """What `dump_placement` gave this form.

    Raises:
        CaseFileError: an entry is malformed, or two are of one tensor.
    """
    found: dict[Tensor, Placement] = {}
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
        if tensors[i] in found:
            raise CaseFileError(f"{where}.persistent", f"persistent[{i}] is placed already")
        found[tensors[i]] = Placement(buffer, entry["usage"], entry.get("must", False))
    return found


def _count(value: Any, most: int, where: str) -> int:  # noqa: ANN401  # a stranger's JSON
    if type(value) is not int or not 0 <= value <= most:
        raise CaseFileError(where, f"an integer of 0 to {most} expected, something else found")
    return value
