"""Replies of a backend's process, whose writer may be anyone.

A missing field, or one of another type, is a `BackendError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from conformance.backend.interface import BufferType, DeviceInfo, Support, Witness
from conformance.backend.strict import MAX_ENTRIES, plain
from conformance.case.case import JSON, Case
from conformance.ggml.arithmetic import Arithmetic, Mixed, faults
from conformance.ggml.errors import BackendError

MOST = 1 << 20
"""Maximum number of cases that a backend may request in one graph."""

_R = TypeVar("_R", DeviceInfo, Arithmetic, BufferType, Witness)
Reply = Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Description:
    """Properties that an adapter declares when it is opened."""

    info: DeviceInfo
    arithmetic: Arithmetic
    """Rounding of the device, if no case changes it."""
    buffer_types: Sequence[BufferType]
    """At least one, the default first."""
    batch: int
    """`Backend.batch`, from 1 to `MOST`."""
    threads: int | None
    fragile: bool
    whole: bool
    """True if the adapter overrides `supports_case`."""
    rounds_by_case: bool
    """True if it overrides `arithmetic_in`."""
    stages: tuple[str, ...]
    options: frozenset[str]
    """Names of its constructor's options."""


def description(hello: Reply) -> Description:
    """Decode the first reply of a process; BackendError if malformed."""

    def is_bool(v: JSON) -> bool:
        return type(v) is bool

    buffers = entry(hello, "buffer_types", _is_list, "a list")
    stages = entry(hello, "stages", _is_texts, "a list of texts")
    if "run" not in stages[-1:]:
        raise BackendError(f"stages: names of stages, the last of them 'run', expected, {stages!r:.80} found")
    batch = entry(hello, "batch", is_count, "a whole number")
    if not 1 <= batch <= MOST:
        raise BackendError(f"batch: a whole number from 1 to {MOST} expected, {batch} found")
    if not buffers:
        raise BackendError("buffer_types: at least one expected (the default), none found")
    return Description(
        info=record(DeviceInfo, hello.get("info"), "info"),
        arithmetic=_arithmetic(hello.get("arithmetic")),
        buffer_types=[record(BufferType, b, f"buffer_types[{i}]") for i, b in enumerate(buffers)],
        batch=batch,
        threads=entry(hello, "threads", lambda v: v is None or is_count(v), "a whole number or nothing"),
        fragile=entry(hello, "fragile", is_bool, "true or false"),
        whole=entry(hello, "whole", is_bool, "true or false"),
        rounds_by_case=entry(hello, "by_case", is_bool, "true or false"),
        stages=tuple(stages),
        options=frozenset(entry(hello, "options", _is_texts, "a list of texts")),
    )


def supports(reply: Reply, wanted: int) -> list[Support]:
    """Decode the answers for `wanted` nodes; BackendError if malformed."""
    found = entry(reply, "supports", lambda v: type(v) is list, "a list")
    if len(found) != wanted or not all(v is None or type(v) is str for v in found):
        raise BackendError(f"supports: yes or a reason for each of {wanted} nodes expected, other values found")
    return [Support(True) if v is None else Support(False, plain(v, "supports")) for v in found]


def unpack_arithmetic(reply: Mapping[str, JSON], case: Case) -> Arithmetic:
    """Decode the reply of a worker's `do_arithmetic_in`; BackendError if malformed."""
    kinds = [_arithmetic(a) for a in entry(reply, "arithmetics", _is_list, "a list")]
    name = entry(reply, "mixed", lambda v: v is None or _is_text(v), "a text or nothing")
    if name is None and len(kinds) == 1:
        return kinds[0]
    found = entry(reply, "nodes", _is_list, "a list")
    graphs = [s.graph for s in case.steps]
    fits = len(found) == len(graphs) and all(
        _is_list(own) and len(own) == len(g) and all(is_count(i) and i < len(kinds) for i in own)
        for own, g in zip(found, graphs, strict=True)
    )
    if name is None or not fits:
        raise BackendError(f"nodes: one of {len(kinds)} arithmetics expected for each node, other values found")
    nodes = {n: kinds[i] for own, g in zip(found, graphs, strict=True) for n, i in zip(g, own, strict=True)}
    return Mixed(name, nodes=nodes)


def _arithmetic(value: JSON) -> Arithmetic:
    """Decode a declared arithmetic; BackendError if beyond upstream's limits."""
    found = record(Arithmetic, value, "arithmetic")
    for fault in faults(found):
        raise BackendError(f"arithmetic: {fault}")
    return found


def seconds(reply: Reply) -> float:
    """Return the seconds that the request took; BackendError if malformed."""
    return float(entry(reply, "seconds", _is_finite, "a finite number"))


def entry(reply: Reply, name: str, fits: Callable[[JSON], bool], wanted: str) -> JSON:
    """Return an entry of a reply; BackendError, with what is `wanted`, unless it `fits`."""
    value = reply.get(name)
    if not fits(value):
        raise BackendError(f"{name}: {wanted} expected, {value!r:.80} found")
    return value


def record(kind: type[_R], value: JSON, where: str) -> _R:
    """Decode a record, whose fields all have their types; BackendError if malformed."""
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(kind)}:
        raise BackendError(f"{where}: the fields of {kind.__name__} expected, {value!r:.80} found")
    for f in fields(kind):
        wanted, fits = _TYPES[str(f.type)]
        if not fits(value[f.name]):
            raise BackendError(f"{where}.{f.name}: {wanted} expected, {value[f.name]!r:.80} found")
    return kind(**plain(value, where))


def _is_text(v: JSON) -> bool:
    return type(v) is str


def is_count(v: JSON) -> bool:
    """Return True for a whole number from 0 on that fits 64 bits."""
    return type(v) is int and 0 <= v < 1 << 63


def _is_whole(v: JSON) -> bool:
    return type(v) is int and abs(v) < 1 << 63


def _is_finite(v: JSON) -> bool:
    return type(v) in (int, float) and math.isfinite(v)


def _is_list(v: JSON) -> bool:
    return type(v) is list and len(v) <= MAX_ENTRIES


def _is_texts(v: JSON) -> bool:
    return _is_list(v) and all(type(e) is str for e in v)


def _is_dict(fits: Callable[[JSON], bool]) -> Callable[[JSON], bool]:
    return lambda v: type(v) is dict and len(v) <= MAX_ENTRIES and all(map(fits, v.values()))


_TYPES: dict[str, tuple[str, Callable[[JSON], bool]]] = {
    "str": ("a text", _is_text),
    "bool": ("true or false", lambda v: type(v) is bool),
    "int": ("a whole number", _is_whole),
    "int | None": ("a whole number or nothing", lambda v: v is None or _is_whole(v)),
    "list[str]": ("a list of texts", _is_texts),
    "dict[str, int]": ("whole numbers by name", _is_dict(_is_whole)),
    "dict[str, dict[str, int]]": ("whole numbers by two names", _is_dict(_is_dict(_is_whole))),
    "dict[str, float]": ("numbers by name", _is_dict(_is_finite)),
    "Mapping[str, str]": ("texts by name", _is_dict(_is_text)),
    "Mapping[str, int]": ("whole numbers by name", _is_dict(_is_whole)),
    "Mapping[str, float]": ("numbers by name", _is_dict(_is_finite)),
}
"""Annotation of a record's field -> its description in messages, and the check of a value."""
