"""Case files: a `.gguf` file with one case, or a bundle of many.

Metadata: `general.architecture` and `general.type` identify the format, `conformance.ids` names the cases, and
`conformance.cases` has one JSON document of `codec` per case: a line for the whole case and a line per step, each with
one extra field `blobs`: name of a byte array -> index of its tensor (null: no bytes). Tensors: weights, caches, inputs
and expected values with their ggml types and `ne` in native blocks; equal bytes are stored once. A type that the `gguf`
package does not know is stored as I8; the document has its type. Weights of a model file that the user has may stay
there (`reference`).

`conformance.seal` is the SHA-256 of the header with zeros in place of the seal. The header has the CRC-32 of each
document and each tensor, and padding must be zero, so every bit of the file is protected against accidents. Because a
file may be malicious, nothing is trusted: `gguf` checks the header (and explains why not `gguf.GGUFReader`), `codec`
each field, `Case.validate` each rule of ggml and each size.

Reading takes at most four times the file's size, or `FREE_MEMORY` if that is more; a file that would take more is
refused before parsing. Bytes made by recipes count separately: at most `recipe.MAX_BYTES`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from conformance.ggml.errors import CaseFileError
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.text import printable

from .case import Case
from .codec import check, dump, load_head, load_step
from .gguf import MAX_TENSOR_NAME, Header, Kind, crc32, read_header
from .leftover import prefix
from .recipe import MAX_BYTES
from .reference import Reference, dump_references, link_models, load_references
from .strict import JSON, Memory, parse_json, weigh

ARCHITECTURE = "ggml-conformance"
VERSION = 1
"""Version of the file format; documents have their own (`codec.VERSION`)."""
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
    TENSORS_CRC: Kind.UINT32S,  # omitted without tensors: the `gguf` package writes no empty array
    SEAL: Kind.STRING,
}
NO_SEAL = b"0" * 64

FREE_MEMORY = 16 << 20
"""Bytes of memory that reading may take even for a small file."""
# CPython's size of a case's objects, rounded up.
_TENSOR_COST, _BLOB_COST, _VIEW_COST, _STEP_COST, _CASE_COST = 400, 200, 200, 800, 1024
_NEWLINE = re.compile(rb"\n")
LONGEST_ID = 300
"""Characters of an id in a message."""
LISTED = 4096
"""Maximum number of damaged parts of a file in a message."""
_BLOB = re.compile(r"(?:s[0-9]{1,9}/)?([pcie])([0-9]{1,9})")
_EXPECTED = re.compile(r"s[0-9]{1,9}/[ec][0-9]{1,9}")


def write(path: str | os.PathLike[str], cases: Case | Iterable[Case]) -> None:
    """Write one case, or a bundle, to `path`, atomically; equal cases give equal bytes.

    Links to the model files with the weights are created beside `path`.

    Raises:
        CaseFileError: no case, a duplicate id, a field that JSON cannot represent, or `path` cannot be written.
        GraphError: a graph that `codec.dump` refuses.
    """
    path = Path(path)
    bundle = _Bundle()
    for case in [cases] if isinstance(cases, Case) else cases:
        bundle.add(case)
    if not bundle.ids:
        raise CaseFileError("cases", "at least one case expected, none given")
    try:
        with tempfile.TemporaryDirectory(prefix=prefix(path.parent), dir=path.parent) as folder:
            temporary = Path(folder, path.name)
            bundle.write(temporary)
            _seal(temporary)
            temporary.replace(path)
        link_models(bundle.references, path.parent)
    except OSError as e:
        raise CaseFileError("file", f"{path} cannot be written: {e.strerror or e}") from e


class _Bundle:
    """Content of a file to write: documents, and each distinct byte array once."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        self.documents: list[bytes] = []
        self.tensors: list[tuple[str, Bytes, Tensor]] = []
        self.references: list[Reference] = []
        self._places: dict[bytes, int] = {}

    def add(self, case: Case) -> None:
        k = len(self.ids)
        where = f"cases[{k}]"
        if case.id in self.ids:
            raise CaseFileError(f"{where}.id", f"{case.id!a} occurs twice")
        self.ids[case.id] = None
        doc, blobs = dump(case)
        if references := dump_references(case.persistent, case.references, blobs):
            doc["references"] = references
            self.references += case.references.values()
        owners = _owners(case)
        try:
            case.id.encode()
            parts: list[dict[str, JSON]] = [{key: value for key, value in doc.items() if key != "steps"}, *doc["steps"]]
            for part in parts:
                part["blobs"] = {}
            for name, data in blobs.items():
                part = parts[0] if name.startswith("p") else parts[1 + int(name[1 : name.index("/")])]
                part["blobs"][name] = self._place(f"{k}/{name}", data, owners[name])
            lines = [json.dumps(part, separators=(",", ":"), allow_nan=False) for part in parts]
        except (TypeError, ValueError, RecursionError) as e:
            raise CaseFileError(where, f"{case.id!a} has a value that JSON cannot hold: {e}") from None
        if [json.loads(line) for line in lines] != parts:
            raise CaseFileError(
                where, f"{case.id!a} has values that JSON changes, such as a tuple or a key that is not a string"
            )
        self.documents.append("\n".join(lines).encode("ascii"))

    def _place(self, name: str, data: Bytes, tensor: Tensor) -> int | None:
        if not data.nbytes:
            return None
        place = self._places.setdefault(sha256(data.data).digest(), len(self.tensors))
        if place == len(self.tensors):
            full = f"{name} {tensor.name}".rstrip().encode()
            self.tensors.append((full[:MAX_TENSOR_NAME].decode(errors="ignore"), data, tensor))
        return place

    def write(self, path: Path) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter  # noqa: PLC0415  # takes a tenth of a start, and most never need it

        writer = GGUFWriter(path, ARCHITECTURE)
        writer.add_string(TYPE_KEY, TYPE)
        writer.add_uint32(VERSION_KEY, VERSION)
        writer.add_array(IDS, list(self.ids))
        writer.add_key_value(CASES, self.documents, GGUFValueType.ARRAY, GGUFValueType.STRING)
        crcs = list(map(zlib.crc32, self.documents))
        writer.add_key_value(CASES_CRC, crcs, GGUFValueType.ARRAY, GGUFValueType.UINT32)
        if self.tensors:
            crcs = [zlib.crc32(data.data) for _, data, _ in self.tensors]
            writer.add_key_value(TENSORS_CRC, crcs, GGUFValueType.ARRAY, GGUFValueType.UINT32)
        writer.add_string(SEAL, NO_SEAL.decode())
        for name, data, t in self.tensors:
            known = GGML_QUANT_SIZES.get(t.type.id) == (t.type.blck_size, t.type.type_size)  # type: ignore[call-overload]  # an IntEnum's key
            ne = list(t.ne) if known else [data.nbytes]
            while len(ne) > 1 and ne[-1] == 1:
                ne.pop()
            raw_type = GGMLQuantizationType(t.type.id) if known else GGMLQuantizationType.I8
            writer.add_tensor(name, data.view(np.int8), raw_shape=ne[::-1], raw_dtype=raw_type)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _owners(case: Case) -> dict[str, Tensor]:
    """Return name of a byte array -> the tensor with its type and `ne`."""
    places = {t: i for i, t in enumerate(case.persistent)}
    owners = {f"p{i}": t for t, i in places.items()}
    for k, step in enumerate(case.steps):
        numbers = {t: j for j, t in enumerate(step.graph.tensors())}
        owners.update((f"s{k}/i{numbers[t]}", t) for t in step.inputs)
        owners.update((f"s{k}/c{places[t]}" if t in places else f"s{k}/e{numbers[t]}", t) for t in step.expected)
    return owners


