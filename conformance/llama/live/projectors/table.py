"""Projectors of libmtmd, each as metadata and the shapes of its weights.

`projectors.json`: metadata keys of every vision or audio projector (`common`), lists of weights that several share
(`parts`), and for each projector its `type` (`clip.projector_type`; default: its name), changed keys (`set`, null
removes a key; `i32` for keys that libmtmd reads as signed), its weights (`tensors`; the pattern `f16` marks those that
must be F16), the tile size in pixels (`tile`, if it is not `image_size`), and its text model (`text`, `text_set`). Keys
are written without their prefix `clip.`. An entry of `tensors` is one of

- `NAME NE…`: a weight and its `ne`, each a sum of products of numbers and `SYMBOLS`;
- `linear NAME IN OUT`: `NAME.weight` and `NAME.bias`; `norm NAME N`: the same, one row each;
- `@PART`: the list of this part.

`*` in a name stands for the number of each block. The required weights were read from `tools/mtmd/clip.cpp` and
`tools/mtmd/models/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Literal

from conformance import shipped
from conformance.ggml.errors import UsageError, unknown
from conformance.llama.zoo.model import Value

_TABLE = shipped.path("llama", "live", "projectors", "projectors.json")
Modality = Literal["vision", "audio"]
SYMBOLS = {
    "E": "embedding_length", "F": "feed_forward_length", "P": "projection_dim", "H": "attention.head_count",
    "p": "patch_size", "m": "num_mel_bins",
}  # fmt: skip
"""Symbol in a shape -> metadata key.

Also `D` = E / H, and `N`, the number of patches of an image."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A projector and its encoder."""

    name: str
    type: str
    """`clip.projector_type`."""
    modality: Modality
    keys: Mapping[str, Value]
    """Metadata, with full key names."""
    signed: Mapping[str, int]
    """Metadata that GGUF holds as int32."""
    tensors: Mapping[str, tuple[int, ...]]
    """Name of a weight -> its `ne`."""
    f16: str = "^$"
    """Pattern of weights that must be F16."""
    tile: int = 0
    """Side of an image tile in pixels; 0 for audio."""
    text: str = "llama"
    """Architecture of the text model."""
    text_keys: Mapping[str, Value] = field(default_factory=dict)
    """Metadata of the text model, beyond the zoo's own keys."""


@cache
def table() -> dict[str, Projector]:
    """Return every projector by name."""
    try:
        read = json.loads(_TABLE.read_text("utf-8"))
    except OSError as e:
        raise UsageError(f"{_TABLE}: cannot be read: {e.strerror}; {shipped.AGAIN}") from None
    return {name: _projector(name, entry, read) for name, entry in sorted(read["projectors"].items())}


def projector(name: str) -> Projector:
    """Return the projector called `name`; UsageError lists the known ones."""
    if name not in table():
        raise unknown("zoo: projector", name, table())
    return table()[name]


def _projector(name: str, entry: Mapping[str, Any], read: Mapping[str, Any]) -> Projector:
    modality: Modality = entry.get("modality", "vision")
    kind = entry.get("type", name)
    values = {**read["common"][modality], **entry.get("set", {}), "projector_type": kind}
    keys = {f"clip.{key}": value for key, value in values.items() if value is not None}
    sizes = {s: keys[k] for s, key in SYMBOLS.items() if (k := f"clip.{modality}.{key}") in keys}
    sizes["D"] = sizes["E"] // sizes["H"]
    if "p" in sizes:
        sizes["N"] = (keys["clip.vision.image_size"] // sizes["p"]) ** 2
    blocks = keys[f"clip.{modality}.block_count"]
    tensors = {
        name: tuple(_number(n, sizes) for n in ne)
        for pattern, ne in _weights(entry["tensors"], read["parts"])
        for name in ([pattern.replace("*", str(i)) for i in range(blocks)] if "*" in pattern else [pattern])
    }
    signed = {f"clip.{key}": value for key, value in entry.get("i32", {}).items()}
    text_keys = dict(entry.get("text_set", {}))
    tile = entry.get("tile", keys.get("clip.vision.image_size", 0))
    return Projector(
        name, kind, modality, keys, signed, tensors, entry.get("f16", "^$"), tile, entry.get("text", "llama"), text_keys
    )


def _weights(lines: Sequence[str], parts: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield name and `ne`, as written, of every weight in the entries."""
    for line in lines:
        if line.startswith("@"):
            yield from _weights(parts[line[1:]], parts)
            continue
        first, *rest = line.split()
        if first in ("linear", "norm"):
            name, *ne = rest
            yield f"{name}.weight", ne
            yield f"{name}.bias", ne[-1:]
        else:
            yield first, rest


def _number(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a sum of products, such as `4*E` or `N+1`."""
    terms = (term.split("*") for term in text.split("+"))
    return sum(prod(int(f) if f.isdecimal() else sizes[f] for f in factors) for factors in terms)
