"""The family `ops`: every promised combination is there, every id builds a legal case, and the same one everywhere."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.case.case import Case
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.quants import to_float
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import FLAG_INPUT, Tensor, contiguous_nb, nbytes, new_tensor, strided
from conformance.ggml.types import F16, F32, GLU_OPS, Q8_0, UNARY_OPS
from conformance.suite.data import blind, causal
from conformance.suite.family import LEVELS, keys, read_keys, with_seed
from conformance.suite.grid import ids_of_rows
from conformance.suite.ops import KNOWN, build, ids
from conformance.suite.ops.bench import TABLES, Bench, OpId, parse

STANDARD = ids("standard")
ROWS = [with_seed("ops", body) for t in TABLES for body in ids_of_rows((*t.standard, *t.smoke))]
"""What `smoke` shows a cross-section of."""

OPS = {*DECLARATIONS, *(f"UNARY.{op}" for op in UNARY_OPS), *(f"GLU.{op}" for op in GLU_OPS)} - {"UNARY", "GLU"}
"""Every op that has a rule, the two with a sub-op by each of theirs."""
FLOATS = ("f32", "f16", "bf16")
BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K")
RARE_STORED = ("iq4_nl", "q1_0", "q2_0", "nvfp4", "tq1_0", "tq2_0", "iq4_xs")
RARE = (*RARE_STORED, "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
ALL = (*FLOATS, *BLOCKS)
EVERY = (*ALL, "i32", "i64")

PROMISED: dict[str, Sequence[str]] = {
    **dict.fromkeys(("NONE", "VIEW", "RESHAPE", "PERMUTE", "CONT", "DUP"), (*EVERY, *RARE)),
    "TRANSPOSE": [*FLOATS, "i32", "i64"],
    "CPY": [
        *(f"{a}+{b}" for a in FLOATS for b in ALL),
        *(f"{b}+{t}" for b in BLOCKS for t in ("f32", b)),
        *(f"{a}+{b}" for a in FLOATS for b in RARE_STORED),
        *(f"{b}+f32" for b in RARE),
        *("f32+i32", "i32+f32", "i32+i32", "i64+i64"),
    ],
    "ADD": [*(f"{t}+f32" for t in (*ALL, *RARE)), "f16+f16", "bf16+bf16"],
    **dict.fromkeys(("SUB", "MUL", "DIV"), ("f32+f32", "f16+f16", "bf16+bf16", "f16+f32", "bf16+f32")),
    "SCALE": ["f32", "bf16"],
    "CLAMP": ["f32", "f16"],
    "CONCAT": (*EVERY, *RARE),
    "REPEAT": [*FLOATS, "i32"],
    **dict.fromkeys(("SQR", "SQRT", *(f"UNARY.{op}" for op in UNARY_OPS)), FLOATS),
    **{f"GLU.{op}": FLOATS for op in GLU_OPS if op not in {"SWIGLU_OAI", "SWIGLU_CLAMP"}},
    "GLU.SWIGLU_OAI": ["f32"],
    "GLU.SWIGLU_CLAMP": ["f32", "f16"],
    "MUL_MAT": [*(f"{t}+f32" for t in (*ALL, *RARE)), "f16+f16", "bf16+bf16", "f32+bf16", "f32+f16"],
    "MUL_MAT_ID": [f"{t}+f32" for t in (*ALL, *RARE)],
    "OUT_PROD": [f"{t}+f32" for t in ("f32", "f16", *BLOCKS, *RARE)],
    "GET_ROWS": [f"{t}+i32" for t in [*ALL, *RARE, "i32"]],
    "SET_ROWS": [
        *(f"{t}+{b}+{i}" for t in ALL for b in ("f32", "f16") for i in ("i64", "i32")),
        *(f"{t}+{b}" for t in RARE_STORED for b in ("f32+i64", "f32+i32", "f16+i64")),
    ],
    "ROPE": ["f32", "f16"],
    "FLASH_ATTN_EXT": [f"{t}+{t}" for t in (*ALL, *RARE)],
}
"""Op -> the operand types that ggml's CPU computes and that `standard` has; ops not named here take F32."""

