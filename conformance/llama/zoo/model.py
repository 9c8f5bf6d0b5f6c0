"""Build a model of an architecture from a table: GGUF metadata, weight recipes, whole file.

`architectures.json`: keys of every architecture (`common`), keys that several share (`groups`), and per architecture
its groups (`with`), the differences (`set`; null removes a key), if it only encodes, and why it does not run (`lacks`).
A key without one of the dot-separated roots stands for `ARCH.key`. `variants`: models that llama.cpp runs as the
architecture `of`, under their own names.
"""

from __future__ import annotations

import json
import math
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance import shipped
from conformance.case.recipe import Recipe, make
from conformance.ggml.errors import UsageError, unknown
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import F32, TYPES, GGMLType

if TYPE_CHECKING:
    from gguf import GGUFWriter

Value = int | float | bool | str | list[int] | list[float] | list[str]
"""Value of a metadata key."""

_TABLE = shipped.path("llama", "zoo", "architectures.json")
_BYTES, _HALF = np.dtype(np.uint8), np.dtype(np.float16)
_ALIGNMENT = 32
_FACTS = ("lacks", "encodes", "flash_attn", "unified", "optional", "absent", "types", "of")
_ROOTS = ("general.", "tokenizer.", "xielu.")
"""Prefixes of keys that are not under the architecture's name."""
_WIDE = re.compile(r"\.ple\.(layer_multipliers|head_offsets|head_vocab_sizes)$")
"""Keys of arrays of 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture that llama.cpp knows."""

    name: str
    keys: Mapping[str, Value] = field(default_factory=dict)
    """Metadata, in full names."""
    lacks: str = ""
    """Reason why it does not run; empty if it does."""
    encodes: bool = False
    """True if it has an encoder and no decoder: batches are encoded, and no state remains."""
    flash_attn: bool = True
    unified: bool = False
    """Default of the context parameter."""
    optional: str = ""
    """Pattern of weights that llama.cpp treats as optional but real models have."""
    absent: str = ""
    """Pattern of weights that real models do not have; with them llama.cpp builds another graph."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Pattern of weights -> their required type, if not F32."""
    of: str = ""
    """For a variant: the architecture that its files name."""


def lacks() -> str:
    """Return the reason why no model can be created; empty if the table is installed."""
    return "" if _TABLE.is_file() else f"no {_TABLE}; {shipped.AGAIN}"


@cache
def table() -> dict[str, Architecture]:
    """Return every architecture and variant by name, including those that do not run."""
    try:
        read = json.loads(_TABLE.read_text("utf-8"))
    except OSError as e:
        raise UsageError(f"{_TABLE}: cannot be read: {e.strerror}; {shipped.AGAIN}") from None
    entries = {**read["architectures"], **read["variants"]}
    return {name: _architecture(name, entry, read) for name, entry in sorted(entries.items())}


def runnable(*, with_variants: bool = False) -> list[str]:
    """Return the names of the architectures that run."""
    return [a.name for a in table().values() if not a.lacks and (with_variants or not a.of)]


def architecture(name: str) -> Architecture:
    """Return an architecture; UsageError if it is unknown or does not run."""
    arch = table().get(name)
    if arch is None:
        raise unknown("zoo: architecture", name, runnable(with_variants=True))
    if arch.lacks:
        raise UsageError(f"zoo: {name} does not run: {arch.lacks}")
    return arch


def _architecture(name: str, entry: Mapping[str, Any], read: Mapping[str, Any]) -> Architecture:
    shared = [read["groups"][group] for group in entry.get("with", ())]
    values = dict(ChainMap(entry.get("set", {}), *reversed(shared), read["common"]))
    keys = {full_key(entry.get("of", name), key): value for key, value in values.items() if value is not None}
    return Architecture(name, keys, **{k: entry[k] for k in _FACTS if k in entry})


def full_key(arch: str, key: str) -> str:
    """Return the full name of a key: `llama.embedding_length` for `embedding_length`."""
    return key if key.startswith((*_ROOTS, f"{arch}.")) else f"{arch}.{key}"


