"""The keys of a case file, and the digest that seals its header; `casefile` says what stands where."""

from __future__ import annotations

from hashlib import sha256

from .gguf_header import Header, Kind

ARCHITECTURE = "ggml-conformance"
VERSION = 1
"""Of the file's form; the documents inside have their own (`codec.VERSION`)."""
TYPE = "conformance-cases"
ARCHITECTURE_KEY, TYPE_KEY, VERSION_KEY = "general.architecture", "general.type", "conformance.version"
IDS, CASES, SEAL = "conformance.ids", "conformance.cases", "conformance.seal"
CASES_CRC, TENSORS_CRC = "conformance.cases.crc32", "conformance.tensors.crc32"
KEYS = {
    ARCHITECTURE_KEY: Kind.STRING,
    TYPE_KEY: Kind.STRING,
    VERSION_KEY: Kind.UINT32,
    IDS: Kind.STRINGS,
    CASES: Kind.STRINGS,
    CASES_CRC: Kind.UINT32S,
    TENSORS_CRC: Kind.UINT32S,  # left out where there are no tensors: the `gguf` package writes no empty array
    SEAL: Kind.STRING,
}
NO_SEAL = b"0" * 64


def header_digest(buffer: memoryview, header: Header) -> bytes:
    """SHA-256 in hexadecimal of everything before the data, with `NO_SEAL` where the seal stands."""
    at = header.strings[SEAL].offsets[0]
    digest = sha256(buffer[:at])
    digest.update(NO_SEAL)
    digest.update(buffer[at + len(NO_SEAL) : header.end])
    return digest.hexdigest().encode()