PINNED = {
    "ops/ADD-bf16+bf16-a=16x6x4x2,vb=pad.p2013@778": "fd1d39bfc25728e5",
    "ops/DIV-f32+f32-a=13x5x3x2,b=13x1x3@806": "4e167e33eeb18097",
    "ops/MUL-f32+f32-a=13x5x3x2,b=13x1x3@83": "44ae90d45bf8d71a",
    "ops/SUB-f32+f32-a=13x5x3x2,b=13x1x3@422": "6d5e49556009c43a",
    "ops/SOFT_MAX-f32-ne=256x5,scale=1.0@557": "cd8acb5f5c206826",
    "ops/ARGSORT-f32-ne=24x6x3,vne=off,order=ASC@628": "c67cff4e8b079fa4",
    "ops/TOP_K-f32-ne=60x5x3,k=8@629": "15a7a0f7d45bfdfb",
    "ops/MEAN-f32-ne=35x6x3x2,vne=p0321@234": "6fd4d6a7aa9827dd",
    "ops/SUM_ROWS-f32-ne=35x6x3x2,vne=p0321@990": "1809c08d4d8b6626",
    "ops/TRANSPOSE-f16-a=9x4x3@626": "2daf461b6f81a3ca",
    "ops/MUL_MAT-f16+f32-a=256x16,b=256x7@687": "b3db36fecb1cd2d8",
    "ops/GET_ROWS-f16+i32-a=256x6x3x2,n=4@893": "967b67e8696c1755",
    "ops/SSM_CONV-f32+f32-out=32x5x3,d_conv=2,vsx=off@888": "34d55da8b5376a1f",
    "ops/SET_ROWS-bf16+f32+i64-a=256x9x2,n=4,va=slab@284": "58faf3a4c5162ce8",
    "ops/NONE-mxfp4-a=256x3x2@198": "d10e83f69e33e171",
    "ops/ROPE-f32-ne=128x2x2,mode=NORMAL,ff=1@380": "2b8418528772823b",
    "ops/GLU.SWIGLU_CLAMP-f32-ne=14x5x3x2,form=split@182": "92398503872dcaee",
    "ops/L2_NORM-f32-ne=64x5x2,inplace=mid@772": "7b3b901e169ce940",
    "ops/NORM-f32-ne=64x5x2,inplace=mid@952": "6733990d6d6dbd97",
    "ops/RMS_NORM-f32-ne=64x5x2,eps=1e-6@871": "d84ecf19be656bbe",
    "ops/UNARY.EXP-f32-ne=67x4@583": "2bbddb4ad92dc27c",
    "ops/SQR-bf16-ne=18x6x3x2,vne=off@241": "489fdd6158ca1aef",
    "ops/CLAMP-f32-ne=67x4,min=-inf,max=1.25@59": "c96a7cd11095361f",
    "ops/SCALE-f32-ne=67x4,s=0.125,b=-1.5@968": "ed7eb28e0bbbabd2",
    "ops/SQRT-bf16-ne=18x6x3x2,vne=rows@262": "3ca70f4a4f1866e3",
    "ops/PERMUTE-i32-a=10x3x4x2,axes=2x0x3x1,va=p0213@479": "1e0a15fccfe6bcf2",
    "ops/ADD_ID-f32+f32-a=33x3x5,n_expert=8,vids=p1023@515": "ebfba1ab4f9a1d82",
    "ops/CONCAT-f32-a=12x6x4x2,dim=3,n=7,va=rows,vb=off@770": "eb17189fd5e4dbec",
    "ops/CPY-i64+i64-a=12x6x4,b=24x12@43": "5396aa71496eab64",
    "ops/CONT-bf16-ne=256x3x2,vne=rows@124": "79870f66a7825620",
    "ops/DUP-i32-ne=256x3x2@8": "2afea03a0c9317e2",
    "ops/REPEAT-bf16-a=9x5x3x2,to=9x5x3x8@490": "e099e3179056d603",
    "ops/RESHAPE-q2_K-a=256x6x4,ne=6144@230": "7eac9567183393fb",
    "ops/FLASH_ATTN_EXT-bf16+bf16-q=64x5x4,k=64x32x2,mask=32x5,max_bias=8.0@573": "27ceb4294021fc28",
    "ops/VIEW-mxfp4-a=256x6x3,ne=256x4,at=0x1x1,rank=2@868": "c20748d2e196feb2",
    "ops/MUL_MAT_ID-bf16+f32-as=256x6x8,n_used=2,n_tokens=5,vb=pad@887": "00270d1a7ddca22f",
}