def _seal(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped) as buffer:
        header = read_header(buffer, KEYS)
        at = header.strings[SEAL].offsets[0]
        buffer[at : at + len(NO_SEAL)] = header_digest(buffer, header)


def header_digest(buffer: memoryview, header: Header) -> bytes:
    """Return the hexadecimal SHA-256 of all before the data, with `NO_SEAL` as the seal."""
    at = header.strings[SEAL].offsets[0]
    digest = sha256(buffer[:at])
    digest.update(NO_SEAL)
    digest.update(buffer[at + len(NO_SEAL) : header.end])
    return digest.hexdigest().encode()


def read(path: str | os.PathLike[str]) -> list[Case]:
    """Return every case of the file, validated; arrays are read-only views of one copy of it.

    CaseFileError names file and field if the file cannot be read or trusted; `others` lists all damaged bytes.
    """
    with _naming(path):
        file = _open(path)
        return [file.case(k) for k in range(len(file.ids))]


def read_one(path: str | os.PathLike[str], case_id: str | None = None, models: Sequence[Path] = ()) -> Case:
    """Return the case `case_id` of the file (None: its only case), validated.

    `models` are searched for weights outside the file before its own folder. CaseFileError as `read`, or if there is no
    such case, or several and no id is given.
    """
    with _naming(path):
        file = _open(path, models)
        if case_id is None and len(file.ids) != 1:
            raise CaseFileError(IDS, f"one case expected, {len(file.ids)} found; name one, such as {file.ids[0]!a}")
        if case_id is not None and case_id not in file.ids:
            raise CaseFileError(
                IDS, f"no case {case_id!a} among the {len(file.ids)} of this file, such as {file.ids[0]!a}"
            )
        return file.case(0 if case_id is None else file.ids.index(case_id))


