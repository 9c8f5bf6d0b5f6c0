"""Reading a case file that may come from a stranger; `casefile` says what stands in one and what guards it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from conformance.ggml.errors import CaseFileError
from conformance.ggml.tensor import Bytes

from .case import JSON, Case
from .casefile_layout import (
    ARCHITECTURE,
    ARCHITECTURE_KEY,
    CASES,
    CASES_CRC,
    IDS,
    KEYS,
    NO_SEAL,
    SEAL,
    TENSORS_CRC,
    TYPE,
    TYPE_KEY,
    VERSION,
    VERSION_KEY,
    header_digest,
)
from .codec import check, load_head, load_step
from .gguf_header import Header, crc32, read_header
from .recipe import MAX_BYTES
from .reference import load_references
from .strictjson import Memory, parse, weigh

FREE_MEMORY = 16 << 20
"""Bytes that reading may take however small the file is."""


# What a case's objects take in CPython, rounded up.
_TENSOR_COST, _BLOB_COST, _VIEW_COST, _STEP_COST, _CASE_COST = 400, 200, 200, 800, 1024
_NEWLINE = re.compile(rb"\n")


def read(path: str | os.PathLike[str], models: Sequence[Path] = ()) -> list[Case]:
    """Every case of the file, validated; byte arrays are read-only views of one copy of the file.

    Args:
        path: the case file.
        models: folders in which weights that are not in the file are looked for, before the file's own folder.

    Raises:
        CaseFileError: the file cannot be read or trusted; one line that names the field.
    """
    file = _open(path, models)
    return [file.case(k) for k in range(len(file.ids))]


def read_one(path: str | os.PathLike[str], case_id: str | None = None, models: Sequence[Path] = ()) -> Case:
    """The only case of the file, or of a bundle the one called `case_id`, validated; `models` as in `read`.

    Raises:
        CaseFileError: as `read`; or there is no such case, or more than one to choose from.
    """
    file = _open(path, models)
    if case_id is None and len(file.ids) != 1:
        raise CaseFileError(IDS, f"one case expected, {len(file.ids)} found: say which, such as {file.ids[0]!a}")
    if case_id is not None and case_id not in file.ids:
        raise CaseFileError(IDS, f"no case {case_id!a} in this file of {len(file.ids)}, such as {file.ids[0]!a}")
    return file.case(0 if case_id is None else file.ids.index(case_id))


def stream(path: str | os.PathLike[str]) -> Iterator[Case]:
    """As `read`, one case at a time: for bundles whose graphs together would not fit.

    Raises:
        CaseFileError: as `read`, at the case that it concerns.
    """
    file = _open(path)
    taken = file.memory.taken
    for k in range(len(file.ids)):
        yield file.case(k)
        file.memory.taken = taken  # what recipes made is not given back: making it again and again takes time
        file.views.clear()


def index(path: str | os.PathLike[str]) -> list[str]:
    """The ids of the file's cases, from its header alone.

    Raises:
        CaseFileError: as `read`.
    """
    with _opened(path) as file:
        buffer = np.memmap(file, np.uint8, "r").data
    return _ids(buffer, _checked_header(buffer))


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode) or not found.st_size:
            raise CaseFileError("file", f"{os.fspath(path)} is empty or no regular file")
        return Path(path).open("rb")
    except (OSError, ValueError) as e:  # ValueError: a path with a NUL in it
        raise CaseFileError("file", f"{os.fspath(path)} cannot be read: {getattr(e, 'strerror', None) or e}") from e


@dataclass(slots=True)
class _File:
    """A file's bytes, its header checked and each tensor's CRC right."""

    buffer: memoryview
    header: Header
    ids: list[str]
    memory: Memory
    folders: tuple[Path, ...]
    """Where weights that stay in a model file are looked for."""
    made: Memory = field(default_factory=lambda: Memory(MAX_BYTES, 0))
    """What recipes may take: it has nothing to do with the file's size."""
    views: dict[int, Bytes] = field(default_factory=dict)
    """Number of a tensor -> its bytes."""

    def case(self, k: int) -> Case:
        """Case `k`, validated.

        Raises:
            CaseFileError: names the field, from `cases[k]` on.
        """
        where = f"cases[{k}]"
        try:
            case = self._case(k)
        except CaseFileError as e:
            raise CaseFileError(f"{where}.{e.field}", e.message) from None
        if case.id != self.ids[k]:
            raise CaseFileError(f"{where}.id", f"{self.ids[k]!a} expected, as {IDS} says, {case.id!a} found")
        return case

    def _case(self, k: int) -> Case:
        documents = self.header.strings[CASES]
        at, end = documents.offsets[k], documents.offsets[k] + documents.sizes[k]
        self.memory.keep(_CASE_COST, "document")
        case: Case | None = None
        for line in self._lines(at, end):
            where = "document" if case is None else f"steps[{len(case.steps)}]"
            doc = parse(line, self.memory, where)
            if not isinstance(doc, dict):
                raise CaseFileError(where, "an object expected, something else found")
            blobs = self._blobs(doc.pop("blobs", {}), where)
            if case is None:
                free = ("params", "tolerance", "provenance", "demands", "recipes", "references")
                self.memory.keep(sum(weigh(doc.get(key), key) for key in free), where)
                self._keep_tensors(doc.get("persistent"), where)
                elsewhere, references = load_references(doc.pop("references", []), self.folders)
                case = load_head(doc, {**blobs, **elsewhere}, self.made)
                case.references = {t: references[i] for i, t in enumerate(case.persistent) if i in references}
            else:
                self.memory.keep(_STEP_COST + weigh(doc.get("note"), f"{where}.note"), where)
                self._keep_tensors(doc.get("tensors"), where)
                case.steps.append(load_step(len(case.steps), doc, case, blobs))
        if case is None:
            raise CaseFileError("document", "is empty")
        check(case)
        return case

    def _lines(self, at: int, end: int) -> Iterator[memoryview]:
        while at < end:
            found = _NEWLINE.search(self.buffer, at, end)
            stop = end if found is None else found.start()
            yield self.buffer[at:stop]
            at = stop + 1

    def _keep_tensors(self, tensors: JSON, where: str) -> None:
        if isinstance(tensors, list):
            self.memory.keep(_TENSOR_COST * len(tensors), where)

    def _blobs(self, places: JSON, where: str) -> dict[str, Bytes]:
        if not isinstance(places, dict):
            raise CaseFileError(f"{where}.blobs", "an object expected: name of a byte array -> number of a tensor")
        self.memory.keep(_BLOB_COST * len(places), f"{where}.blobs")
        return {name: self._view(i, f"{where}.blobs.{name[:40]!a}") for name, i in places.items()}

    def _view(self, i: JSON, where: str) -> Bytes:
        if i is None:
            return np.empty(0, np.uint8)
        if type(i) is not int or not 0 <= i < len(self.header.offsets):
            raise CaseFileError(where, f"null or the number of one of {len(self.header.offsets)} tensors expected")
        if i not in self.views:
            self.memory.keep(_VIEW_COST, where)
            self.views[i] = np.frombuffer(self.buffer, np.uint8, self.header.sizes[i], self.header.offsets[i])
        return self.views[i]