def _op(case_id: str) -> str:
    return case_id.partition("/")[2].partition("-")[0]


def _types(case_id: str) -> str:
    return case_id.split("-")[1]


def _digest(case: Case) -> str:
    """Of everything a backend sees: tensors, links, bytes."""
    h = hashlib.sha256()
    (step,) = case.steps
    tensors = step.graph.tensors()
    for t in tensors:
        link = [None if s is None else tensors.index(s) for s in (*t.src, t.view_src)]
        h.update(repr((t.name, t.type, t.ne, t.nb, t.op, t.op_params, link, t.view_offs, t.flags)).encode())
    for data in (*case.persistent.values(), *step.inputs.values()):
        h.update(data.tobytes())
    return h.hexdigest()[:16]


def test_levels_have_their_sizes_and_are_nested() -> None:
    """400-1,100 cases at smoke, 2,000 and more at standard; each level is part of the next, ids are unique."""
    smoke, standard, full = (ids(level) for level in LEVELS)
    assert 400 <= len(smoke) <= 1100
    assert 2000 <= len(standard) < len(full)
    for level in (smoke, standard, full):
        assert len(set(level)) == len(level)
    assert set(smoke) <= set(standard) <= set(full)
    order = {case_id: i for i, case_id in enumerate(full)}
    for level in (smoke, standard):
        assert [order[i] for i in level] == sorted(order[i] for i in level)


def test_ids_stand_by_size() -> None:
    """Small cases come first: the bytes of the first tenth are far below those of the last."""

    def size(case_id: str) -> int:
        case = build(case_id)
        return sum(d.nbytes for d in (*case.persistent.values(), *case.steps[0].inputs.values()))

    n = len(STANDARD) // 10
    assert sum(map(size, STANDARD[:n:5])) * 10 < sum(map(size, STANDARD[-n::5]))


def test_no_kernel_has_too_many_positions() -> None:
    """`standard` has small kernels only, because adapters emit a slice per position; `full` has a larger one."""

    def positions(case_id: str) -> int:
        shape = parse(case_id, KNOWN).values["a"]
        return int(math.prod(shape[: 3 if "3D" in case_id else 2]))

    moved = ("ops/IM2COL-", "ops/IM2COL_3D-", "ops/CONV_2D-", "ops/CONV_2D_DW-", "ops/CONV_3D-")
    limit = 256
    two_d = [i for i in ids("full") if i.startswith(moved) and (not i.startswith(moved[0]) or "is_2D=1" in i)]
    assert {i for i in two_d if positions(i) > limit}
    assert not {i for i in two_d if positions(i) > limit} & set(ids("standard"))


def test_every_op_is_there() -> None:
    """All ops that have a rule, every unary and every glu, at smoke already."""
    assert set(KNOWN) == OPS
    assert {_op(i) for i in ids("smoke")} == OPS


def test_every_promised_type_is_there() -> None:
    """Standard has a case of each op for each combination of types that ggml computes.

    Smoke has each operand's types, without rare ones.
    """
    there = {(_op(i), _types(i)) for i in STANDARD}
    assert {(op, types) for op, every in PROMISED.items() for types in every} - there == set()

    def operands(case_ids: Sequence[str]) -> set[tuple[str, int, str]]:
        return {(KNOWN[_op(i)].ops[0], k, t) for i in case_ids for k, t in enumerate(_types(i).split("+"))}

    assert operands(ROWS) <= operands(ids("smoke"))


def test_smoke_shows_every_kind() -> None:
    """Each op's every key, and each word that the rows of its table say, stands in a smoke case of the op."""

    def kinds(case_ids: Sequence[str]) -> set[tuple[str, str, str]]:
        given = [(_op(i).partition(".")[0], parse(i, KNOWN).given) for i in case_ids]
        return {(op, k, p if p.isalpha() else "") for op, keys in given for k, v in keys.items() for p in v.split(".")}

    assert kinds(ROWS) <= kinds(ids("smoke"))


