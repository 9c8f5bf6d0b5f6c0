"""Weights that stay compressed in OpenVINO: every encoding is exact, and the device reads it in place."""

from __future__ import annotations

import gc
import importlib
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.openvino import OpenVinoStateless
from backends.openvino.compile import executed
from backends.openvino.weights import ENCODINGS, Packed, Stored, WeightStore, packed, packed_copies, stored
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.ops.build import Builder
from conformance.ggml.quants import from_float, to_float
from conformance.ggml.quants.blocks import BLOCK, random_blocks
from conformance.ggml.quants.requant import FORMS, MODES, requantised, weight_form
from conformance.ggml.tensor import FLAG_INPUT, Bytes, Dims, Tensor, new_tensor
from conformance.ggml.types import BF16, F16, F32, I32, IQ4_NL, Q4_0, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, GGMLType
from conformance.judge.judge import judge_step

ov: Any = importlib.import_module("openvino")
o: Any = importlib.import_module("openvino.opset15")
CORE = ov.Core()
ACCURACY = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
B = Builder()
OV: TypeAlias = Any
"""An object of openvino, which ships no type information."""

AFFINE = (Q4_1, Q5_1, Q4_K, Q5_K)
"""Types with a minimum; their zero points round once."""
KEPT = (*ENCODINGS, F16, BF16)
LAYOUT = {Q4_0: "i4", Q4_1: "u4", Q4_K: "u4", F16: "f16", BF16: "bf16"}
"""What the Constant is made of; i8 or u8 for the rest."""
WIDE = 4096
SUMS_OF_WIDE = WIDE / 2 * 2.0**-48 / 3
"""NMSE of that many products that are added one after another in F32, as a CPU without AVX-512 does: each addition is
off by 2^-24 of the sum so far at most, so by a third of its square on average, and the sums so far have half of the
last one's square on average."""
EDGES = np.array([0, -0.0, 5.96e-8, -5.96e-8, 6.1e-5, 1, -1, 65504, -65504, 0.0123], np.float16)
"""Scales and minima: zeros, the smallest denormals, the largest numbers, either sign."""


def compressed(type_: GGMLType, data: Bytes, ne: Dims) -> OV:
    """A weight as a subgraph, or None as in `stored`."""
    s = stored(type_, data, ne)
    return None if s is None else s.matrix()


def bytes_of(type_: GGMLType, x: NDArray[np.float32]) -> Bytes:
    """`x` stored in a type."""
    return np.ascontiguousarray(from_float(type_, x)).reshape(-1).view(np.uint8)


def values_of(type_: GGMLType, data: Bytes, rows: int) -> NDArray[np.float32]:
    """What the bytes mean, (rows, ne0)."""
    raw = data.reshape(rows, -1, type_.type_size) if type_.is_quantized else data.view(type_.dtype or "<u2")
    return np.asarray(to_float(type_, raw)).reshape(rows, -1)


def weight(type_: GGMLType, rows: int, ne0: int, seed: int = 0) -> Bytes:
    """Bytes of normal weights."""
    return bytes_of(type_, np.random.default_rng(seed).standard_normal((rows, ne0)).astype(np.float32))


def words(seed: int) -> NDArray[np.uint64]:
    """Random bits, enough for any test here."""
    return np.random.default_rng(seed).integers(0, 2**64, 1024, np.uint64)


