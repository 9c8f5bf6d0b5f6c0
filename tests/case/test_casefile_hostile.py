"""A broken or hostile case file gives one CaseFileError that names the field, soon, and within its memory."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changed_json import LEFT_OUT, changed, places
from random_cases import small_case

from conformance.case import casefile
from conformance.case.case import JSON
from conformance.case.casefile import KEYS, NO_SEAL, header_digest
from conformance.case.gguf import crc32, read_header
from conformance.ggml.errors import CaseFileError

SECONDS = 10.0
"""At most, for one file of a few kilobytes or megabytes."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file: two cases of two steps."""
    path = tmp_path / "a.gguf"
    casefile.write(path, [small_case(), small_case("small/cache@1")])
    return path


def refused(path: Path, data: bytes | None = None) -> CaseFileError:
    """The one error that reading gives, after checking what every error must be."""
    if data is not None:
        path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(CaseFileError) as e:
        casefile.read(path)
    assert time.perf_counter() - start < SECONDS
    error = e.value
    assert error.field
    assert str(error).isprintable()
    assert len(str(error)) < 2000
    return error


def test_every_bit_is_guarded(path: Path) -> None:
    """One bit flipped in any byte of the file is found, and where it lies in data or in a document, that is named."""
    casefile.write(path, small_case())
    good = bytearray(path.read_bytes())
    header = read_header(memoryview(bytes(good)), KEYS)
    documents = header.strings["conformance.cases"]
    named = 0
    for at in range(len(good)):
        good[at] ^= 1 << at * 5 % 8
        error = refused(path, bytes(good))
        good[at] ^= 1 << at * 5 % 8
        for i, (start, size) in enumerate(zip(header.offsets, header.sizes, strict=True)):
            if start <= at < start + size:
                assert error.field == f"tensors[{i}]"
                named += 1
        for k, (start, size) in enumerate(zip(documents.offsets, documents.sizes, strict=True)):
            if start <= at < start + size:
                assert error.field == f"cases[{k}]"
                named += 1
    assert len(good) > 3000
    assert named > len(good) // 2
    path.write_bytes(good)
    assert len(casefile.read(path)) == 1


def test_truncated_or_longer_anywhere(path: Path) -> None:
    """A file cut at any byte, or with bytes behind its end, is refused."""
    good = path.read_bytes()
    for end in range(1, len(good), 3):
        refused(path, good[:end])
    for more in (b"\0", b"\0" * 32, b"GGUF", good):
        refused(path, good + more)


def test_random_damage(path: Path) -> None:
    """Blocks overwritten with zeros, ones, noise or other parts of the file are refused."""
    rng = random.Random(1)  # noqa: S311  # the same damage in every run
    good = path.read_bytes()
    for _ in range(500):
        data = bytearray(good)
        at, n = rng.randrange(len(data)), rng.randrange(1, 64)
        other = rng.randrange(len(data))
        data[at : at + n] = rng.choice([b"\0" * n, b"\xff" * n, rng.randbytes(n), good[other : other + n]])
        if data != good:
            refused(path, bytes(data))


# ---------------------------------------------------------------------------------- documents, sealed again by a forger


def forged(path: Path, document: bytes, *, ids: str = "small/cache@0") -> None:
    """Write the good case's tensors with another document, every digest right."""
    bundle = casefile._Bundle()
    bundle.add(small_case())
    bundle.ids = {ids: None}
    bundle.documents[0] = document
    bundle.write(path)
    casefile._seal(path)


def lines(path: Path) -> list[JSON]:
    """The document of the good case: the whole case's line, and the steps'."""
    casefile.write(path, small_case())
    bundle = casefile._Bundle()
    bundle.add(small_case())
    return [json.loads(line) for line in bundle.documents[0].split(b"\n")]


_STRANGE: tuple[Any, ...] = (
    *(None, -1, 2**31, 2**63 - 1, 2**64, 0.5, "", "x", [], [0], [-1, -1], [2**62] * 4, {}, {"a": 1}),
    LEFT_OUT,
)


def test_every_field_of_a_document(path: Path) -> None:
    """Each value of a document replaced by others, or left out, and every digest right: refused by name, or a case."""
    good = lines(path)
    tried = refusals = 0
    for n, place in enumerate(places(good)):
        for value in _STRANGE[n % 5 :: 5]:  # a fifth of them in each place, all of them in the places together
            parts = changed(good, place, value)
            forged(path, b"\n".join(json.dumps(p).encode() for p in parts))
            tried += 1
            try:
                casefile.read(path)
            except CaseFileError:
                refusals += 1
                error = refused(path)
                assert error.field.startswith(("cases[0].", "conformance."))
    assert tried > 400
    assert refusals > tried * 2 // 3


