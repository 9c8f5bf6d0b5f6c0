"""Sums that cancel: a right one passes, and a wrong bit of a block or a wrong weight is still seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml import quants
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import strided
from conformance.ggml.types import TYPES
from conformance.judge.cancellation import cancellations
from conformance.judge.judge import judge_step
from conformance.run.execute import execute
from conformance.run.runner import Runner

WITH_MINIMA = ("q4_1", "q5_1", "q2_K", "q4_K", "q5_K")
PRODUCTS = {
    "MUL_MAT": "ops/MUL_MAT-{}+f32-a=4096x64,b=4096x4@5",
    "MUL_MAT_ID": "ops/MUL_MAT_ID-{}+f32-as=4096x64x4,n_used=2,n_b=2,n_tokens=3@5",
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One runner for all."""
    runner = Runner()
    yield runner
    runner.close()


def _offset(runner: Runner, op: str, type_: str, offset: float) -> Case:
    """A product of weights around 0 and activations around `offset`, as models with massive activations have them."""
    case = runner.case(PRODUCTS[op].format(type_))
    rng = np.random.default_rng(3)
    (weight, data), *_ = case.persistent.items()
    w = rng.standard_normal(weight.shape, dtype=np.float32)
    w -= w.mean(-1, keepdims=True)
    persistent = {**case.persistent, weight: np.ascontiguousarray(quants.from_float(weight.type, w)).reshape(-1)}
    assert persistent[weight].nbytes == data.nbytes
    step = case.steps[0]
    inputs = dict(step.inputs)
    x = next(t for t in inputs if t.type.name == "f32")
    inputs[x] = (rng.standard_normal(x.shape, dtype=np.float32) + np.float32(offset)).reshape(-1).view(np.uint8)
    return replace(case, persistent=persistent, steps=[Step(step.graph, inputs, step.outputs)])


@needs_wheel
@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("type_", WITH_MINIMA)
def test_ggml_is_right_where_two_sums_cancel(runner: Runner, op: str, type_: str) -> None:
    """Scales and minima have sums of their own: where these cancel, float32 rounding is relative to them."""
    case = _offset(runner, op, type_, 100.0)
    (result,) = runner.run(Spec("ggml"), [case])
    assert result.verdict == "PASS", result.detail


def _minimum(block: np.ndarray) -> None:
    """Every minimum of the block is that of a step less."""
    name = "m" if "m" in (block.dtype.names or ()) else "dmin"
    block[name] = (block[name].view(np.uint16) + 32).view(np.float16)


def _scale(block: np.ndarray) -> None:
    """The scale is off by three percent."""
    block["d"] = (block["d"].view(np.uint16) + 32).view(np.float16)


def _nibble(block: np.ndarray) -> None:
    """One quant is off by one."""
    block["qs"][0] ^= 1


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("type_", WITH_MINIMA)
@pytest.mark.parametrize("spoil", [_minimum, _scale, _nibble])
def test_a_wrong_block_is_seen(runner: Runner, type_: str, offset: float, spoil: Callable[[np.ndarray], None]) -> None:
    """One block of 64 rows: its minimum or scale 3 % off, or one quant off by one, is beyond the budget."""
    case = _offset(runner, "MUL_MAT", type_, offset)
    (weight, data), *_ = case.persistent.items()
    wrong = data.copy()
    spoil(wrong.view(BLOCK[TYPES[type_]])[37])
    assert (wrong != data).any()
    (expectation,) = runner.oracle.expect([case], runner.backend(Spec("ggml")).arithmetic())
    reference = runner.oracle.reference_in(expectation.arithmetic)
    found = execute(reference, Case(case.id, {**case.persistent, weight: wrong}, case.steps)).steps[0].outputs
    (judged,) = judge_step(case, 0, expectation.steps[0].outputs, found, expectation.arithmetic)
    assert judged.used > (2 if offset else 20)