def index(path: str | os.PathLike[str]) -> list[str]:
    """Return the ids of the file's cases, reading only its header. Raises as `read`."""
    with _naming(path), _opened(path) as file:
        buffer = np.memmap(file, np.uint8, "r").data
        return _ids(buffer, _checked_header(buffer))


class Recorded:
    """Expected values of a file, for cases generated from their ids; builds no case."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the file and check every CRC. Raises as `read`."""
        self.path = os.fspath(path)
        with _naming(path):
            self._file = _open(path)
        self._places = {case_id: k for k, case_id in enumerate(self._file.ids)}

    def __contains__(self, case_id: str) -> bool:
        return case_id in self._places

    def values(self, case: Case) -> list[dict[Tensor, Bytes]]:
        """Return the file's expected values for each step of `case`, by place in the graph.

        Raises:
            CaseFileError: the file's case has other steps or tensors.
        """
        with _naming(self.path):
            file = replace(self._file, memory=replace(self._file.memory))  # discard what this allocates
            return file.expected(self._places[case.id], case)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of the file to an error without one."""
    try:
        yield
    except CaseFileError as e:
        for error in (e, *e.others):
            if error.field != "file":
                error.file = printable(os.fspath(path))
        raise


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise CaseFileError("file", f"{os.fspath(path)} is empty or not a regular file")
        return Path(path).open("rb")
    except (OSError, ValueError) as e:  # ValueError: a path with a NUL in it
        raise CaseFileError("file", f"{os.fspath(path)} cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _names(doc: JSON, field: str) -> list[str]:
    """Return the name of each tensor in a list of a document, or its op if it has none."""
    entries = doc.get(field) if isinstance(doc, dict) else None
    rows = [e if isinstance(e, dict) else {} for e in (entries if isinstance(entries, list) else ())]
    return [str(e.get("name") or e.get("op") or "") for e in rows]


def _named(blob: str, persistent: Sequence[str], tensors: Sequence[str]) -> str:
    """Describe a byte array of a case: its role, its tensor and its name."""
    kind = _BLOB.fullmatch(blob)
    if kind is None:
        return f"tensor {blob[:40]!a}"
    what = {"p": "persistent tensor", "c": "expected cache", "i": "input", "e": "expected value of"}[kind[1]]
    among, i = (persistent if kind[1] in "pc" else tensors), int(kind[2])
    name = among[i][:MAX_TENSOR_NAME] if i < len(among) else ""
    return f"{what} {printable(name) or i} ({blob})"


@dataclass(slots=True)
class _File:
    """A file with checked header and CRCs."""

    path: str
    buffer: memoryview
    header: Header
    ids: list[str]
    memory: Memory
    folders: tuple[Path, ...]
    """Folders to search for model files."""
    recipes: Memory = field(default_factory=lambda: Memory(MAX_BYTES, 0))
    """Memory limit of recipes, independent of the file's size."""
    views: dict[int, Bytes] = field(default_factory=dict)
    """Index of a tensor -> its bytes."""

    def case(self, k: int) -> Case:
        """Return case `k`, validated; the field of a CaseFileError begins with `cases[k]`."""
        where = f"cases[{k}]"
        try:
            case = self._case(k)
        except CaseFileError as e:
            raise CaseFileError(f"{where}.{e.field}", e.message) from None
        if case.id != self.ids[k]:
            raise CaseFileError(f"{where}.id", f"{self.ids[k]!a} expected (from {IDS}), {case.id!a} found")
        case.file = self.path
        return case

    def expected(self, k: int, case: Case) -> list[dict[Tensor, Bytes]]:
        """Return the expected values of case `k` for the tensors at their places in `case`."""
        documents = self.header.strings[CASES]
        at, end = documents.offsets[k], documents.offsets[k] + documents.sizes[k]
        lines = list(self._lines(at, end))[1:]
        if len(lines) != len(case.steps):
            raise CaseFileError(f"cases[{k}].steps", f"{len(case.steps)} expected, {len(lines)} found")
        found = []
        for i, (line, step) in enumerate(zip(lines, case.steps, strict=True)):
            where = f"cases[{k}].steps[{i}]"
            doc = parse_json(line, self.memory, where)
            if not isinstance(doc, dict):
                raise CaseFileError(where, "an object expected, something else found")
            names = {f"s{i}/e{j}": t for j, t in enumerate(step.graph.tensors())}
            names |= {f"s{i}/c{j}": t for j, t in enumerate(case.persistent)}
            blobs = {n: x for n, x in self._blobs(doc.get("blobs", {}), where).items() if _EXPECTED.fullmatch(n)}
            if not blobs.keys() <= names.keys():
                raise CaseFileError(f"{where}.expected", "its tensors are not those of the case with its id")
            found.append({names[name]: data for name, data in blobs.items()})
        return found

    def users(self, tensors: Collection[int]) -> dict[int, str]:
        """Return tensor of the file -> the first case with its bytes, and a count of others."""
        found: dict[int, str] = {}
        more: Counter[int] = Counter()
        documents = self.header.strings[CASES]
        for k, case_id in enumerate(self.ids):
            names: list[str] = []
            for line in self._lines(documents.offsets[k], documents.offsets[k] + documents.sizes[k]):
                with suppress(CaseFileError):
                    doc = parse_json(line, self.memory, f"cases[{k}]")
                    held = doc.get("blobs") if isinstance(doc, dict) else None
                    names, own = names or _names(doc, "persistent"), _names(doc, "tensors")
                    for blob, i in (held if isinstance(held, dict) else {}).items():
                        if type(i) is int and i in found:
                            more[i] += 1
                        elif type(i) is int and i in tensors:
                            found[i] = f"{case_id[:LONGEST_ID]!a}: {_named(blob, names, own)}"
        return {i: f"{text} and {more[i]} more" if more[i] else text for i, text in found.items()}

    def _case(self, k: int) -> Case:
        documents = self.header.strings[CASES]
        at, end = documents.offsets[k], documents.offsets[k] + documents.sizes[k]
        self.memory.keep(_CASE_COST, "document")
        case: Case | None = None
        for line in self._lines(at, end):
            where = "document" if case is None else f"steps[{len(case.steps)}]"
            doc = parse_json(line, self.memory, where)
            if not isinstance(doc, dict):
                raise CaseFileError(where, "an object expected, something else found")
            blobs = self._blobs(doc.pop("blobs", {}), where)
            if case is None:
                free = ("params", "tolerance", "provenance", "demands", "recipes", "references")
                self.memory.keep(sum(weigh(doc.get(key), key) for key in free), where)
                self._keep_tensors(doc.get("persistent"), where)
                elsewhere, references = load_references(doc.pop("references", []), self.folders)
                case = load_head(doc, {**blobs, **elsewhere}, self.recipes)
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
            newline = _NEWLINE.search(self.buffer, at, end)
            stop = end if newline is None else newline.start()
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
    with _opened(path) as opened:
        buffer = memoryview(opened.read())
    header = _checked_header(buffer)
    taken = 3 * len(buffer) // 2  # the file's bytes and the header's tables
    memory = Memory(max(FREE_MEMORY, 4 * len(buffer)), taken)
    file = _File(os.fspath(path), buffer, header, _ids(buffer, header), memory, (*models, Path(path).parent))
    crcs = header.numbers.get(TENSORS_CRC, ())
    damaged = [i for i, crc in enumerate(crcs) if crc32(buffer, header.offsets[i], header.sizes[i]) != crc]
    if damaged:
        words, shown = "its bytes are damaged (CRC-32 differs)", damaged[:LISTED]
        users = file.users(frozenset(shown))
        errors = [CaseFileError(f"tensors[{i}]", f"{users.get(i, 'of no case')}: {words}") for i in shown]
        if damaged[LISTED:]:
            errors.append(CaseFileError("tensors", f"{len(damaged) - LISTED} more are damaged"))
        raise _all(errors)
    return file


