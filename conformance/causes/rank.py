"""Whom a cause hurts: the architectures of which some block holds a node that its conditions match."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
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
from .form import Form
from .grouping.nodes import TELLS

BLOCKS = "blocks"
"""Family whose cases are a sublayer of one architecture each, `blocks/ARCHITECTURE-…`."""


LAYS_OUT = "xllamacpp"
"""The package whose llama.cpp lays out the architectures that the builder does not know."""

MAKING = ("ggml", "case", "suite")
"""The rooms whose code says what a block's nodes are."""


@cache
def _architectures() -> Mapping[str, Sequence[Features]]:
    """Architecture -> the different nodes of its blocks. Laying them out takes a minute, so a file keeps them for the
    code that made them.
    """
    path = default_folder() / f"nodes-{_digest()}.json"
    with suppress(OSError, ValueError):
        return _checked(json.loads(path.read_bytes()))
    found = _laid_out()
    with suppress(OSError):
        write_whole(path, json.dumps(found))
    return found


def _digest() -> str:
    """Of the code that makes blocks and their features, and of the llama.cpp that it asks."""
    root = Path(conformance.__file__).parent
    digest = sha256()
    made = [path for room in MAKING for path in (root / room).rglob("*.py")]
    for path in sorted([*made, root / "causes" / "features.py"]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    with suppress(PackageNotFoundError):
        digest.update(version(LAYS_OUT).encode())
    return digest.hexdigest()[:16]


def _checked(found: object) -> Mapping[str, Sequence[Features]]:
    """What a file holds; ValueError if that is no such table."""
    if isinstance(found, dict) and all(
        isinstance(rows, list) and all(map(_is_features, rows)) for rows in found.values()
    ):
        return found
    raise ValueError("a table of nodes expected")


def _is_features(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(v, str) for v in row.values())


def _laid_out() -> Mapping[str, Sequence[Features]]:
    found: dict[str, dict[frozenset[tuple[str, str]], Features]] = {}
    for case_id in FAMILIES[BLOCKS].ids("full"):
        case = build(case_id)
        name = case_id.removeprefix(f"{BLOCKS}/").partition(",")[0].rpartition("-")[0]
        rows = (features(case, k, node) for k, _, node in nodes_of(case))
        found.setdefault(name, {}).update((frozenset(f.items()), f) for f in rows)
    return {name: list(rows.values()) for name, rows in found.items()}


def rank(cause: Cause) -> Cause:
    """`cause` with the number of `architectures` that hold such a node; as it is where no single node is at fault, or
    where nearly all such nodes are right: its form does not say whom it hurts.
    """
    form, failed = Form(cause.conditions), cause.rank.get("failed", 0)
    tells = failed >= TELLS * (failed + cause.rank.get("passed", 0))
    if not tells or not any(c.key == OP for c in cause.conditions):
        return cause
    hit = sum(any(form.holds(f) for f in rows) for rows in _architectures().values())
    return replace(cause, rank={**cause.rank, "architectures": hit})
