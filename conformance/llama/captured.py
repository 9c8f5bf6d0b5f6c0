"""Cases captured from llama.cpp with its eval callback: real graphs, node names and values.

A capture is a `.json` file with the graphs and a `.npz` file with the bytes. `persistent`: weights and caches.
`steps[k].tokens`: rows `[token, position, sequence, wants_logits]`; `steps[k].tensors`: fields of `struct ggml_tensor`,
each after its `src` and `view_src`, with `node` (in the graph's node list), `input` (a leaf that is filled per step)
and `persistent` (the name of the persistent tensor). Arrays are raw uint8 laid out by `nb`: `p{i}` persistent[i] before
the first step; in step k `s{k}_i{j}` input j, `s{k}_o{j}` node j right after it ran, `s{k}_c{i}` cache i after the
step. A node without FLAG_COMPUTE was not computed; its recorded bytes are meaningless.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from conformance import shipped
from conformance.case import casefile
from conformance.case.case import JSON, Case, Step
from conformance.case.codec import VERSION, check, load_head, load_step
from conformance.case.strict import Memory, parse_json, weigh
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_OUTPUT, Bytes, Tensor, computes, nbytes, pack
from conformance.suite.family import Family, Level

MAX_MEMORY = 4 << 30
"""Memory limit in bytes to read one capture."""
TOLERANCE = {"nmse": 5e-4}
"""Maximum difference between a free run and a recording in ggml's quantised arithmetic."""
GOLDEN = shipped.own_golden() / "captured"
"""Folder of the captures that are shipped."""

ARITHMETIC = {"xllamacpp ggml 0.26.0": GGML_CPU.name}
"""`source` of a capture -> arithmetic of the recording ggml, for the reference."""

_NPY_HEADER = 4096  # bytes at most; NumPy writes 128
# NumPy's own reader evaluates the header; every array of a capture has this one.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '\|u1', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),\), \} *\n",
    re.DOTALL,
)
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError, MemoryError)
# RuntimeError: encrypted; its subclass NotImplementedError: an unsupported compression method.

_FIELDS = ("type", "ne", "nb", "op", "op_params", "src", "view_src", "view_offs", "flags", "name")


def import_capture(path: Path) -> Case:
    """Read a `.json` capture and its `.npz` file as a case with recorded values.

    Outputs are the results: recorded nodes flagged OUTPUT that no node reads, else the last computed node. Every
    recorded computing node and cache has an expected value. The id is `captured/{file name}@0`.

    Raises:
        CaseFileError: names the field or array, and its defect.
    """
    memory = Memory(MAX_MEMORY, 0)
    doc = _document(path, memory)
    with closing(Arrays(path.with_suffix(".npz"), memory)) as arrays:
        case = _head(path.stem, doc, arrays)
        names = {t.name: i for i, t in enumerate(case.persistent)}
        if len(names) != len(case.persistent):
            raise CaseFileError("persistent", "two tensors have the same name")
        for k, entry in enumerate(_list(doc.get("steps"), "steps")):
            case.steps.append(_step(k, entry, case, names, arrays))
    if not case.steps:
        raise CaseFileError("steps", "at least one expected, none found")
    check(case)
    return case


def _document(path: Path, memory: Memory) -> dict[str, JSON]:
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise CaseFileError("file", f"{path} cannot be read: {e.strerror or e}") from e
    return _object(parse_json(memoryview(raw), memory, "document"), "document")


def _head(name: str, doc: Mapping[str, JSON], arrays: Arrays) -> Case:
    facts = {key: value for key, value in doc.items() if key not in ("persistent", "steps")}
    arrays.memory.keep(weigh(facts, "document"), "document")
    source = facts.get("source")
    if isinstance(source, str) and source in ARITHMETIC:
        facts["arithmetic"] = ARITHMETIC[source]
    entries = _list(doc.get("persistent"), "persistent")
    head = {
        "version": VERSION,
        "id": f"captured/{name}@0",
        "family": "captured",
        "params": {"capture": name},
        "tolerance": dict(TOLERANCE),
        "provenance": facts,
        "persistent": [_tensor(e, {}, f"persistent[{i}]") for i, e in enumerate(entries)],
    }
    case = load_head(head, _nothing())
    for i, t in enumerate(case.persistent):
        case.persistent[t] = arrays.read(f"p{i}", nbytes(t))
    return case


