"""Count the architectures that contain a matching node."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import conformance
from conformance.case.leftover import write_whole
from conformance.judge.cause import Cause
from conformance.process import Deadline
from conformance.run.session.folder import default_folder
from conformance.run.session.select import build
from conformance.suite import FAMILIES

from .features import OP, Features, features, nodes_of
from .rule import Rule

BLOCKS = "blocks"
"""Family with one case per sublayer of an architecture, `blocks/ARCHITECTURE-…`."""
LAYS_OUT = "xllamacpp"
"""Package with the llama.cpp that builds the architectures unknown to the suite."""
MAKING = ("ggml", "case", "suite")
"""Packages whose code determines the nodes of a block."""
TELLS = 0.1
"""Minimum share of failures among matching nodes for a rule to be counted."""
EVERY = 10
"""Architectures between two progress lines."""

Table = dict[str, list[Features]]
"""Architecture -> distinct nodes of its blocks."""


def count_architectures(
    causes: Sequence[Cause],
    deadline: Deadline,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Cause]:
    """Return `causes` with the number of `architectures` that contain a matching node.

    Building all blocks takes a minute, so `deadline` bounds it; `counted` says how many were examined. A file caches
    them for the code that made them, and the next call continues from there. Causes without a failing node, and causes
    whose rule mostly matches passing nodes or is not established, are returned unchanged.
    """
    ranked = [c for c in causes if _tells(c)]
    if not ranked:
        return list(causes)
    table, of = _laid_out(deadline, progress)
    return [_counted(c, table, of) if c in ranked else c for c in causes]


def _tells(cause: Cause) -> bool:
    failed = cause.rank.get("failed", 0)
    return (
        cause.search == "complete"
        and failed >= TELLS * (failed + cause.rank.get("passed", 0))
        and any(c.key == OP for c in cause.conditions)
    )


def _counted(cause: Cause, table: Table, of: int) -> Cause:
    rule = Rule(cause.conditions)
    hit = sum(any(map(rule.holds, rows)) for rows in table.values())
    return replace(cause, rank={**cause.rank, "architectures": hit, "counted": len(table), "of": of})


def _laid_out(deadline: Deadline, progress: Callable[[str], None]) -> tuple[Table, int]:
    """Return the table of as many architectures as fit, and the total number."""
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
        if deadline.is_over():
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
    """Return the digest of the code that makes blocks and features, and of llama.cpp's version."""
    root = Path(conformance.__file__).parent
    digest = sha256()
    made = [path for room in MAKING for path in (root / room).rglob("*.py")]
    for path in sorted([*made, root / "causes" / "features.py"]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    with suppress(PackageNotFoundError):
        digest.update(version(LAYS_OUT).encode())
    return digest.hexdigest()[:16]


def _checked(found: object, names: Mapping[str, object]) -> Table:
    """Return the contents of a cached table; ValueError if it is not a valid one."""
    if isinstance(found, dict) and found.keys() <= names.keys() and all(map(_are_features, found.values())):
        return found
    raise ValueError("a table of nodes expected")


def _are_features(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(v, str) for v in row.values()) for row in rows
    )
