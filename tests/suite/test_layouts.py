"""Every source of every op is tested in each layout that ggml's constructors take."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import conform
from numpy.lib.stride_tricks import as_strided
from planted_adapter import planted_adapter

from backends.cpu import CpuBackend
from conformance.backend import kernel
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, ConformanceError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Bytes, Tensor, contiguous_nb, pack, strided
from conformance.judge.verdict import Verdict
from conformance.run.contiguous import contiguous
from conformance.run.execute import execute
from conformance.run.runner import Runner
from conformance.suite.ops import KNOWN, build, built, ids
from conformance.suite.ops.bench import TABLES, parse
from conformance.suite.ops.layouts import CLASSES, DENSE, EXCEPTIONS, LAYOUTS, OFFSET, class_of, small, sources, survey

LAID = [case_id for case_id in ids("full") if ",src" in case_id]
"""Cases that lay out a source by its number."""

IGNORES = '''
"""Kernels that take their source's elements to lie side by side, from the first on."""

import numpy as np

from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend


def side_by_side(x):
    strides = np.empty(x.shape, x.dtype).strides
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


def scale(node, dst, src):
    dst[...] = side_by_side(src[0]).astype(np.float64) * node.params.s + node.params.b


def leaky_relu(node, dst, src):
    x = side_by_side(src[0]).astype(np.float64)
    dst[...] = np.where(x > 0, x, x * node.params.negative_slope)


class Ignores(KernelBackend):
    def info(self):
        return DeviceInfo("ignores", "none", "ignores strides")

    def kernels(self):
        return {"SCALE": scale, "LEAKY_RELU": leaky_relu}

    def refuses(self, node):
        return "" if node.type.name == "f32" else "F32 only"
