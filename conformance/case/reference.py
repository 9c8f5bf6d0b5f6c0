"""References to weights in a model file; a case file has its name and their digests.

`references` in a case's document, beside `blobs`; `codec` does not read it:

    [{"persistent": index, "file": name, "offset": int, "size": int, "sha256": str}]

An untrusted case file may name a file, never a folder: `name` is searched for beside the case file and in the user's
folders. Its bytes are used only if their digest matches. So a case file gives no access to unknown content, and a
changed model is an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from conformance.ggml.errors import CaseFileError
from conformance.ggml.tensor import Bytes, Tensor

FOLDERS = "CONFORMANCE_MODELS"
"""Environment variable: folders of model files, joined as in PATH."""
_FIELDS: dict[str, type] = {"persistent": int, "file": str, "offset": int, "size": int, "sha256": str}
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """Position of a persistent tensor's bytes in a model file."""

    file: str
    """Name of the model file, without folders."""
    offset: int
    """Offset in bytes from the start of the file."""
    folder: Path | None = field(default=None, compare=False)
    """Folder of the file on this machine; never written to a case file."""


def link_models(references: Iterable[Reference], folder: Path) -> None:
    """Make a symbolic link to each model in `folder`, beside the case file that needs it.

    Does nothing if a file of that name exists or the link fails; reading then reports the missing file.
    """
    for name, place in {r.file: r.folder for r in references if r.folder is not None}.items():
        link = folder / name
        if not link.exists():
            with suppress(OSError):
                link.unlink(missing_ok=True)  # a dangling link
                link.symlink_to((place / name).resolve())


def dump_references(
    tensors: Iterable[Tensor], references: Mapping[Tensor, Reference], blobs: dict[str, Bytes]
) -> list[dict[str, Any]]:
    """Encode the references of persistent `tensors`; remove their `p{i}` from `blobs`."""
    entries = []
    for i, t in enumerate(tensors):
        data = blobs.get(f"p{i}")
        if t in references and data is not None and data.nbytes:
            r = references[t]
            digest = sha256(data.data).hexdigest()
            entries.append({"persistent": i, "file": r.file, "offset": r.offset, "size": data.nbytes, "sha256": digest})
            del blobs[f"p{i}"]
    return entries


def load_references(entries: object, folders: Sequence[Path]) -> tuple[dict[str, Bytes], dict[int, Reference]]:
    """Resolve untrusted entries: `p{i}` -> a read-only mapped view, index -> reference.

    `folders` are searched for model files in order, before those of the environment. CaseFileError if an entry is
    malformed, a file is missing or too small, or its bytes do not match the digest.
    """
    if not isinstance(entries, list):
        raise CaseFileError("references", "a list expected, something else found")
    blobs: dict[str, Bytes] = {}
    references: dict[int, Reference] = {}
    files: dict[str, Bytes] = {}
    places: dict[str, Path] = {}
    left: dict[str, int] = {}
    for k, entry in enumerate(entries):
        where = f"references[{k}]"
        _check(entry, where)
        i, name, offset, size = entry["persistent"], entry["file"], entry["offset"], entry["size"]
        if i in references:
            raise CaseFileError(f"{where}.persistent", f"persistent[{i}] has a reference already")
        if name not in files:
            files[name], places[name] = _mapped(name, folders, f"{where}.file")
            left[name] = files[name].nbytes
        left[name] -= size  # bounds the total: no file is read more than once
        if offset + size > files[name].nbytes or left[name] < 0:
            raise CaseFileError(where, f"{size} bytes from {offset} on expected, {name!a} has {files[name].nbytes}")
        data = files[name][offset : offset + size]
        if sha256(data.data).hexdigest() != entry["sha256"]:
            raise CaseFileError(
                f"{where}.sha256", f"{name!a} is not the recorded model: its bytes from offset {offset} on differ"
            )
        blobs[f"p{i}"], references[i] = data, Reference(name, offset, places[name])
    return blobs, references


def _check(entry: object, where: str) -> None:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
        raise CaseFileError(where, f"an object of {', '.join(_FIELDS)} expected, something else found")
    for key, kind in _FIELDS.items():
        if type(entry[key]) is not kind or (kind is int and not 0 <= entry[key] < 2**63):
            raise CaseFileError(f"{where}.{key}", f"{'text' if kind is str else 'a whole number'} expected")
    name = entry["file"]
    plain = name.isprintable() and not set(name) & set('/\\:"<>|?*') and not name.startswith(".")
    if not plain or not 0 < len(name) <= _LONGEST:
        raise CaseFileError(f"{where}.file", f"the name of a file without folders expected, {name[:40]!a} found")
    if not entry["size"]:
        raise CaseFileError(f"{where}.size", "at least one byte expected, none found")


def _mapped(name: str, folders: Sequence[Path], where: str) -> tuple[Bytes, Path]:
    extra = [Path(f) for f in os.environ.get(FOLDERS, "").split(os.pathsep) if f]
    for folder in (*folders, *extra):
        path = folder / name
        try:
            if stat.S_ISREG(path.stat().st_mode):
                return np.asarray(np.memmap(path, np.uint8, "r")).view(np.ndarray), folder
        except (OSError, ValueError):  # not there; ValueError: it is empty
            continue
    raise CaseFileError(
        where, f"{name!a} was not found: put the model beside the case file, or add its folder to {FOLDERS}"
    )
