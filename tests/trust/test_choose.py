"""The choice of `smoke`: what it is made of, and that the file is the choice."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from conformance.suite import FAMILIES
from conformance.suite.ops import CHOSEN, NAME, ids
from trust import choose
from trust.kernels.places import Edit
from trust.kernels.tree import Mutant
from trust.traits import Pair, pairs, traits
from trust.weights import KINDS, half, subject


def test_the_file_is_the_choice() -> None:
    """The command would write what is there; one that is not needed there is an id of `standard`, and none twice."""
    kept = json.loads(CHOSEN.read_text(encoding="ascii"))
    chosen = choose.choose()
    assert [i.partition("/")[2].rpartition("@")[0] for i in chosen] == kept, "run `python -m tests.trust choose`"
    assert tuple(chosen) == ids("smoke") == ids("standard")[: len(chosen)]
    assert len(set(chosen)) == len(chosen) == choose.CASES
    assert set(chosen) <= set(ids("standard"))


def test_weights_are_of_kinds_of_pairs() -> None:
    """Each is a share of a doubt; no kind is unknown."""
    shares = json.loads(choose.WEIGHTS.read_text(encoding="ascii"))
    assert {tuple(kind.split()) for kind in shares} <= set(KINDS)
    assert all(0 < share < 1 for share in shares.values())


def test_a_case_has_the_traits_of_its_id() -> None:
    """Types, classes of sizes, what blocks leave over, layouts, and how two shapes compare; a pair is two of them."""
    op, found = traits("ops/MUL_MAT-q4_0+f32-a=64x5x2,b=64x33x4,va=pad@1")
    assert op == "MUL_MAT"
    assert {"type 0 q4_0", "group 0 blocks of 32", "length a 7", "tail a none", "rest b odd", "several a True False",
            "layout va pad", "match a b 1 <"} <= {" ".join(t) for t in found}  # fmt: skip
    n = len(found)
    assert len(set(pairs("ops/MUL_MAT-q4_0+f32-a=64x5x2,b=64x33x4,va=pad@1"))) == n * (n - 1) // 2


def _pair(name: str) -> Pair:
    return next(p for p in pairs("ops/ADD-f32+f32-a=4x3,b=4x3@0") if p.kind == tuple(name.split()))


@pytest.mark.parametrize(
    ("prices", "expected"),
    [({"a": 1.0, "b": 1.0, "c": 1.0}, ["c"]), ({"a": 1.0, "b": 1.0, "c": 9.0}, ["a", "b"])],
    ids=["as dear", "dear"],
)
def test_the_most_per_second_comes_first(prices: Mapping[str, float], expected: list[str]) -> None:
    """A case with all pairs is the only one, unless two others cost less."""
    one, two = _pair("op type"), _pair("length type")
    items = {"a": {one}, "b": {two}, "c": {one, two}}
    assert choose._cover(items, {one: 3, two: 2}, prices) == expected
    assert choose._cover(items, {one: 3, two: 2}, prices, given=["c"]) == []


def _mutant(function: str) -> Mutant:
    return Mutant(1, "ops", "a.cpp", Edit("constant", 0, 1, 1, function, "1", "2"))


def test_variants_of_an_op_are_on_one_side() -> None:
    """All variants of a function are in the same half: to learn from, or to measure the choice."""
    names = ("ggml_compute_forward_soft_max_f32", "ggml_compute_forward_soft_max", "ggml_compute_forward_soft_max_f16")
    assert len({subject(_mutant(n)) for n in names}) == len({half(_mutant(n)) for n in names}) == 1
    assert {half(_mutant(f"f_{k}th")) for k in range(20)} == {0, 1}


def test_rows_of_the_mission_stay() -> None:
    """`smoke` has every family of graphs that the suite is for."""
    for name in ("kv_growth", "gqa", "multi_sequence", "weight_placement"):
        assert FAMILIES[name].ids("smoke")
    assert all(i.startswith(f"{NAME}/") for i in ids("smoke"))
