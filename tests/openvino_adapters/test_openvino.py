"""The OpenVINO adapter: what it translates is what the reference computes; what it refuses has a reason."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.openvino import OpenVinoStateless
from backends.openvino.emit.rows import STABLE
from backends.openvino.nodes import Constants, round_bf16, round_f16
from backends.openvino.storage import BLOCKS, decode, encode
from backends.openvino.views import read, region, write
from conformance import shipped
from conformance.backend.interface import Backend
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.quants import from_float
from conformance.ggml.tensor import Bytes, Tensor, nbytes, new_tensor, strided
from conformance.ggml.types import BF16, F16, F32, I32, I64, IQ4_NL, Q4_0, Q4_K, Q8_0, TYPES, GGMLType
from conformance.judge.judge import judge_step
from conformance.run.session.settings import read_waivers
from conformance.suite import ops
from conformance.suite.batch import merge

openvino: Any = importlib.import_module("openvino")  # after the adapter, which keeps its telemetry from the network
o: Any = importlib.import_module("openvino.opset15")
B = Builder()
EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e9, -1e9, np.inf, -np.inf, np.nan, 6e-5, 6.1e-5, 5.96e-8, 2.98e-8,
         2.99e-8, 1e-30, 3.3e38, -3.3e38, 1.7e38, 2.0**100]  # fmt: skip


@pytest.fixture(scope="module")
def ov() -> OpenVinoStateless:
    """One backend for all tests: its program cache is part of what is tested."""
    return OpenVinoStateless()


def _floats(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _bytes(x: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _step(inputs: dict[Tensor, NDArray[Any]], *outputs: Tensor) -> Step:
    return Step(B.build_forward_expand(*outputs), {t: _bytes(x) for t, x in inputs.items()}, outputs)


def _run(backend: Backend, case: Case) -> list[dict[Tensor, Bytes]]:
    """Outputs and caches after each step."""
    case.validate()
    found = []
    with backend.open(case) as session:
        for step in case.steps:
            got = dict(session.compute(step.graph, step.inputs, step.outputs))
            found.append({**got, **{t: session.read(t) for t in case.caches()}})
    return found


def _f32(data: Bytes) -> NDArray[np.float32]:
    return data.view(np.float32)


def _evaluated(x: Any, *feeds: tuple[Any, NDArray[Any]], fusion: str = "on") -> NDArray[Any]:  # noqa: ANN401  # OpenVINO nodes have no types
    """What a node gives, compiled as the adapter compiles it."""
    ov = OpenVinoStateless(fusion=fusion)
    compiled = ov._compiler.compiled([o.result(x)], [p for p, _ in feeds])
    return np.array(compiled([a for _, a in feeds])[0])


# -- against the reference ------------------------------------------------------------------------------------------


def test_smoke_ops_are_within_budget_without_fusion() -> None:
    """Each second op case of smoke, unless refused or waived, takes at most its budget, a hundred of them in one model.

    With fusion `pytest conformance` runs them.
    """
    known = read_waivers(shipped.path("waivers", "openvino.toml")).entries
    ov = OpenVinoStateless(fusion="off")
    reference = CpuBackend()
    cases = [c for c in map(ops.build, ops.ids("smoke")[::2]) if all(ov.supports(c.steps[0].graph))]
    assert len(cases) > 250
    over = []
    for first in range(0, len(cases), ov.batch):
        part = cases[first : first + ov.batch]
        (found,) = _run(ov, merge(part))
        for case in part:
            (expected,) = _run(reference, case)
            over += [(case.id, j.used) for j in judge_step(case, 0, expected, found, EXACT) if j.used > 1]
    assert [(i, used) for i, used in over if not any(w.covers(i) for w in known)] == []


def test_a_trajectory_with_a_quantised_cache(ov: OpenVinoStateless) -> None:
    """Three steps write a Q8_0, an F16 and a BF16 cache and attend to two of them: caches live from step to step."""
    caches = {new_tensor(t, 32, 16, name=f"cache_{t}"): np.zeros(nbytes(new_tensor(t, 32, 16)), np.uint8)
              for t in (Q8_0, F16, BF16)}  # fmt: skip
    steps = []
    for k in range(3):
        rows, ids = new_tensor(F32, 32, 2, name="rows"), new_tensor(I64, 2, name="ids")
        q, mask = new_tensor(F32, 32, 2, 4, name="q"), new_tensor(F16, 16, 2, name="mask")
        written = [B.set_rows(t, rows, ids) for t in caches]
        keys, values = (B.reshape_3d(t, 32, 16, 1) for t in written[:2])
        out = B.flash_attn_ext(q, keys, values, mask, 0.2, 0.0, 0.0)
        visible = np.where(np.arange(16) < 2 * k + 2, 0, -np.inf).astype(np.float16)
        inputs: dict[Tensor, NDArray[Any]] = {rows: _floats(2, 32, seed=k), ids: np.array([2 * k, 2 * k + 1], np.int64),
                  q: _floats(4, 2, 32, seed=9 + k), mask: np.stack([visible, visible])}  # fmt: skip
        steps.append(_step(inputs, out, written[2]))
    case = Case("trajectory", caches, steps)
    for k, (found, expected) in enumerate(zip(_run(ov, case), _run(CpuBackend(), case), strict=True)):
        for t in caches:
            assert np.array_equal(found[t], expected[t]), (k, t)
        out = steps[k].outputs[0]
        np.testing.assert_allclose(_f32(found[out]), _f32(expected[out]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [STABLE, 131_072])
def test_argsort_orders_equal_values_of_short_rows_and_sorts_long_ones_in_time(ov: OpenVinoStateless, n: int) -> None:
    """Each index occurs once, in order; equals of a short row stay in order; a long row takes less than n^2 steps."""
    x, given = new_tensor(F32, n, 2, name="x"), np.random.default_rng(n).integers(0, 7, (2, n)).astype(np.float32)
    order = B.argsort(x, SORT_ORDER.DESC)
    start = time.process_time()
    (found,) = _run(ov, Case("sorted", {}, [_step({x: given}, order)]))[0].values()
    assert time.process_time() - start < 10  # 80 s if neighbours are exchanged
    picked = found.view(np.int32).reshape(2, n)
    assert np.array_equal(np.sort(picked), np.tile(np.arange(n), (2, 1)))
    assert np.array_equal(np.take_along_axis(given, picked, 1), -np.sort(-given))
    assert n > STABLE or np.array_equal(picked, np.argsort(-given, kind="stable"))


@pytest.mark.parametrize("type_", [*BLOCKS, F16], ids=str)
def test_rows_that_the_next_step_reads_have_the_scales_of_their_type(ov: OpenVinoStateless, type_: GGMLType) -> None:
    """No node of the step reads the rows that it stores: the host rounds the scales before the next step does."""
    cache = new_tensor(type_, 256, 8, name="cache")
    rows, ids, x = (
        new_tensor(F32, 256, 8, name="rows"),
        new_tensor(I64, 8, name="ids"),
        new_tensor(F32, 256, 3, name="x"),
    )
    store = _step({rows: _floats(8, 256, seed=3), ids: np.arange(8, dtype=np.int64)}, B.set_rows(cache, rows, ids))
    product = _step({x: _floats(3, 256, seed=4)}, B.mul_mat(cache, x), B.set_rows(cache, rows, ids))
    product.inputs |= store.inputs
    case = Case("read next", {cache: np.zeros(nbytes(cache), np.uint8)}, [store, product])
    found, expected = (_run(b, case)[1][product.outputs[0]] for b in (ov, CpuBackend()))
    np.testing.assert_allclose(_f32(found), _f32(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("type_", [*BLOCKS, F16, BF16, I32], ids=str)
@pytest.mark.parametrize("fusion", ["on", "off"])
def test_values_are_stored_as_ggml_stores_them(fusion: str, type_: GGMLType) -> None:
    """CPY of floats into any type that the translation stores gives the reference quantiser's bytes exactly."""
    ov = OpenVinoStateless(fusion=fusion)
    x = _floats(64, 256) * np.float32(3)
    x[0], x[1, :32] = 0, 1
    a, out = new_tensor(F32, 256, 64), new_tensor(type_, 256, 64)
    node = B.cpy(a, out)
    (found,) = _run(ov, Case("cpy", {out: np.zeros(nbytes(out), np.uint8)}, [_step({a: x}, node)]))
    assert np.array_equal(found[node], _bytes(from_float(type_, x)))
    assert np.array_equal(found[out], found[node])


