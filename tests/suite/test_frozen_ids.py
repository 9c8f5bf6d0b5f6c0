"""Case ids are the public interface: every family has exactly these, in this order, at each level.

`python tests/suite/test_frozen_ids.py` writes `frozen_ids.json` anew, in a commit that says which ids change and why.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from conformance.suite import FAMILIES, LEVELS, Family

FROZEN = Path(__file__).with_name("frozen_ids.json")
"""Family -> level -> number of ids, and SHA-256 of the ids joined by newlines."""
Frozen = dict[str, dict[str, int | str]]


def frozen(family: Family) -> Frozen:
    """A family's part of the file."""
    levels = {level: family.ids(level) for level in LEVELS}
    return {
        level: {"count": len(ids), "sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest()}
        for level, ids in levels.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_as_frozen(name: str) -> None:
    """Count, text and order at each level."""
    assert frozen(FAMILIES[name]) == json.loads(FROZEN.read_text(encoding="ascii"))[name]


def test_each_frozen_family_is_there() -> None:
    """No family is renamed or lost."""
    assert list(json.loads(FROZEN.read_text(encoding="ascii"))) == list(FAMILIES)


if __name__ == "__main__":
    found = {name: frozen(family) for name, family in FAMILIES.items()}
    FROZEN.write_text(json.dumps(found, indent=2) + "\n", encoding="ascii", newline="\n")
