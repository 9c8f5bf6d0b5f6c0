"""The family `weight_placement`: the same weights in every kind of memory, and quantised tensors that are no weights.

`weight_placement/llama-w=q4_0,run=p5.d1,buffer=1,usage=any,weights=attn_q+ffn_up@7`: a decoder's id (`models.grammar`),
or a small graph's (`graphs`: `rows-w=q4_0@7`), and where weights lie: `weights` of these roles (the last part of their
names, `all` of them if left out) in the `buffer`-th buffer type that the backend offers, as `usage`. The bytes do not
depend on these three: the same id without them is the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from conformance.case.case import MAX_BUFFER, USAGES, Case, Placement
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import nelements
from conformance.suite.decoder import make
from conformance.suite.decoder.listed import elements
from conformance.suite.family import LEVELS, Family, Level
from conformance.suite.ops.grammar import Key, count, expand, read_keys, text, without, word

from . import graphs

NAME = "weight_placement"

KEYS: dict[str, Key] = {
    "buffer": count(0),
    "usage": word(*USAGES),
    "weights": text("all", "roles like attn_q joined by +"),
}
"""Where weights lie."""

_DECODER = "llama-l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64"
_EACH = "{attn_q|attn_k|attn_v|attn_output|ffn_gate|ffn_up|ffn_down|output|token_embd|attn_norm}"
_GRAPHS = "{rows|parts|both|input|computed|cache|experts}"
_K_QUANTS = _DECODER.replace("embd=64", "embd=256").replace("ff=64", "ff=256").replace("heads=2,kv=1", "heads=8,kv=2")

TABLE: dict[Level, tuple[str, ...]] = {
    "smoke": (
        "{rows|parts|input|computed|cache}-w=q4_0,buffer=1",
        "parts-w={q4_1|q5_0|mxfp4},buffer=1",
        "parts-w={q4_K|q6_K},d=256,buffer=1",
        f"{_DECODER},w=q4_0,tied=1,run=p5.d1,buffer=1",
        f"{_DECODER},w=q8_0,cache=q8_0,run=p5.d1,buffer=1,usage=any",
    ),
    "standard": (
        f"{_GRAPHS}-w={{f32|f16|bf16|q4_0|q4_1|q5_0|q8_0}},buffer=1",
        "{rows|parts|both|input|experts}-w={q4_K|q6_K|mxfp4},d=256,buffer=1",
        "activations-w={f16|bf16|q4_0|q8_0},buffer=1",
        "added-w=f32,buffer=1",
        "{rows|both|experts}-w={q4_0|q8_0},usage=any,buffer={0|1}",
        f"{_DECODER},w={{q4_0|q8_0}},run=p5.d1,buffer=1,weights={_EACH}",
        f"{_DECODER},w={{f32|f16|q4_0|q8_0}},run=p5.d1,buffer=1,usage={{weights|any}}",
        f"{_DECODER},w={{f16|q4_0|q8_0}},tied=1,run=p5.d1,buffer={{0|1|2}}",
        f"{_K_QUANTS},w={{q4_K|q6_K}},tied=1,run=p5.d1,buffer=1",
        f"{_DECODER},w=q4_0,qkv=fused,qkvbias=1,run=p5.d1,buffer=1",
        f"{_DECODER},w=q4_0,{{cache=q8_0|cache=q4_0|cache=q8_0,cache_v=q4_0}},run=p5.d1,buffer=1",
        f"{_DECODER},w=q4_0,fa=0,cache={{q8_0|q4_0}},cache_v=f16,run=p5.d1,buffer=1",
        f"{_DECODER},attn_q=q4_0,attn_k=q8_0,attn_v=f16,ffn_up=q4_1,ffn_down=q5_0,output=bf16,run=p5.d1,buffer=1",
        "gpt-oss-l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64,w={f16|q4_0|mxfp4},run=p5.d1,buffer=1",
        "{qwen3|gemma2|lfm2}-l=2,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64,w=q4_0,run=p5.d1,buffer=1",
    ),
    "full": (
        f"{_DECODER.replace('l=1', 'l=2')},w={{q4_0|q8_0|f16}},run=at250.p5.d3,buffer={{1|2}},weights={_EACH}",
        f"{_K_QUANTS},w={{q4_K|q6_K}},run=p5.d1,buffer=1,weights={_EACH}",
    ),
}
"""Level -> ids without family and seed that it adds."""


def ids(level: Level) -> Sequence[str]:
    """Case ids of a level and those below it, smallest first in each."""
    return _ids(level)


@cache
def _ids(level: Level) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for each in LEVELS[: LEVELS.index(level) + 1]:
        bodies = [body for pattern in TABLE[each] for body in expand(pattern)]
        found |= dict.fromkeys(with_seed(body) for body in sorted(bodies, key=_size))
    return tuple(found)


def _size(body: str) -> int:
    bare, _ = without(body, KEYS)
    if bare.partition("-")[0] not in graphs.KINDS:
        return elements(bare)
    return sum(map(nelements, graphs.build(f"{NAME}/{bare}@0", NAME).persistent))


def with_seed(body: str) -> str:
    """The id of a table's row; placements of one model have one seed."""
    return f"{NAME}/{body}@{zlib.crc32(without(body, KEYS)[0].encode()) % 1000}"


def build(case_id: str) -> Case:
    """The case behind an id.

    Raises:
        UsageError: the id cannot be read, no graph can be built from it, or no weight has such a role.
    """
    head, at, seed = case_id.rpartition("@")
    family, _, body = head.partition("/")
    if family != NAME or not at:
        raise UsageError(f"case {case_id!r}: {NAME}/WHAT-key=value,key=value@seed expected")
    bare, placed = without(body, KEYS)
    values, given = read_keys(case_id, placed, KEYS)
    if not 0 <= values["buffer"] <= MAX_BUFFER:
        raise UsageError(f"case {case_id!r}: buffer: 0 to {MAX_BUFFER} expected, {values['buffer']} found")
    case = _bare(f"{NAME}/{bare}@{seed}")
    caches = frozenset(case.caches())
    roles = {t: t.name.removesuffix(".weight").rpartition(".")[2] for t in case.persistent if t not in caches}
    wanted = values["weights"].split("+")
    if unknown := set(wanted) - {*roles.values(), "all"}:
        raise UsageError(
            f"case {case_id!r}: weights: {', '.join(sorted(unknown))} found; {sorted(set(roles.values()))}"
        )
    place = Placement(values["buffer"], values["usage"])
    placement = {t: place for t, role in roles.items() if "all" in wanted or role in wanted}
    return replace(case, id=case_id, params={**case.params, **given}, placement=placement)


def _bare(case_id: str) -> Case:
    body = case_id.partition("/")[2]
    return graphs.build(case_id, NAME) if body.partition("-")[0] in graphs.KINDS else make(case_id)


FAMILY = Family(NAME, "weights in every kind of memory, and quantised tensors that are no weights", ids, build)