@pytest.mark.parametrize("type_", TYPES.values(), ids=str)
def test_persistent_bytes_come_back_exactly(ov: OpenVinoStateless, type_: GGMLType) -> None:
    """What is written to a weight or a cache of any type reads back byte for byte."""
    t = new_tensor(type_, type_.blck_size, 3)
    data = np.random.default_rng(0).integers(0, 256, nbytes(t), np.uint8)
    if type_ in (BF16, F16, F32, *BLOCKS):
        data &= 0x3B  # no NaN, whose payload a float conversion may change
    weight = Case("weight", {t: data}, [])
    other = new_tensor(type_, type_.blck_size, 3)
    cache = Case("cache", {t: data}, [_step({other: data}, B.cpy(other, t))])
    for case in (weight, cache):
        with ov.open(case) as session:
            assert np.array_equal(session.read(t), data)
            session.write(t, data[::-1].copy())
            assert np.array_equal(session.read(t), data[::-1])


# -- aliasing -------------------------------------------------------------------------------------------------------


def test_a_view_shows_what_was_written_after_it_was_made(ov: OpenVinoStateless) -> None:
    """A view is read when it is consumed; an output is what its node held right after it ran."""
    a, x = new_tensor(F32, 4, 3), new_tensor(F32, 4, 3)
    before = B.scale(a, 1.0)
    view = B.view_2d(before, 2, 3, before.nb[1], 4)
    early = B.cont(view)
    overwritten = B.cpy(x, before)
    late = B.scale(view, 10.0)
    for n in (before, early, overwritten, late):
        n.flags |= 16
    graph = Graph([before, view, early, overwritten, late])
    values = {a: _floats(3, 4, seed=1), x: _floats(3, 4, seed=2)}
    case = Case("alias", {}, [Step(graph, {t: _bytes(v) for t, v in values.items()}, (before, early, view, late))])
    (found,) = _run(ov, case)
    assert np.array_equal(_f32(found[before]), values[a].reshape(-1))
    assert np.array_equal(_f32(found[early]), values[a][:, 1:3].reshape(-1))
    assert np.array_equal(_f32(found[late]), values[x][:, 1:3].reshape(-1) * 10)


