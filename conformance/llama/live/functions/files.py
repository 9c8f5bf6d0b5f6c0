"""Ways `gguf-*`: a library reads and writes GGUF files, and refuses contradictory ones.

The files are made here byte by byte; what the library writes must be the same bytes.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from conformance.ggml.lib.layout import GgufInitParams, InitParams, Signatures
from conformance.ggml.lib.library import Library
from conformance.ggml.types import TYPES
from conformance.llama.live.ways import Mismatch, bound

GGUF = "gguf-"
_P, _S, _I64, _Z, _B, _I = (
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_bool,
    ctypes.c_int,
)
NUMBERS: Mapping[str, tuple[int, str, Any]] = {
    "u8": (0, "B", ctypes.c_uint8), "i8": (1, "b", ctypes.c_int8), "u16": (2, "H", ctypes.c_uint16),
    "i16": (3, "h", ctypes.c_int16), "u32": (4, "I", ctypes.c_uint32), "i32": (5, "i", ctypes.c_int32),
    "f32": (6, "f", ctypes.c_float), "bool": (7, "?", ctypes.c_bool), "u64": (10, "Q", ctypes.c_uint64),
    "i64": (11, "q", ctypes.c_int64), "f64": (12, "d", ctypes.c_double),
}  # fmt: skip
"""Name of a value type -> its id in GGUF, its letter of `struct`, its C type."""
TEXT, ARRAY = 8, 9
"""Ids of the other value types."""
VALUES: Mapping[str, Sequence[Any]] = {
    "u8": (0, 255), "i8": (-128, 127), "u16": (0, 65535), "i16": (-32768, 32767), "u32": (0, 2**32 - 1),
    "i32": (-(2**31), 2**31 - 1), "f32": (0.5, -1.5e38), "bool": (False, True), "u64": (0, 2**64 - 1),
    "i64": (-(2**63), 2**63 - 1), "f64": (0.1, -1e300),
}  # fmt: skip
STRINGS = ("", "x", "é–α 🙂", "long " * 900)
ALIGNMENT = "general.alignment"
FUNCTIONS: Signatures = {
    "init_empty": (_P, ()), "init_from_file": (_P, (_S, GgufInitParams)), "free": (None, (_P,)),
    "get_version": (ctypes.c_uint32, (_P,)), "get_alignment": (_Z, (_P,)), "get_data_offset": (_Z, (_P,)),
    "get_n_kv": (_I64, (_P,)), "find_key": (_I64, (_P, _S)), "get_key": (_S, (_P, _I64)),
    "get_kv_type": (_I, (_P, _I64)), "get_arr_type": (_I, (_P, _I64)), "get_arr_n": (_Z, (_P, _I64)),
    "get_arr_data": (_P, (_P, _I64)), "get_arr_str": (_S, (_P, _I64, _Z)), "get_val_str": (_S, (_P, _I64)),
    "get_n_tensors": (_I64, (_P,)), "find_tensor": (_I64, (_P, _S)), "get_tensor_offset": (_Z, (_P, _I64)),
    "get_tensor_name": (_S, (_P, _I64)), "get_tensor_type": (_I, (_P, _I64)), "get_tensor_size": (_Z, (_P, _I64)),
    "set_val_str": (None, (_P, _S, _S)), "set_arr_data": (None, (_P, _S, _I, _P, _Z)),
    "set_arr_str": (None, (_P, _S, ctypes.POINTER(_S), _Z)), "set_kv": (None, (_P, _P)),
    "add_tensor": (None, (_P, _P)), "write_to_file": (_B, (_P, _S, _B)), "get_meta_size": (_Z, (_P,)),
    **{f"get_val_{name}": (kind, (_P, _I64)) for name, (_, _, kind) in NUMBERS.items()},
    **{f"set_val_{name}": (None, (_P, _S, kind)) for name, (_, _, kind) in NUMBERS.items()},
}  # fmt: skip
"""`gguf_*`."""


@dataclass(frozen=True, slots=True)
class Info:
    """A tensor in a file; its bytes are 1, 2, 3 and so on."""

    name: str
    type: int
    ne: Sequence[int]
    size: int
    """Bytes."""
    offset: int | None = None
    """Offset if it is not the end of the tensors before, aligned."""


def _text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def number(name: str, value: Any) -> bytes:  # noqa: ANN401  # as many types as GGUF has
    """Return type and bytes of a value."""
    id_, letter, _ = NUMBERS[name]
    return struct.pack(f"<I{letter}", id_, value)


def text(value: str) -> bytes:
    """Return type and bytes of a string."""
    return struct.pack("<I", TEXT) + _text(value)


def array(id_: int, n: int, raw: bytes) -> bytes:
    """Return type and bytes of an array of `n` elements of a type."""
    return struct.pack("<IIQ", ARRAY, id_, n) + raw


@dataclass(frozen=True, slots=True)
class File:
    """A GGUF file in the making: every count and size can be another than it is."""

    values: Sequence[tuple[str, bytes]] = ()
    tensors: Sequence[Info] = ()
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    n_kv: int | None = None
    n_tensors: int | None = None
    key_size: int | None = None
    """Size of each key, as the file says."""

    def meta(self) -> bytes:
        """Return all bytes before the tensors' data, without padding."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.values) if self.n_kv is None else self.n_kv
        out = self.magic + struct.pack("<IQQ", self.version, n_tensors & _MASK, n_kv & _MASK)
        for key, value in self.values:
            size = len(key) if self.key_size is None else self.key_size
            out += struct.pack("<Q", size) + key.encode() + value
        for info, offset in zip(self.tensors, self.offsets(), strict=True):
            at = offset if info.offset is None else info.offset
            dims = struct.pack(f"<I{len(info.ne)}Q", len(info.ne), *(n & _MASK for n in info.ne))
            out += _text(info.name) + dims + struct.pack("<IQ", info.type, at & _MASK)
        return out

    def as_written(self) -> File:
        """Return the file as ggml writes it: dimensions of 1 at the end are left out."""
        return replace(self, tensors=[replace(t, ne=_dims(t.ne)) for t in self.tensors])

    def offsets(self) -> list[int]:
        """Return where the data of each tensor begins, from the first on."""
        ends = np.cumsum([0, *(_padded(t.size, self.alignment) for t in self.tensors)], dtype=object)
        return [int(n) for n in ends[:-1]]

    def bytes(self) -> bytes:
        """Return the file."""
        meta = self.meta()
        data = (content(t) for t in self.tensors)
        return b"".join(part.ljust(_padded(len(part), self.alignment), b"\0") for part in (meta, *data))


