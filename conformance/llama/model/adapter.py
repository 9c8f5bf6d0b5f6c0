"""Check the factors of a LoRA adapter, by themselves and against the model.

A weight `[ne0, ne1, experts]` gets the product of `NAME.lora_b` `[rank, ne1, experts]` and `NAME.lora_a` `[ne0, rank,
experts]`. llama.cpp compares neither ranks nor experts when it loads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding, FindingKind
from .modelfile import ModelFile

_A, _B = ".lora_a", ".lora_b"
_TRANSPOSED = "token_embd.weight"
"""A weight whose rows are looked up: its factors are stored the other way round."""


def is_adapter(file: ModelFile) -> bool:
    """Return True for the file of an adapter."""
    return file.keys.get("general.type") == "adapter"


def _weights(file: ModelFile) -> list[str]:
    """Return the names of the weights that have a factor."""
    ends = (name.removesuffix(end) for name in file.tensors for end in (_A, _B) if name.endswith(end))
    return list(dict.fromkeys(ends))


def _whole(ne: tuple[int, ...]) -> tuple[int, ...]:
    return (*ne, *(1,) * (4 - len(ne)))


def header(file: ModelFile) -> Iterator[Finding]:
    """Yield factors without a partner, and pairs that differ in rank or in experts."""
    for name in _weights(file):
        a, b = (file.tensors.get(name + end) for end in (_A, _B))
        if a is None or b is None:
            there, lacking = (_B, _A) if a is None else (_A, _B)
            yield Finding(FindingKind.MISSING, name + lacking, why=f"there is {name}{there}")
        elif name != _TRANSPOSED:
            (_, rank, *experts), (width, _, *of_b) = _whole(a.ne), _whole(b.ne)
            if width != rank:
                yield Finding(FindingKind.SHAPE, b.name, why="ne[0] is the rank of lora_a", expected=rank, found=width)
            if of_b != experts:
                why = "lora_a and lora_b have as many experts"
                yield Finding(FindingKind.SHAPE, b.name, why=why, expected=experts[0], found=of_b[0])


def against(file: ModelFile, model: ModelFile) -> Iterator[Finding]:
    """Yield factors that do not fit the weights of a model."""
    if file.arch != model.arch:
        yield Finding(FindingKind.METADATA, "general.architecture", expected=model.arch, found=file.arch)
        return
    for name in _weights(file):
        a, b, weight = (f.tensors.get(n) for f, n in ((file, name + _A), (file, name + _B), (model, name)))
        if weight is None:
            yield Finding(FindingKind.EXTRA, name, why=f"{model.path.name} has no such weight")
            continue
        ne0, ne1, *experts = _whole(weight.ne)
        for t, side, size in ((a, 0, ne0), (b, 1, ne1)):
            if t is None or name == _TRANSPOSED:
                continue
            ne = _whole(t.ne)
            if ne[side] != size:
                yield Finding(FindingKind.SHAPE, t.name, why=f"ne[{side}] of {name}", expected=size, found=ne[side])
            if list(ne[2:]) != experts:
                why = f"experts of {name}, which llama.cpp does not check"
                yield Finding(FindingKind.SHAPE, t.name, why=why, expected=experts[0], found=ne[2])