'''


LEFT_OUT = (
    ("SCALE", 0, False, "pad rows"),
    ("LEAKY_RELU", 0, False, "slab part p0213 p1023"),
    ("LEAKY_RELU", 0, True, "slab p0213 p1023"),
    ("DIAG_MASK_INF", 0, True, "p1023"),
    ("SET", 0, False, "rows pad slab part p0213 p1023"),
    ("ADD1", 0, False, "pad rows"),
    ("ROPE", 1, False, "off pad.p1023"),
    ("OPT_STEP_ADAMW", 2, False, "pad p0213 p1023"),
    ("CROSS_ENTROPY_LOSS", 1, False, "pad p0213"),
    ("UNARY.XIELU", 0, False, "p1023"),
)
"""Op, source, in place or not, and layouts that were left out once: no rule of the derivation may lose them."""


def test_full_has_each_layout_that_ggml_takes_and_standard_each_class() -> None:
    """Derived from the declarations: a layout is needed where a case with it builds. `python ci/layouts.py` adds it."""
    standard = survey(filter(small, ids("standard")))
    full = deepcopy(standard)
    for case_id in filter(small, set(ids("full")).difference(ids("standard"))):
        full.add(case_id)
    lacking = []
    for source in sources():
        op = source.op.partition(".")[0]
        if (op, source.name) in EXCEPTIONS:
            continue
        assert source.inplace or standard.bases.get(source), f"{source}: no case of `standard` has a leaf there"
        for class_, layout, body in standard.accepted(source):
            if (source, layout) not in full.layouts:
                lacking.append(f"full: {source}: {body}")
            if not source.inplace and class_ != DENSE and (source, class_) not in standard.classes:
                lacking.append(f"standard: {source}: {class_}: {body}")
    lacking += [f"standard: {body}" for body in standard.between_lacking()]
    assert lacking == []
    assert len({op for op, *_ in standard.between}) > 100
    for op, at, inplace, layouts in LEFT_OUT:
        there = {layout for s, layout in full.layouts if (s.op, s.at, s.inplace) == (op, at, inplace)}
        assert set(layouts.split()) <= there, op


def test_each_source_is_asked_for() -> None:
    """The list follows from the tables and the declarations: each op's every source, and its form in place."""
    asked = {(s.op, s.at) for s in sources()}
    assert asked == {
        (op, i) for t in TABLES for op in t.ops for i in range(len(DECLARATIONS[op.partition(".")[0]].src))
    }
    assert {s.op for s in sources() if s.inplace} == {op for t in TABLES for op in t.ops if "inplace" in t.keys}
    assert all((op in DECLARATIONS and name in DECLARATIONS[op].src and why) for (op, name), why in EXCEPTIONS.items())


def test_an_output_between_two_results_is_the_only_one() -> None:
    """`dst=between` needs a graph with one result, and changes neither the op's operands nor its parameters."""
    with pytest.raises(ConformanceError, match="a graph with one result, which is no view, expected"):
        build("ops/SCALE-f32-ne=8x5x3x2,inplace=mid,dst=between@1")
    plain, between = (build(f"ops/MUL_MAT-f32+f32-a=64x7,b=64x8{key}@1") for key in ("", ",dst=between"))
    nodes = [case.steps[0].graph.nodes for case in (plain, between)]
    assert [n.op for n in nodes[1]] == ["UNARY", "UNARY", "UNARY", "SUM", "MUL_MAT"]
    assert [(t.name, t.ne) for t in nodes[0][-1].src if t] == [(t.name, t.ne) for t in nodes[1][-1].src if t]


def test_what_ggml_refuses_is_no_case() -> None:
    """The declaration decides: SCALE of permuted rows cannot be constructed, SOFT_MAX takes a contiguous mask."""
    for body in ("SCALE-f32-ne=7x5x3x2,src0=p0213", "SOFT_MAX-f32-ne=32x6x4,mask=32x6,src1=pad"):
        with pytest.raises(ConformanceError, match="GGML_ASSERT"):
            build(f"ops/{body}@1")


def _source(case: Case, case_id: str) -> Tensor:
    op, at = case_id.partition("/")[2].partition("-")[0].partition(".")[0], int(case_id.rpartition(",src")[2][0])
    node = [n for n in case.steps[0].graph if n.op == op][-1]
    source = node.src[at]
    assert source is not None
    return source


def test_a_source_in_a_layout_holds_the_elements_of_its_leaf() -> None:
    """Its values are those that it had without gaps: an index stays an index, a mask a mask."""
    lists = "ops/MUL_MAT_ID-f32+f32-as=32x5x8,n_used=4,n_tokens=5,src2=pad.p1023@3"
    case = build(lists)
    ids_ = _source(case, lists)
    rows = pack(case.steps[0].inputs[ids_.root], ids_).view("<i4").reshape(5, 4)
    assert all(len(set(row)) == 4 and max(row) < 8 for row in rows.tolist())
    held = case.steps[0].inputs[ids_.root].view("<i4")
    assert 0 <= held.min() <= held.max() < 8


def test_the_class_is_that_of_the_strides() -> None:
    """A word names a layout of four dimensions; of a vector it may mean no more than an offset."""
    for layout, class_ in LAYOUTS.items():
        case_id = f"ops/CONT-f32-ne=7x5x3x2,src0={layout}@1"
        assert class_of(_source(build(case_id), case_id)) == class_, layout
    case_id = "ops/CONT-f32-ne=7,src0=slab@1"
    assert class_of(_source(build(case_id), case_id)) == CLASSES[1]


UNSEEN = {
    "IM2COL src0": "its shape alone counts",
    "IM2COL_3D src0": "its shape alone counts",
    "IM2COL_BACK src1": "its shape alone counts",
    "ADD1 src1": "its one element is also in the gap",
    "CROSS_ENTROPY_LOSS_BACK src0": "its one element is also in the gap",
    "SUM src0": "the sum of a permutation is the same",
    "TRANSPOSE src0": "nothing computes it",
    "VIEW src0": "nothing computes it",
    "SET_ROWS src2": "it is read as the result",
}
"""Operands whose strides do not show in any layout, or in one of them."""


def test_each_layout_shows_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements read side by side, or from the beginning of their buffer, give another result."""
    laid: set[Tensor] = set()

    def ignoring(buffer: Bytes, t: Tensor, offset: int | None = None) -> Any:  # noqa: ANN401  # as `strided`
        if t not in laid or class_of(t) == DENSE:
            return strided(buffer, t, offset)
        x = strided(buffer, t, 0 if class_of(t) == OFFSET else offset)
        return as_strided(x, strides=(*contiguous_nb(t.type, t.ne)[::-1], *x.strides[4:]))

    monkeypatch.setattr(kernel, "strided", ignoring)
    backend, unseen = CpuBackend(), set()
    for case_id in set(LAID).intersection(ids("standard")):
        bench, outputs = built(parse(case_id, KNOWN))
        if all(class_of(t) == DENSE for t in bench.laid):
            continue
        case = bench.case(outputs)
        laid.clear()
        right = _bytes(backend, case)
        laid.update(bench.laid)
        if _bytes(backend, case) == right:
            unseen.add(f"{case_id.partition('/')[2].partition('-')[0]} {case_id.rpartition(',')[2].partition('=')[0]}")
    assert unseen == UNSEEN.keys()


def _bytes(backend: CpuBackend, case: Case) -> list[bytes] | str:
    try:
        return [np.asarray(data).tobytes() for data in execute(backend, case).steps[0].all.values()]
    except BackendError as e:
        return str(e)


def test_an_adapter_that_ignores_strides_fails_at_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCALE and LEAKY_RELU that read src[0] as if it had no gaps: wrong in each."""
    with planted_adapter(tmp_path, monkeypatch, "ignores", IGNORES, "Ignores"):
        for op in ("SCALE", "LEAKY_RELU"):
            ran = conform("run", "--backend", "ignores", "--level", "standard", "--case", f"ops/{op}-*", cwd=tmp_path)
            assert ran.returncode == 1, ran.stdout + ran.stderr
            assert f"FAIL ops/{op}-f32" in ran.stdout


def test_the_reference_sets_a_part_of_what_has_gaps(tmp_path: Path) -> None:
    """SET whose src[0] has gaps, in place and not: checked against ggml, which itself aborts on it."""
    cases = [f"ops/SET-f32-a=10x6x4x2,b=10x2x4x2,at=0x3,va={layout}@1" for layout in ("rows", "pad", "slab", "part")]
    cases += [f"ops/SET-f32-a=10x6x4x2,b=4x6x4x2,at=5,inplace=leaf,src0={layout}@1" for layout in ("pad", "p1023")]
    ran = conform("run", "--backend", "cpu", "--verbose", *(w for c in cases for w in ("--case", c)), cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASS ops/SET") == len(cases)


def test_the_reference_is_checked_where_ggml_itself_is_wrong() -> None:
    """Against ggml over contiguous copies of its sources, and the result says so; a wrong reference still fails."""
    ops = ("ops/LEAKY_RELU", "ops/OPT_STEP_ADAMW", "ops/CONV_2D", "ops/SSM_SCAN")
    cases = [c for c in LAID if c.partition("-")[0] in ops]
    runner = Runner()
    try:
        results = runner.run(Spec("cpu"), [build(c) for c in cases])
        assert [r.case for r in results if r.verdict is not Verdict.PASS] == []
        copied = [r for r in results if "over contiguous copies" in r.detail]
        assert {r.case.partition("-")[0] for r in copied} == set(ops)
    finally:
        runner.close()


def test_contiguous_copies_change_no_value() -> None:
    """The reference gives the same for a case and for its copy, in place or not, outputs and caches."""
    backend = CpuBackend()
    copied = 0
    for case_id in LAID[::7]:
        case = build(case_id)
        asked = contiguous(case)
        if asked is None:
            continue
        copy, outputs = asked
        copy.validate()
        copied += 1
        want, got = execute(backend, case).steps[0], execute(backend, copy).steps[0]
        for t, data in want.outputs.items():
            assert np.array_equal(data, got.outputs[outputs[t]]), case_id
        for t, data in want.caches.items():
            assert np.array_equal(data, got.caches[t]), case_id
    assert copied > 100