def test_plain_parameters_constants_and_duplicates_are_right_outputs(ov: OpenVinoStateless) -> None:
    """An input that becomes a cache unchanged, the same value twice, a weight as an output: all arrive."""
    a, w, cache = new_tensor(F32, 5, 2), new_tensor(F32, 5, 2), new_tensor(F32, 5, 2)
    copy, once, twice, weight = B.cpy(a, cache), B.cont(a), B.dup(a), B.cont(w)
    x, y = _floats(2, 5), _floats(2, 5, seed=3)
    step = _step({a: x}, copy, once, twice, weight)
    for steps in ([step], [step, step]):  # weights are parameters in one step, constants in two
        case = Case("plain", {w: _bytes(y), cache: np.zeros(40, np.uint8)}, steps)
        for found in _run(ov, case):
            for t in (copy, once, twice, cache):
                assert np.array_equal(found[t], _bytes(x)), t
            assert np.array_equal(found[weight], _bytes(y))


def test_narrow_values_are_rounded_before_anything_reads_them(ov: OpenVinoStateless) -> None:
    """Values stored whole, in part and in a cache are read on their grid, in the same step and the next."""
    for type_ in (F16, BF16):
        cache, a, b = new_tensor(type_, 8, 2), new_tensor(F32, 8, 2), new_tensor(type_, 8)
        stored = B.cpy(a, cache)
        row = B.cpy(b, B.view_1d(stored, 8, stored.nb[1]))
        wide = B.cast(stored, F32)
        scaled = B.scale(B.cast(B.scale(a, 1.0), type_), 3.0)
        x = _floats(2, 8)
        first = Step(Graph([stored]), {a: _bytes(x)}, (stored,))
        values = {a: _bytes(x), b: _bytes(from_float(type_, _floats(8, seed=4)))}
        both = B.build_forward_expand(stored, row, wide, scaled)
        second = Step(both, values, (wide, scaled))
        seen = B.cast(cache, F32)
        third = Step(B.build_forward_expand(seen), {}, (seen,))
        case = Case("narrow", {cache: np.zeros(32, np.uint8)}, [first, third, second, third])
        for found, expected in zip(_run(ov, case), _run(CpuBackend(), case), strict=True):
            for t, want in expected.items():
                assert np.array_equal(found[t], want), (type_, t)


