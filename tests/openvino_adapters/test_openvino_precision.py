"""`precision=default`: a device's hint reaches products, and nothing whose value would be lost by it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backends.openvino.compile import compiler
from backends.openvino.emit.elementwise import softplus
from backends.openvino.nodes import Constants, round_bf16, round_f16
from backends.openvino.rewrite import mark_float32
from conformance.backend.registry import Spec
from conformance.judge.verdict import Verdict
from conformance.run.runner import Runner

ov: Any = importlib.import_module("openvino")  # after the adapter, which keeps its telemetry from the network
o: Any = importlib.import_module("openvino.opset15")

ROPES = [
    f"ops/ROPE-f32-ne={ne},mode={mode},from=261000,to=262144@3"
    for ne in ("64x3x4", "64x2x1")
    for mode in ("NORMAL", "NEOX", "MROPE,sections=8x8x8x8", "IMROPE,sections=11x11x10x0")
]
TRAJECTORIES = [
    f"kv_growth/llama-{more}run=at253.d5.back3.d2@582"
    for more in ("", "rope=neox,", "cache=f32,", "cache=q8_0,head=32,rot=0,", "w=q4_0,write=cpy,", "fa=0,")
]
JUNK = [f"ops/FLASH_ATTN_EXT-{t}-q=32x3x4,k=32x16x2,mask=16x3,hide=junk@7" for t in ("f16+f16", "f32+f32")]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all."""
    runner = Runner()
    yield runner
    runner.close()


def _passes(runner: Runner, spec: str, ids: list[str]) -> None:
    results = runner.run(Spec.parse(spec), [runner.case(i) for i in ids])
    assert [(r.verdict, r.detail) for r in results if r.verdict is not Verdict.PASS] == []
    assert len(results) == len(ids)


@pytest.mark.parametrize("precision", ["accuracy", "default"])
def test_angles_hold_to_two_to_the_eighteenth(runner: Runner, precision: str) -> None:
    """Large positions turn by their own angle, whatever the hint: one position more would be off by 1e-2 and more."""
    _passes(runner, f"openvino-stateless?precision={precision}", ROPES)


def test_softplus_has_correct_digits_far_below_zero() -> None:
    """SSM_SCAN multiplies its input by softplus(dt), so the relative error counts, for any dt."""
    x = np.concatenate([np.linspace(-80, 80, 1001), np.linspace(-6, 0, 1001)]).astype("f4")
    parameter = o.parameter([x.size], np.float32)
    model = ov.Model([softplus(Constants(), parameter)], [parameter])
    y = compiler("CPU", "accuracy", "auto").model(model)([x])[0].astype("f8")
    np.testing.assert_allclose(y, np.log1p(np.exp(x.astype("f8"))), rtol=1e-6)


@pytest.mark.parametrize("name", ["openvino-stateless", "openvino-stateful"])
def test_trajectories_cross_256_by_default(runner: Runner, name: str) -> None:
    """Positions that BF16 cannot hold, caches that are rounded into, rewound: right in the device's own precision."""
    _passes(runner, f"{name}?precision=default", TRAJECTORIES)


@pytest.mark.parametrize("name", ["openvino-stateless", "openvino-stateful"])
def test_blocks_that_a_product_reads_are_rounded_as_ever(runner: Runner, name: str) -> None:
    """In a graph without weights too, whose elementwise kernels would not be fused by themselves."""
    types = ("q4_0", "q4_1", "q5_0", "q8_0")
    ids = [f"weight_placement/{of}-w={t},buffer=1@801" for of in ("computed", "cache") for t in types]
    _passes(runner, f"{name}?precision=default", ids)


def test_what_is_stored_right_after_a_norm_keeps_its_bits(runner: Runner) -> None:
    """K that is a scaled norm goes into a variable as float32 rounded to F16: an RMS layer would give it in BF16."""
    _passes(runner, "openvino-stateful?precision=default", ["alias/differs=eps,tokens=5,order=aab@745"])


@pytest.mark.parametrize("spec", ["", "?attention=sdpa", "?attention=sdpa5d", "?precision=default"])
def test_what_a_mask_hides_may_be_anything(runner: Runner, spec: str) -> None:
    """NaN and infinities in cells that no row sees reach no output, in any form of attention."""
    _passes(runner, f"openvino-stateless{spec}", JUNK)


@pytest.mark.parametrize("rounding", [round_f16, round_bf16])
def test_rounding_between_products_is_kept(rounding: Any) -> None:  # noqa: ANN401  # either of two functions
    """Arithmetic that rounds, between two products by one, gives the same as alone; in BF16 it would give zeros."""
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    given, one = o.parameter([-1, 32], ov.Type.f32), np.eye(32, dtype=np.float32)
    y = o.matmul(rounding(Constants(), o.matmul(given, o.constant(one), False, True)), o.constant(one), False, True)
    compiled = compiler("CPU", "default", "auto").compiled([o.result(y)], [given])
    found = compiled.create_infer_request().infer([x])[0]
    # two roundings of BF16 at most, where the device likes it
    assert ((found - x) ** 2).mean() < 2e-5 * (x**2).mean()


def test_only_what_a_product_rounds_anyway_is_left_to_the_hint() -> None:
    """The weights of a product and what only moves its operands are not marked; what computes is."""
    a, b = (o.parameter([4, 4], ov.Type.f32) for _ in range(2))
    moved, added = o.transpose(a, o.constant(np.array([1, 0]))), o.add(b, o.constant(np.float32(1)))
    weight = o.multiply(o.constant(np.ones((4, 4), np.float32)), o.constant(np.float32(2)))
    y = o.matmul(o.matmul(moved, added, False, False), weight, False, False)
    model = ov.Model([o.result(y), o.result(added)], [a, b])
    mark_float32(ov.Core(), model)
    marked = {n.get_type_name() for n in model.get_ordered_ops() if "DisablePrecisionConversion_0" in n.get_rt_info()}
    assert marked == {"Add"}


def test_nodes_outside_the_model_change_no_mark() -> None:
    """A move that only a product of the model reads stays with the hint, whatever else a walk made of its value."""
    a, b = (o.parameter([4, 4], ov.Type.f32) for _ in range(2))
    moved = o.transpose(a, o.constant(np.array([1, 0])))
    unread = o.exp(moved)
    model = ov.Model([o.result(o.matmul(moved, b, False, False))], [a, b])
    mark_float32(ov.Core(), model)
    assert unread.get_type_name() == "Exp"  # alive, and still a reader of the value
    assert not any("DisablePrecisionConversion_0" in n.get_rt_info() for n in model.get_ordered_ops())