def _all(errors: Sequence[CaseFileError]) -> CaseFileError:
    """Return the first of `errors` with the others attached."""
    first, *others = errors
    first.others = tuple(others)
    return first


def _checked_header(buffer: memoryview) -> Header:
    header = read_header(buffer, KEYS)
    for key in KEYS:
        if key not in header.strings and key not in header.numbers and key != TENSORS_CRC:
            raise CaseFileError(key, "is missing")
    _check_format(buffer, header)
    _check_documents(buffer, header)
    seal = header.strings[SEAL]
    if seal.sizes[0] != len(NO_SEAL):
        raise CaseFileError(SEAL, f"{len(NO_SEAL)} hexadecimal digits expected, {seal.sizes[0]} bytes found")
    if bytes(buffer[seal.offsets[0] : seal.offsets[0] + len(NO_SEAL)]) != header_digest(buffer, header):
        raise CaseFileError(SEAL, "the header is damaged (SHA-256 differs)")
    return header


def _check_format(buffer: memoryview, header: Header) -> None:
    for key, word in ((ARCHITECTURE_KEY, ARCHITECTURE), (TYPE_KEY, TYPE)):
        value = header.strings[key]
        text = bytes(buffer[value.offsets[0] : value.offsets[0] + min(value.sizes[0], 40)])
        if text != word.encode():
            raise CaseFileError(key, f"{word} expected, {text!r} found: not a case file")
    version = header.numbers[VERSION_KEY][0]
    if version != VERSION:
        raise CaseFileError(VERSION_KEY, f"{VERSION} expected, {version} found; read it with the release that wrote it")