def edge_blocks(type_: GGMLType) -> Bytes:
    """One row per pair of edge scale and edge minimum, quants random: 100 rows of 512 values."""
    rng = np.random.default_rng(9)
    n = len(EDGES) ** 2 * (512 // type_.blck_size)
    blocks = rng.integers(0, 256, (n, type_.type_size), np.uint8).view(BLOCK[type_]).reshape(-1)
    per_row = n // len(EDGES) ** 2
    for field, at in (
        ("d", np.repeat(EDGES, len(EDGES))),
        ("m", np.tile(EDGES, len(EDGES))),
        ("dmin", np.tile(EDGES, 10)),
    ):
        if field in (BLOCK[type_].names or ()):
            blocks[field] = np.repeat(at, per_row)
    return blocks.view(np.uint8).reshape(-1)


def taken_apart(p: Packed) -> NDArray[np.float32]:
    """The values of parts, (rows, ne0), computed as a device does."""
    q = p.q
    if p.dtype.endswith("4"):
        q = np.stack([q & 15, q >> 4], axis=-1).reshape(-1)
        q = np.where(q > 7, q - np.uint8(16), q) if p.dtype == "i4" else q
    numbers = (q.view(np.int8) if p.dtype[0] == "i" else q).astype(np.float32).reshape(p.shape)
    if p.zero is not None:
        numbers = numbers - p.zero
    return (numbers * p.scale).reshape(p.shape[0], -1)


def evaluated(result: OV, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A subgraph without inputs, interpreted."""
    out = ov.Tensor(ov.Type.f32, ov.Shape(shape))
    assert ov.Model([o.result(result)], []).evaluate([out], [])
    return np.array(out.data)


def compiled(result: OV, parameters: list[OV]) -> OV:
    """A compiled model of one result."""
    return CORE.compile_model(ov.Model([o.result(result)], parameters), "CPU", ACCURACY)


def layers(model: OV) -> dict[str, str]:
    """Layer type -> element type of what it gives, of each layer that runs."""
    return {
        str(n.get_rt_info()["layerType"].astype(str)): str(n.get_output_element_type(0).get_type_name())
        for n in model.get_runtime_model().get_ordered_ops()
        if n.get_output_size()
    }


def constants(model: OV) -> set[str]:
    """Element types of a compiled model's constants."""
    return {
        str(n.get_output_element_type(0).get_type_name())
        for n in model.get_runtime_model().get_ordered_ops()
        if n.get_rt_info()["layerType"].astype(str) == "Const"
    }


def product(type_: GGMLType, data: Bytes, rows: int, ne0: int) -> tuple[OV, OV]:
    """A compiled MUL_MAT with the weight, and what it was compiled from."""
    w = compressed(type_, data, (ne0, rows, 1, 1))
    x = o.parameter([1, 1, -1, ne0], ov.Type.f32)
    return compiled(o.matmul(x, w, False, True), [x]), w


def nmse(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """Squared error over squared size, in float64."""
    e, f = exact.astype(np.float64), found.astype(np.float64)
    return float(((f - e) ** 2).sum() / (e**2).sum())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(ENCODINGS)), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_parts_are_the_blocks_values(type_: GGMLType, seed: int, rows: int) -> None:
    """Of random bits: equal to the bit without a minimum, else within two float32 roundings of it."""
    data = random_blocks(type_, words(seed), rows * 512 // type_.blck_size).reshape(-1)
    p = packed(type_, data, rows)
    assert p is not None
    exact = values_of(type_, data, rows)
    found = taken_apart(p)
    if type_ in AFFINE:
        assert nmse(found, exact) < 1e-13
    else:
        assert np.array_equal(found.view(np.uint32), exact.view(np.uint32))


@pytest.mark.parametrize("type_", ENCODINGS, ids=str)
def test_edge_blocks_keep_their_values(type_: GGMLType) -> None:
    """Scales 0, -0, denormal, largest and negative; minima likewise; the scale 0 leaves the minimum alone."""
    data = edge_blocks(type_)
    p = packed(type_, data, 100)
    assert p is not None
    exact = values_of(type_, data, 100)
    found, there = taken_apart(p), evaluated(compressed(type_, data, (512, 100, 1, 1)), (100, 512))
    assert np.isfinite(exact).all()
    assert np.array_equal(found, there)
    if type_ not in AFFINE:
        assert np.array_equal(found, exact)
        return
    assert p.low is not None
    # what cancels is as large as the minimum: its own unit in the last place is what may be lost
    size = np.abs(exact).reshape(p.shape) + np.abs(p.low)
    assert (np.abs(found.reshape(p.shape) - exact.reshape(p.shape)) <= 2.0**-22 * size).all()


@pytest.mark.parametrize("type_", ENCODINGS, ids=str)
def test_scales_that_are_no_numbers_have_no_parts(type_: GGMLType) -> None:
    """Infinity times zero is made of them in another order: such a weight is left to float32."""
    for bad in (np.inf, np.nan):
        data = weight(type_, 2, 256)
        data.view(BLOCK[type_])["d"][0] = bad
        assert stored(type_, data, (256, 2, 1, 1)) is None


def test_other_types_and_empty_weights_have_no_parts() -> None:
    """Float32, tables of values and nothing at all."""
    assert stored(F32, np.zeros(256, np.uint8), (32, 2, 1, 1)) is None
    assert stored(IQ4_NL, np.zeros(36, np.uint8), (32, 2, 1, 1)) is None
    assert stored(Q4_0, np.zeros(0, np.uint8), (32, 0, 1, 1)) is None


@pytest.mark.parametrize("type_", KEPT, ids=str)
def test_a_product_reads_the_weight_in_place_and_is_exact(type_: GGMLType) -> None:
    """4096 wide: NMSE of float32 sums, one FullyConnected over the compressed constant, nothing expanded."""
    rows, ne0 = 40, WIDE
    data = weight(type_, rows, ne0)
    model, _ = product(type_, data, rows, ne0)
    x = np.random.default_rng(1).standard_normal((1, 1, 4, ne0)).astype(np.float32)
    found = model([x])[0]
    assert nmse(found, x.astype(np.float64) @ values_of(type_, data, rows).astype(np.float64).T) < SUMS_OF_WIDE
    names = layers(model)
    assert "FullyConnected" in names
    assert not names.keys() & {"Convert", "Eltwise", "Reshape", "Reorder"}
    assert LAYOUT.get(type_, "u8" if type_ in AFFINE else "i8") in constants(model)


@pytest.mark.parametrize("type_", ENCODINGS, ids=str)
def test_a_product_of_edge_blocks_is_within_float32(type_: GGMLType) -> None:
    """The device multiplies denormal, huge and zero scales: each sum is right relative to its largest terms."""
    data = edge_blocks(type_)
    p = packed(type_, data, 100)
    assert p is not None
    model, _ = product(type_, data, 100, 512)
    x = np.random.default_rng(2).standard_normal((1, 1, 3, 512)).astype(np.float32)
    w = values_of(type_, data, 100).astype(np.float64)
    size = np.abs(w) if p.low is None else np.abs(w) + np.abs(p.low).repeat(p.shape[2], 2).reshape(w.shape)
    error = np.abs(model([x])[0] - x @ w.T)
    assert (error <= 512 * 2.0**-24 * (np.abs(x) @ size.T) + 1e-30).all()


@pytest.mark.parametrize("type_", KEPT, ids=str)
@pytest.mark.parametrize("rank", [1, 2])
def test_rows_looked_up_are_equal_to_the_bit(type_: GGMLType, rank: int) -> None:
    """Compiled and interpreted; the device gathers compressed rows and expands only those."""
    rows, ne0 = 50, 512
    data = weight(type_, rows, ne0, seed=4)
    s = stored(type_, data, (ne0, rows, 1, 1), lookup=True)
    assert s is not None
    ids = o.parameter([-1] * rank, ov.Type.i32)
    result = s.rows(ids)
    model = compiled(result, [ids])
    asked = np.array([3, 49, 0, 3, 17, 8], np.int32).reshape((6,) if rank == 1 else (3, 2))
    exact = values_of(type_, data, rows)[asked]
    assert np.array_equal(model([asked])[0], exact)
    out = ov.Tensor(ov.Type.f32, ov.Shape(exact.shape))
    assert ov.Model([o.result(result)], [ids]).evaluate([out], [ov.Tensor(asked)])
    assert np.array_equal(out.data, exact)
    widths = {"i4": 0.5, "u4": 0.5, "i8": 1, "u8": 1, "f16": 2, "bf16": 2, "f32": 4}
    expanded = [
        n
        for n in model.get_runtime_model().get_ordered_ops()
        if n.get_rt_info()["layerType"].astype(str) == "Const"
        and widths.get(n.get_output_element_type(0).get_type_name(), 8) * np.prod(n.get_output_shape(0))
        >= 4 * rows * ne0
    ]
    assert not expanded


@pytest.mark.parametrize("type_", [Q4_0, Q4_K, Q6_K, F16], ids=str)
def test_experts_are_looked_up_as_rows(type_: GGMLType) -> None:
    """A weight of three dimensions is its rows, one matrix after the other: any expert's can be gathered."""
    experts, rows, ne0 = 4, 6, 256
    data = weight(type_, experts * rows, ne0)
    s = stored(type_, data, (ne0, rows, experts, 1))
    assert s is not None
    ids = o.parameter([-1], ov.Type.i32)
    each = o.add(
        o.multiply(o.unsqueeze(ids, o.constant(1)), o.constant(np.int32(rows))),
        o.constant(np.arange(rows, dtype=np.int32)),
    )
    model = compiled(s.rows(each), [ids])
    picked = np.array([2, 0, 2], np.int32)
    exact = values_of(type_, data, experts * rows).reshape(experts, rows, ne0)[picked]
    assert nmse(model([picked])[0], exact) < 1e-13
    assert LAYOUT.get(type_, "i8") in constants(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("type_", [Q4_0, Q5_K, Q6_K], ids=str)
def test_requantised_weights_hold_the_values_of_the_pure_function(type_: GGMLType, form: str) -> None:
    """What both the reference and the device multiply; and the device reads it in place."""
    data = weight(type_, 24, 512)
    s = stored(type_, data, (512, 24, 1, 1), form)
    assert s is not None
    exact = requantised(form, values_of(type_, data, 24))
    assert np.array_equal(evaluated(s.matrix(), (24, 512)), exact)
    x = o.parameter([-1, 512], ov.Type.f32)
    model = compiled(o.matmul(x, s.matrix(), False, True), [x])
    a = np.random.default_rng(6).standard_normal((3, 512)).astype(np.float32)
    assert nmse(model([a])[0], a.astype(np.float64) @ exact.astype(np.float64).T) < 1e-12
    assert {"q4_0x128": "i4", "q8_0xrow": "i8", "int8xrow": "i8", "f16": "f16"}[form] in constants(model)


def reading(op: str, w: Tensor) -> Tensor:
    """A node that reads `w`."""
    if op == "GET_ROWS":
        return B.get_rows(w, new_tensor(I32, 2, flags=FLAG_INPUT))
    return B.mul_mat(w, new_tensor(F32, w.ne[0], 3, flags=FLAG_INPUT))


class Reads:
    """A memory that counts."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.count = 0

    def __call__(self, _: Tensor) -> Bytes:
        """The bytes."""
        self.count += 1
        return self.data


def test_a_weight_is_taken_apart_once() -> None:
    """Two models, two nodes: one reading; a second form for rows where the first would not be exact; then forgotten."""
    w = new_tensor(Q4_K, 256, 8)
    read, store = Reads(weight(Q4_K, 8, 256)), WeightStore()
    first: Stored | None = store.get(reading("MUL_MAT", w), w, read)
    assert first is not None
    assert store.get(reading("MUL_MAT", w), w, read) is first
    assert read.count == 1
    assert store.nbytes == first.nbytes == 8 * (128 + 2 * 4 * 8)
    rows = store.get(reading("GET_ROWS", w), w, read)
    assert rows is not None
    assert rows is not first
    assert store.nbytes == first.nbytes + rows.nbytes
    store.forget(w)
    assert store.nbytes == 0
    assert store.get(reading("MUL_MAT", w), w, read) is not first


def test_one_form_serves_products_and_rows_where_it_is_exact() -> None:
    """A tied embedding without minima is held once."""
    w = new_tensor(Q6_K, 256, 8)
    read, store = Reads(weight(Q6_K, 8, 256)), WeightStore()
    assert store.get(reading("MUL_MAT", w), w, read) is store.get(reading("GET_ROWS", w), w, read)
    assert read.count == 1


def test_a_store_requantises_by_what_reads() -> None:
    """The same weight as an embedding and as a matrix has two forms; one that cannot be held is asked for once."""
    w = new_tensor(Q4_0, 256, 8)
    read, store = Reads(weight(Q4_0, 8, 256)), WeightStore(MODES["npu"])
    exact = values_of(Q4_0, read.data, 8)
    for op, form in (("MUL_MAT", "q4_0x128"), ("GET_ROWS", "q8_0xrow")):
        s = store.get(reading(op, w), w, read)
        assert s is not None
        assert np.array_equal(evaluated(s.matrix(), (8, 256)), requantised(form, exact))
    other = new_tensor(F32, 256, 8)
    assert store.get(reading("MUL_MAT", other), other, read) is None
    assert read.count == 2


@pytest.mark.parametrize("type_", [Q4_0, Q4_K, Q8_0, F16], ids=str)
def test_models_outlive_the_store(type_: GGMLType) -> None:
    """Constants share the store's memory and keep it: the numbers stay right when everything else is gone."""
    w, data = new_tensor(type_, 512, 16), weight(type_, 16, 512)
    store = WeightStore()
    s = store.get(reading("MUL_MAT", w), w, Reads(data))
    assert s is not None
    x = o.parameter([-1, 512], ov.Type.f32)
    model = compiled(o.matmul(x, s.matrix(), False, True), [x])
    exact = values_of(type_, data, 16).astype(np.float64)
    del store, s, data, x
    gc.collect()
    rubbish = [np.full(16 * 512, 255, np.uint8) for _ in range(64)]
    a = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)
    assert nmse(model([a])[0], a @ exact.T) < 1e-12
    assert rubbish


def test_packed_copies_count_what_a_kernel_keeps() -> None:
    """Quants, scales and zero points of each FullyConnected; nothing of a Gather."""
    data = weight(Q4_K, 64, 512)
    model, _ = product(Q4_K, data, 64, 512)
    assert packed_copies(executed(model)) == 64 * (512 // 2 + 2 * 4 * 512 // 32)
    half = weight(F16, 64, 512)
    assert packed_copies(executed(product(F16, half, 64, 512)[0])) == 64 * 512 * 4
    s = stored(Q4_0, weight(Q4_0, 64, 512), (512, 64, 1, 1), lookup=True)
    ids = o.parameter([-1], ov.Type.i32)
    assert s is not None
    assert packed_copies(executed(compiled(s.rows(ids), [ids]))) == 0


def operand(type_: GGMLType, ne: tuple[int, ...], seed: int) -> Bytes:
    """Bytes of normal numbers; of a type without a quantiser, random blocks."""
    x = np.random.default_rng(seed).standard_normal(ne[::-1]).astype(np.float32)
    return bytes_of(type_, x)


def small_case(op: str, type_: GGMLType, batch: int) -> Case:
    """One node over a weight of 256 x 8 x `batch`."""
    rng = np.random.default_rng(8)
    w = new_tensor(type_, 256, 8, batch, name="w")
    inputs: dict[Tensor, Bytes] = {}

    def given(t: Tensor, data: NDArray[Any]) -> Tensor:
        inputs[t] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return t

    if op == "GET_ROWS":
        ids = given(new_tensor(I32, 3, batch, flags=FLAG_INPUT), rng.integers(0, 8, (batch, 3)).astype(np.int32))
        node = B.get_rows(w, ids)
    elif op == "MUL_MAT_ID":
        x = given(new_tensor(F32, 256, 1, 5, flags=FLAG_INPUT), rng.standard_normal((5, 1, 256)).astype(np.float32))
        ids = given(new_tensor(I32, 2, 5, flags=FLAG_INPUT), rng.integers(0, batch, (5, 2)).astype(np.int32))
        node = B.mul_mat_id(w, x, ids)
    else:
        x = new_tensor(F32, 256, 3, 2 * batch, flags=FLAG_INPUT)
        node = B.mul_mat(w, given(x, rng.standard_normal(x.shape).astype(np.float32)))
    return Case(
        "t/weights@0", {w: operand(type_, (256, 8, batch), 7)}, [Step(B.build_forward_expand(node), inputs, (node,))]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("op", "batch"), [("MUL_MAT", 1), ("MUL_MAT", 2), ("MUL_MAT_ID", 4), ("GET_ROWS", 1), ("GET_ROWS", 3)]
)
@pytest.mark.parametrize("type_", [Q4_0, Q4_K, Q6_K, IQ4_NL], ids=str)
def test_the_adapter_is_within_rounding_of_the_reference(type_: GGMLType, op: str, batch: int, mode: str) -> None:
    """Of every mode, in that mode's arithmetic: the budgets of ordinary products and lookups, no wider."""
    case = small_case(op, type_, batch)
    step = case.steps[0]
    backend = OpenVinoStateless(requant=mode)
    arithmetic = backend.arithmetic()
    with CpuBackend().computing_in(arithmetic).open(case) as session:
        expected = session.compute(step.graph, step.inputs, step.outputs)
    with backend.open(case) as session:
        found = session.compute(step.graph, step.inputs, step.outputs)
        notes, held = session.witness().notes, session.witness().bytes.get("weights", 0)
    used = [j.used for j in judge_step(case, 0, expected, found, arithmetic)]
    assert len(used) == 1
    assert used[0] <= 1
    kept = type_ in ENCODINGS or bool(weight_form(step.graph.nodes[0], MODES[mode].weights, MODES[mode].rows))
    assert ("1 weights kept compressed" in notes) == kept
    assert bool(held) == kept


def test_a_weight_that_is_written_is_read_anew() -> None:
    """New bytes give new products; nothing of the old is held."""
    case = small_case("MUL_MAT", Q4_0, 1)
    step, (w,) = case.steps[0], case.persistent
    fresh = operand(Q4_0, (256, 8, 1), 99)
    with OpenVinoStateless().open(case) as session:
        session.compute(step.graph, step.inputs, step.outputs)
        before = session.witness().bytes["weights"]
        session.write(w, fresh)
        found = session.compute(step.graph, step.inputs, step.outputs)
        assert session.witness().bytes["weights"] == before
    changed = Case(case.id, {w: fresh}, case.steps)
    with CpuBackend().open(changed) as session:
        expected = session.compute(step.graph, step.inputs, step.outputs)
    assert [j.used <= 1 for j in judge_step(changed, 0, expected, found, EXACT)] == [True]
