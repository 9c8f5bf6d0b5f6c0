"""Digests of a library's contents: functions, shaders, sources, symbols, ops, types, keys.

The library is not loaded. The result is cached by the digest of the file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from itertools import takewhile
from math import gcd
from pathlib import Path
from typing import Any

import msgspec

from .archive import cache, digest
from .code import functions, is_own, plain
from .elf import OBJECT, Image, Symbol

VERSION = 3
"""Number of the method; another one finds nothing in the cache."""
_MAGIC = b"\x03\x02\x23\x07"
"""First word of a SPIR-V module."""
_GENERATOR = slice(8, 12)
"""The word with the version of the compiler."""
_SHADER = "_data"
"""Suffix of the symbols of libggml-vulkan's modules."""
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e\x80-\xff]{256,}")
_KERNEL = re.compile(rb"^[ \t]*(?:__)?kernel\s+(?:__\w+\s*\(\(.*?\)\)\s*)*void\s+(\w+)", re.MULTILINE)
_KEY = re.compile(rb"\0((?:%s|general|tokenizer|adapter|split|clip|imatrix|quantize)\.[a-z0-9_.%]*[a-z0-9_])(?=\0)")
_PUBLIC = re.compile(
    r"(?:ggml_(?:tensor|init_params|cplan|object|type_traits\w*|backend_\w+)|gguf_init_params|llama_\w+_params|llama_batch)$"
)
"""Structs that callers allocate or read."""
_MOST_DEBUGGING = 8 << 20
"""Maximum bytes of debugging information that is read, since more would take seconds."""
_STRUCTS = ("ggml_tensor", "llama_context_params")
"""Structs after which no further translation unit is read."""
_TABLE = re.compile(r"^(?!_ZTI).*(?:traits|_ZTVN4ggml|interface|kernels|_i$)")
"""Pattern for objects with pointers to functions."""


class Contents(msgspec.Struct, frozen=True):
    """Contents of a library; no digest depends on addresses, lines or folders."""

    machine: str
    compilers: list[str]
    is_stripped: bool
    functions: dict[str, str]
    """Symbol of a function of ggml -> digest."""
    nameless: list[str]
    """Digests of functions without a symbol."""
    shaders: dict[str, str]
    """SPIR-V module, by symbol or number -> digest."""
    sources: dict[str, str]
    """Kernel whose source lies in the library -> digest."""
    tables: dict[str, str]
    """Object with pointers to functions -> digest."""
    exported: list[str]
    ops: list[str]
    """Names of ops by number, empty if the library does not tell."""
    types: dict[str, int]
    """Type -> number, empty if the library does not tell."""
    structs: dict[str, list[str]]
    """Struct -> its fields with offsets, from debugging information; the last line is its size."""
    keys: list[str]
    """GGUF keys."""


def contents_of(path: Path) -> Contents:
    """Return the contents of a library, from the cache if it was read before.

    UnavailableError if it is not an ELF library for x86-64 or aarch64.
    """
    kept = cache().parent / "contents" / f"{digest(path)}-{VERSION}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(kept.read_bytes(), type=Contents)
    found = _read(path)
    with suppress(OSError):  # the next call reads it again
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".new")
        partial.write_bytes(msgspec.json.encode(found))
        partial.rename(kept)
    return found


def _read(path: Path) -> Contents:
    image = Image(path)
    ops = _names(image, "GGML_OP_NAME")
    own, nameless = functions(image, dict(enumerate(ops)))
    constant = [image.read(s.address, s.size) for s in image.sections if s.is_constant and s.name.startswith(".rodata")]
    shaders = dict(_shaders(image)) or dict(_modules(constant))
    producers, structs = _debugging(image)
    sources: dict[str, str] = {}
    for data in constant:
        sources |= _sources(data)
    return Contents(
        machine=image.machine,
        compilers=producers or _comments(image),
        is_stripped=image.is_stripped,
        functions=own,
        nameless=nameless,
        shaders=shaders,
        sources=sources,
        tables={s.name: _table(image, s) for s in image.symbols if s.type == OBJECT and _is_table(image, s)},
        exported=image.exported,
        ops=ops,
        types=_types(image),
        structs=structs,
        keys=sorted({m[1].decode() for data in constant for m in _KEY.finditer(data)}),
    )


def _comments(image: Image) -> list[str]:
    """Return the compilers that the section `.comment` names."""
    return sorted({t.decode("utf-8", "replace") for t in image.data(".comment").split(b"\0") if t})