def test_every_id_builds_the_case_that_it_names() -> None:
    """Every case at standard is a valid graph of ggml and knows its id, family and seed.

    It has bytes for every leaf and a node of the id's op, whose weights and caches are persistent, all else an
    input. No input of one case occurs in another, so that no backend can answer from the case before.
    """
    seen: Counter[bytes] = Counter()
    for case_id in STANDARD:
        case = build(case_id)
        case.validate()
        assert (case.id, case.family) == (case_id, "ops")
        assert case.seed == int(case_id.rpartition("@")[2])
        inputs = case.steps[0].inputs
        assert all(t.flags & FLAG_INPUT for t in inputs)
        _check_op(case)
        _check_roots(case)
        if "HADAMARD" not in case_id:
            seen.update({d.tobytes() for t, d in inputs.items() if d.nbytes > 64 and "mask" not in t.name})
    assert max(seen.values()) == 1


def _check_op(case: Case) -> None:
    """Check that the graph holds the op of the id; the sub-op is the one named."""
    op, _, sub = _op(case.id).partition(".")
    nodes = [t for t in case.steps[0].graph.tensors() if t.op == op]
    assert nodes, case.id
    assert not sub or {"UNARY": UNARY_OPS, "GLU": GLU_OPS}[op][nodes[-1].op_params[0]] == sub


def _check_roots(case: Case) -> None:
    """Check that weights of MUL_MAT, MUL_MAT_ID and GET_ROWS and whatever is written into are persistent."""
    for node in case.steps[0].graph:
        if node.op in {"MUL_MAT", "MUL_MAT_ID", "GET_ROWS"} and node.op == _op(case.id):
            assert node.src[0] is not None
            assert node.src[0].root in case.persistent
            assert node.src[1] is not None
            assert node.src[1].root in case.steps[0].inputs
        if node.view_src is not None and node.op in {"SET_ROWS", "CPY"} and node.op == _op(case.id):
            assert node.view_src in case.caches()


def test_rebuilding_gives_the_same_bytes() -> None:
    """A case is its id: built twice it has the same tensors and bytes, and another seed has others."""
    for case_id in STANDARD[::19]:
        if case_id.startswith("ops/COUNT_EQUAL-") and ",n=1@" in case_id:  # all of its elements are equal
            continue
        assert _digest(build(case_id)) == _digest(build(case_id))
        head, _, seed = case_id.rpartition("@")
        assert _digest(build(case_id)) != _digest(build(f"{head}@{int(seed) + 1}"))


@pytest.mark.parametrize(("case_id", "digest"), PINNED.items())
def test_bytes_are_these_forever(case_id: str, digest: str) -> None:
    """A sample keeps the digests it had; a change of any generator raises `bench.GENERATOR`."""
    assert digest == _digest(build(case_id))


def test_indices_are_legal() -> None:
    """Indices are in range; GET_ROWS may repeat rows, SET_ROWS never within a list.

    MUL_MAT_ID repeats only with `pick=twice`. With `pick=last` each list has the highest expert.
    """
    for case_id in STANDARD:
        op = _op(case_id)
        if op not in {"GET_ROWS", "SET_ROWS", "MUL_MAT_ID", "ADD_ID"}:
            continue
        case = build(case_id)
        node = next(n for n in case.steps[0].graph if n.op == op)
        src = [s for s in node.src if s is not None]
        ids_, rows = {
            "GET_ROWS": (src[1], src[0].ne[1]),
            "SET_ROWS": (src[1], node.ne[1]),
            "MUL_MAT_ID": (src[-1], src[0].ne[2]),
            "ADD_ID": (src[-1], src[1].ne[1]),
        }[op]
        values = strided(case.steps[0].inputs[ids_.root], ids_)
        assert values.min() >= 0, case_id
        assert values.max() < rows, case_id
        if op in {"SET_ROWS", "MUL_MAT_ID"}:
            flat = values.reshape(-1, values.shape[-1])
            repeats = [len(set(row)) < len(row) for row in flat.tolist()]
            assert all(repeats) if "pick=twice" in case_id else not any(repeats), case_id
            assert "pick=last" not in case_id or (flat.max(-1) == rows - 1).all(), case_id