def parse_value(text: str) -> Value:
    """Parse JSON or text of `--set KEY=VALUE`; UsageError for a list of other than numbers."""
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


def write_metadata(
    path: Path, arch: str, keys: Mapping[str, Value], types: Mapping[str, tuple[GGMLType, list[int]]]
) -> None:
    """Write a GGUF file that contains metadata only.

    `types`: weight name -> type and `ne`, for types other than F32; it gets a tensor entry without data.

    Raises:
        UsageError: a value that GGUF cannot store.
    """
    from gguf import GGMLQuantizationType  # noqa: PLC0415  # takes a tenth of a start, and most never need it

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
    with path.open("r+b") as file:  # llama.cpp expects the file to reach where data would begin
        file.truncate(-(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT)


def open_writer(path: Path, arch: str, keys: Mapping[str, Value]) -> GGUFWriter:
    """Return a writer with the metadata; UsageError for a value that GGUF cannot store."""
    from gguf import GGUFValueType, GGUFWriter  # noqa: PLC0415  # takes a tenth of a start, and most never need it

    entry = table().get(arch)
    writer = GGUFWriter(path, entry.of or arch if entry else arch)
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
        elif _WIDE.search(key):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.UINT64)
        else:
            writer.add_array(key, value)
    return writer


# Recipes for weights of any architecture, by llama.cpp's names, such that every part of a graph affects the result:
# norms are around 1, matrices preserve magnitudes, queries and keys are large enough for attention to select few cells,
# and recurrent states decay. The first matching pattern of `TABLE` applies.


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of `TABLE`: a draw of `recipe.DRAWS` and its parameters."""

    draw: str
    a: float
    b: float
    by_fan_in: bool = False
    """Divide `b` by the square root of `ne[0]`: it is the standard deviation of products."""
    shared: bool = False
    """The first half of each row is the same in all rows."""


_SELECTIVE = 1.5
"""Standard deviation that gives attention logits one of about 2, as in `decoder.weights`."""

# fmt: off
TABLE: tuple[tuple[str, Draw], ...] = (
    (r"rope_freqs|rope_factors", Draw("uniform", 1.0, 8.0)),
    (r"token_embd\.weight$|per_layer_token_embd", Draw("normal", 0.0, 1.0, shared=True)),
    (r"position_embd|token_types|embd.*pos", Draw("normal", 0.0, 0.5)),
    (r"ssm_a\b|ssm_a$", Draw("uniform", -2.0, -0.1)),
    (r"ssm_dt\.bias|ssm_dt_b", Draw("uniform", -2.0, 0.5)),
    (r"ssm_d\b|ssm_d$", Draw("uniform", 0.5, 1.5)),
    (r"conv1d|shortconv\.conv|ssm_conv", Draw("normal", 0.0, 1.0, by_fan_in=True)),
    (r"time_mix_decay\.weight|time_mix_w0", Draw("uniform", -3.0, 0.5)),
    (r"time_mix_decay_w\d", Draw("normal", 0.0, 0.3, by_fan_in=True)),
    (r"time_mix_first|time_mix_r_k", Draw("normal", 0.0, 0.5)),
    (r"time_mix_lerp|channel_mix_lerp", Draw("uniform", 0.1, 0.9)),
    (r"time_mix_(k_k|k_a)", Draw("uniform", 0.5, 1.0)),
    (r"time_mix_(a0|v0)", Draw("uniform", -1.0, 1.0)),
    (r"attn_sinks", Draw("normal", 0.0, 1.0)),
    (r"norm.*\.weight$|norm$|_ln.*\.weight$|ln\.weight$", Draw("uniform", 0.5, 1.5)),
    (r"exp_probs_b", Draw("normal", 0.0, 0.3)),
    (r"\.scale$|_scale|layer_out_scale", Draw("uniform", 0.5, 1.5)),
    (r"\.bias$|_b$", Draw("normal", 0.0, 0.2)),
    (r"attn_[qk](_|\.)", Draw("normal", 0.0, _SELECTIVE, by_fan_in=True)),
    (r"attn_output|attn_out", Draw("normal", 0.0, 2.0, by_fan_in=True)),
    (r"ffn_down", Draw("normal", 0.0, 1.5, by_fan_in=True)),
)
# fmt: on
"""Pattern -> distribution of matching weights."""
_MATRIX = Draw("normal", 0.0, 1.0, by_fan_in=True)
_VECTOR = Draw("uniform", 0.5, 1.5)


def recipe(case: str, t: Tensor) -> Recipe:
    """Return the recipe of weight `t` of a case."""
    default = _VECTOR if t.ne[1:] == (1, 1, 1) else _MATRIX
    draw = next((d for pattern, d in TABLE if re.search(pattern, t.name)), default)
    b = draw.b / math.sqrt(max(1, t.ne[0])) if draw.by_fan_in else draw.b
    block = t.type.blck_size
    return Recipe(case, t.name, draw.draw, draw.a, b, t.ne[0] // 2 // block * block if draw.shared else 0)


_OPTIONAL = re.compile(r"(\.scale|_scale|\.bias|rope_freqs\.weight)$")
"""Weights that llama.cpp can run without; a file lacks them unless loading then fails."""
_STAY_F32 = re.compile(
    r"norm|ssm_(?!in|out)|conv|time_mix_(?!key|value|receptance|output|gate)|gate_inp|position_embd|token_types|sinks|"
    r"rel_b|bias|_b$|lerp|indexer|cls"
)
"""Matrices that llama.cpp requires in F32."""

Weights = Sequence[Sequence[Any]]
"""Every weight that llama.cpp loads for the architecture, as `[name, type, ne]`."""


def chosen_types(weights: Weights, type_name: str, arch: Architecture) -> dict[str, tuple[GGMLType, list[int]]]:
    """Return name -> type and `ne` of weights that are not F32, by request or requirement."""
    matrix = TYPES[type_name]
    types = {
        name: (matrix, list(ne))
        for name, _, ne in weights
        if matrix is not F32 and ne[1] > 1 and ne[0] % matrix.blck_size == 0 and not _STAY_F32.search(name)
    }
    for pattern, must in arch.types.items():
        types.update((name, (TYPES[must], list(ne))) for name, _, ne in weights if re.search(pattern, name))
    return types


def write_model(
    path: Path,
    stream: str,
    type_w: str,
    arch: Architecture,
    keys: Mapping[str, Value],
    weights: Weights,
    missing: Collection[str],
) -> None:
    """Write a GGUF file that llama.cpp loads: metadata, and weights from their recipes.

    `type_w` is the type of matrices that need not be F32; `missing` names weights that match `_OPTIONAL` but are
    required.
    """
    types = chosen_types(weights, type_w, arch)
    tensors: dict[str, Tensor] = {}
    for name, _, ne in weights:
        needed = not _OPTIONAL.search(name) or name in missing or _matches(arch.optional, name)
        if needed and not _matches(arch.absent, name):
            tensors[name] = new_tensor(types.get(name, (F32, []))[0], *ne, name=name)
    write_tensors(open_writer(path, arch.name, keys), tensors.values(), lambda t: make(recipe(stream, t), t))


def write_tensors(writer: GGUFWriter, tensors: Iterable[Tensor], data_of: Callable[[Tensor], Bytes]) -> None:
    """Write a GGUF file: the metadata that `writer` has, and the tensors."""
    from gguf import GGMLQuantizationType  # noqa: PLC0415  # takes a tenth of a start, and most never need it

    for t in tensors:
        n_dims = max([1, *(i + 1 for i, n in enumerate(t.ne) if n > 1)])
        raw = GGMLQuantizationType(t.type.id)
        writer.add_tensor(t.name, data_of(t).view(np.int8), raw_shape=t.ne[:n_dims][::-1], raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matches(pattern: str, name: str) -> bool:
    return bool(pattern) and re.search(pattern, name) is not None