@pytest.mark.parametrize("ne", [(1, 2), (3, 2), (8, 5), (8, 5, 1, 2), (8, 5, 3)])
@pytest.mark.parametrize("dim", range(4))
def test_a_repeated_value_joined_with_itself_keeps_its_order(
    ov: OpenVinoStateless, ne: tuple[int, ...], dim: int
) -> None:
    """Also if another node reads it: the plugin then stores the channels of a Tile last, even a single one."""
    x = new_tensor(F32, *ne, name="x")
    b = Builder()
    twice = b.repeat_4d(x, 2 * ne[0], *x.ne[1:])
    joined = b.concat(twice, twice, dim)
    values = _floats(*x.ne[::-1])
    (out,) = _run(ov, Case("joined", {}, [_step({x: values}, joined, b.sub(twice, x))]))
    tiled = np.tile(values, 2)
    assert np.array_equal(_f32(out[joined]), np.concatenate([tiled, tiled], 3 - dim).ravel())


def test_uncomputed_nodes_change_nothing_and_cannot_be_read(ov: OpenVinoStateless) -> None:
    """A node without FLAG_COMPUTE leaves memory alone; computing with one is an error that names both."""
    a, cache = new_tensor(F32, 4), new_tensor(F32, 4)
    skipped, out = B.cpy(a, cache), B.scale(a, 2.0)
    out.flags |= 16
    x = _floats(4)
    step = Step(Graph([skipped, out]), {a: _bytes(x)}, (out,))
    with ov.open(Case("skip", {cache: np.zeros(16, np.uint8)}, [step])) as session:
        assert np.array_equal(_f32(session.compute(step.graph, step.inputs, step.outputs)[out]), x * 2)
        assert not session.read(cache).any()
    dead = B.scale(a, 3.0)
    reader = B.scale(dead, 2.0)
    reader.flags |= 16
    with (
        ov.open(Case("dead", {}, [])) as session,
        pytest.raises(BackendError, match="which the graph does not compute"),
    ):
        session.compute(Graph([dead, reader]), {a: _bytes(x)}, [reader])


def test_empty_tensors_give_empty_outputs(ov: OpenVinoStateless) -> None:
    """A tensor without elements is computed by doing nothing."""
    a = new_tensor(F32, 0, 3)
    out = B.scale(a, 2.0)
    (found,) = _run(ov, Case("empty", {}, [_step({a: np.empty(0, np.float32)}, out)]))
    assert found[out].size == 0


# -- one program per distinct graph ---------------------------------------------------------------------------------