def _open(path: str | os.PathLike[str], models: Sequence[Path] = ()) -> _File:
    with _opened(path) as file:
        buffer = memoryview(file.read())
    header = _checked_header(buffer)
    for i, crc in enumerate(header.numbers.get(TENSORS_CRC, ())):
        if crc32(buffer, header.offsets[i], header.sizes[i]) != crc:
            raise CaseFileError(f"tensors[{i}]", "its bytes are not those written (CRC-32 differs)")
    taken = 3 * len(buffer) // 2  # the file's bytes, and what the header's tables take
    memory = Memory(max(FREE_MEMORY, 4 * len(buffer)), taken)
    return _File(buffer, header, _ids(buffer, header), memory, (*models, Path(path).parent))


def _checked_header(buffer: memoryview) -> Header:
    header = read_header(buffer, KEYS)
    for key in KEYS:
        if key not in header.strings and key not in header.numbers and key != TENSORS_CRC:
            raise CaseFileError(key, "is missing")
    for key, word in ((ARCHITECTURE_KEY, ARCHITECTURE), (TYPE_KEY, TYPE)):
        found = header.strings[key]
        text = bytes(buffer[found.offsets[0] : found.offsets[0] + min(found.sizes[0], 40)])
        if text != word.encode():
            raise CaseFileError(key, f"{word} expected, {text!r} found: not a case file")
    version = header.numbers[VERSION_KEY][0]
    if version != VERSION:
        raise CaseFileError(VERSION_KEY, f"{VERSION} expected, {version} found: read it with the release it needs")
    documents, crcs = header.strings[CASES], header.numbers[CASES_CRC]
    counts = {IDS: len(header.strings[IDS]), CASES_CRC: len(crcs)}
    for key, count in counts.items():
        if count != len(documents):
            raise CaseFileError(key, f"{len(documents)} entries expected, one per case, {count} found")
    if len(header.numbers.get(TENSORS_CRC, ())) != len(header.offsets):
        raise CaseFileError(TENSORS_CRC, f"{len(header.offsets)} entries expected, one per tensor")
    for k, crc in enumerate(crcs):
        if crc32(buffer, documents.offsets[k], documents.sizes[k]) != crc:
            raise CaseFileError(f"cases[{k}]", "its document is not the one written (CRC-32 differs)")
    seal = header.strings[SEAL]
    if seal.sizes[0] != len(NO_SEAL):
        raise CaseFileError(SEAL, f"{len(NO_SEAL)} hexadecimal digits expected, {seal.sizes[0]} bytes found")
    if bytes(buffer[seal.offsets[0] : seal.offsets[0] + len(NO_SEAL)]) != header_digest(buffer, header):
        raise CaseFileError(SEAL, "the header is not the one written (SHA-256 differs)")
    return header


def _ids(buffer: memoryview, header: Header) -> list[str]:
    found = header.strings[IDS]
    if not len(found):
        raise CaseFileError(IDS, "at least one case expected, none found")
    ids = []
    for k, (at, size) in enumerate(zip(found.offsets, found.sizes, strict=True)):
        try:
            ids.append(str(buffer[at : at + size], "utf-8"))
        except UnicodeDecodeError:
            raise CaseFileError(f"{IDS}[{k}]", "UTF-8 expected, other bytes found") from None
    if len(set(ids)) != len(ids):
        raise CaseFileError(IDS, "an id stands twice")
    return ids
