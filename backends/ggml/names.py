"""Which ids a library gives to ops, sub-ops and types: asked by name, because they differ between versions.

ggml's tables have no bounds check. A walk stops at the last name known, or where an entry cannot be a name of this
library: `dladdr` knows which library a pointer points into.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from conformance.ggml.ops.names import GLU_OPS, OPS, UNARY_OPS
from conformance.ggml.types import TYPES

_LIMIT = 256
_FAR = 1 << 26
"""Where `dladdr` is missing: names of one library are never this many bytes apart."""


class _DlInfo(ctypes.Structure):
    """`Dl_info`."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


_NAME = re.compile(rb"[A-Z][A-Z0-9_]*")
_TYPE_NAME = re.compile(rb"[ -~]+")


def _home(pointer: int) -> int:
    """Something equal for all pointers into one library."""
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None) if os.name == "posix" else None
    if dladdr is None:
        return pointer // _FAR
    dladdr.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    info = _DlInfo()
    return (info.dli_fbase or 0) if dladdr(pointer, ctypes.byref(info)) else 0


def _walk(name_at: Callable[[int], int | None], legal: re.Pattern[bytes]) -> Iterator[tuple[int, str]]:
    home: int | None = None
    for i in range(_LIMIT):
        pointer = name_at(i)
        if pointer is None and home is not None:
            continue  # a removed type has no name
        if pointer is None or home not in (None, _home(pointer)):
            return
        home = _home(pointer) if home is None else home
        text = ctypes.string_at(pointer, 64).split(b"\0", 1)[0]
        if not legal.fullmatch(text):
            return
        yield i, text.decode()


def _ids(name_at: Callable[[int], int | None], known: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for i, name in _walk(name_at, _NAME):
        if name in found:
            break
        if name in known:
            found[name] = i
        if name == known[-1]:
            break
    return found


def op_ids(ggml: SimpleNamespace) -> dict[str, int]:
    """Name -> id, by `ggml_op_name`; ops that the library lacks are absent."""
    return _ids(ggml.op_name, OPS)


def unary_ids(ggml: SimpleNamespace) -> dict[str, int]:
    """Name -> id, by `ggml_unary_op_name`."""
    return _ids(ggml.unary_op_name, UNARY_OPS)


def glu_ids(ggml: SimpleNamespace) -> dict[str, int]:
    """Name -> id, by `ggml_glu_op_name`."""
    return _ids(ggml.glu_op_name, GLU_OPS)


def type_ids(ggml: SimpleNamespace) -> tuple[dict[str, int], dict[str, str]]:
    """Types by `ggml_type_name`, checked against `ggml_blck_size` and `ggml_type_size`.

    Returns:
        name -> id of each type that is laid out as ours, and name -> what differs for the others.
    """
    last = max(t.id for t in TYPES.values())
    seen: dict[str, int] = {}
    for i, name in _walk(ggml.type_name, _TYPE_NAME):
        if i > last:
            break
        seen[name] = i
    ids: dict[str, int] = {}
    others: dict[str, str] = {}
    for name, t in TYPES.items():
        if name not in seen:
            others[name] = "is not in this library"
            continue
        i = seen[name]
        here = (i, ggml.blck_size(i), ggml.type_size(i))
        if here == (t.id, t.blck_size, t.type_size):
            ids[name] = i
        else:
            others[name] = (
                f"has id {t.id} and {t.type_size} bytes for {t.blck_size} elements, "
                f"in this library id {here[0]} and {here[2]} bytes for {here[1]}"
            )
    return ids, others
