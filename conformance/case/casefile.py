"""Case files: one `.gguf` file holds one case, or a bundle of many.

Metadata: `general.architecture` and `general.type` say what it is, `conformance.ids` names the cases, and
`conformance.cases` holds each as the JSON document of `codec`, one line for what belongs to the whole case and one per
step, each with one field more: `blobs`, the name of a byte array -> the number of the tensor that holds it (null: it
has no bytes). Tensors: weights, caches, inputs and expected values with their ggml types and `ne` in native blocks;
equal bytes are stored once. A type that the `gguf` package does not know stands as I8; the document has its type.

Weights of a model file that the user has may stay there (`reference`).

`conformance.seal` is the SHA-256 of the header with zeros in the seal's own place; the header holds the CRC-32 of each
document and each tensor, and padding must be zero: so every bit of the file is guarded against accidents. Against
malice nothing in it is trusted, seal or no seal: `gguf_header` walks it (and says why not `gguf.GGUFReader`), `codec`
checks each field, `Case.validate` each rule of ggml and each size.

Reading takes at most four times the file's size, or `FREE_MEMORY` where that is more; what would take more is refused
before it is parsed. Bytes that recipes make count by themselves: at most `recipe.MAX_BYTES` of them.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

from conformance.ggml.errors import CaseFileError
from conformance.ggml.tensor import Bytes, Tensor

from .case import JSON, Case
from .casefile_layout import (
    ARCHITECTURE,
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
from .casefile_read import FREE_MEMORY, index, read, read_one, stream
from .codec import dump
from .gguf_header import MAX_TENSOR_NAME, crc32, read_header
from .leftover import prefix
from .reference import Reference, dump_references, link_models

__all__ = ["FREE_MEMORY", "index", "read", "read_one", "stream", "write"]


def write(path: str | os.PathLike[str], cases: Case | Iterable[Case]) -> None:
    """Write one case, or a bundle, to `path`: whole or not at all, and the same cases to the same bytes.

    Where weights stay in a model file, a link to that stands beside `path` then.

    Raises:
        CaseFileError: no case, two of one id, a field that JSON cannot hold, or a place that cannot be written to.
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
    """What is to be written: documents, and each distinct byte array once."""

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
            raise CaseFileError(f"{where}.id", f"{case.id!a} stands twice")
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
            raise CaseFileError(where, f"{case.id!a} holds what JSON cannot: {e}") from None
        if [json.loads(line) for line in lines] != parts:
            raise CaseFileError(where, f"{case.id!a} holds what JSON changes, such as a tuple or a key that is no text")
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
        writer = GGUFWriter(path, ARCHITECTURE)
        writer.add_string(TYPE_KEY, TYPE)
        writer.add_uint32(VERSION_KEY, VERSION)
        writer.add_array(IDS, list(self.ids))
        writer.add_key_value(CASES, self.documents, GGUFValueType.ARRAY, GGUFValueType.STRING)
        writer.add_key_value(
            CASES_CRC, _crcs(map(memoryview, self.documents)), GGUFValueType.ARRAY, GGUFValueType.UINT32
        )
        if self.tensors:
            crcs = _crcs(data.data for _, data, _ in self.tensors)
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
    """Name of a byte array -> the tensor whose type and `ne` it is stored with."""
    places = {t: i for i, t in enumerate(case.persistent)}
    owners = {f"p{i}": t for t, i in places.items()}
    for k, step in enumerate(case.steps):
        numbers = {t: j for j, t in enumerate(step.graph.tensors())}
        owners.update((f"s{k}/i{numbers[t]}", t) for t in step.inputs)
        owners.update((f"s{k}/c{places[t]}" if t in places else f"s{k}/e{numbers[t]}", t) for t in step.expected)
    return owners


def _crcs(of: Iterable[memoryview]) -> list[int]:
    return [crc32(data, 0, len(data)) for data in of]


def _seal(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped) as buffer:
        header = read_header(buffer, KEYS)
        at = header.strings[SEAL].offsets[0]
        buffer[at : at + len(NO_SEAL)] = header_digest(buffer, header)
