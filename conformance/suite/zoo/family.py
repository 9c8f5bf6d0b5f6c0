"""The family `zoo`: graphs and results of llama.cpp itself, for every architecture it knows.

An id is `zoo/ARCH-key=value,key=value@seed`; a key left out has its default. `seqs` sequences of `ctx` cells each (or,
`unified=1`, together), flash attention `fa`, `swa=window` for a small cache where the attention window slides, cache
types `cache` and `cache_v`, tokens per graph `ubatch`, type of the matrices `w`, `real=1` without the weights that
llama.cpp can do without, `nodes=2` with the value of every node of the first two graphs, `set` of metadata keys
(`set=block_count:1+attention.head_count:2/0`) and the plan `run` (`cases.plan`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import cache

from conformance.case.case import Case
from conformance.case.recipe import MAKEABLE
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.types import TYPES
from conformance.suite.family import LEVELS, Family, Key, Level, expand, keys, read_keys, text

from . import model
from .capture import Request, capture
from .model import Value, full_key, parse_value

NAME = "zoo"
_MEMORY = 8
"""Cases to remember, so that the next backend need not record them again."""

_CACHES = tuple(t for t in ("f16", *TYPES))
_WEIGHTS = ("f32", *(t for t in TYPES if t in MAKEABLE - {"f32"}))

KEYS: dict[str, Key] = {
    **keys("seqs=1 unified=|0|1 fa=|0|1 swa=full|window"),
    **keys(f"cache={'|'.join(_CACHES)} cache_v=|{'|'.join(_CACHES)} ctx=256 ubatch=512 w={'|'.join(_WEIGHTS)}"),
    **keys("real=0|1 nodes=0"),
    "set": text("", "KEY:VALUE joined by +"),
    "run": text("p5.d4", "a plan like p5.d4"),
}
"""Key -> its grammar; `unified` and `fa` left out are the architecture's own."""

_ID = re.compile(r"(?P<arch>[a-z0-9_.-]+?)(?:-(?P<keys>[a-z_]+=.*))?", re.ASCII)
_BOTH = "seqs=2,nodes=2"
"""Two sequences; the prefill and the first decode step are also compared node by node."""
TABLE: dict[Level, tuple[str, ...]] = {
    "smoke": (
        "qwen3-seqs=2,nodes=1,set=block_count:1",
        "gpt-oss-seqs=2,set=block_count:1",
        "lfm2-seqs=2",
        "rwkv7-seqs=2,set=block_count:1",
    ),
    "standard": (),
    "full": (
        "[llama|qwen3|gemma2|gpt-oss|falcon|deepseek2|lfm2|bloom|grok]-seqs=2,fa=0",
        "[llama|gemma2|gpt-oss|qwen3next]-seqs=3,[unified=0|unified=1],run=p5+3+7.d2.rm1.d2.add1.p2.d1",
        "[llama|gemma3|phi3]-seqs=2,[cache=q8_0|cache=f32|cache=bf16]",
        "[llama|qwen2|olmo2|gpt-oss|command-r]-seqs=2,w=[q4_0|q8_0]",
        "[llama|qwen3|gemma2|gpt-oss|lfm2]-seqs=2,real=1",
        "[llama|gemma2|phi2|qwen2moe]-run=p20.d2.shift5.d2.back2.p4.d1",
        "[llama|mamba|qwen3next|t5]-run=p7.d1.reset.p9.d2",
        "[llama|gpt-oss|mamba2|rwkv6]-seqs=2,ubatch=16,run=p20.d2",
        "llama-seqs=3,unified=1,run=p9.cp0.d3",
        "llama-ctx=512,run=p253.d6",
    ),
}
"""Level -> ids without family and seed that it adds; `standard` also has every architecture that runs."""


def ids(level: Level) -> Sequence[str]:
    """Case ids of a level and those below it.

    Raises:
        UnavailableError: there is no llama.cpp here.
    """
    find_library()
    return _ids(level)


