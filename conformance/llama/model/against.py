"""Compare the files of two models: metadata, tokenizer, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose

import numpy as np

from conformance.case.case import JSON

from . import blocks
from .blocks import Compared
from .finding import Finding, FindingKind
from .graphs import Say
from .modelfile import KeyValue, ModelFile, StoredTensor

SWAPS = 32
"""Maximum number of wrong tensors of one shape among which each is searched."""
CLOSE = 1e-6
"""Relative difference of equal numbers, which files store in 32 or 64 bits."""
_NEUTRAL = ("chat_template", "huggingface.json", "unknown_token_id", "padding_token_id", "seperator_token_id",
            "separator_token_id", "mask_token_id", "cls_token_id", ".context_length")  # fmt: skip
"""Ends of keys that leave the result of a prompt as it is."""


def header(a: ModelFile, b: ModelFile) -> Iterator[Finding]:
    """Yield differences of metadata, tokenizer, and the names and shapes of tensors."""
    if a.arch != b.arch:
        yield Finding(FindingKind.METADATA, "general.architecture", expected=b.arch, found=a.arch)
        return
    for key in dict.fromkeys([*b.keys, *a.keys]):
        if key.startswith((f"{a.arch}.", "tokenizer.")):
            yield from _key(key, a, b)
    for name, t in b.tensors.items():
        if name not in a.tensors:
            yield Finding(FindingKind.MISSING, name, expected=_shape(t))
        elif a.tensors[name].ne != t.ne:
            yield Finding(FindingKind.SHAPE, name, expected=_shape(t), found=_shape(a.tensors[name]))
    for name, t in a.tensors.items():
        if name not in b.tensors:
            yield Finding(FindingKind.EXTRA, name, found=_shape(t))


def _shape(t: StoredTensor) -> str:
    return f"{t.type}[{', '.join(map(str, t.ne))}]"


def _key(key: str, a: ModelFile, b: ModelFile) -> Iterator[Finding]:
    found, expected = (f.keys.get(key, _default(key, f)) for f in (a, b))
    kind = FindingKind.TOKENIZER if key.startswith("tokenizer.") else FindingKind.METADATA
    wrong = not key.endswith(_NEUTRAL) and ".chat_template" not in key
    if isinstance(found, (list, np.ndarray)) and isinstance(expected, (list, np.ndarray)):
        yield from _entries(key, kind, wrong, found, expected)
    elif not _equal(found, expected):
        yield Finding(kind, key, wrong, expected=_value(expected), found=_value(found))


def _entries(key: str, kind: FindingKind, wrong: bool, found: KeyValue, expected: KeyValue) -> Iterator[Finding]:
    assert isinstance(found, (list, np.ndarray))
    assert isinstance(expected, (list, np.ndarray))
    if len(found) != len(expected):
        yield Finding(kind, key, wrong, why="number of entries", expected=len(expected), found=len(found))
        return
    bad = [i for i, (x, y) in enumerate(zip(found, expected, strict=True)) if x != y and not _equal(x, y)]
    if bad:
        i = bad[0]
        yield Finding(kind, key, wrong, index=i, count=len(bad), of=len(found), expected=_value(expected[i]),
                      found=_value(found[i]))  # fmt: skip


def _equal(a: KeyValue | None, b: KeyValue | None) -> bool:
    numbers = (bool, int, float, np.number, np.bool_)
    if isinstance(a, numbers) and isinstance(b, numbers):
        return isclose(a, b, rel_tol=CLOSE)
    return type(a) is type(b) and bool(np.all(a == b))


def _value(value: KeyValue | None) -> JSON:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    return value if value is None or isinstance(value, (str, int, float)) else f"an array of {len(value)}"


def _default(key: str, file: ModelFile) -> KeyValue | None:
    """Return what llama.cpp takes for a key that is absent; None if nothing is known."""
    name = key.removeprefix(f"{file.arch}.")
    heads, width = file.number("attention.head_count"), file.number("embedding_length")
    known: Mapping[str, KeyValue | None] = {
        "rope.freq_base": 10000.0,
        "attention.head_count_kv": heads,
        "attention.causal": True,
        "vocab_size": len(tokens) if isinstance(tokens := file.keys.get("tokenizer.ggml.tokens"), list) else None,
        **dict.fromkeys(
            ("attention.key_length", "attention.value_length", "rope.dimension_count"),
            width // heads if heads and width else None,
        ),
    }
    return known.get(name)


def tensors(a: ModelFile, b: ModelFile, say: Say) -> Iterator[Finding]:
    """Yield differences of values, tensor by tensor; those of whole tensors at the end."""
    whole: dict[str, Compared] = {}
    inside = {t.name: t for t in b.readable()}
    for x in a.readable():
        y = inside.get(x.name)
        if y is None or x.ne != y.ne:
            continue
        say(f"comparing {x.name}")
        if not blocks.comparable(x, y):
            if x.type is not y.type or not np.array_equal(a.raw(x, 0, x.n_blocks), b.raw(y, 0, y.n_blocks)):
                yield Finding(FindingKind.VALUES, x.name, why="the numbers differ", expected=_shape(y), found=_shape(x))
            continue
        compared = blocks.compare(a, x, b, y)
        if compared.whole:
            whole[x.name] = compared
        elif len(compared.wrong):
            yield _blocks(x, compared)
    for name, compared in whole.items():
        say(f"searching for the values of {name}")
        peers = [n for n in whole if n != name and a.tensors[n].ne == a.tensors[name].ne]
        other = _holder(a, b, name, peers) if len(peers) < SWAPS else ""
        fit = compared.fit
        kind, why = (FindingKind.SWAPPED, "") if other else (FindingKind.VALUES, f"not the values of {b.path.name}")
        yield Finding(kind, name, other=other, cosine=fit.cosine, gain=fit.gain, why=why)


def _blocks(t: StoredTensor, compared: Compared) -> Finding:
    worst = int(compared.wrong[0])
    first = worst * compared.unit
    return Finding(FindingKind.VALUES, t.name, index=worst, per=compared.unit, row=first // t.ne[0],
                   count=len(compared.wrong), of=compared.n_units, excess=float(compared.excess[0]))  # fmt: skip


def _holder(a: ModelFile, b: ModelFile, name: str, peers: list[str]) -> str:
    """Return the tensor of `b` that has the values of a tensor of `a`, or an empty text."""
    fits = {n: blocks.fit(a, a.tensors[name], b, b.tensors[n]).cosine for n in peers}
    for n in sorted(peers, key=lambda n: -fits[n])[:3]:
        if not blocks.compare(a, a.tensors[name], b, b.tensors[n]).whole:
            return n
    return ""
