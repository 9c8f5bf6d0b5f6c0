"""What a trajectory may cost follows from its shapes: other sizes of known forms are free, each new form costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.case import casefile
from conformance.case.case import Case
from conformance.run.session.select import build

TINY = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"


def of(run: str, keys: str = "") -> Case:
    """A trajectory of a small decoder."""
    return build(f"{TINY},ctx=2048{keys},run={run}@1")


@pytest.mark.parametrize(
    ("run", "lifted", "static"),
    [
        ("d4", 1, 1),
        ("p9.d4", 2, 2),
        ("p9.p9.d1", 2, 2),
        ("p9.p12.d1", 3, 2),
        ("at255.d2", 2, 1),
        ("at200.p20.d1.p250.d1", 4, 2),
        ("at200.p20.d1.p250.d1.p250.d1", 4, 2),
        ("at200.p20.d1.p250.d1.p250.d1.5(p99.d9)", 4, 2),
        ("p9.o9.o12.d1", 4, 3),
    ],
)
def test_programs_are_counted_by_form(run: str, lifted: int, static: int) -> None:
    """A form costs one program, one more where its sizes change, and however many sizes there are no third."""
    demands = of(run).demands
    assert demands["lifts"] == {"compiles": f"<={lifted}"}
    assert demands["static"] == {"compiles": f"<={static}"}


@pytest.mark.parametrize(
    ("keys", "cell"), [("", 2 * 16 * 2), (",cache=f32", 2 * 16 * 4), (",cache=q8_0,head=32", 2 * 34)]
)
def test_a_step_may_move_the_cells_that_it_writes(keys: str, cell: int) -> None:
    """K and V of each token, in the cache's type, whatever n_kv is."""
    for at in ("at9", "at1000"):
        assert of(f"{at}.p7.d3", keys).demands["appends"] == {"cache_bytes": f"<={10 * cell}"}


@pytest.mark.parametrize(
    ("keys", "run", "fused"),
    [
        ("", "p9.d2", True),
        (",write=cpy", "p9.d2", True),
        (",cache=q8_0,head=32", "p9.d2", False),
        (",fa=0", "p9.d2", False),
        (",sinks=1", "p9.d2", False),
        (",softcap=3", "p9.d2", False),
        (",rope=none,alibi=8", "p9.d2", False),
        ("", "p9.shift2.d2", False),
        (",seqs=2", "p9.d2", True),
        (",seqs=2,write=cpy", "p9+3.d2", False),
    ],
)
def test_plain_attention_over_floats_is_fused(keys: str, run: str, fused: bool) -> None:
    """Blocks, masks with extras and caches that are rotated in place are no part of the promise."""
    assert ("fuses" in of(run, keys).demands) is fused


@pytest.mark.parametrize(
    ("keys", "run", "most"),
    [
        ("", "at253.p3.d3", (6 + 512) * 64),
        ("", "p256.d3", (259 + 2 * 512) * 64),
        (",write=cpy", "at9.d5.back2.d2", (7 + 256) * 64),
        (",seqs=2,unified=1", "p9.rm1.d2", (20 + 256) * 64),
        (",seqs=2", "p9.d2", (22 + 2 * 256) * 64),
        (",seqs=2", "p9.rm1.d2", None),
        (",seqs=2,unified=0", "p3+2.p0+4.d1", None),
        (",fa=0", "p9.d2", None),
        ("", "p9.shift2.d2", None),
    ],
)
def test_a_cache_is_loaded_once(keys: str, run: str, most: int | None) -> None:
    """And again where 256 cells were written over; sequences in turn and writes of whole caches are no part of it."""
    demand = None if most is None else {"cache_bytes": f"<={most}"}
    assert of(run, keys).demands.get("resumes") == demand


@pytest.mark.parametrize(
    ("case_id", "packed"),
    [
        (f"{TINY},head=32,w=q4_0,run=p9.d2@1", True),
        (f"{TINY},w=f16,run=p9.d2@1", False),
        ("weight_placement/llama-l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64,w=q4_0,run=p5.d1,buffer=1@1", False),
    ],
)
def test_weights_in_blocks_stay_small(case_id: str, *, packed: bool) -> None:
    """Those that products read are packed, unless the caller has them in memory of its choice."""
    assert ("packs" in build(case_id).demands) is packed


def test_a_single_step_demands_nothing() -> None:
    """It has nothing to use again, and shares a graph with others."""
    assert of("p9").demands == {}


def test_demands_travel_with_the_case(tmp_path: Path) -> None:
    """A saved trajectory demands what it did, and its demands are legal."""
    case = of("p9.d2")
    case.validate()
    casefile.write(tmp_path / "c.gguf", [case])
    assert casefile.read(tmp_path / "c.gguf")[0].demands == case.demands