@pytest.mark.parametrize("ne", ["1x1", "16x16", "32x32x2", "8x8x3x2"])
def test_every_matrix_under_the_hint_is_a_hadamard_matrix(ne: str) -> None:
    """Of a batch each one is whole and orthogonal: its bytes are as many as its shape says."""
    case = build(f"ops/MUL_MAT-f32+f32-a={ne},b={ne},hint=SRC0_IS_HADAMARD@1")
    case.validate()
    ((a, data),) = case.persistent.items()
    h = strided(data.view(np.uint8), a).view("<f4").astype(np.float64)
    assert np.allclose(h @ h.swapaxes(-1, -2), np.eye(a.ne[0]), atol=1e-6)


def test_sorted_rows_hold_different_values() -> None:
    """ARGSORT and TOP_K have one right answer each, but for ties by design."""
    for case_id in STANDARD:
        if _op(case_id) in {"ARGSORT", "TOP_K"} and "data=ties" not in case_id and "form=" not in case_id:
            case = build(case_id)
            a = case.steps[0].graph.nodes[-1].src[0]
            assert a is not None
            rows = strided(case.steps[0].inputs[a.root], a).reshape(-1, a.ne[0])
            assert (np.diff(np.sort(rows, axis=-1)) > 0).all(), case_id


@given(st.integers(1, 9), st.integers(0, 20), st.integers(1, 3), st.floats(0, 0.9))
def test_masks_leave_each_query_its_own_key(n: int, past: int, heads: int, dead: float) -> None:
    """A causal mask shows past and own key, never the future; a blind one hides one row altogether."""
    ne = (past + n, n, heads, 1)
    mask = causal(past, dead=dead)(Stream("a"), ne).reshape(heads, n, past + n)
    for i in range(n):
        assert (mask[:, i, past + i] == 0).all()
        assert np.isneginf(mask[:, i, past + i + 1 :]).all()
        assert dead > 0 or (mask[:, i, : past + i + 1] == 0).all()
    hidden = np.isneginf(blind(causal(past))(Stream("a"), ne)).all(axis=-1).reshape(heads, n)
    assert hidden.sum() == heads


@given(st.integers(1, 9), st.integers(1, 60), st.floats(0, 0.9))
def test_a_query_before_the_first_key_sees_one_at_most(keys: int, before: int, dead: float) -> None:
    """However many queries there are more than keys, each has a row of the mask."""
    queries = keys + before
    mask = causal(-before, dead=dead)(Stream("a"), (keys, queries, 1, 1)).reshape(queries, keys)
    assert (np.isfinite(mask[:before]).sum(axis=-1) <= (dead > 0)).all()
    assert np.isfinite(mask[range(before, queries), range(keys)]).all()


def _layout(layout: str, ne: tuple[int, int, int, int], *, quantized: bool = False) -> tuple[Tensor, Bench]:
    bench = Bench(OpId("ops/X@1", "X", (), {}, {}, 1))
    type_ = Q8_0 if quantized else F16
    return bench.operand("a", type_, ne, lambda s, m: s.normal(m[0] * m[1] * m[2] * m[3]), layout), bench