def _with(place: tuple[str | int, ...], value: JSON) -> Callable[[list[JSON]], None]:
    def change(parts: list[JSON]) -> None:
        target: Any = parts
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_with((1, "tensors", 2, "ne"), [2**62, 2**62]), "cases[0].steps[0]"),
        (_with((1, "tensors", 2, "ne", 0), -4), "cases[0].steps[0].tensors[2].ne[0]"),
        (_with((1, "tensors", 2, "src"), [0, 2]), "cases[0].steps[0].tensors[2].src[1]"),
        (_with((1, "tensors", 2, "src"), [3, 1]), "cases[0].steps[0].tensors[2].src[0]"),
        (_with((2, "tensors", 2, "view_src"), 2), "cases[0].steps[1].tensors[2].view_src"),
        (_with((2, "tensors", 6, "view_offs"), 2**40), "cases[0].steps[1]"),
        (_with((2, "tensors", 6, "view_offs"), -16), "cases[0].steps[1].tensors[6].view_offs"),
        (_with((2, "tensors", 6, "nb"), [4, 2**60, 2**60, 2**60]), "cases[0].steps[1]"),
        (_with((2, "tensors", 6, "name"), "evil\n\x1b[31m" * 999), "cases[0].steps[1]"),
        (_with((0, "persistent", 1, "ne"), [2**31, 2**31]), "cases[0].persistent"),
        (_with((0, "persistent", 1, "type"), "f33"), "cases[0].persistent[1].type"),
        (_with((0, "blobs", "p1"), 99), "cases[0].document.blobs.'p1'"),
        (_with((0, "blobs", "p1"), -1), "cases[0].document.blobs.'p1'"),
        (_with((0, "blobs", "p1"), None), "cases[0].persistent"),
        (_with((0, "blobs", "p0"), 1), "cases[0].persistent"),
        (_with((1, "blobs"), {}), "cases[0].steps[0].inputs"),
        (_with((0, "id"), "other/x@0"), "cases[0].id"),
        (_with((0, "version"), 2), "cases[0].version"),
        (_with((1, "note"), json.loads("[" * 200 + "]" * 200)), "cases[0].steps[0].note"),
    ],
)
def test_hostile_field_is_named(path: Path, change: Callable[[list[JSON]], None], field: str) -> None:
    """Huge sizes, negative offsets, cycles and bytes of another size: the message has the path of the field."""
    parts = lines(path)
    change(parts)
    forged(path, b"\n".join(json.dumps(p).encode() for p in parts))
    assert refused(path).field == field


def _head(more: bytes) -> bytes:
    return b'{"version":1,"id":"small/cache@0","blobs":{},"persistent":[],' + more + b"}"


_MIB = 1 << 20
_NOT_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b" ", "invalid JSON"),
    "no object": (b"[]", "an object expected"),
    "no JSON": (b"{]", "invalid JSON at character 1"),
    "not ended": (b'{"version":1', "invalid JSON"),
    "two values": (b"{} {}", "invalid JSON"),
    "not UTF-8": ('{"id":"é"}'.encode("latin-1"), "UTF-8"),
    "UTF-16": ('{"id":1}'.encode("utf-16"), "UTF-8"),
    "NUL": (b'{"id":"\0"}', "invalid JSON"),
    "NaN": (_head(b'"seed":NaN'), "NaN"),
    "infinity": (_head(b'"tolerance":{"nmse":-Infinity}'), "Infinity"),
    "over float64": (_head(b'"tolerance":{"nmse":1e999}'), "float64"),
    "key twice": (_head(b'"seed":1,"seed":2'), "occurs twice"),
    "key twice, late": (
        _head(b'"params":{%s"k0":1}' % b"".join(b'"k%d":1,' % i for i in range(20000))),
        "occurs twice",
    ),
    "lone surrogate": (_head(b'"family":"\\ud800"'), "surrogate"),
    "long integer": (_head(b'"seed":' + b"9" * 100_000), "digits"),
    "nested": (b"[" * 100_000, "deeper than 64"),
    "nested a million deep": (b"[" * 10**6, "bytes of memory"),
    "nested objects": (b'{"a":' * 20_000, "deeper than 64"),
    "nested in params": (_head(b'"params":{"a":%s1%s}' % (b"[" * 100, b"]" * 100)), "deeper than 64"),
    "many lists": (_head(b'"params":{"a":[%s[]]}' % (b"[]," * _MIB)), "bytes of memory"),
    "many objects": (_head(b'"params":{"a":[%s{}]}' % (b"{}," * _MIB)), "bytes of memory"),
    "many numbers": (_head(b'"params":{"a":[%s1]}' % (b"7777777," * _MIB)), "bytes of memory"),
    "many keys": (_head(b'"params":{%s"":1}' % b"".join(b'"%x":1,' % i for i in range(400_000))), "bytes of memory"),
    "wide text": (_head(b'"params":{"a":"%s\\ud83d\\ude00"}' % (b"a" * 8 * _MIB)), "bytes of memory"),
    "wide text in UTF-8": (_head(b'"params":{"a":"%s\xf0\x9f\x98\x80"}' % (b"a" * 8 * _MIB)), "bytes of memory"),
    "many tensors": (_head(b'"seed":0') + b'\n{"tensors":[%s{}]}' % (b"{}," * 400_000), "bytes of memory"),
    "many steps": (_head(b'"seed":0') + b"\n{}" * 800_000, "bytes of memory"),
    "empty steps": (_head(b'"seed":0') + b"\n" * 800_000, "invalid JSON"),
    "many blobs": (
        _head(b'"seed":0') + b'\n{"blobs":{%s}}' % b",".join(b'"%x":0' % i for i in range(400_000)),
        "memory",
    ),
}


