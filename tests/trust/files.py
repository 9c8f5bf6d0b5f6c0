"""Draw damages in the files of models, and healthy pairs, to see which `check-model --compare` names.

A model is one of the zoo's architectures. Its values are drawn again, unlike noise: heavy tails, channels of very
different size, few values, and blocks that repeat. The real ggml quantises them, in half of the cases with an
importance matrix.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.library import Library
from conformance.ggml.quants import from_float
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.types import F32, TYPES, GGMLType
from conformance.llama.live.llama import Device
from conformance.llama.model import against, layers, plausible
from conformance.llama.model.finding import Finding, FindingKind
from conformance.llama.model.graphs import silent
from conformance.llama.model.llama_process import LlamaProcess, alone
from conformance.llama.model.modelfile import ModelFile, read
from conformance.llama.zoo import family, model

ARCHITECTURES = ("llama", "qwen3", "gemma2", "phi3", "falcon", "deepseek2", "olmoe", "lfm2")
SOURCES = ("f32", "f16", "bf16", "q8_0")
QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs",
             "iq3_s", "iq2_s", "mxfp4", "f16", "bf16")  # fmt: skip
PROMPT = [3, 14, 15, 92, 65]
DISTRIBUTIONS = ("normal", "tails", "channels", "few", "repeated")
F = NDArray[np.float32]


@dataclass(slots=True)
class Draft:
    """A model's file before it is written."""

    arch: str
    keys: dict[str, Any]
    types: dict[str, GGMLType]
    ne: dict[str, tuple[int, ...]]
    raw: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def write(self, path: Path) -> ModelFile:
        """Write the file and read it."""
        self._write(path, list(self.raw))
        return read(path)

    def split(self, folder: Path, *parts: Sequence[str]) -> list[Path]:
        """Write files of some of the tensors each, as llama-gguf-split does."""
        paths = [folder / f"{self.arch}-{k:05}-of-{len(parts):05}.gguf" for k in range(1, len(parts) + 1)]
        for k, (path, names) in enumerate(zip(paths, parts, strict=True)):
            numbers = {"split.no": k, "split.count": len(parts)}
            if k == 0:
                numbers["split.tensors.count"] = len(self.raw)
            self._write(path, names, numbers)
        return paths

    def _write(self, path: Path, names: Sequence[str], numbers: Mapping[str, int] = {}) -> None:
        with closing(model.open_writer(path, self.arch, {} if numbers.get("split.no") else self.keys)) as writer:
            for key, number in numbers.items():
                (writer.add_int32 if key == "split.tensors.count" else writer.add_uint16)(key, number)
            for name in names:
                data = self.raw[name]
                kind = GGMLQuantizationType(self.types[name].id)
                writer.add_tensor(name, data.view(np.int8), raw_shape=self.ne[name][::-1], raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()


def zoo(arch: str, folder: Path) -> ModelFile:
    """A model of an architecture as the zoo makes it, with three layers where it has as many of one kind."""
    path = folder / f"{arch}.gguf"
    if not path.exists():
        request, name, keys, _ = family.read(f"zoo/{arch}-w=f32@0")
        family.make_model(path, request, name, keys)
    return read(path)


def drafted(file: ModelFile) -> Draft:
    """A draft of a file, to be written in another way."""
    keys = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in file.keys.items()}
    of = {t.name: t.type for t in file.tensors.values() if t.type is not None}
    raw = {t.name: file.raw(t, 0, t.n_blocks).view(np.uint8).reshape(-1) for t in file.readable()}
    return Draft(file.arch, keys, of, {t.name: t.ne for t in file.tensors.values()}, raw)


def draw_values(t: F, rng: np.random.Generator, kind: str) -> F:
    """Values of a tensor with another distribution, of about the same size."""
    x = rng.standard_normal(t.shape) * t.std()
    if kind == "tails":
        x = rng.standard_t(3, t.shape) * t.std()
    elif kind == "channels":
        x = x * np.exp(1.5 * rng.standard_normal(t.shape[-1])) * np.exp(rng.standard_normal((*t.shape[:-1], 1)))
    elif kind == "few":
        x = x * (rng.random(t.shape) < 0.2)
    elif kind == "repeated":
        x = np.round(x / t.std()) * t.std() / 2
    return np.asarray(x, np.float32)


