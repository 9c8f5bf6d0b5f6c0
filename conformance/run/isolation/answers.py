"""Checks what a worker replies before it is used: its process may be anyone's.

Every function raises `BackendError` for a field that is missing or of another type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from conformance.backend.interface import BufferType, DeviceInfo, Support, Witness
from conformance.backend.strict import MAX_ENTRIES, plain
from conformance.case.case import JSON
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError

R = TypeVar("R", DeviceInfo, Arithmetic, BufferType, Witness)
Reply = Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Hello:
    """How a backend describes itself when it is opened."""

    info: DeviceInfo
    arithmetic: Arithmetic
    buffer_types: list[BufferType]
    batch: int
    threads: int | None
    whole: bool
    """Whether its class overrides `supports_case`."""
    stages: tuple[str, ...]
    options: tuple[str, ...]
    """Parameters of its constructor."""


def hello(reply: Reply) -> Hello:
    """The first reply of a worker."""
    buffers = _field(reply, "buffer_types", _is_list, "a list")
    stages = _field(reply, "stages", _texts, "a list of texts")
    if "run" not in stages[-1:]:
        raise BackendError(f"stages: names of stages, the last of them 'run', expected, {stages!r:.80} found")
    batch = _field(reply, "batch", _count, "a whole number")
    if batch < 1:
        raise BackendError(f"batch: 1 or more expected, {batch} found")
    return Hello(
        info=_record(DeviceInfo, reply.get("info"), "info"),
        arithmetic=_record(Arithmetic, reply.get("arithmetic"), "arithmetic"),
        buffer_types=[_record(BufferType, b, f"buffer_types[{i}]") for i, b in enumerate(buffers)],
        batch=batch,
        threads=_field(reply, "threads", lambda v: v is None or _count(v), "a whole number or nothing"),
        whole=_field(reply, "whole", lambda v: type(v) is bool, "true or false"),
        stages=tuple(stages),
        options=tuple(_field(reply, "options", _texts, "a list of texts")),
    )


def supports(reply: Reply, wanted: int) -> list[Support]:
    """One answer for each of `wanted` nodes."""
    found = _field(reply, "supports", lambda v: type(v) is list, "a list")
    if len(found) != wanted or not all(v is None or type(v) is str for v in found):
        raise BackendError(f"supports: yes or a reason for each of {wanted} nodes expected, others found")
    return [Support(True) if v is None else Support(False, plain(v, "supports")) for v in found]


def seconds(reply: Reply) -> float:
    """Seconds of a session's clock."""
    return float(_field(reply, "seconds", _finite, "a finite number"))


def opaque(reply: Reply, count: int) -> frozenset[int]:
    """Indices of those of `count` persistent tensors that cannot be read."""

    def indices(v: JSON) -> bool:
        return type(v) is list and all(_count(i) and i < count for i in v)

    return frozenset(_field(reply, "opaque", indices, f"a list of indices below {count}"))


def witness(reply: Reply) -> Witness:
    """The witness of a session."""
    return _record(Witness, reply.get("witness"), "witness")


def peak(reply: Reply) -> int | None:
    """Bytes by which memory rose."""
    found: int | None = _field(reply, "peak", lambda v: v is None or _count(v), "a whole number or nothing")
    return found


def _field(reply: Reply, name: str, fits: Callable[[JSON], bool], wanted: str) -> JSON:
    value = reply.get(name)
    if not fits(value):
        raise BackendError(f"{name}: {wanted} expected, {value!r:.80} found")
    return value


def _record(kind: type[R], value: JSON, where: str) -> R:
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(kind)}:
        raise BackendError(f"{where}: the fields of {kind.__name__} expected, {value!r:.80} found")
    for f in fields(kind):
        wanted, fits = _TYPES[str(f.type)]
        if not fits(value[f.name]):
            raise BackendError(f"{where}.{f.name}: {wanted} expected, {value[f.name]!r:.80} found")
    return kind(**plain(value, where))


def _text(v: JSON) -> bool:
    return type(v) is str


def _count(v: JSON) -> bool:
    return type(v) is int and 0 <= v < 1 << 63


def _whole(v: JSON) -> bool:
    return type(v) is int and abs(v) < 1 << 63


def _finite(v: JSON) -> bool:
    return type(v) in (int, float) and math.isfinite(v)


def _is_list(v: JSON) -> bool:
    return type(v) is list and len(v) <= MAX_ENTRIES


def _texts(v: JSON) -> bool:
    return _is_list(v) and all(type(e) is str for e in v)


def _of(fits: Callable[[JSON], bool]) -> Callable[[JSON], bool]:
    return lambda v: type(v) is dict and len(v) <= MAX_ENTRIES and all(map(fits, v.values()))


_TYPES: dict[str, tuple[str, Callable[[JSON], bool]]] = {
    "str": ("a text", _text),
    "bool": ("true or false", lambda v: type(v) is bool),
    "int": ("a whole number", _whole),
    "int | None": ("a whole number or nothing", lambda v: v is None or _whole(v)),
    "list[str]": ("a list of texts", _texts),
    "dict[str, int]": ("whole numbers by name", _of(_whole)),
    "dict[str, float]": ("numbers by name", _of(_finite)),
    "Mapping[str, str]": ("texts by name", _of(_text)),
}
"""Annotation of a record's field -> its name in messages, and the check of a value."""
