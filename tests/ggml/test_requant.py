"""Requantised weights: the forms, which nodes read them, and the reference that computes with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from conformance.case.case import Case, Step
from conformance.ggml import quants
from conformance.ggml.arithmetic import EXACT, requantising
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.quants.requant import (
    FORMS,
    MODES,
    quantised,
    requantised,
    weight_form,
)
from conformance.ggml.tensor import FLAG_INPUT, Bytes, Tensor, new_tensor
from conformance.ggml.types import F16, F32, I32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, TYPES, GGMLType, type_named
from conformance.judge.budget import changes

B = Builder()


def raw(type_: GGMLType, x: NDArray[np.float32]) -> Bytes:
    """The bytes of `x` in a block type."""
    return np.ascontiguousarray(quants.from_float(type_, x)).reshape(-1).view(np.uint8)


def one_by_one(
    bits: int, group: int, x: NDArray[np.float32], scale: type[np.floating] = np.float16
) -> NDArray[np.float32]:
    """The rule in scalars, as the C loop has it."""
    out = np.empty_like(x)
    top = 1 << bits - 1
    for i in range(0, len(x), group):
        v = x[i : i + group]
        amax, largest = np.float32(0), np.float32(0)
        for one in v:
            if abs(one) > amax:
                amax, largest = abs(one), one
        d = np.float32(largest / np.float32(-top)) if bits == 4 else np.float32(amax / np.float32(127))
        inv = np.float32(1) / d if d else np.float32(0)
        for j, one in enumerate(v):
            y = float(np.float32(one * inv))
            q = int(np.copysign(np.floor(abs(y) + 0.5), y))
            out[i + j] = np.float32(max(-top, min(top - 1, q))) * np.float32(scale(d))
    return out


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["q4_0x128", "q8_0xrow", "int8xrow"]), st.integers(-12, 12))
def test_a_grid_rounds_as_the_scalar_rule(seed: int, name: str, power: int) -> None:
    """Scale from the largest magnitude, quants halves away from zero, the scale itself rounded last."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(256) * 2.0**power).astype(np.float32)
    x[rng.random(256) < 0.2] = 0
    form = FORMS[name]
    assert form is not None
    expected = one_by_one(form.bits, form.group or 256, x, np.float16 if form.scale is F16 else np.float32)
    assert np.array_equal(requantised(name, x[None])[0], expected)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_keeps_its_own_values(name: str) -> None:
    """Requantising a second time changes by no more than a scale's rounding."""
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    once = requantised(name, x)
    twice = requantised(name, once)
    assert np.abs(twice - once).max() <= 2.0**-10 * np.abs(once).max()


def test_zeros_and_tiny_groups_stay_finite() -> None:
    """A group of zeros is zeros; one below what F16 can scale becomes zeros, never NaN."""
    x = np.zeros((3, 128), np.float32)
    x[1] = 1e-44
    x[2] = 1e-9
    for name in FORMS:
        assert np.isfinite(requantised(name, x)).all()
        assert not requantised(name, x)[0].any()
    form = FORMS["q4_0x128"]
    assert form is not None
    q, d = quantised(form, x)
    assert (q.shape, d.shape) == ((3, 1, 128), (3, 1, 1))
    assert (q.dtype.name, d.dtype.name) == ("int8", "float16")


def test_unknown_names_are_refused() -> None:
    """The message lists the names there are."""
    with pytest.raises(GraphError, match="q4_0x128, q8_0xrow, int8xrow, f16 expected, 'q3' found"):
        requantised("q3", np.zeros((1, 128), np.float32))
    with pytest.raises(UsageError, match="none, npu, channel8 expected, 'gpu' found"):
        requantising("gpu")


DISTANCE = {"q4_0x128": 0.14, "q8_0xrow": 5e-3, "int8xrow": 5e-3, "f16": 2e-7}
"""Form -> NMSE allowed between products of the original and of the requantised weights.

Four times the worst measured over ten block types and rows of 256 to 14,336 values, normal or Student's t of 4 degrees:
`q4_0x128` 7e-3 to 1.2e-2 (t: up to 3.5e-2), `q8_0xrow` 4e-5 to 9e-5 (t: up to 1.3e-3, growing with the row as its
largest value does), `f16` up to 4.5e-8.
"""


@pytest.mark.parametrize("mode", MODES)
def test_what_a_mode_costs_is_within_what_is_allowed(mode: str) -> None:
    """The stated distance holds for products with normal weights of every type that the mode touches."""
    rng = np.random.default_rng(3)
    for table in (MODES[mode].weights, MODES[mode].rows):
        for name, form in table.items():
            type_ = type_named(name)
            if type_ not in {Q4_0, Q8_0, Q4_K, Q5_K, Q6_K}:
                continue
            w = quants.roundtrip(type_, rng.standard_normal((32, 1024)).astype(np.float32)).astype(np.float64)
            x = rng.standard_normal((1024, 16))
            exact, found = w @ x, requantised(form, w).astype(np.float64) @ x
            nmse = ((found - exact) ** 2).sum() / (exact**2).sum()
            assert 0 < nmse < DISTANCE[form] / 3