def _check_documents(buffer: memoryview, header: Header) -> None:
    documents, crcs = header.strings[CASES], header.numbers[CASES_CRC]
    for key, count in ((IDS, len(header.strings[IDS])), (CASES_CRC, len(crcs))):
        if count != len(documents):
            raise CaseFileError(key, f"{len(documents)} entries expected, one per case, {count} found")
    if len(header.numbers.get(TENSORS_CRC, ())) != len(header.offsets):
        raise CaseFileError(TENSORS_CRC, f"{len(header.offsets)} entries expected, one per tensor")
    damaged = [k for k, crc in enumerate(crcs) if crc32(buffer, documents.offsets[k], documents.sizes[k]) != crc]
    if damaged:
        ids, words = _ids(buffer, header), "its document is damaged (CRC-32 differs)"
        raise _all([CaseFileError(f"cases[{k}]", f"{ids[k][:LONGEST_ID]!a}: {words}") for k in damaged[:LISTED]])


def _ids(buffer: memoryview, header: Header) -> list[str]:
    texts = header.strings[IDS]
    if not len(texts):
        raise CaseFileError(IDS, "at least one case expected, none found")
    ids = []
    for k, (at, size) in enumerate(zip(texts.offsets, texts.sizes, strict=True)):
        try:
            ids.append(str(buffer[at : at + size], "utf-8"))
        except UnicodeDecodeError:
            raise CaseFileError(f"{IDS}[{k}]", "UTF-8 expected, other bytes found") from None
    if len(set(ids)) != len(ids):
        raise CaseFileError(IDS, "an id occurs twice")
    return ids