_MASK = (1 << 64) - 1


def _dims(ne: Sequence[int]) -> Sequence[int]:
    """Return the dimensions up to the last one over 1."""
    n = max((i for i, size in enumerate(ne) if size > 1), default=0)
    return ne[: n + 1]


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def content(info: Info) -> bytes:
    """Return the bytes of a tensor; none for one that no file can have."""
    return (np.arange(info.size) % 255 + 1).astype(np.uint8).tobytes() if info.size < 1 << 20 else b""


def whole(alignment: int = 32) -> File:
    """Return a file with values of all types, arrays of them, and tensors of all types."""
    values: list[tuple[str, bytes]] = [(ALIGNMENT, number("u32", alignment))] if alignment != 32 else []
    for name, both in VALUES.items():
        values += [(f"value.{name}.{k}", number(name, v)) for k, v in enumerate(both)]
        id_, letter, _ = NUMBERS[name]
        values += [(f"array.{name}", array(id_, 2, struct.pack(f"<2{letter}", *both)))]
        values += [(f"none.{name}", array(id_, 0, b""))]
    values += [(f"string.{k}", text(s)) for k, s in enumerate(STRINGS)]
    values += [
        ("strings", array(TEXT, len(STRINGS), b"".join(map(_text, STRINGS)))),
        ("no.strings", array(TEXT, 0, b"")),
    ]
    tensors = [Info(f"of.{t.name}", t.id, (t.blck_size * 2, 3), 6 * t.type_size) for t in TYPES.values()]
    tensors += [Info("one", 0, (1,), 4), Info("four", 0, (2, 3, 4, 5), 480), Info("n" * 63, 0, (7,), 28)]
    return File(values, tensors, alignment)


class Gguf:
    """The functions `gguf_*` of a library, and a folder for files."""

    def __init__(self, library: Library, folder: Path) -> None:
        self.library, self._folder = library, folder

    def __getattr__(self, name: str) -> Callable[..., Any]:
        result, arguments = FUNCTIONS[name]
        return bound(self.library, f"gguf_{name}", result, *arguments)

    def path(self) -> Path:
        """Return the path of the file."""
        return self._folder / "x.gguf"

    def open(self, raw: bytes, context: Any = None) -> int:  # noqa: ANN401  # a ctypes pointer
        """Return the `gguf_context` of a file with these bytes, 0 if it is refused."""
        self.path().write_bytes(raw)
        params = GgufInitParams(context is None, None if context is None else ctypes.addressof(context))
        return int(self.init_from_file(os.fsencode(self.path()), params) or 0)


