"""The same id gives the same bytes on every machine, every Python and every NumPy.

A digest that changed on purpose needs the generator's version raised: saved ids then mean something else. Print the new
ones with `python tests/helpers/graphs/digests.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from digests import SAMPLES, digest

from conformance.run.session.select import build
from conformance.suite import FAMILIES

PINNED: dict[str, str] = json.loads((Path(__file__).parent / "digests.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case_id", PINNED)
def test_the_bytes_of_an_id_never_change(case_id: str) -> None:
    """Graphs, weights, caches, inputs, notes and parameters are those that were pinned."""
    assert digest(build(case_id)) == PINNED[case_id]


def test_building_twice_gives_the_same() -> None:
    """Nothing of one build is left over for the next."""
    for case_id in list(PINNED)[::3]:
        assert digest(build(case_id)) == digest(build(case_id))


def test_every_seeded_family_is_pinned() -> None:
    """A family that makes cases of seeds has ids here, unless it is recorded from a library."""
    pinned = {i.partition("/")[0] for i in PINNED}
    assert pinned == set(SAMPLES) == {name for name, f in FAMILIES.items() if f.seeded and name != "zoo"}
