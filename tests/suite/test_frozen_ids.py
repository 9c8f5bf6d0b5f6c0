"""Case ids are the public interface: every family has exactly these, in this order, at each level; none is ever lost.

`python tests/suite/test_frozen_ids.py` adds new ids to `frozen_ids.json` and `frozen_ids.npz`. It refuses to lose one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from conformance.judge.verdict import counted
from conformance.suite import FAMILIES, LEVELS, Family

FROZEN = Path(__file__).with_name("frozen_ids.json")
"""Family -> level -> number of ids, and SHA-256 of the ids joined by newlines."""
KNOWN = FROZEN.with_suffix(".npz")
"""Family -> `hashes` of every id that it has had at any level."""
Frozen = dict[str, dict[str, int | str]]


def frozen(family: Family) -> Frozen:
    """A family's part of the file."""
    levels = {level: family.ids(level) for level in LEVELS}
    return {
        level: {"count": len(ids), "sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest()}
        for level, ids in levels.items()
    }


def hashes(ids: Iterable[str]) -> npt.NDArray[np.uint32]:
    """The first 4 bytes of the SHA-256 of each id, sorted: 200 KB for all, which miss one in 80,000."""
    digests = b"".join(hashlib.sha256(i.encode()).digest()[:4] for i in ids)
    return np.unique(np.frombuffer(digests, ">u4")).astype(np.uint32)


def lost(family: Family) -> int:
    """The number of ids that a family has had and does not have."""
    with np.load(KNOWN) as known:
        had = known[family.name] if family.name in known else np.empty(0, np.uint32)
    return len(np.setdiff1d(had, hashes(family.ids(LEVELS[-1]))))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_id_is_lost(name: str) -> None:
    """Every id that was ever frozen is still one of `full`; and every id is frozen."""
    assert lost(FAMILIES[name]) == 0
    with np.load(KNOWN) as known:
        assert np.array_equal(known[name], hashes(FAMILIES[name].ids("full")))


def test_a_lost_id_is_noticed() -> None:
    """One id of another name, as many as before: one is lost, and the script writes nothing."""
    family = FAMILIES["gqa"]
    first, *others = family.ids("full")
    changed = replace(family, ids=lambda _: [f"{first}0", *others])
    assert lost(changed) == 1
    before = FROZEN.read_bytes(), KNOWN.read_bytes()
    with pytest.raises(SystemExit, match="gqa: 1 id lost"):
        write({**FAMILIES, "gqa": changed})
    assert (FROZEN.read_bytes(), KNOWN.read_bytes()) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_as_frozen(name: str) -> None:
    """Count, text and order at each level."""
    assert frozen(FAMILIES[name]) == json.loads(FROZEN.read_text(encoding="ascii"))[name]


def test_each_frozen_family_is_there() -> None:
    """No family is renamed or lost."""
    assert list(json.loads(FROZEN.read_text(encoding="ascii"))) == list(FAMILIES)


def write(families: Mapping[str, Family]) -> None:
    """Write both files; SystemExit if a family has lost an id."""
    with np.load(KNOWN) as known:
        gone = {name: len(known[name]) for name in known if name not in families}
    gone |= {name: n for name, family in families.items() if (n := lost(family))}
    if gone:
        what = ", ".join(f"{name}: {counted(n, 'id')} lost" for name, n in gone.items())
        raise SystemExit(f"{what}; ids do not change: users and waivers name them")
    found = {name: frozen(family) for name, family in families.items()}
    FROZEN.write_text(json.dumps(found, indent=2) + "\n", encoding="ascii", newline="\n")
    np.savez(KNOWN, allow_pickle=False, **{name: hashes(family.ids(LEVELS[-1])) for name, family in families.items()})


if __name__ == "__main__":
    write(FAMILIES)