def _same(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise Mismatch(f"{what}: {_short(expected)} expected, {_short(found)} found")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."  # a line


def read(gguf: Gguf, alignment: int = 32) -> None:
    """Read a file of all value types and tensor types, and compare all of it."""
    file = known(gguf, whole(alignment))
    data = _P()
    context = gguf.open(file.bytes(), data)
    if not context:
        raise Mismatch(f"a valid file with alignment {alignment} is refused: {gguf.library.log.complaints()}")
    try:
        _check_values(gguf, context, file)
        _check_tensors(gguf, context, file, data.value or 0)
    finally:
        gguf.free(context)
        gguf.library.ggml.free(data)


def _check_values(gguf: Gguf, context: int, file: File) -> None:
    _same("gguf_get_version", 3, gguf.get_version(context))
    _same("gguf_get_alignment", file.alignment, gguf.get_alignment(context))
    _same("gguf_get_n_kv", len(file.values), gguf.get_n_kv(context))
    _same("gguf_find_key of none", -1, gguf.find_key(context, b"value.none"))
    _same("gguf_get_data_offset", _padded(len(file.meta()), file.alignment), gguf.get_data_offset(context))
    for i, (key, raw) in enumerate(file.values):
        _same(f"gguf_find_key({key})", i, gguf.find_key(context, key.encode()))
        _same(f"gguf_get_key({i})", key.encode(), gguf.get_key(context, i))
        _same(f"gguf_get_kv_type({key})", raw[0], gguf.get_kv_type(context, i))
        _same(key, value_of(raw), _value(gguf, context, i, raw))


def value_of(raw: bytes) -> object:
    """Return the value that `number`, `text` or `array` made."""
    id_ = raw[0]
    if id_ == TEXT:
        return raw[12:]
    if id_ != ARRAY:
        return struct.unpack(f"<{_letter(id_)}", raw[4:])[0]
    of, n = struct.unpack("<IQ", raw[4:16])
    if of != TEXT:
        return of, struct.unpack(f"<{n}{_letter(of)}", raw[16:])
    texts, at = [], 16
    for _ in range(n):
        (size,) = struct.unpack_from("<Q", raw, at)
        texts.append(raw[at + 8 : at + 8 + size])
        at += 8 + size
    return of, tuple(texts)


def _letter(id_: int) -> str:
    return next(letter for i, letter, _ in NUMBERS.values() if i == id_)


def _value(gguf: Gguf, context: int, i: int, raw: bytes) -> object:
    """Return a value by the functions of the library."""
    names = {id_: name for name, (id_, _, _) in NUMBERS.items()}
    if raw[0] == TEXT:
        return gguf.get_val_str(context, i)
    if raw[0] != ARRAY:
        return getattr(gguf, f"get_val_{names[raw[0]]}")(context, i)
    of, n = gguf.get_arr_type(context, i), gguf.get_arr_n(context, i)
    if of == TEXT:
        return of, tuple(gguf.get_arr_str(context, i, k) for k in range(n))
    if of not in names:
        return of, ()
    kind = NUMBERS[names[of]][2]
    return of, tuple((kind * n).from_address(gguf.get_arr_data(context, i))) if n else ()


def _check_tensors(gguf: Gguf, context: int, file: File, data: int) -> None:
    library = gguf.library
    get = bound(library, "ggml_get_tensor", _P, _P, _S)
    _same("gguf_get_n_tensors", len(file.tensors), gguf.get_n_tensors(context))
    for i, (info, offset) in enumerate(zip(file.tensors, file.offsets(), strict=True)):
        name = info.name.encode()
        _same(f"gguf_find_tensor({info.name})", i, gguf.find_tensor(context, name))
        _same(f"gguf_get_tensor_name({i})", name, gguf.get_tensor_name(context, i))
        _same(f"gguf_get_tensor_type({info.name})", info.type, gguf.get_tensor_type(context, i))
        _same(f"gguf_get_tensor_offset({info.name})", offset, gguf.get_tensor_offset(context, i))
        _same(f"gguf_get_tensor_size({info.name})", info.size, gguf.get_tensor_size(context, i))
        t = library.struct(get(data, name) or 0)
        _same(f"ne of {info.name}", [*info.ne, *(1,) * (4 - len(info.ne))], list(t.ne))
        _same(f"type of {info.name}", info.type, t.type)
        _same(f"bytes of {info.name}", content(info), ctypes.string_at(t.data, info.size))


def known(gguf: Gguf, file: File) -> File:
    """Return a file without tensors of types that the library lacks."""
    ids = {TYPES[name].id for name in gguf.library.types}
    return replace(file, tensors=[t for t in file.tensors if t.type in ids])


def write(gguf: Gguf, alignment: int = 32) -> None:
    """Make the same file from values and tensors; compare its bytes, also of the header alone."""
    file = known(gguf, whole(alignment))
    context = gguf.init_empty()
    try:
        for key, raw in file.values:
            _set(gguf, context, key.encode(), raw)
        _compare_written(gguf, context, file)
    finally:
        gguf.free(context)


def copy(gguf: Gguf) -> None:
    """Copy the values of a file that was read to an empty one, and compare its bytes."""
    file = known(gguf, whole())
    source, target = gguf.open(replace(file, tensors=()).bytes()), gguf.init_empty()
    try:
        _set(gguf, target, b"value.u8.0", number("u8", 7))  # which is replaced
        gguf.set_kv(target, source)
        _compare_written(gguf, target, replace(file, values=sorted(file.values, key=lambda v: v[0] != "value.u8.0")))
    finally:
        gguf.free(source)
        gguf.free(target)


def _set(gguf: Gguf, context: int, key: bytes, raw: bytes) -> None:
    """Set a value that `number`, `text` or `array` made."""
    names = {id_: name for name, (id_, _, _) in NUMBERS.items()}
    value: Any = value_of(raw)
    if raw[0] == TEXT:
        gguf.set_val_str(context, key, value)
    elif raw[0] != ARRAY:
        getattr(gguf, f"set_val_{names[raw[0]]}")(context, key, value)
    elif value[0] == TEXT:
        gguf.set_arr_str(context, key, (_S * len(value[1]))(*value[1]), len(value[1]))
    else:
        gguf.set_arr_data(context, key, value[0], ctypes.create_string_buffer(raw[16:]), len(value[1]))


def _compare_written(gguf: Gguf, context: int, file: File) -> None:
    library, g = gguf.library, gguf.library.ggml
    tensors = g.init(InitParams((len(file.tensors) + 1) * library.layout.overhead, None, True))
    try:
        data = []
        for info in file.tensors:
            tensor = g.new_tensor_4d(tensors, info.type, *info.ne, *(1,) * (4 - len(info.ne)))
            g.set_name(tensor, info.name.encode())
            data.append(ctypes.create_string_buffer(content(info)))
            library.struct(tensor).data = ctypes.addressof(data[-1])
            gguf.add_tensor(context, tensor)
        expected = file.as_written().bytes()
        meta = _padded(len(file.as_written().meta()), file.alignment)
        _same("gguf_get_meta_size", meta, gguf.get_meta_size(context))
        for only_meta, whole_ in ((False, expected), (True, expected[:meta])):
            _same("gguf_write_to_file", True, gguf.write_to_file(context, os.fsencode(gguf.path()), only_meta))
            _same_bytes(f"gguf_write_to_file(only_meta={only_meta})", whole_, gguf.path().read_bytes())
    finally:
        g.free(tensors)


def _same_bytes(what: str, expected: bytes, found: bytes) -> None:
    _same(f"{what}: bytes of the file", len(expected), len(found))
    a, b = (np.frombuffer(raw, np.uint8) for raw in (expected, found))
    wrong = np.flatnonzero(a != b)
    if wrong.size:
        at = int(wrong[0])
        raise Mismatch(f"{what}: {wrong.size} bytes wrong, byte {at} is {b[at]}, {a[at]} expected")


def truncated(gguf: Gguf) -> None:
    """Every beginning of a file is refused."""
    file = File(
        [("a", number("u32", 1)), ("s", text("text")), ("n", array(TEXT, 2, _text("x") + _text("y")))],
        [Info("t", 0, (4, 2), 32), Info("u", 0, (4,), 16)],
    )
    raw = file.bytes()
    for n in range(len(raw) - 16):  # without the padding of the last tensor
        _refused(gguf, raw[:n], f"the first {n} bytes of {len(raw)}")
    context = gguf.open(raw, _P())
    _same("all bytes are accepted", True, bool(context))
    gguf.free(context)


def _refused(gguf: Gguf, raw: bytes, what: str) -> None:
    data = _P()
    if context := gguf.open(raw, data):
        gguf.free(context)
        raise Mismatch(f"gguf_init_from_file: {what}: NULL expected, a context found")


_ONE = Info("t", 0, (4,), 16)
_HUGE = 1 << 62
ODD: Mapping[str, File] = {
    "magic": File(magic=b"GGUG"),
    "version-0": File(version=0),
    "version-1": File(version=1),
    "version-swapped": File(version=3 << 24),
    "version-later": File(version=1000),
    "values-many": File(n_kv=1 << 61),
    "values-negative": File(n_kv=-1),
    "tensors-many": File(n_tensors=1 << 61),
    "tensors-negative": File(n_tensors=-1),
    "key-long": File([("k", number("u8", 1))], key_size=_HUGE),
    "string-long": File([("k", struct.pack("<IQ", TEXT, _HUGE))]),
    "array-long": File([("k", array(10, 1 << 61, b""))]),
    "array-longer": File([("k", array(10, _MASK, b""))]),
    "strings-long": File([("k", array(TEXT, 1 << 60, b""))]),
    "array-of-arrays": File([("k", array(ARRAY, 1, struct.pack("<IQ", 0, 0)))]),
    "array-type": File([("k", array(99, 1, b"\0" * 16))]),
    "value-type": File([("k", struct.pack("<I", 99) + b"\0" * 16)]),
    "key-twice": File([("k", number("u8", 1)), ("k", number("u8", 2))]),
    "alignment-0": File([(ALIGNMENT, number("u32", 0))], [_ONE]),
    "alignment-3": File([(ALIGNMENT, number("u32", 3))], [_ONE]),
    "alignment-type": File([(ALIGNMENT, number("i32", 32))], [_ONE]),
    "dimensions-5": File(tensors=[Info("t", 0, (1, 1, 1, 1, 1), 4)]),
    "dimension-negative": File(tensors=[Info("t", 0, (-4,), 16)]),
    "elements-many": File(tensors=[Info("t", 0, (1 << 32, 1 << 32), 16)]),
    "bytes-many": File(tensors=[Info("t", 0, (_HUGE,), 16)]),
    "bytes-together": File(tensors=[Info(f"t{k}", 24, (1 << 62,), 1 << 62) for k in range(4)]),
    "type": File(tensors=[Info("t", 999, (4,), 16)]),
    "type-negative": File(tensors=[Info("t", (1 << 32) - 1, (4,), 16)]),
    "type-removed": File(tensors=[Info("t", 4, (32,), 16)]),
    "block-part": File(tensors=[Info("t", 2, (33,), 36)]),
    "offset": File(tensors=[_ONE, Info("u", 0, (4,), 16, offset=64)]),
    "offset-unaligned": File(tensors=[_ONE, Info("u", 0, (4,), 16, offset=33)]),
    "offset-back": File(tensors=[_ONE, Info("u", 0, (4,), 16, offset=0)]),
    "offset-huge": File(tensors=[Info("t", 0, (4,), 16, offset=_MASK - 31)]),
    "name-twice": File(tensors=[_ONE, _ONE]),
    "name-long": File(tensors=[Info("n" * 64, 0, (4,), 16)]),
}
"""Name of what is wrong -> a file that must be refused."""
ALIGNMENTS = (8, 128)
PLAY: Mapping[str, Callable[[Gguf], None]] = {
    f"{GGUF}read": read,
    f"{GGUF}write": write,
    **{f"{GGUF}read-{n}": (lambda gguf, n=n: read(gguf, n)) for n in ALIGNMENTS},  # type: ignore[misc]  # its default
    **{f"{GGUF}write-{n}": (lambda gguf, n=n: write(gguf, n)) for n in ALIGNMENTS},  # type: ignore[misc]  # as above
    f"{GGUF}copy": copy,
    f"{GGUF}truncated": truncated,
    **{
        f"{GGUF}odd-{name}": (lambda gguf, name=name: _refused(gguf, ODD[name].bytes(), name))  # type: ignore[misc]
        for name in ODD
    },
}
"""Way -> the function that plays it."""
WAYS = tuple(PLAY)


def play(library: Library, way: str) -> None:
    """Read or write a file."""
    with TemporaryDirectory(prefix="conformance-gguf-") as folder:
        PLAY[way](Gguf(library, Path(folder)))