LAYOUTS: dict[str, Callable[[Tensor], bool]] = {
    "": lambda t: t.view_src is None and t.nb == contiguous_nb(t.type, t.ne),
    "flat": lambda t: t.op == "RESHAPE" and t.nb == contiguous_nb(t.type, t.ne),
    "off": lambda t: t.view_offs > 0 and t.nb == contiguous_nb(t.type, t.ne),
    "pad": lambda t: t.view_offs > 0 and t.nb[1] > contiguous_nb(t.type, t.ne)[1],
    "rows": lambda t: t.view_offs > 0 and t.nb[1] == 2 * contiguous_nb(t.type, t.ne)[1],
    "slab": lambda t: t.view_offs > 0 and t.nb[2] > t.nb[1] * t.ne[1],
    "part": lambda t: t.view_offs > 0 and t.nb[3] > t.nb[2] * t.ne[2],
    "p0213": lambda t: t.nb[1] > t.nb[2],
    "part.p0213": lambda t: t.nb[1] > t.nb[2] and t.view_offs > 0,
    "pad.p0321": lambda t: t.nb[1] > t.nb[2] > t.nb[3],
}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_shape_asked_for(layout: str, quantized: bool) -> None:
    """Whatever the layout, the operand has the shape asked for, the strides promised, and lies within its leaf."""
    t, bench = _layout(layout, (64, 5, 3, 2), quantized=quantized)
    assert t.ne == (64, 5, 3, 2)
    assert LAYOUTS[layout](t)
    assert t.view_offs + nbytes(t) <= nbytes(t.root)
    assert [*bench.inputs] == [t.root]


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_permutes_chain(a: list[int], b: list[int]) -> None:
    """Two permutes after one another still end in the shape asked for."""
    digits = ["".join(map(str, p)) for p in (a, b)]
    t, _ = _layout(f"pad.p{digits[0]}.p{digits[1]}", (4, 3, 2, 5))
    assert t.ne == (4, 3, 2, 5)
    assert t.view_src is not None
    assert t.view_src.ne != new_tensor(F32, *t.ne).ne


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**9))
def test_other_numbers_work_as_well(ne0: int, ne1: int, ne2: int, seed: int) -> None:
    """An id that no table lists is a case all the same, the same each time."""
    case_id = f"ops/MUL-f16+f32-a={ne0}x{ne1}x{ne2},b={ne0}x1x{ne2},va=slab.p0213,vb=pad@{seed}"
    case = build(case_id)
    case.validate()
    assert case.steps[0].outputs[0].ne == (ne0, ne1, ne2, 1)
    assert case.seed == seed
    assert _digest(case) == _digest(build(case_id))


def test_keys_are_declared_as_they_stand_in_an_id() -> None:
    """The default says what a key takes: shape, integers, integer, number, one of some words, or text."""
    declared = keys("ne=SHAPE b=SHAPE? by=NUMBERS n=4 eps=1e-5 hide=causal|bias cast=|f32 va=")
    values, given = read_keys("x@1", "ne=16x4,by=1x-2,cast=f32", declared)
    defaults = {"b": None, "n": 4, "eps": 1e-5, "hide": "causal", "va": ""}
    assert values == {"ne": (16, 4, 1, 1), "by": (1, -2), "cast": "f32", **defaults}
    assert given == {"ne": "16x4", "by": "1x-2", "cast": "f32"}
    for wrong in ("", "ne=0", "ne=1,n=x", "ne=1,n=4294967296", "ne=1,hide=no", "ne=1,eps=", "ne=1,what=1", "ne=1,ne=1"):
        with pytest.raises(UsageError, match="case 'x@1'"):
            read_keys("x@1", wrong, declared)


