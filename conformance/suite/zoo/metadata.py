"""What llama.cpp must be told to build a model of an architecture: GGUF metadata, and nothing else.

`architectures.json`: keys that every architecture gets (`common`), those of a mixture of experts (`experts`), and per
architecture what differs (`set`, null takes a key away), whether it has experts, whether it only encodes, or why it
does not run (`lacks`). A key without a dot-separated root of its own stands for `ARCH.key`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from conformance import shipped
from conformance.ggml.errors import UsageError
from conformance.ggml.types import GGMLType

Value = int | float | bool | str | list[int] | list[float]
"""What a metadata key of the zoo can hold."""

_TABLE = shipped.path("suite", "zoo", "architectures.json")
_BYTES, _HALF = np.dtype(np.uint8), np.dtype(np.float16)
_ALIGNMENT = 32
_FACTS = ("lacks", "encodes", "flash_attn", "unified", "optional", "absent", "types")
_ROOTS = ("general.", "tokenizer.", "xielu.")
"""Keys that stand as they are; all others belong to the architecture."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture that llama.cpp knows."""

    name: str
    keys: Mapping[str, Value] = field(default_factory=dict)
    """Metadata, in full names."""
    lacks: str = ""
    """Why it does not run; empty where it does."""
    encodes: bool = False
    """It has an encoder and no decoder: the plan's batches are encoded, and nothing is remembered."""
    flash_attn: bool = True
    unified: bool = False
    """How its context runs where nothing else is said."""
    optional: str = ""
    """Pattern of weights that llama.cpp can do without and its models have all the same."""
    absent: str = ""
    """Pattern of weights that its models never have: llama.cpp has a place for them, and takes another path."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Pattern of weights -> the type that they must have, where that is not F32."""


def lacks() -> str:
    """Why nothing can be made; empty where the table came along."""
    return "" if _TABLE.is_file() else f"no {_TABLE}; {shipped.AGAIN}"


@cache
def table() -> dict[str, Architecture]:
    """Every architecture by name, those that do not run too."""
    try:
        read = json.loads(_TABLE.read_text("utf-8"))
    except OSError as e:
        raise UsageError(f"{_TABLE}: cannot be read: {e.strerror}; {shipped.AGAIN}") from None
    return {name: _architecture(name, entry, read) for name, entry in sorted(read["architectures"].items())}


def runnable() -> list[str]:
    """The names of those that run."""
    return [a.name for a in table().values() if not a.lacks]


def architecture(name: str) -> Architecture:
    """The architecture called `name`.

    Raises:
        UsageError: there is none, or it does not run; says why.
    """
    found = table().get(name)
    if found is None:
        raise UsageError(f"zoo: architecture {name!r} is unknown; known: {', '.join(runnable())}")
    if found.lacks:
        raise UsageError(f"zoo: {name} does not run: {found.lacks}")
    return found


def _architecture(name: str, entry: Mapping[str, Any], read: Mapping[str, Any]) -> Architecture:
    values = {**read["common"], **(read["experts"] if entry.get("experts") else {}), **entry.get("set", {})}
    keys = {full_key(name, key): value for key, value in values.items() if value is not None}
    return Architecture(name, keys, **{k: entry[k] for k in _FACTS if k in entry})


def full_key(arch: str, key: str) -> str:
    """`key` as a GGUF file has it: `embedding_length` is `llama.embedding_length`."""
    return key if key.startswith((*_ROOTS, f"{arch}.")) else f"{arch}.{key}"


def parse_value(text: str) -> Value:
    """The value of `--set KEY=VALUE`: JSON (number, true, false, list of numbers), or text.

    Raises:
        UsageError: a list of anything but numbers.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if type(value) in (int, float, bool):
        return value  # type: ignore[no-any-return]  # one of the three
    if type(value) is list and value and all(type(v) is int for v in value):
        return value
    if type(value) is list and value and all(type(v) in (int, float) for v in value):
        return [float(v) for v in value]
    raise UsageError(f"a number, true, false, a list of numbers or text expected, {text[:60]!r} found")


def write(path: Path, arch: str, keys: Mapping[str, Value], types: Mapping[str, tuple[GGMLType, list[int]]]) -> None:
    """A GGUF file of metadata alone.

    Args:
        path: where to.
        arch: the architecture.
        keys: full names -> values.
        types: name of a weight -> its type, where that is not F32, and its `ne`; it gets a place but no bytes.

    Raises:
        UsageError: a value that GGUF cannot hold.
    """
    writer = open_writer(path, arch, keys)
    for name, (type_, ne) in types.items():
        n_bytes = type_.type_size * ne[0] // type_.blck_size
        for n in ne[1:]:
            n_bytes *= n
        shape = [*ne[::-1][:-1], ne[0] // type_.blck_size * type_.type_size]
        raw = GGMLQuantizationType(type_.id)
        dtype = _BYTES if type_.is_quantized else type_.dtype or _HALF
        writer.add_tensor_info(name, shape if type_.is_quantized else ne[::-1], dtype, n_bytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if types:
        writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:  # llama.cpp wants the place where data would begin
        file.truncate(-(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT)


def open_writer(path: Path, arch: str, keys: Mapping[str, Value]) -> GGUFWriter:
    """A writer that has the metadata; tensors may be added.

    Raises:
        UsageError: a value that GGUF cannot hold.
    """
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            if not -(2**31) <= value < 2**32:
                raise UsageError(f"{key}: a 32-bit integer expected, {value} found")
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    return writer
