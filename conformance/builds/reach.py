"""Which case reaches which function of ggml: measured on the pinned wheel, else by names.

`reach.json.xz` has the functions that each case of `standard` reaches on the CPU; `ci/reach.py` writes it. A function
that the wheel lacks, a shader, and a case that is not in the file are matched by the names of op and types.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from conformance import shipped

from .code import shown
from .difference import Difference

FILE = shipped.path("builds", "reach.json.xz")
REPACK = "?buffer=CPU_REPACK"
SETUPS: Mapping[str, re.Pattern[str]] = {
    "": re.compile(""),
    REPACK: re.compile(r"ops/(MUL_MAT|MUL_MAT_ID)-|(?!ops|tbo)"),
}
"""Options of the adapter `ggml` -> the cases that are measured with them."""
SHARED, MOST = 0.25, 0.9
"""Shares of ops, and of cases, above which a function is shared: a case per op shows it."""
FEW = 8
"""Fewest ops for such a share."""
_KEY = re.compile(r"[^-(@]*(?:-[^-(@,=]*)?")
_WORDS = re.compile(r"[a-z0-9]+")
_OP = re.compile(r"(?:UNARY|GLU)\.")
_KERNEL = re.compile(r"compute_forward|_vec_|gem[mv]|quantize|repack|apply_|tinyBLAS|mul_mat|_vk_|opencl|cuda")
"""Pattern for functions that compute, whose names have the op."""
_QUANT = re.compile(r"(?<![a-z0-9])(iq[1-4]_[a-z]+|t?q[1-8]_[0-9k]|mxfp4|nvfp4)(?![a-z0-9])")
ALIASES: Mapping[str, str] = {
    "flash_attn": "flash_attn_ext", "fa": "flash_attn_ext",
    "matmul": "mul_mat", "mul_mm": "mul_mat", "mul_mv": "mul_mat", "mul_mmq": "mul_mat", "gemm": "mul_mat",
    "gemv": "mul_mat", "vec_dot": "mul_mat", "tinyblas": "mul_mat", "split_k_reduce": "mul_mat",
    "dequant": "mul_mat", "dequantize": "mul_mat", "quantize": "mul_mat", "quantize_row": "mul_mat",
    "matmul_id": "mul_mat_id", "mul_mv_id": "mul_mat_id", "mul_mat_vec_id": "mul_mat_id",
    "copy": "cpy", "contig_cpy": "cont", "softmax": "soft_max", "multi_add": "add", "topk": "top_k",
    "wkv6": "rwkv_wkv6", "wkv7": "rwkv_wkv7",
}  # fmt: skip
"""Words of kernels -> the op that they compute, where they do not have its name."""


@dataclass(frozen=True, slots=True)
class Impact:
    """The cases that changed code concerns."""

    cases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Function or shader -> the cases that reach it, most telling first; without `shared` ones."""
    shared: Sequence[str] = ()
    """Functions that over `SHARED` of the cases reach."""
    unreached: Sequence[str] = ()
    """Functions and shaders that no case reaches."""

    @property
    def reached(self) -> set[str]:
        """The cases that reach a changed function other than a shared one."""
        return {i for ids in self.cases.values() for i in ids}

    def first(self) -> list[str]:
        """Return `reached` in running order: a case of each function, then another of each.

        Functions of few cases come first, since the others get more of the time anyway.
        """
        place: dict[str, tuple[int, int]] = {}
        for name in self.cases:
            for n, i in enumerate(self.cases[name]):
                rank = (n, len(self.cases[name]))
                place[i] = min(rank, place.get(i, rank))
        return sorted(place, key=place.__getitem__)