@pytest.mark.parametrize("type_", WITH_MINIMA)
def test_offsets_are_the_values_of_blocks_whose_quants_are_0(type_: str) -> None:
    """A block with every quant 0 has its offsets as values."""
    rng = np.random.default_rng(1)
    raw = quants.from_float(TYPES[type_], rng.standard_normal((3, 512), dtype=np.float32))
    found = quants.offsets(TYPES[type_], raw)
    blocks = raw.reshape(-1, TYPES[type_].type_size).view(BLOCK[TYPES[type_]])
    for name in {"qs", "qh"} & set(blocks.dtype.names or ()):
        blocks[name] = 0
    assert found is not None
    assert np.array_equal(np.repeat(found, 512 // found.shape[-1], -1), quants.to_float(TYPES[type_], raw))


@pytest.mark.parametrize("type_", ["q4_0", "q8_0", "q6_K", "f16"])
def test_other_types_have_no_minima(runner: Runner, type_: str) -> None:
    """Their products are one sum, and their budgets know no cancellation."""
    case = runner.case(f"ops/MUL_MAT-{type_}+f32-a=4096x64,b=4096x4@5")
    (expectation,) = runner.oracle.expect([case], runner.backend(Spec("ggml")).arithmetic())
    assert not cancellations(case, 0, expectation.steps[0].outputs)
    weight = next(iter(case.persistent))
    assert quants.offsets(weight.type, strided(case.persistent[weight], weight)) is None


def _check_cancelling(runner: Runner, case: Case, wrong: Case) -> None:
    """Assert that ggml passes `case`, whose sums cancel, and that `wrong` exceeds the budget."""
    (result,) = runner.run(Spec("ggml"), [case])
    assert result.verdict == "PASS", result.detail
    (expectation,) = runner.oracle.expect([case], runner.backend(Spec("ggml")).arithmetic())
    assert max(cancellations(case, 0, expectation.steps[0].outputs).values()) > 1e5
    found = execute(runner.oracle.reference_in(expectation.arithmetic), wrong).steps[0].outputs
    (judged,) = judge_step(case, 0, expectation.steps[0].outputs, found, expectation.arithmetic)
    assert judged.used > 20


def _opposite_heads(runner: Runner, wrong: float = 0.0) -> Case:
    """Every second head is the one before it, with the opposite weight but for a part in 1,000."""
    case = runner.case("ops/LIGHTNING_INDEXER-f32-q=128x64x2,n_kv=16@1")
    step = case.steps[0]
    q, _, weights, _ = next(n for n in step.graph if n.op == "LIGHTNING_INDEXER").src
    assert q is not None
    assert weights is not None
    inputs = dict(step.inputs)
    heads, worth = (inputs[t].view("<f4").reshape(t.shape).copy() for t in (q, weights))
    heads[:, :, 1::2] = heads[:, :, ::2]
    worth[..., 1::2] = -worth[..., ::2] * np.float32(0.999)
    worth[..., 0] *= 1 + wrong
    inputs |= {q: heads.reshape(-1).view(np.uint8), weights: worth.reshape(-1).view(np.uint8)}
    return replace(case, steps=[Step(step.graph, inputs, step.outputs)])


@needs_wheel
def test_heads_that_cancel(runner: Runner) -> None:
    """The result of ggml passes; one head whose weight is 0.1 % off fails."""
    _check_cancelling(runner, _opposite_heads(runner), _opposite_heads(runner, 1e-3))


def _few(runner: Runner, case_id: str, wrong: float = 0.0) -> Case:
    """Each row of the last operand is changed so that its result is a thousandth of what it was."""
    case = runner.case(case_id)
    step = case.steps[0]
    data = {**case.persistent, **step.inputs}
    node = next(n for n in step.graph if n.op in {"MUL_MAT", "SUM_ROWS"})
    t = node.src[-1]
    assert t is not None
    x = data[t].view("<f4").reshape(t.shape).astype(np.float64)
    by = 1.0 if node.op == "SUM_ROWS" else data[node.src[0]].view("<f4").astype(np.float64)  # type: ignore[index]
    x -= 0.999 * (x * by).sum(-1, keepdims=True) / x.shape[-1] / by
    x[..., 0] *= 1 + wrong
    changed = x.astype(np.float32).reshape(-1).view(np.uint8)
    inputs, persistent = ({k: changed if k is t else d for k, d in m.items()} for m in (step.inputs, case.persistent))
    return replace(case, persistent=persistent, steps=[Step(step.graph, inputs, step.outputs)])


@needs_wheel
@pytest.mark.parametrize("case_id", ["ops/MUL_MAT-f32+f32-a=300x1,b=300x2@5", "ops/SUM_ROWS-f32-ne=300x2@5"])
def test_few_sums_that_cancel(runner: Runner, case_id: str) -> None:
    """The result of ggml passes; one term that is 1 % off fails."""
    _check_cancelling(runner, _few(runner, case_id), _few(runner, case_id, 0.01))


@pytest.mark.parametrize("seed", range(100, 108))
def test_a_mean_far_from_zero(runner: Runner, seed: int) -> None:
    """Means that are rounded to float32 pass; a variance as a difference of two means fails."""
    case = runner.case(f"ops/NORM-f32-ne=67x4,data=far@{seed}")
    step = case.steps[0]
    (x,) = (data.view("<f4").reshape(4, 67) for data in step.inputs.values())
    (expectation,) = runner.oracle.expect([case], EXACT)
    expected = expectation.steps[0].outputs
    mean = x.mean(-1, keepdims=True, dtype=np.float64).astype(np.float32)
    left = x - mean
    right = left / np.sqrt((left * left).mean(-1, keepdims=True) + np.float32(1e-5))
    wrong = left / np.sqrt((x * x).mean(-1, keepdims=True) - mean * mean + np.float32(1e-5))
    for found, passes in ((right, True), (wrong, False)):
        values = {step.outputs[0]: found.astype("<f4").reshape(-1).view(np.uint8)}
        (judged,) = judge_step(case, 0, expected, values, EXACT)
        assert (judged.used <= 1) == passes


@needs_wheel
@pytest.mark.parametrize(
    "case_id",
    ["ops/ARANGE-f32-stop=16.0@283", "ops/ADD-f32+f32-a=32x1,special=nan@1", "ops/SUM-f32-ne=1x7@636"],
)
def test_small_results_of_any_kind_are_judged(runner: Runner, case_id: str) -> None:
    """Also without operands, with operands that are not finite, and of few terms."""
    (result,) = runner.run(Spec("ggml"), [runner.case(case_id)])
    assert result.verdict == "PASS", result.detail


@pytest.mark.parametrize("op", ["UNARY.GELU_ERF-f32-ne=3x1", "UNARY.GELU_ERF-f32-ne=17x1", "GLU.GEGLU_ERF-f32-ne=34x1"])
@pytest.mark.parametrize("seed", range(400, 406))
def test_one_plus_erf_cancels_for_negative_elements(runner: Runner, op: str, seed: int) -> None:
    """Erf in float32, rounded near -1, passes; a result that is 0.1 % off fails."""
    case = runner.case(f"ops/{op}@{seed}")
    (expectation,) = runner.oracle.expect([case], EXACT)
    ((node, data),) = expectation.steps[0].outputs.items()
    (held,) = (data.view("<f4") for data in (case.steps[0].inputs or case.persistent).values())
    x, gate = np.split(held, 2) if op.startswith("GLU") else (held, np.ones_like(held))
    erf = np.array([math.erf(v / math.sqrt(2)) for v in x], np.float32)
    rounded = (np.float32(0.5) * x * (np.float32(1) + erf) * gate).astype("<f4")
    for values, passes in ((rounded, True), (data.view("<f4") * np.float32(1.001), False)):
        found = {node: values.view(np.uint8)}
        (judged,) = judge_step(case, 0, expectation.steps[0].outputs, found, EXACT)
        assert (judged.used <= 1) is passes, judged
