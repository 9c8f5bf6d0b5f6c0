"""The family `blocks`: each architecture's sublayers alone: attention, feed-forward, recurrence, norm and residual.

`blocks/llama-fa=0,run=p5.d1,layer=0,block=attention@7`: the id of a decoder (`models.grammar`), or, for architectures
that the builder does not know, of a recording (`zoo.family`; only where llama.cpp is installed), and which block.
Weights and caches are the whole model's; what comes from the layers before is drawn anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.suite.decoder import make
from conformance.suite.decoder.grammar import split_arch
from conformance.suite.family import LEVELS, Family, Level
from conformance.suite.ops.grammar import Key, count, expand, read_keys, text, without
from conformance.suite.zoo import family as zoo
from conformance.suite.zoo import model

from .cut import Block, alone
from .table import TABLE, ZOO_TABLE

NAME = "blocks"

KEYS: dict[str, Key] = {"layer": count(0), "block": text("attention", "a block's name")}
"""Which block."""


def ids(level: Level) -> Sequence[str]:
    """Case ids of a level and those below it; those of recordings where llama.cpp is there to make them."""
    return _ids(level, recorded=not zoo.available())


@cache
def _ids(level: Level, *, recorded: bool) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for each in LEVELS[: LEVELS.index(level) + 1]:
        rows = (*TABLE[each], *(ZOO_TABLE[each] if recorded else ()))
        found |= dict.fromkeys(with_seed(body) for pattern in rows for body in expand(pattern))
    return tuple(found)


def with_seed(body: str) -> str:
    """The id of a table's row; blocks of one model have one seed, and so one model."""
    return f"{NAME}/{body}@{zlib.crc32(without(body, KEYS)[0].encode()) % 1000}"


def build(case_id: str) -> Case:
    """The case behind an id.

    Raises:
        UsageError: the id cannot be read, no graph can be built from it, or it has no such block.
        UnavailableError: the architecture is one that only llama.cpp knows, and there is none here.
    """
    head, at, seed = case_id.rpartition("@")
    family, _, body = head.partition("/")
    if family != NAME or not at:
        raise UsageError(f"case {case_id!r}: {NAME}/ARCH-key=value,layer=N,block=NAME@seed expected")
    bare, which = without(body, KEYS)
    values, given = read_keys(case_id, which, KEYS)
    case = alone(case_id, _whole(bare, seed), Block(values["layer"], values["block"]))
    return replace(case, family=NAME, params={**case.params, **given})


def _whole(bare: str, seed: str) -> Case:
    if split_arch(bare)[0]:
        return make(f"{NAME}/{bare}@{seed}")
    return zoo.build(f"{zoo.NAME}/{bare}@{seed}")


FAMILY = Family(NAME, "each architecture's sublayers alone", ids, build, lacks=model.lacks)