def vocabulary(n: int, bpe: bool) -> dict[str, Any]:
    """The tables of a tokenizer with `n` tokens."""
    texts = [f"t{i:x}" for i in range(n)]
    if not bpe:
        kinds = [3, 3, 3, *[1] * (n - 3)][:n]
        tables = {"model": "llama", "tokens": texts, "scores": [0.0, 0.0, 0.0, *(-float(i) for i in range(n - 3))][:n]}
    else:
        half = n // 2
        texts[half:] = [texts[i % half] + texts[(7 * i + i // half) % half] for i in range(half, n)]
        merges = [f"{texts[i % half]} {texts[(7 * i + i // half) % half]}" for i in range(half, n)]
        kinds, tables = [1] * n, {"model": "gpt2", "pre": "default", "tokens": texts, "merges": merges}
    return {f"tokenizer.ggml.{k}": v for k, v in {**tables, "token_type": kinds, "bos_token_id": 1}.items()}


def quantised(type_: GGMLType, x: F, importance: F | None) -> NDArray[np.uint8]:
    """Bytes of a type as the real ggml writes them."""
    if not type_.is_quantized:
        return np.ascontiguousarray(from_float(type_, x)).view(np.uint8).reshape(-1)
    quantise = Library().function("ggml_quantize_chunk")
    assert quantise is not None
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = (ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p)
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    out = np.empty(x.size // type_.blck_size * type_.type_size, np.uint8)
    weights = None if importance is None else importance.ctypes.data
    assert quantise(type_.id, rows.ctypes.data, out.ctypes.data, 0, *rows.shape, weights) == out.nbytes
    return out


@dataclass(frozen=True, slots=True)
class Pair:
    """Two files of one model."""

    words: str
    a: Draft
    b: Draft

    def findings(self, folder: Path) -> list[Finding]:
        """Return all findings of the comparison, worst first."""
        a, b = self.a.write(folder / "a.gguf"), self.b.write(folder / "b.gguf")
        found = [*against.header(a, b), *against.tensors(a, b, silent), *self.alone(folder)]
        return sorted(found, key=lambda f: f.rank)

    def layer(self, folder: Path) -> Finding | None:
        """Return the first node that differs by more than the types cost, for a prompt of five tokens.

        None if there is none, or if llama.cpp refuses a file.
        """
        files = layers.Files(self.a.write(folder / "a.gguf"), self.b.write(folder / "b.gguf"))
        with suppress(UsageError):
            a, b = (_recorded(file) for file in (files.a, files.b))
            return layers.first(files, a, b, CpuBackend(), silent)
        return None

    def alone(self, folder: Path) -> list[Finding]:
        """Return the findings for the first file without the second."""
        a = self.a.write(folder / "a.gguf")
        return [*plausible.header(a), *plausible.values(a, silent)]


def _recorded(file: ModelFile) -> Case:
    """Return the graph that llama.cpp builds for the prompt."""
    with closing(LlamaProcess(file.path, Device("llama.cpp"))) as llama:
        return llama.record(alone(PROMPT))[1]


def healthy(seed: int, folder: Path, archs: Sequence[str] = ARCHITECTURES) -> Pair:
    """Draw a model and two types of it."""
    r, rng = random.Random(seed), np.random.default_rng(seed)  # noqa: S311  # no secret
    arch, kind, to = r.choice(archs), r.choice(DISTRIBUTIONS), r.choice(QUANTISED)
    of = r.choice([s for s in (*SOURCES, "q4_0") if s != to])
    weighted = r.random() < 0.5
    base = zoo(arch, folder)
    keys: dict[str, Any] = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in base.keys.items()}
    if "token_embd.weight" in base.tensors:
        keys |= vocabulary(base.tensors["token_embd.weight"].ne[1], r.random() < 0.5)
    ne = {t.name: t.ne for t in base.tensors.values()}
    drafts = [Draft(arch, dict(keys), {}, ne) for _ in range(2)]
    for t in base.readable():
        x = base.values(t, 0, t.n_blocks).reshape(t.ne[::-1])
        if len(t.ne) > 1 and t.ne[1] > 1:
            x = draw_values(x, rng, kind)
        importance = np.exp(rng.standard_normal(x.shape[-1])).astype(np.float32)
        for draft, name in zip(drafts, (to, of), strict=True):
            type_ = TYPES[name]
            type_ = type_ if len(t.ne) > 1 and t.ne[1] > 1 and t.ne[0] % type_.blck_size == 0 else F32
            draft.types[t.name] = type_
            weights = importance if weighted and draft is drafts[0] else None
            draft.raw[t.name] = quantised(type_, x, weights)
    words = f"{arch}, {kind} values: {to}{' by importance' if weighted else ''} of {of}"
    return Pair(words, *drafts)


# -- damages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damaged:
    """A pair of which `a` is damaged, and what must be named."""

    pair: Pair
    words: str
    where: tuple[str, ...]
    """Tensors or keys."""
    value: int | None = None
    """Number of a value in the damaged block; None if the whole tensor is concerned."""

    def named(self, found: Sequence[Finding]) -> bool:
        """True if a wrong finding names each place and its block, and none another place."""
        wrong = [f for f in found if f.wrong]
        right = [f for f in wrong if f.where in self.where and (
            self.value is None or (f.index is not None and f.per and f.index == self.value // f.per))]  # fmt: skip
        beside = [f for f in wrong if f.where not in self.where]
        return {f.where for f in right} == set(self.where) and all(
            f.kind is FindingKind.TOKENIZER and "tokenizer" in self.where[0] for f in beside
        )


Damage = Callable[[Draft, random.Random], tuple[str, tuple[str, ...], int | None]]
"""Changes a draft; returns words, the places, and a value of the block."""


def _block(draft: Draft, r: random.Random) -> tuple[str, int, NDArray[np.uint8]]:
    """Draw a tensor in the draft's own type, and a block of it that is not zero."""
    name = r.choice([n for n, t in draft.types.items() if t is not F32 or len(draft.ne[n]) > 1])
    type_ = draft.types[name]
    size = type_.type_size if type_.is_quantized else 32 * type_.type_size
    draft.raw[name] = draft.raw[name].copy()
    blocks = draft.raw[name].reshape(-1, size)
    k = r.choice(np.flatnonzero(blocks.any(axis=1)).tolist())
    return name, k, blocks[k]


def _scaled(factor: float, words: str) -> Damage:
    def damage(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
        name, k, block = _block(draft, r)
        type_ = draft.types[name]
        by = factor if factor < 0 else (factor * r.uniform(1, 4)) ** r.choice((-1, 1))
        if not type_.is_quantized:
            values = block.view(type_.dtype) if type_.dtype else (block.view("<u2").astype("<u4") << 16).view("<f4")
            block[:] = np.ascontiguousarray(from_float(type_, values.astype(np.float32) * by)).view(np.uint8)
        elif type_.name == "mxfp4":
            block[0] ^= 4  # an exponent: its scale has no sign
        else:
            fields = block.view(BLOCK[type_])
            fields["d"] *= by
        per = type_.blck_size if type_.is_quantized else 32
        return f"{words} ({by:.3g}) of block {k} of {name} ({type_})", (name,), k * per

    return damage


def _noise(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    name, k, block = _block(draft, r)
    type_ = draft.types[name]
    n = len(block)
    block[n // 4 : n // 4 + n // 2] = np.frombuffer(r.randbytes(n // 2), np.uint8)
    return (
        f"random bytes in block {k} of {name} ({type_})",
        (name,),
        k * (type_.blck_size if type_.is_quantized else 32),
    )


def _swap(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    pairs = [(x, y) for x in draft.ne for y in draft.ne if x < y and draft.ne[x] == draft.ne[y]
             and draft.types[x] is draft.types[y] and not np.array_equal(draft.raw[x], draft.raw[y])]  # fmt: skip
    x, y = r.choice(pairs)
    draft.raw[x], draft.raw[y] = draft.raw[y], draft.raw[x]
    return f"{x} and {y} swapped", (x, y), None


def _rotate(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    name = r.choice([n for n, ne in draft.ne.items() if len(ne) > 1 and ne[1] > 8])
    by = r.randint(1, draft.ne[name][1] - 1)
    draft.raw[name] = np.roll(draft.raw[name].reshape(draft.ne[name][1], -1), by, axis=0).reshape(-1)
    return f"{by} rows of {name} at the wrong end", (name,), None


def _not_a_number(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    name = r.choice([n for n, t in draft.types.items() if t is F32])
    data = draft.raw[name].copy()
    k = r.randrange(data.size // 4)
    data.view("<f4")[k] = np.nan
    draft.raw[name] = data
    return f"NaN at {k} of {name}", (name,), k


def _norm(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    name = r.choice([n for n in draft.ne if "norm" in n])
    del draft.raw[name]
    return f"{name} is missing", (name,), None


def _key(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    keys = [
        k
        for k, v in draft.keys.items()
        if k.startswith(f"{draft.arch}.")
        and k.endswith(("freq_base", "_epsilon", "head_count", "head_count_kv", "dimension_count"))
        and isinstance(v, (int, float))
    ]
    key = r.choice(keys)
    by = r.choice((2, 10, 100))
    draft.keys[key] *= by
    return f"{key} times {by}", (key,), None


def _table(draft: Draft, r: random.Random) -> tuple[str, tuple[str, ...], int | None]:
    tables = [k for k, v in draft.keys.items() if k.startswith("tokenizer.ggml.") and isinstance(v, list)]
    if not tables:
        return _key(draft, r)
    key = r.choice(tables)
    table = list(draft.keys[key])
    if r.random() < 0.3:
        table = table[:-1]
    else:
        i = r.randrange(1, len(table))
        table[i] = {str: "damaged", int: 2, float: -0.5}[type(table[i])]
    draft.keys[key] = table
    return f"an entry of {key}", (key,), None


DAMAGES: Mapping[str, Damage] = {
    "negated": _scaled(-1.0, "scale negated"), "scaled": _scaled(2.0, "scale multiplied"), "noise": _noise,
    "swapped": _swap, "rotated": _rotate, "nan": _not_a_number, "norm": _norm, "key": _key, "table": _table,
}  # fmt: skip


def damaged(seed: int, folder: Path, archs: Sequence[str] = ARCHITECTURES, kind: str = "") -> Damaged:
    """Draw a pair and damage its first file."""
    r, pair = random.Random(f"damage {seed}"), healthy(seed, folder, archs)  # noqa: S311  # no secret
    a = replace(pair.a, keys=dict(pair.a.keys), raw=dict(pair.a.raw))
    words, where, value = DAMAGES[kind or r.choice([*DAMAGES])](a, r)
    return Damaged(replace(pair, a=a), f"{pair.words}; {words}", where, value)