def test_equal_graphs_share_a_program_and_others_do_not() -> None:
    """A then B is B alone: one op_param, view offset or weight byte more makes another program, a name does not."""
    ov = OpenVinoStateless()
    x, w = _floats(4, 8), _floats(4, 8, seed=5)

    def case(scale: float = 2.0, offset: int = 0, weight: NDArray[np.float32] = w, name: str = "a") -> Case:
        a, b = new_tensor(F32, 8, 4, name=name), new_tensor(F32, 8, 4)
        out = B.scale(B.cont(B.view_2d(B.add(a, b), 4, 4, 32, offset)), scale)
        step = _step({a: x}, out)
        return Case("key", {b: _bytes(weight)}, [step, step])

    def compiles(c: Case) -> tuple[int, int]:
        with ov.open(c) as session:
            for step in c.steps:
                found = session.compute(step.graph, step.inputs, step.outputs)
            expected = _run(CpuBackend(), c)[-1]
            for t in step.outputs:
                np.testing.assert_allclose(_f32(found[t]), _f32(expected[t]), rtol=1e-6)
            return session.witness().compiles, session.witness().cache_hits

    other = w.copy()
    other[3, 7] += 1
    assert compiles(case()) == (1, 1)
    assert compiles(case()) == (0, 2)
    assert compiles(case(name="b")) == (0, 2)
    assert compiles(case(scale=2.5)) == (1, 1)
    assert compiles(case(offset=16)) == (1, 1)
    assert compiles(case(weight=other)) == (1, 1)


def test_a_weight_written_in_a_session_is_the_one_used(ov: OpenVinoStateless) -> None:
    """Weights are part of a program; writing one makes the session use another program."""
    a, w = new_tensor(F32, 4), new_tensor(F32, 4)
    out = B.add(a, w)
    step = _step({a: _floats(4)}, out)
    with ov.open(Case("write", {w: _bytes(_floats(4, seed=1))}, [step, step])) as session:
        session.compute(step.graph, step.inputs, step.outputs)
        session.write(w, _bytes(np.zeros(4, np.float32)))
        found = session.compute(step.graph, step.inputs, step.outputs)
        assert np.array_equal(found[out], step.inputs[a])
        with pytest.raises(UsageError, match="16 bytes expected, 3 given"):
            session.write(w, np.zeros(3, np.uint8))
        with pytest.raises(UsageError, match="persistent tensor"):
            session.read(a)


def test_the_witness_says_what_ran(ov: OpenVinoStateless) -> None:
    """Device as OpenVINO reports it, layers as it names them, views and host work in notes."""
    a, b = new_tensor(Q4_K, 256, 8), new_tensor(F32, 512, 2)
    out = B.mul_mat(a, B.view_2d(b, 256, 2, b.nb[1], 1024))
    step = _step({a: np.zeros(nbytes(a), np.uint8), b: _floats(2, 512)}, out)
    with ov.open(Case("witness", {}, [step])) as session:
        session.compute(step.graph, step.inputs, step.outputs)
        w = session.witness()
    assert (w.device, w.path, w.nodes, w.compiles, w.cache_hits) == ("CPU", "translated", 1, 1, 0)
    assert w.kernels["Output"] == 1
    assert w.notes == ["1 leaves dequantised on the host", "1 views read by slice"]


# -- pieces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ["on", "off"])
def test_rounding_to_narrow_floats_is_to_nearest_even(fusion: str) -> None:
    """The arithmetic that stands for Convert gives what NumPy and ggml give, at every edge and 20,000 random bits."""
    random = np.random.default_rng(0).integers(0, 2**32, 20000, np.uint32).view(np.float32)
    normal = random[~((np.abs(random) < 1e-37) & (random != 0))]  # OpenVINO flushes what float32 cannot hold normally
    x = np.concatenate([np.array(EDGES, np.float32), normal])
    p = o.parameter([len(x)], openvino.Type.f32)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(_evaluated(round_f16(Constants(), p), (p, x), fusion=fusion), expected)
    wide = from_float(BF16, x).astype(np.uint32) << 16
    np.testing.assert_array_equal(_evaluated(round_bf16(Constants(), p), (p, x), fusion=fusion), wide.view(np.float32))