@pytest.mark.parametrize("name", _NOT_JSON)
def test_hostile_document(path: Path, name: str) -> None:
    """Malformed or hostile JSON is one line of error, soon and in little memory.

    The memory is at most four times the file's size, or `FREE_MEMORY`.
    """
    document, words = _NOT_JSON[name]
    forged(path, document)
    assert words in str(refused(path))
    assert _peak(path) < max(casefile.FREE_MEMORY, 4 * path.stat().st_size)


def _peak(path: Path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CaseFileError):
            casefile.read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------- headers, written byte by byte


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _kv(key: bytes, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _tensor(name: bytes, ne: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return _string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_id, offset)


def _gguf(
    kvs: list[bytes], tensors: list[bytes], data: bytes = b"", n: tuple[int | None, int | None] = (None, None)
) -> bytes:
    counts = [len(x) if m is None else m for x, m in zip((tensors, kvs), n, strict=True)]
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(kvs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


_F32 = 0
_ARCH = _kv(b"general.architecture", 8, _string(b"ggml-conformance"))
_HEADERS: dict[str, tuple[bytes, str]] = {
    "not GGUF": (b"PK\3\4" + b"\0" * 60, "magic"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "gguf.version"),
    "version 2": (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "gguf.version"),
    "many values": (_gguf([], [], n=(0, 2**63)), "gguf.kv_count"),
    "many tensors": (_gguf([], [], n=(2**63, 0)), "gguf.tensor_count"),
    "more tensors than fit": (_gguf([], [], b"\0" * 4096, n=(4096, 0)), "gguf.tensor_count"),
    "long key": (_gguf([struct.pack("<Q", 2**63) + b"a"], []), "kv[0].key"),
    "key is not UTF-8": (_gguf([_kv(b"\xff\xfe", 8, _string(b""))], []), "kv[0].key"),
    "unknown key": (_gguf([_kv(b"evil", 8, _string(b""))], []), "kv[0].key"),
    "key twice": (_gguf([_ARCH, _ARCH], []), "general.architecture"),
    "long string": (_gguf([_kv(b"general.type", 8, struct.pack("<Q", 2**63))], []), "general.type"),
    "another kind": (_gguf([_kv(b"general.type", 4, struct.pack("<I", 1))], []), "general.type"),
    "unknown kind": (_gguf([_kv(b"general.type", 77, b"")], []), "general.type"),
    "long array": (_gguf([_kv(b"conformance.cases", 9, struct.pack("<IQ", 8, 2**61))], []), "conformance.cases"),
    "array of arrays": (
        _gguf([_kv(b"conformance.cases", 9, struct.pack("<IQIQ", 9, 1, 9, 1) * 99)], []),
        "conformance.cases",
    ),
    "array ends early": (
        _gguf([_kv(b"conformance.cases", 9, struct.pack("<IQ", 8, 2) + _string(b"a") + b"\1" * 8)], []),
        "conformance.cases",
    ),
    "no dimensions": (_gguf([], [_tensor(b"a", (), _F32, 0)], b"\0" * 32), "tensors[0].n_dims"),
    "many dimensions": (
        _gguf([], [_string(b"a") + struct.pack("<I", 2**31) + b"\0" * 64], b"\0" * 32),
        "tensors[0].n_dims",
    ),
    "no elements": (_gguf([], [_tensor(b"a", (4, 0), _F32, 0)], b"\0" * 32), "tensors[0].ne"),
    "product over 64 bits": (_gguf([], [_tensor(b"a", (2**32, 2**32 + 1), _F32, 0)], b"\0" * 32), "tensors[0].ne"),
    "size over 64 bits": (_gguf([], [_tensor(b"a", (2**62, 1), _F32, 0)], b"\0" * 32), "tensors[0].ne"),
    "larger than the file": (_gguf([], [_tensor(b"a", (2**20,), _F32, 0)], b"\0" * 32), "tensors[0].ne"),
    "half a block": (_gguf([], [_tensor(b"a", (48,), 2, 0)], b"\0" * 32), "tensors[0].ne"),
    "unknown type": (_gguf([], [_tensor(b"a", (8,), 4, 0)], b"\0" * 32), "tensors[0].type"),
    "long name": (_gguf([], [_tensor(b"a" * 64, (8,), _F32, 0)], b"\0" * 32), "tensors[0].name"),
    "name is not UTF-8": (_gguf([], [_tensor(b"\xc3", (8,), _F32, 0)], b"\0" * 32), "tensors[0].name"),
    "same name": (_gguf([], [_tensor(b"a", (8,), _F32, 0), _tensor(b"a", (8,), _F32, 32)], b"\0" * 64), "tensors"),
    "overlap": (
        _gguf([], [_tensor(b"a", (8,), _F32, 0), _tensor(b"b", (8,), _F32, 0)], b"\0" * 64),
        "tensors[1].offset",
    ),
    "gap": (_gguf([], [_tensor(b"a", (8,), _F32, 0), _tensor(b"b", (8,), _F32, 64)], b"\0" * 96), "tensors[1].offset"),
    "negative offset": (_gguf([], [_tensor(b"a", (8,), _F32, 2**64 - 32)], b"\0" * 32), "tensors[0].offset"),
    "data ends early": (_gguf([], [_tensor(b"a", (9,), _F32, 0)], b"\0" * 32), "data"),
    "padding": (_gguf([], [_tensor(b"a", (1,), _F32, 0)], b"\0" * 4 + b"\1" * 28), "data"),
    "nothing": (_gguf([], []), "general.architecture"),
    "a model": (_gguf([_kv(b"general.architecture", 8, _string(b"llama"))], []), "general.type"),
}


@pytest.mark.parametrize("name", _HEADERS)
def test_hostile_header(path: Path, name: str) -> None:
    """Impossible counts, sizes, offsets and names are refused before anything is allocated."""
    data, field = _HEADERS[name]
    assert refused(path, data).field == field
    assert _peak(path) < _MIB
    with pytest.raises(CaseFileError):
        casefile.index(path)


def test_header_of_another_file_of_gguf(path: Path) -> None:
    """A value of another program's, digests right, is refused by what it says it is."""
    for key, old, new in (
        ("general.architecture", b"ggml-conformance", b"gguf-conformance"),
        ("general.type", b"conformance-cases", b"conformance-bases"),
    ):
        casefile.write(path, small_case())
        path.write_bytes(path.read_bytes().replace(old, new))
        assert refused(path, _resealed(path.read_bytes())).field == key


def _resealed(data: bytes) -> bytes:
    header = read_header(memoryview(data), KEYS)
    at = header.strings["conformance.seal"].offsets[0]
    return data[:at] + header_digest(memoryview(data), header) + data[at + len(NO_SEAL) :]


def test_many_tensors_fit_the_memory(path: Path) -> None:
    """A header of 20,000 tensors and another of 100,000 empty documents stay within four times the file's size."""
    n = 20_000
    tensors = [_tensor(b"%x" % i, (1,), 24, 32 * i) for i in range(n)]
    path.write_bytes(_gguf([_ARCH], tensors, b"\0" * 32 * n))
    assert _peak(path) < 4 * path.stat().st_size
    documents = struct.pack("<IQ", 8, 100_000) + _string(b"{}") * 100_000
    path.write_bytes(_gguf([_ARCH, _kv(b"conformance.cases", 9, documents)], []))
    assert _peak(path) < 4 * path.stat().st_size


def test_wrong_data_with_right_digest_is_still_checked(path: Path) -> None:
    """Digests guard against accidents only: a forger's are right, and the case is validated all the same."""
    data = bytearray(path.read_bytes())
    header = read_header(memoryview(bytes(data)), KEYS)
    data[header.offsets[0]] ^= 1
    assert refused(path, bytes(data)).field == "tensors[0]"
    crc = crc32(memoryview(data), header.offsets[0], header.sizes[0])
    old = struct.pack("<I", header.numbers["conformance.tensors.crc32"][0])
    assert data.count(old) == 1
    path.write_bytes(_resealed(bytes(data).replace(old, struct.pack("<I", crc))))
    assert len(casefile.read(path)) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """A named pipe that nobody writes to is refused at once."""
    pipe = tmp_path / "a.gguf"
    os.mkfifo(pipe)
    for reader in (casefile.read, casefile.index):
        with pytest.raises(CaseFileError, match="not a regular file"):
            reader(pipe)