@pytest.mark.parametrize(
    ("case_id", "message"),
    [
        ("ops/ADD-f32+f32-a=4", "OP-types-key=value"),
        ("ops/ADD-f32+f32-a=4@x", "OP-types-key=value"),
        ("other/ADD-f32+f32-a=4@1", "OP-types-key=value"),
        ("ops/FROB-f32-a=4@1", "op 'FROB' is unknown; known: .*MUL_MAT"),
        ("ops/SOFTMAX-f32-ne=4@1", r"op 'SOFTMAX' is unknown; did you mean SOFT_MAX\? known: MUL_MAT"),
        ("ops/ADD-f32-a=4@1", "types of a, b joined by"),
        ("ops/ADD-f32+f31-a=4@1", "'f32.f31' found; types: f32, f16"),
        ("ops/ADD-f32+f32-a=4,c=3@1", "key 'c' is unknown; known: a, b, va"),
        ("ops/ADD-f32+f32-a=4,b@1", "'b' found"),
        ("ops/ADD-f32+f32-a=4,a=5@1", "a occurs twice"),
        ("ops/ADD-f32+f32-a=4x0@1", "a: a shape like 16x4x2"),
        ("ops/ADD-f32+f32-a=99999x99999@1", "of at most"),
        ("ops/ADD-f32+f32-b=4@1", "a: .* is missing"),
        ("ops/ADD-f32+f32-a=4,inplace=maybe@1", "inplace: one of .*leaf, mid, input expected, 'maybe' found"),
        ("ops/SUM-f32-ne=4,inplace=leaf@1", "ggml has no sum_inplace"),
        ("ops/ADD-f32+f32-a=4,va=upside@1", "layout 'upside': pad, off"),
        ("ops/ADD-f32+f32-a=4,va=p0012@1", "layout 'p0012'"),
        ("ops/ADD-f32+f32-a=4,b=3@1", "ggml has no such op: .*can_repeat"),
        ("ops/MUL_MAT-q4_0+f32-a=31x2,b=31@1", "q4_0"),
        ("ops/PERMUTE-f32-a=4x3,axes=0x0x1x2@1", "axes: 0 to 3"),
        ("ops/SET_ROWS-f32+f32+i64-a=4x3,n=9@1", "9 distinct numbers of 3"),
        ("ops/SET_ROWS-f32+f32+i64-a=4x3,n=2,ids=2,vids=p1023@1", "ids: a layout whose permutes keep axis 0"),
        ("ops/SCALE-f32-ne=4,s=big@1", "s: a number expected, 'big' found"),
        ("ops/TOP_K-f32-ne=4,k=5@1", "a->ne"),
        ("ops/MUL_MAT-f32+f32-a=64x32,b=64x3,hint=SRC0_IS_HADAMARD@1", "square matrices whose order is a power of two"),
        ("ops/MUL_MAT-f32+f32-a=48x48,b=48x3,hint=SRC0_IS_HADAMARD@1", "square matrices whose order is a power of two"),
        ("ops/MUL_MAT-f32+f32-a=64x64,b=64,va=pad,hint=SRC0_IS_HADAMARD@1", "a contiguous f32 a"),
        ("ops/MUL_MAT-f16+f32-a=64x64,b=64,hint=SRC0_IS_HADAMARD@1", "a contiguous f32 a"),
    ],
)
def test_wrong_ids_are_explained(case_id: str, message: str) -> None:
    """What is wrong with an id is said with what may stand there."""
    with pytest.raises(UsageError, match=message):
        build(case_id)


@pytest.mark.parametrize(("type_", "field", "values"), [("nvfp4", "d", range(256)), ("mxfp4", "e", range(2, 255))])
def test_bytes_has_every_scale_of_one_byte(type_: str, field: str, values: range) -> None:
    """Also those that no quantiser writes."""
    case = build(f"ops/GET_ROWS-{type_}+i32-a=256x65,n=33,data=bytes@0")
    weight, raw = next(iter(case.persistent.items()))
    assert set(np.unique(raw.view(BLOCK[weight.type])[field]).tolist()) == set(values)


@pytest.mark.parametrize("op", ["UNARY.EXP", "SQR"])
@pytest.mark.parametrize(("type_", "largest"), [("f32", 3.4028235e38), ("f16", 65504.0), ("bf16", 3.3895314e38)])
def test_last_comes_near_the_largest_result_and_not_beyond(op: str, type_: str, largest: float) -> None:
    """Each result is finite in its type; a quarter of the largest is the step of BF16 there."""
    case = build(f"ops/{op}-{type_}-ne=67x4,data=last@0")
    leaf, raw = next(iter(case.steps[0].inputs.items()))
    stored = raw.view({"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[type_])
    x = to_float(leaf.type, stored).astype(np.float64)
    y = np.exp(x) if op == "UNARY.EXP" else x * x
    assert 0.75 * largest < y.max() <= largest


@pytest.mark.parametrize("form", ["softmax", "sigmoid", "biased"])
def test_scores_of_a_router_are_far_apart(form: str) -> None:
    """No rounding of float32 changes which experts a token has."""
    case = build(f"ops/ARGSORT-f32-ne=576x33,order=DESC,form={form},n_used=4@0")
    leaves = (*case.persistent.items(), *case.steps[0].inputs.items())
    values = {t.name: d.view("<f4").astype(np.float64) for t, d in leaves}
    x = values["a"].reshape(33, 576)
    scores = np.exp(x) / np.exp(x).sum(1, keepdims=True) if form == "softmax" else 1 / (1 + np.exp(-x))
    scores = np.sort(scores + values.get("exp_probs_b.bias", 0.0))
    assert (np.diff(scores) > 1e-5 * scores[:, 1:]).all()