@pytest.mark.parametrize("type_", [*BLOCKS, Q4_K, IQ4_NL, I64], ids=str)
def test_parts_hold_all_bytes(type_: GGMLType) -> None:
    """Taking blocks apart and putting them together again is the identity on any bytes."""
    t = new_tensor(type_, type_.blck_size * 2, 5)
    data = np.random.default_rng(1).integers(0, 256, nbytes(t), np.uint8)
    data.reshape(-1, type_.type_size)[:, 1] &= 0x7B  # NaN payloads of the scales may change
    data.reshape(-1, type_.type_size)[:, 3] &= 0x7B
    assert np.array_equal(decode(type_, encode(t, data)), data)


@st.composite
def _views(draw: st.DrawFn) -> Tensor:
    """A view of a view of a small leaf: permuted, cut, with steps, overlapping."""
    ne = draw(st.tuples(*[st.integers(1, 5)] * 4))
    root = new_tensor(F32, *ne)
    order = draw(st.permutations(range(4)))
    keep = [draw(st.integers(1, ne[a])) for a in order]
    starts = [draw(st.integers(0, ne[a] - n)) for a, n in zip(order, keep, strict=True)]
    nb = [root.nb[a] * draw(st.sampled_from([0, 1, 1, 1])) for a in order]
    offset = sum(s * root.nb[a] for s, a in zip(starts, order, strict=True))
    t = Tensor(F32, tuple(keep), tuple(nb), "VIEW", src=(root,), view_src=root, view_offs=offset)  # type: ignore[arg-type]  # four each
    return (
        t
        if draw(st.booleans())
        else Tensor(F32, (t.ne[0], 1, 1, t.ne[3]), t.nb, "VIEW", view_src=root, view_offs=offset)
    )


def _interpreted(x: Any, p: Any, array: NDArray[Any]) -> NDArray[Any]:  # noqa: ANN401  # OpenVINO nodes have no types
    out = openvino.Tensor(openvino.Type.f32, openvino.Shape(list(x.shape)))
    assert openvino.Model([o.result(x)], [p]).evaluate([out], [openvino.Tensor(array)])
    return np.array(out.data)