def node_of(op: str, w: Tensor) -> Tensor:
    """A node that reads `w` whole."""
    k = w.ne[0]
    if op == "GET_ROWS":
        return B.get_rows(w, new_tensor(I32, 2, name="ids", flags=FLAG_INPUT))
    if op == "MUL_MAT_ID":
        ids = new_tensor(I32, 1, 3, name="ids", flags=FLAG_INPUT)
        return B.mul_mat_id(w, new_tensor(F32, k, 1, 3, name="x", flags=FLAG_INPUT), ids)
    return B.mul_mat(w, new_tensor(F32, k, 3, name="x", flags=FLAG_INPUT))


@pytest.mark.parametrize("op", ["MUL_MAT", "MUL_MAT_ID", "GET_ROWS"])
def test_only_whole_leaves_that_are_no_inputs_are_weights(op: str) -> None:
    """A view, an input, a float type and a row that no group divides are read as they are."""
    npu = MODES["npu"]
    shape = (256, 8, 2) if op == "MUL_MAT_ID" else (256, 8)

    def form(w: Tensor) -> str:
        return weight_form(node_of(op, w), npu.weights, npu.rows)

    whole = new_tensor(Q4_0, *shape)
    assert form(whole) == ("q8_0xrow" if op == "GET_ROWS" else "q4_0x128")
    assert form(new_tensor(Q6_K, *shape)) == ("f16" if op == "GET_ROWS" else "q8_0xrow")
    assert form(new_tensor(Q4_0, *shape, flags=FLAG_INPUT)) == ""
    assert form(new_tensor(F32, *shape)) == ""
    assert form(B.view_3d(whole, 256, 4, shape[2] if len(shape) > 2 else 1, whole.nb[1], whole.nb[2], 0)) == ""
    narrow = new_tensor(Q4_0, 96, *shape[1:])
    assert form(narrow) == ("q8_0xrow" if op == "GET_ROWS" else "")
    assert changes(node_of(op, whole), requantising("npu"))
    assert not changes(node_of(op, whole), EXACT)


@pytest.mark.parametrize("op", ["MUL_MAT", "MUL_MAT_ID", "GET_ROWS"])
@pytest.mark.parametrize("name", ["q4_0", "q5_K", "q6_K"])
@pytest.mark.parametrize("mode", ["npu", "channel8"])
def test_the_reference_computes_with_requantised_weights(op: str, name: str, mode: str) -> None:
    """In the arithmetic of a mode it gives what it gives for float32 weights that hold the requantised values."""
    rng = np.random.default_rng(5)
    type_ = type_named(name)
    shape = (256, 8, 2) if op == "MUL_MAT_ID" else (256, 8)
    w = new_tensor(type_, *shape, name="w")
    node = node_of(op, w)
    data = raw(type_, rng.standard_normal(w.shape).astype(np.float32))
    inputs: dict[Tensor, Bytes] = {}
    for s in node.src[1:]:
        if s is not None and s.type is I32:
            inputs[s] = rng.integers(0, 2, s.shape).astype(np.int32).reshape(-1).view(np.uint8)
        elif s is not None:
            inputs[s] = rng.standard_normal(s.shape).astype(np.float32).reshape(-1).view(np.uint8)
    found = run(node, {w: data}, inputs, requantising(mode).name, mode)

    form = weight_form(node, MODES[mode].weights, MODES[mode].rows)
    values = quants.to_float(type_, data.reshape(*w.shape[:-1], -1, type_.type_size))
    plain = new_tensor(F32, *shape, name="w")
    twin = replace(node, src=(plain, *node.src[1:]))
    held = np.ascontiguousarray(requantised(form, values) if form else values).reshape(-1).view(np.uint8)
    expected = run(twin, {plain: held}, inputs, "exact", "none")
    assert found.any()
    assert np.array_equal(found, expected)


def run(node: Tensor, persistent: dict[Tensor, Bytes], inputs: dict[Tensor, Bytes], name: str, mode: str) -> Bytes:
    """`node`'s value on the reference in the arithmetic of a mode."""
    case = Case("t/requant@0", persistent, [Step(B.build_forward_expand(node), inputs, (node,))])
    backend = CpuBackend().computing_in(requantising(mode))
    assert backend.arithmetic().name == name
    with backend.open(case) as session:
        return session.compute(case.steps[0].graph, inputs, (node,))[node]


def test_every_type_of_a_table_exists() -> None:
    """Tables name ggml's quantised types and known forms only."""
    for tables in MODES.values():
        for table in (tables.weights, tables.rows):
            assert all(TYPES[name].is_quantized for name in table)
            assert set(table.values()) <= set(FORMS)
