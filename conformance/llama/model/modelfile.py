"""Read a model in GGUF, whole or in parts: its metadata, and its tensors as memory maps.

The `gguf` package's reader takes 20 s for a large vocabulary, and ends with a traceback on damaged files.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError
from conformance.ggml.quants import Raw, to_float
from conformance.ggml.types import TYPES, GGMLType

KeyValue = bool | int | float | str | list[str] | NDArray[Any]
"""Value of a key; an array of numbers is an ndarray, one of texts a list."""
F32 = NDArray[np.float32]

_TYPES: dict[int, GGMLType] = {t.id: t for t in TYPES.values()}
_NUMBERS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
"""GGUF's id of a value's type -> dtype; 8 is a string and 9 an array."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MAX_DIMS = 4
_PART = re.compile(r"(.*)-00001-of-([0-9]{5})\.gguf")
"""Name of the first part of a model, by `llama_split_path`."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file."""

    name: str
    type: GGMLType | None
    """None if ggml has no type of this number."""
    ne: tuple[int, ...]
    offset: int
    """Offset of its first byte in its part."""
    type_id: int
    part: int = 0
    """Index of the part that has it."""

    @property
    def n_blocks(self) -> int:
        """Number of blocks; of a type without blocks, of elements."""
        return prod(self.ne) // (self.type.blck_size if self.type else 1)

    @property
    def n_bytes(self) -> int:
        """Size in bytes; 0 if the type is unknown."""
        return self.n_blocks * self.type.type_size if self.type else 0


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model; its tensors stay on disk until they are read."""

    path: Path
    """Path of the file; of the first part, if there are several."""
    keys: Mapping[str, KeyValue]
    """Keys of the first part, without those about parts."""
    tensors: Mapping[str, StoredTensor]
    parts: Sequence[memoryview]
    """Each file of the model, whole."""
    alignment: int = _ALIGNMENT
    cut: Sequence[str] = field(default_factory=tuple)
    """Names of tensors that end after the end of their file."""

    @property
    def n_bytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(map(len, self.parts))

    @property
    def arch(self) -> str:
        """`general.architecture`, or an empty text."""
        name = self.keys.get("general.architecture", "")
        return name if isinstance(name, str) else ""

    def number(self, key: str) -> int | None:
        """Return an integer of the architecture, such as `block_count`; None if absent or a list."""
        found = self.keys.get(f"{self.arch}.{key}")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def readable(self) -> Iterator[StoredTensor]:
        """Yield tensors of known type that have rows of whole blocks and are not cut off."""
        for t in self.tensors.values():
            if t.type is not None and t.n_blocks and not t.ne[0] % t.type.blck_size and t.name not in self.cut:
                yield t

    def raw(self, t: StoredTensor, first: int, n: int) -> Raw:
        """Return `n` blocks (or elements) from `first` on, laid out as for `quants.to_float`."""
        assert t.type is not None
        size = t.type.type_size
        found = np.frombuffer(self.parts[t.part], np.uint8, n * size, t.offset + first * size)
        if t.type.is_quantized:
            return found.reshape(n, size)
        return found.view(t.type.dtype or np.dtype("<u2"))

    def values(self, t: StoredTensor, first: int, n: int) -> F32:
        """Return the values of `n` blocks (or elements) from `first` on."""
        assert t.type is not None
        return np.asarray(to_float(t.type, self.raw(t, first, n)), np.float32)


def read(path: Path) -> ModelFile:
    """Map a model and read its headers.

    The other parts of a split model lie beside the first, named as llama.cpp names them.

    Raises:
        UsageError: no GGUF, a damaged header, not the first part, or a part that is missing or another model's.
    """
    first = _mapped(path)
    count = first.keys.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return _whole([first])
    if first.keys.get("split.no") != 0:
        raise UsageError(f"{path}: part {first.keys.get('split.no')} of a model, counted from 0; name its first part")
    name = _PART.fullmatch(path.name)
    if name is None or int(name[2]) != count:
        raise UsageError(
            f"{path}: the first of {count} parts; llama.cpp expects the name NAME-00001-of-{count:05}.gguf"
        )
    others = [path.with_name(f"{name[1]}-{k:05}-of-{count:05}.gguf") for k in range(2, count + 1)]
    if missing := [p.name for p in others if not p.exists()]:
        raise UsageError(f"{path}: the first of {count} parts; {', '.join(missing)} expected beside it")
    return _whole([first, *map(_mapped, others)])


def _whole(parts: Sequence[ModelFile]) -> ModelFile:
    """Join the parts of a model in order."""
    first, tensors = parts[0], dict[str, StoredTensor]()
    for k, part in enumerate(parts):
        if k and (part.keys.get("split.no"), part.keys.get("split.count")) != (k, len(parts)):
            found = f"{part.keys.get('split.no')} of {part.keys.get('split.count')}"
            raise UsageError(f"{part.path}: part {k} of {len(parts)} expected, counted from 0; it is {found}")
        if twice := tensors.keys() & part.tensors.keys():
            raise UsageError(f"{part.path}: {min(twice)!a} is also in an earlier part")
        tensors |= {n: replace(t, part=k) for n, t in part.tensors.items()}
    if len(parts) > 1 and (count := first.keys.get("split.tensors.count", len(tensors))) != len(tensors):
        raise UsageError(f"{first.path}: {count} tensors expected in {len(parts)} parts, found {len(tensors)}")
    return replace(
        first,
        keys={key: value for key, value in first.keys.items() if not key.startswith("split.")},
        tensors=tensors,
        parts=[data for part in parts for data in part.parts],
        cut=[name for part in parts for name in part.cut],
    )


def _mapped(path: Path) -> ModelFile:
    try:
        with path.open("rb") as f:
            data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: a model in GGUF expected: {getattr(e, 'strerror', None) or e}") from None
    try:
        return _read(path, data)
    except (struct.error, ValueError, RecursionError) as e:
        raise UsageError(f"{path}: its header is damaged or cut off: {e}; download the file again") from None


def _read(path: Path, data: memoryview) -> ModelFile:
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"{bytes(data[:4])!r} found, 'GGUF' expected")
    walk = _Walk(data)
    (version,) = walk.unpack("<I")
    if version not in {2, 3}:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = (
            "a big-endian file, which only big-endian machines read" if swapped in {2, 3} else "version 2 or 3 expected"
        )
        raise UsageError(f"{path}: GGUF version {swapped if swapped in {2, 3} else version}: {why}")
    n_tensors, n_keys = walk.unpack("<QQ")
    keys: dict[str, KeyValue] = {}
    for _ in range(n_keys):
        key = walk.text()
        keys[key] = walk.value(*walk.unpack("<I"))
    found: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(n_tensors):
        name = walk.text()
        (n_dims,) = walk.unpack("<I")
        if not 0 < n_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name[:80]!a} has {n_dims} dimensions, 1 to {_MAX_DIMS} expected")
        if name in found:
            raise ValueError(f"two tensors have the name {name[:80]!a}")
        ne = walk.unpack(f"<{n_dims}Q")
        type_id, at = walk.unpack("<IQ")
        found[name] = type_id, ne, at
    given = keys.get("general.alignment", _ALIGNMENT)
    alignment = given if isinstance(given, int) and given > 0 and not given & given - 1 else _ALIGNMENT
    start = -(-walk.at // alignment) * alignment
    tensors = {n: StoredTensor(n, _TYPES.get(id_), ne, start + at, id_) for n, (id_, ne, at) in found.items()}
    cut = tuple(t.name for t in tensors.values() if t.offset + t.n_bytes > len(data))
    return ModelFile(path, keys, tensors, [data], alignment, cut)


class _Walk:
    """A position in the header; `struct.error` or ValueError beyond its end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 4

    def unpack(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def take(self, n: int) -> memoryview:
        if n > len(self.data) - self.at:
            raise ValueError(f"{n} bytes expected at {self.at}, the file ends at {len(self.data)}")
        self.at += n
        return self.data[self.at - n : self.at]

    def text(self) -> str:
        return str(self.take(*self.unpack("<Q")), "utf-8", "surrogateescape")

    def value(self, kind: int) -> KeyValue:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            number: bool | int | float = self.numbers(kind, 1)[0].item()
            return number
        of, n = *self.unpack("<I"), *self.unpack("<Q")
        if of == _STRING:
            return self.texts(n)
        if of == _ARRAY:
            raise ValueError(f"an array of arrays at {self.at}, which llama.cpp does not read")
        return self.numbers(of, n)

    def texts(self, n: int) -> list[str]:
        if n > (len(self.data) - self.at) // 8:
            raise ValueError(f"{n} texts expected at {self.at}, the file ends at {len(self.data)}")
        return [self.text() for _ in range(n)]

    def numbers(self, kind: int, n: int) -> NDArray[Any]:
        if kind >= len(_NUMBERS) or not _NUMBERS[kind]:
            raise ValueError(f"a value of type {kind} at {self.at}, which GGUF lacks")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(n * dtype.itemsize), dtype)
