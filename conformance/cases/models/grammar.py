"""The text of a decoder's id: `family/llama-key=value,key=value@seed`; a key left out has its default.

Keys say the model (`l` layers, `embd`, `heads`, `kv` heads, `head` size, `ff`, `vocab`, `rope`, `freqs`, `tied`, `w`
the type of all weights, a role such as `attn_v` that of some), the context (`ctx` cells, `seqs`, `unified`, `fa`,
`cache` type, `cache_v` where V's is another, `write`, `ubatch`, `rot`, `mixed`) and the plan (`run`: `trajectory.py`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from conformance.cases.ops.grammar import Key, count, read_keys, text, word
from conformance.cgraph.case import Case
from conformance.cgraph.errors import GraphError, UsageError
from conformance.cgraph.types import TYPES

from .config import ROLES, Cparams, Hparams
from .trajectory import Trajectory

ARCHITECTURES = ("llama",)
_FLAG = word("0", "1")
_ON = word("1", "0")

KEYS: dict[str, Key] = {
    "l": count(2),
    "embd": count(64),
    "heads": count(4),
    "kv": count(2),
    "head": count(16),
    "ff": count(96),
    "vocab": count(64),
    "rope": word("normal", "neox"),
    "freqs": _FLAG,
    "tied": _FLAG,
    "w": word("f32", *TYPES),
    **dict.fromkeys(ROLES, word("", *TYPES)),
    "ctx": count(512),
    "seqs": count(1),
    "unified": _FLAG,
    "fa": _ON,
    "cache": word("f16", *TYPES),
    "cache_v": word("", *TYPES),
    "write": word("set_rows", "cpy"),
    "ubatch": count(512),
    "rot": _ON,
    "mixed": _ON,
    "run": text("p250.d8", "a plan like p250.d8"),
}


def with_seed(family: str, body: str) -> str:
    """The id of a table's row: its seed comes from its text, so that rows added elsewhere change nothing."""
    return f"{family}/{body}@{zlib.crc32(body.encode()) % 1000}"


def make(case_id: str) -> Case:
    """The case behind an id of any family of decoders.

    Raises:
        UsageError: the id cannot be read, or no graph can be built from it.
    """
    head, _, seed = case_id.rpartition("@")
    family, _, body = head.partition("/")
    arch, _, rest = body.partition("-")
    if arch not in ARCHITECTURES or not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        known = "|".join(ARCHITECTURES)
        raise UsageError(f"case {case_id!r}: {family}/{known}-key=value,key=value@seed expected")
    values, given = read_keys(case_id, rest, KEYS)
    try:
        trajectory = Trajectory(case_id, hparams_of(values), cparams_of(values))
        trajectory.run(values["run"])
        return trajectory.case(family, {"arch": arch, **given}, int(seed))
    except (GraphError, UsageError) as e:
        raise UsageError(f"case {case_id!r}: {e}") from None


def hparams_of(v: Mapping[str, Any]) -> Hparams:
    """The model that an id's values say."""
    return Hparams(
        n_layer=v["l"],
        n_embd=v["embd"],
        n_head=v["heads"],
        n_head_kv=v["kv"],
        n_embd_head=v["head"],
        n_ff=v["ff"],
        n_vocab=v["vocab"],
        rope=v["rope"].upper(),
        rope_freqs=v["freqs"] == "1",
        tied=v["tied"] == "1",
        types={role: TYPES[v[role] or v["w"]] for role in ROLES},
    )


def cparams_of(v: Mapping[str, Any]) -> Cparams:
    """The context that an id's values say."""
    return Cparams(
        n_ctx=v["ctx"],
        n_seq_max=v["seqs"],
        kv_unified=v["unified"] == "1",
        flash_attn=v["fa"] == "1",
        type_k=TYPES[v["cache"]],
        type_v=TYPES[v["cache_v"] or v["cache"]],
        write=v["write"],
        n_ubatch=v["ubatch"],
        rotate=v["rot"] == "1",
        mixed=v["mixed"] == "1",
    )
