"""Count the architectures that contain a matching node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import conformance
from conformance.case.leftover import write_whole
from conformance.run.session.select import build
from conformance.run.session.writeahead import default_folder
from conformance.suite import FAMILIES

from .cause import Cause
from .features import OP, Features, features, nodes_of
from .rule import Rule

BLOCKS = "blocks"
"""Family whose cases are a sublayer of one architecture each, `blocks/ARCHITECTURE-…`."""
LAYS_OUT = "xllamacpp"
"""The package whose llama.cpp lays out the architectures that the builder does not know."""
MAKING = ("ggml", "case", "suite")
"""The packages whose code says what a block's nodes are."""
TELLS = 0.1
"""The share of failures below which a rule does not say whom it hits."""
EVERY = 10
"""Architectures between two lines of progress."""

Table = dict[str, list[Features]]
"""Architecture -> the different nodes of its blocks."""


def count_architectures(
    causes: Sequence[Cause],
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Cause]:
    """Return `causes` with the number of `architectures` that hold a matching node, and of how many `counted` ones.

    To lay out all of them takes a minute, so `seconds` bound it; a file keeps those that are done, for the code that
    made them, and the next call goes on there. A cause of no single node, or whose rule nearly all right nodes meet, is
    returned as it is.
    """
    ranked = [c for c in causes if _tells(c)]
    if not ranked:
        return list(causes)
    table, of = _laid_out(clock() + seconds, progress, clock)
    return [_counted(c, table, of) if c in ranked else c for c in causes]


def _tells(cause: Cause) -> bool:
    failed = cause.rank.get("failed", 0)
    return failed >= TELLS * (failed + cause.rank.get("passed", 0)) and any(c.key == OP for c in cause.conditions)


def _counted(cause: Cause, table: Table, of: int) -> Cause:
    rule = Rule(cause.conditions)
    hit = sum(any(map(rule.holds, rows)) for rows in table.values())
    return replace(cause, rank={**cause.rank, "architectures": hit, "counted": len(table), "of": of})


def _laid_out(end: float, progress: Callable[[str], None], clock: Callable[[], float]) -> tuple[Table, int]:
    """Return the table of as many architectures as fit, and how many there are."""
    ids: dict[str, list[str]] = {}
    for case_id in FAMILIES[BLOCKS].ids("full"):
        name = case_id.removeprefix(f"{BLOCKS}/").partition(",")[0].rpartition("-")[0]
        ids.setdefault(name, []).append(case_id)
    path = default_folder() / f"nodes-{_digest()}.json"
    table: Table = {}
    with suppress(OSError, ValueError):
        table = _checked(json.loads(path.read_bytes()), ids)
    known = len(table)
    for name, case_ids in ids.items():
        if name in table:
            continue
        if clock() >= end:
            break
        if len(table) % EVERY == 0:
            progress(f"counting architectures: {len(table)} of {len(ids)}")
        table[name] = _nodes(case_ids)
    if len(table) > known:
        with suppress(OSError):
            write_whole(path, json.dumps(table))
    progress(f"counted {len(table)} of {len(ids)} architectures")
    return table, len(ids)


def _nodes(case_ids: Sequence[str]) -> list[Features]:
    found: dict[frozenset[tuple[str, str]], Features] = {}
    for case in map(build, case_ids):
        rows = (features(case, k, node) for k, _, node in nodes_of(case))
        found.update((frozenset(f.items()), f) for f in rows)
    return list(found.values())


def _digest() -> str:
    """Return the digest of the code that makes blocks and their features, and of the llama.cpp that it asks."""
    root = Path(conformance.__file__).parent
    digest = sha256()
    made = [path for room in MAKING for path in (root / room).rglob("*.py")]
    for path in sorted([*made, root / "causes" / "features.py"]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    with suppress(PackageNotFoundError):
        digest.update(version(LAYS_OUT).encode())
    return digest.hexdigest()[:16]


def _checked(found: object, names: Mapping[str, object]) -> Table:
    """Return what a file holds; ValueError if that is no such table."""
    if isinstance(found, dict) and found.keys() <= names.keys() and all(map(_are_features, found.values())):
        return found
    raise ValueError("a table of nodes expected")


def _are_features(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(v, str) for v in row.values()) for row in rows
    )