def _step(k: int, entry: JSON, case: Case, names: Mapping[str, int], arrays: Arrays) -> Step:
    where = f"steps[{k}]"
    entry = _object(entry, where)
    entries = _list(entry.get("tensors"), f"{where}.tensors")
    tensors = [_tensor(t, names, f"{where}.tensors[{j}]") for j, t in enumerate(entries)]
    nodes = [j for j, t in enumerate(entries) if t.get("node") is True]
    inputs = [j for j, t in enumerate(entries) if t.get("input") is True]
    note = {"tokens": entry.get("tokens")}
    arrays.memory.keep(weigh(note, f"{where}.tokens"), f"{where}.tokens")
    doc = {"tensors": tensors, "nodes": nodes, "inputs": inputs, "note": note}
    step = load_step(k, doc, case, _nothing())
    used = set(step.graph.tensors())
    step.inputs = {
        t: arrays.read(f"s{k}_i{j}", nbytes(t)) for j, t in zip(inputs, step.inputs, strict=True) if t in used
    }
    arrays_of = [(f"s{k}_o{j}", n) for j, n in zip(nodes, step.graph, strict=True) if computes(n)]
    arrays_of += [(f"s{k}_c{i}", t) for i, t in enumerate(case.persistent)]
    step.expected = {t: pack(arrays.read(name, nbytes(t)), t, 0) for name, t in arrays_of if name in arrays}
    step.outputs = _results(step.graph, step.expected)
    return step


def _tensor(entry: JSON, names: Mapping[str, int], where: str) -> dict[str, JSON]:
    """Convert a tensor of a capture to the form that `codec` expects and checks."""
    entry = _object(entry, where)
    name = entry.get("persistent")
    if name is None or not where.startswith("steps"):
        return {key: entry[key] for key in _FIELDS if key in entry and entry[key] is not None}
    if not isinstance(name, str) or name not in names:
        raise CaseFileError(f"{where}.persistent", "the name of a persistent tensor expected, something else found")
    return {"persistent": names[name]}


def _results(graph: Graph, recorded: Mapping[Tensor, Bytes]) -> tuple[Tensor, ...]:
    read = {s for n in graph for s in n.src if s is not n}
    computed = [n for n in graph if computes(n)]
    results = [n for n in computed if n.flags & FLAG_OUTPUT and n in recorded and n not in read]
    return tuple(results or computed[-1:])


def _nothing() -> defaultdict[str, Bytes]:
    """Return empty byte arrays; sizes are known only after the tensors are loaded."""
    return defaultdict(lambda: np.empty(0, np.uint8))


def _object(value: JSON, where: str) -> dict[str, JSON]:
    if not isinstance(value, dict):
        raise CaseFileError(where, "an object expected, something else found")
    return value


def _list(value: JSON, where: str) -> list[JSON]:
    if not isinstance(value, list):
        raise CaseFileError(where, "a list expected, something else found")
    return value


class Arrays:
    """Raw byte arrays of an untrusted `.npz`; sizes are checked before anything is inflated."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self.memory = memory
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise CaseFileError("npz", f"{path} expected beside the capture's JSON, not found") from None
        except _BROKEN as e:
            raise CaseFileError("npz", f"{path} cannot be read: {e}") from None
        self._members = {m.filename.removesuffix(".npy"): m for m in self._zip.infolist()}

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str, size: int) -> Bytes:
        """Return the array `name` of `size` bytes; CaseFileError if missing, broken or mis-sized."""
        member = self._members.get(name)
        field = f"npz.{name}"
        if member is None:
            raise CaseFileError(field, "is missing")
        if not size < member.file_size <= size + _NPY_HEADER:
            raise CaseFileError(
                field, f"{size} bytes and a header expected, as its tensor takes; {member.file_size} in all found"
            )
        self.memory.keep(member.file_size, field)
        try:
            raw = self._zip.read(member)
        except _BROKEN as e:
            raise CaseFileError(field, f"cannot be read: {e}") from None
        head = _NPY.match(raw)
        if head is None:
            raise CaseFileError(field, "a .npy array of one dimension and uint8 expected, something else found")
        at = 10 + int.from_bytes(raw[8:10], "little")
        if int(head[1]) != size or len(raw) - at != size:
            raise CaseFileError(field, f"{size} bytes expected, an array of {int(head[1])} in {len(raw) - at} found")
        return np.frombuffer(raw, np.uint8, size, at)


def _ids(_: Level) -> Sequence[str]:
    return [case_id for path in _files() for case_id in casefile.index(path)]


def _build(case_id: str) -> Case:
    for path in _files():
        if case_id in casefile.index(path):
            return casefile.read_one(path, case_id)
    known = f"in {GOLDEN} there are {', '.join(_ids('full'))}"
    raise UsageError(f"no case {case_id!r}: {_lacks() or known}")


def _files() -> list[Path]:
    return sorted(GOLDEN.glob("*.gguf"))


def _lacks() -> str:
    return "" if _files() else f"no case files in {GOLDEN}; {shipped.AGAIN}"


FAMILY = Family(
    "captured",
    "recorded runs of llama.cpp, compared with the recorded values",
    _ids,
    _build,
    seeded=False,
    lacks=_lacks,
)