def find_library() -> None:
    """Whether there is a llama.cpp here.

    Raises:
        UnavailableError: there is none; says how to get it.
    """
    from conformance.ggml.lib.library import find  # noqa: PLC0415  # every command imports this family

    find()


@cache
def _ids(level: Level) -> tuple[str, ...]:
    bodies: dict[str, None] = {}
    for name in LEVELS[: LEVELS.index(level) + 1]:
        bodies.update(dict.fromkeys(with_seed(body) for pattern in TABLE[name] for body in expand(pattern)))
        if name == "standard":
            bodies.update(dict.fromkeys(with_seed(f"{arch}-{_BOTH}") for arch in model.runnable()))
    return tuple(bodies)


def with_seed(body: str) -> str:
    """The id of a table's row: its seed comes from its text, so that rows added elsewhere change nothing."""
    return f"{NAME}/{body}@{zlib.crc32(body.encode()) % 1000}"


def read(case_id: str, lib: str = "") -> tuple[Request, str, dict[str, Value], bool]:
    """Parse an id: the request, the architecture, its metadata keys, and whether it lacks all optional weights.

    Raises:
        UsageError: the id cannot be read, or the architecture does not run.
    """
    head, _, seed = case_id.rpartition("@")
    family, _, body = head.partition("/")
    match = _ID.fullmatch(body)
    if family != NAME or match is None or not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        raise UsageError(f"case {case_id!r}: {NAME}/ARCH-key=value,key=value@seed expected")
    values, params = read_keys(case_id, match["keys"] or "", KEYS)
    arch = model.architecture(match["arch"])
    keys = {**arch.keys, **dict(_setting(case_id, arch.name, item) for item in values["set"].split("+") if item)}
    request = Request(
        id=case_id,
        stream=case_id,
        lib=lib,
        plan=values["run"],
        n_ctx=values["ctx"],
        n_seq_max=values["seqs"],
        n_ubatch=values["ubatch"],
        unified=values["unified"] == "1" if values["unified"] else arch.unified,
        flash_attn=values["fa"] == "1" if values["fa"] else arch.flash_attn,
        swa_full=values["swa"] == "full",
        type_k=values["cache"],
        type_v=values["cache_v"] or values["cache"],
        type_w=values["w"],
        nodes=values["nodes"],
        embeddings=arch.encodes,
        family=NAME,
        params={"arch": arch.name, **params},
        seed=int(seed),
        provenance={"arch": arch.name, "keys": keys},
    )
    return request, arch.name, keys, values["real"] == "1" or bool(arch.absent)


def _setting(case_id: str, arch: str, item: str) -> tuple[str, Value]:
    key, colon, value = item.partition(":")
    if not colon or not key:
        raise UsageError(f"case {case_id!r}: set: KEY:VALUE expected, {item!r} found")
    return full_key(arch, key), parse_value(f"[{value.replace('/', ',')}]" if "/" in value else value)


def make(case_id: str, lib: str = "") -> Case:
    """The case of an id: llama.cpp runs it, in a process of its own.

    Raises:
        UsageError: the id cannot be read, or llama.cpp refuses it; gives its reason.
        UnavailableError: there is no llama.cpp here.
    """
    request, arch, keys, whole = read(case_id, lib)
    try:
        return capture(request, arch, keys, whole=whole)
    except UsageError as e:
        raise UsageError(f"case {case_id!r}: {e}") from None


_cases: dict[str, Case] = {}


def build(case_id: str) -> Case:
    """As `make`; remembers the last few."""
    if case_id not in _cases:
        _cases[case_id] = make(case_id)
        while len(_cases) > _MEMORY:
            del _cases[next(iter(_cases))]
    return _cases[case_id]


def available() -> str:
    """Why nothing can be recorded here, or ""."""
    try:
        find_library()
    except UnavailableError as e:
        return str(e)
    return ""


FAMILY = Family(
    NAME,
    "graphs of every architecture that llama.cpp knows, held against what it computed",
    ids,
    build,
    lacks=model.lacks,
)