class Reach:
    """The functions that cases reach in one setup of the CPU."""

    def __init__(self, functions: Sequence[str], sets: Sequence[Sequence[int]], of: Mapping[str, int]) -> None:
        self._functions = {name: n for n, name in enumerate(functions)}
        self._sets = [frozenset(s) for s in sets]
        self._of = of
        self._by_key: dict[str, set[int]] = defaultdict(set)
        for i, n in of.items():
            self._by_key[_key(i)].add(n)

    @property
    def cases(self) -> frozenset[str]:
        """The measured cases."""
        return frozenset(self._of)

    def knows(self, function: str) -> bool:
        """Return True if it was measured whether cases reach the function."""
        return function in self._functions

    def reaching(self, function: str, ids: Sequence[str]) -> list[str]:
        """Return the cases of `ids` that reach a function that `knows`."""
        number = self._functions[function]
        having = {n for n, s in enumerate(self._sets) if number in s}
        return [i for i in ids if (self._of[i] in having if i in self._of else self._by_key[_key(i)] & having)]


@cache
def measured(setup: str = "") -> Reach:
    """Return what was measured in a setup of `SETUPS`."""
    document = json.loads(lzma.decompress(FILE.read_bytes()))
    found = document["setups"][setup]
    names = found["cases"].split("\n")
    return Reach(document["functions"], found["sets"], dict(zip(names, found["of"], strict=True)))


def code_of(found: Difference, options: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the changed code that a backend can run, and its setup of `SETUPS`.

    That is functions on the CPU; elsewhere shaders, kernels in text, and functions that the CPU's library lacks.
    """
    device = options.get("device", "CPU").upper()
    if device.startswith(("CPU", "RPC")):
        setup = REPACK if options.get("buffer") == "CPU_REPACK" else ""
        return [] if found.rebuilt else [*found.functions.differ, *found.tables.differ], setup
    own = [n for n in found.functions.differ if not measured().knows(n)]
    return [*own, *found.shaders.differ, *found.sources.differ], ""


def impact(changed: Iterable[str], ids: Sequence[str], setup: str = "") -> Impact:
    """Return which of `ids` reach changed code in a setup of `SETUPS`.

    The order of `ids` is kept.
    """
    reach = measured(setup)
    named = _Named(ids)
    cases: dict[str, list[str]] = {}
    shared: list[str] = []
    unreached: list[str] = []
    every = _ops(ids)
    for name in dict.fromkeys(changed):
        is_kernel = not name.startswith(("ggml_", "_Z", "gguf_")) or _KERNEL.search(name)
        by_name = named.of(shown(name)) if is_kernel and not reach.knows(name) else []
        found = reach.reaching(name, ids) if reach.knows(name) else by_name
        if not found:
            unreached.append(name)
        elif _is_shared(found, ids, every):
            shared.append(name)
        else:
            cases[name] = found
    return Impact(cases, shared, unreached)


def _ops(ids: Iterable[str]) -> set[str]:
    """Return the ops of the family `ops` that have a case."""
    return {op for family, _, op in (_key(i).partition("-")[0].partition("/") for i in ids) if family == "ops"}


def _is_shared(found: Sequence[str], ids: Sequence[str], every: Collection[str]) -> bool:
    return len(found) > MOST * len(ids) or (len(every) >= FEW and len(_ops(found)) > SHARED * len(every))


class _Named:
    """Cases by the words in the names of functions."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._of: dict[str, list[str]] = defaultdict(list)
        for i in ids:
            family, _, rest = _key(i).partition("/")
            if family == "ops":
                self._of[_OP.sub("", rest.partition("-")[0]).lower()].append(i)

    def of(self, text: str) -> list[str]:
        """Return the cases of the ops in a name, and of the quantised types if it has any."""
        words = _WORDS.findall(text.lower().replace("kernel_", ""))
        ops = dict.fromkeys(self._ops(words))
        found = [i for op in ops for i in self._of[op]]
        types = set(_QUANT.findall("_".join(words)))
        return [i for i in found if not types or types & set(re.split(r"[-+,=]", i.lower()))]

    def _ops(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the longest names of ops among the words, from left to right."""
        at = 0
        while at < len(words):
            for end in range(min(len(words), at + 5), at, -1):
                name = "_".join(words[at:end])
                op = ALIASES.get(name, name)
                if op in self._of:
                    yield op
                    at = end - 1
                    break
            at += 1


def _key(case_id: str) -> str:
    """Return op and types of a case: `ops/MUL_MAT-q4_0+f32`."""
    return _KEY.match(case_id)[0]  # type: ignore[index]  # an empty text at least