@settings(max_examples=200, deadline=None)
@given(_views())
def test_views_read_and_write_the_elements_that_strides_name(t: Tensor) -> None:
    """Whole, slice or gather, concat or scatter: a view's elements are those of `tensor.strided`."""
    root = np.arange(nbytes(t.root) // 4, dtype=np.float32).reshape(t.root.shape)
    expected = strided(_bytes(root), t)
    p = o.parameter(list(root.shape), openvino.Type.f32)
    x, _ = read(Constants(), p, region(t, blocks=False))
    assert np.array_equal(_interpreted(x, p, root), expected) if x is not p else np.array_equal(root, expected)
    if 0 in t.nb:
        return
    y, _ = write(Constants(), p, region(t, blocks=False), o.constant(-expected))
    want = _bytes(root).copy()
    strided(want, t)[...] = -expected
    assert np.array_equal(_interpreted(y, p, root).reshape(-1), _f32(want))


# -- refusals and errors --------------------------------------------------------------------------------------------


def _refusal(ov: OpenVinoStateless, node: Tensor) -> str:
    answer = ov.supports_op(node)
    assert not answer
    return answer.reason


def test_refusals_give_reasons(ov: OpenVinoStateless) -> None:
    """What cannot be expressed is refused through supports_op, in words."""
    a = new_tensor(F32, 256, 2)
    assert "FLASH_ATTN_BACK" in _refusal(ov, Tensor(F32, a.ne, a.nb, "FLASH_ATTN_BACK", src=(a,)))
    assert "q4_K" in _refusal(ov, B.cpy(a, new_tensor(Q4_K, 256, 2)))
    assert "only leaves" in _refusal(ov, B.mul_mat(B.cont(new_tensor(Q4_K, 256, 2)), a))
    odd = Tensor(F32, (2, 1, 1, 1), (4, 6, 6, 6), "VIEW", src=(a,), view_src=a, view_offs=2)
    assert "not multiples" in _refusal(ov, B.scale(B.cont(odd), 2.0).src[0] or odd)
    assert ov.supports_op(B.cpy(a, new_tensor(Q4_0, 256, 2)))


def test_absent_devices_and_unknown_options_say_what_there_is() -> None:
    """Each error names the legal values."""
    with pytest.raises(UnavailableError, match=r"'TPU' is not here; devices found: .*CPU"):
        OpenVinoStateless(device="TPU")
    with pytest.raises(UsageError, match="accuracy, default"):
        OpenVinoStateless(precision="f64")
    with pytest.raises(UsageError, match="auto, on, off"):
        OpenVinoStateless(fusion="maybe")


def test_absent_openvino_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the adapter imports, and its constructor says what to install."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UnavailableError, match="pip install openvino"):
        OpenVinoStateless()


def test_a_refused_compile_is_one_line(ov: OpenVinoStateless) -> None:
    """OpenVINO's own words, without its source lines."""
    p = o.parameter([2], openvino.Type.f32)
    q = o.parameter([2], openvino.Type.f32)
    with pytest.raises(BackendError, match="refused to compile: ") as e:
        ov._compiler.compiled([o.result(o.add(p, q))], [p])
    assert "\n" not in str(e.value)


def test_a_property_that_openvino_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may lack the plugin's own switch for fusing: models compile without it."""
    monkeypatch.setattr("backends.openvino.compile.UNFUSED", {"NO_SUCH_PROPERTY": "1"})
    a = new_tensor(F32, 4)
    out = B.scale(a, 2.0)
    (found,) = _run(OpenVinoStateless(), Case("property", {}, [_step({a: _floats(4)}, out)]))
    assert np.array_equal(_f32(found[out]), _floats(4) * 2)


def test_the_default_precision_computes_too() -> None:
    """The device's own choice of precision is a mode of its own: near, not exact."""
    a, b = new_tensor(F32, 64, 8), new_tensor(F32, 64, 4)
    out = B.mul_mat(a, b)
    x, y = _floats(8, 64), _floats(4, 64, seed=1)
    (found,) = _run(OpenVinoStateless(precision="default"), Case("default", {}, [_step({a: x, b: y}, out)]))
    np.testing.assert_allclose(_f32(found[out]).reshape(4, 8), y @ x.T, rtol=0.1, atol=0.3)


_OFFLINE = """
import sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        print("network:", event, args, file=sys.stderr); sys.exit(9)
sys.addaudithook(hook)
from backends.openvino import OpenVinoStateless
print(OpenVinoStateless().info().versions["openvino"])
"""


def test_nothing_reaches_the_network() -> None:
    """OpenVINO comes with a telemetry package; opening the backend makes no connection and raises no warning."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", _OFFLINE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("20")


_ALARM = """
import signal
from backends.openvino import OpenVinoStateless
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
backends = [OpenVinoStateless(), OpenVinoStateless()]
while backends:
    backends.pop(0).close()
signal.raise_signal(signal.SIGINT)
"""


def test_a_signal_after_the_backends_are_gone_reaches_its_handler() -> None:
    """Backends that end in the order they came in leave no stack for signals that is no longer there."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _ALARM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_the_info_names_the_device(ov: OpenVinoStateless) -> None:
    """Versions and the device's full name, as OpenVINO says them."""
    info = ov.info()
    assert (info.backend, info.device) == ("openvino-stateless", "CPU")
    assert info.description
    assert info.versions["openvino"].startswith("20")