def _hash(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _pointed(image: Image, address: int) -> str:
    """Return the text to which the pointer at an address points; empty if to none."""
    target = image.relocations.get(address)
    text = image.text(target) if isinstance(target, int) else None
    return text.decode("utf-8", "replace") if text else ""


def _object(image: Image, name: str) -> Symbol | None:
    return next((s for s in image.symbols if s.name == name and s.type == OBJECT and s.size), None)


def _names(image: Image, name: str) -> list[str]:
    """Return the texts of an array of texts."""
    s = _object(image, name)
    return [] if s is None else list(takewhile(bool, (_pointed(image, s.address + 8 * i) for i in range(s.size // 8))))


def _types(image: Image) -> dict[str, int]:
    """Return the numbers of types, from the array `type_traits` of names and sizes."""
    s = _object(image, "type_traits")
    if s is None:
        return {}
    texts = {at: name for at in range(0, s.size, 8) if (name := _pointed(image, s.address + at))}
    stride = reduce(gcd, texts, 0)
    return (
        {name: at // stride for at, name in texts.items() if " " not in name and name != "DEPRECATED"} if stride else {}
    )


def _is_table(image: Image, s: Symbol) -> bool:
    section = image.section(s.address)
    return bool(s.size and section and section.name == ".data.rel.ro" and _TABLE.search(s.name) and _is_ggml(s))


def _is_ggml(s: Symbol) -> bool:
    return is_own(s) or "ggml" in s.name


def _table(image: Image, s: Symbol) -> str:
    """Return a digest of numbers and of the names to which pointers point."""
    data = bytearray(image.read(s.address, s.size))
    names: list[bytes] = []
    for at in range(0, s.size - 7, 8):
        if (target := image.relocations.get(s.address + at)) is not None:
            data[at : at + 8] = bytes(8)
            text = image.text(target) if isinstance(target, int) else None
            names.append(plain(text) if text else image.label(target).encode())
    return _hash(bytes(data), *names)


def _shaders(image: Image) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each module with a symbol."""
    for s in image.symbols:
        if s.type == OBJECT and s.name.endswith(_SHADER) and s.size > 20:
            data = image.read(s.address, s.size)
            if data.startswith(_MAGIC):
                yield s.name.removesuffix(_SHADER), _module(data)


def _modules(constant: list[bytes]) -> Iterator[tuple[str, str]]:
    """Yield digests of modules without symbols, by magic number; their name is the digest."""
    for data in constant:
        at = data.find(_MAGIC)
        while at >= 0:
            end = at + 20
            while (word := int.from_bytes(data[end : end + 4], "little")) >> 16 and end < len(data):
                if word & 0xFFFF == 0x0203:  # the next module's magic number
                    break
                end += 4 * (word >> 16)
            if end - at > 100:
                found = _module(data[at:end])
                yield found, found
            at = data.find(_MAGIC, at + 4)


def _module(data: bytes) -> str:
    return _hash(data[: _GENERATOR.start], data[_GENERATOR.stop :])


def _sources(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each OpenCL or Metal kernel; a text's beginning belongs to all."""
    for text in _TEXT.finditer(data):
        kernels = list(_KERNEL.finditer(text[0]))
        ends = [*(k.start() for k in kernels[1:]), len(text[0])][: len(kernels)]
        for k, end in zip(kernels, ends, strict=True):
            yield k[1].decode(), _hash(text[0][: kernels[0].start()], text[0][k.start() : end])


def _debugging(image: Image) -> tuple[list[str], dict[str, list[str]]]:
    """Return compilers with their options, and structs of ggml.h and llama.h, if described."""
    compilers: set[str] = set()
    found: dict[str, list[str]] = {}
    if not 0 < image.size(".debug_info") <= _MOST_DEBUGGING:
        return [], {}
    for unit in image.dwarf().iter_CUs():
        top = unit.get_top_DIE()
        producer = top.attributes.get("DW_AT_producer")
        words = producer.value.decode("utf-8", "replace") if producer else ""
        if "rustc" in words or not words:
            continue
        compilers.add(words)
        if not set(_STRUCTS) <= found.keys():
            found |= _structs(top)
    return sorted(compilers), found


def _structs(unit: Any) -> Iterator[tuple[str, list[str]]]:  # noqa: ANN401  # pyelftools has no types
    """Yield the structs that a translation unit defines, each with its fields."""
    for entry in unit.iter_children():
        name = entry.attributes.get("DW_AT_name")
        size = entry.attributes.get("DW_AT_byte_size")
        if entry.tag == "DW_TAG_structure_type" and name is not None and size is not None:
            struct = name.value.decode("utf-8", "replace")
            if _PUBLIC.match(struct):
                yield struct, [*_fields(entry), f"{size.value} bytes"]


def _fields(entry: Any) -> Iterator[str]:  # noqa: ANN401  # pyelftools has no types
    for field in entry.iter_children():
        at = field.attributes.get("DW_AT_data_member_location")
        name = field.attributes.get("DW_AT_name")
        if field.tag == "DW_TAG_member" and at is not None and name is not None:
            yield f"{name.value.decode('utf-8', 'replace')} at {at.value}"


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Return the names that differ, that are only in `new`, and only in `old`."""
    both = sorted(n for n in new if n in old and new[n] != old[n])
    return both, sorted(set(new) - set(old)), sorted(set(old) - set(new))
