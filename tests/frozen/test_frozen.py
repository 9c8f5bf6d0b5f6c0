"""Refactoring changes no golden file, no saved case, no fault and no content of a case.

`frozen.json` has their digests; `tests/suite/frozen_ids.json` has those of all ids at every level. A deliberate change
writes it anew, in a commit that says what changed and why:

    PYTHONPATH=tests/helpers/graphs:tests python tests/frozen/test_frozen.py
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from random import Random

import pytest
from digests import digest
from trust.faults import FOLDER, read

from conformance.case import casefile
from conformance.run.session.select import build
from conformance.suite import FAMILIES

HERE = Path(__file__).parent
FROZEN = HERE / "frozen.json"
GOLDEN = HERE.parents[1] / "golden"
SEED, DRAWN = 20261130, 22
"""Number of ids of `full` that are drawn from each family, without graphs recorded from llama.cpp."""
RECORDED = re.compile("zoo/|blocks/.*nodes=")
Parts = dict[str, dict[str, str]]


@cache
def frozen() -> Parts:
    """The file."""
    found: Parts = json.loads(FROZEN.read_text(encoding="ascii"))
    return found


def golden() -> dict[str, str]:
    """File of `golden/` -> SHA-256 of its bytes."""
    return {
        p.relative_to(GOLDEN).as_posix(): _sha256(p.read_bytes())
        for p in sorted(GOLDEN.rglob("*"))
        if p.suffix in {".gguf", ".json"}
    }


def saved() -> dict[str, str]:
    """Saved case -> digest of its file, of the case read from it, and of the saved result."""
    found = {}
    for path in sorted((HERE / "saved").glob("*.gguf")):
        case = casefile.read_one(path)
        result = json.dumps([case.provenance, case.demands, case.tolerance], sort_keys=True)
        found[path.name] = _sha256(f"{_sha256(path.read_bytes())} {digest(case)} {result}".encode())
    return found


def faults() -> dict[str, str]:
    """Fault -> digest of what must notice it: adapter, families, level, kind and case; not where it is injected."""
    return {f.name: _sha256(repr((f.of, f.families, f.level, f.kind, f.case)).encode())[:16] for f in read([FOLDER])}


def drawn() -> list[str]:
    """Ids drawn by `SEED`, of all families together."""
    random = Random(SEED)  # noqa: S311  # a draw of cases, no secret
    every = (sorted(i for i in f.ids("full") if not RECORDED.match(i)) for f in FAMILIES.values())
    return [i for ids in every for i in random.sample(ids, min(DRAWN, len(ids)))]


def test_golden_files_have_the_same_bytes() -> None:
    """Golden outputs and captured graphs are as committed, and none is lost."""
    assert golden() == frozen()["golden"]


def test_saved_cases_read_as_before() -> None:
    """A case file of an older commit gives the same case and the same saved result."""
    assert saved() == frozen()["saved"]


def test_each_fault_is_noticed_by_the_same() -> None:
    """No fault leaves the table, and none is left to fewer families, a higher level or another case."""
    assert faults() == frozen()["faults"]


@pytest.mark.parametrize("case_id", frozen()["cases"])
def test_a_drawn_case_has_the_same_content(case_id: str) -> None:
    """Graphs, weights, caches, inputs, notes and parameters."""
    assert digest(build(case_id)) == frozen()["cases"][case_id]


def test_the_drawn_cases_are_those_of_the_seed() -> None:
    """They are a sample of all families at `full`, a new one included."""
    assert drawn() == list(frozen()["cases"])
    assert len(frozen()["cases"]) >= 200


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    made = {"golden": golden(), "saved": saved(), "faults": faults(), "cases": {i: digest(build(i)) for i in drawn()}}
    FROZEN.write_text(json.dumps(made, indent=1) + "\n", encoding="ascii", newline="\n")
