"""Why arithmetic is declared: a fault that hides in ggml's usual tolerance is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes
from conformance.ggml.types import F16, F32
from conformance.judge.budget import budget_of
from conformance.judge.compare import compare
from conformance.judge.judge import judge_step
from conformance.run.execute import execute
from conformance.run.runner import Runner

USUAL = 5e-4
"""NMSE that ggml's own tests allow a MUL_MAT."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One runner for all."""
    runner = Runner()
    yield runner
    runner.close()


def _scale_doubled(case: Case) -> Case:
    """The same case with the F16 scale of one block of the weights doubled (its exponent raised by one)."""
    (weight, data), *_ = case.persistent.items()
    wrong = data.copy()
    scale = wrong.reshape(-1, weight.type.type_size)[1234, :2].view(np.uint16)
    scale += 1 << 10
    return Case(case.id, {weight: wrong}, case.steps)


@pytest.mark.parametrize("backend", ["ggml", "openvino-stateless"])
@pytest.mark.parametrize("type_", ["q4_0", "q8_0"])
def test_one_wrong_block_scale_of_8192_is_seen(runner: Runner, backend: str, type_: str) -> None:
    """One doubled block scale in a 4,096-wide MUL_MAT of 64 rows fails, though ggml's usual 5e-4 would let it pass."""
    spec = Spec(backend)
    case = runner.case(f"ops/MUL_MAT-{type_}+f32-a=4096x64,b=4096x4@5")
    (right,) = runner.run(spec, [case])
    assert right.verdict == "PASS"
    device = runner.backend(spec)
    (expectation,) = runner.oracle.expect([case], device.arithmetic())
    found = execute(device, _scale_doubled(case)).steps[0].outputs
    (judged,) = judge_step(case, 0, expectation.steps[0].outputs, found, expectation.arithmetic)
    assert judged.used > 1000
    assert judged.difference.nmse < USUAL


@pytest.mark.parametrize("k", [32, 256, 2048])
def test_sums_in_f16_are_allowed_where_declared(k: int) -> None:
    """Eight F16 sums side by side pass if the device declares them; a lost term of each row does not."""
    g, rng = Builder(), np.random.default_rng(k)
    node = g.mul_mat(g.new_tensor_2d(F16, k, 16), g.new_tensor_2d(F32, k, 8))
    w, x = (rng.standard_normal((n, k)).astype(np.float16).astype(np.float64) for n in (16, 8))
    terms, sums = w * x[:, None], np.zeros((8, 16, 8))
    for i in range(0, k, 8):
        sums = (sums + terms[..., i : i + 8]).astype(np.float16).astype(np.float64)

    def pack(y: NDArray[np.float64]) -> Bytes:
        return y.astype("<f4").reshape(-1).view(np.uint8)

    def used(y: NDArray[np.float64], **declared: Any) -> float:  # noqa: ANN401  # fields of Arithmetic
        budget = budget_of(node, Arithmetic("a", mul_mat={"f16": "f16"}, **declared))
        return budget.used(compare(node, pack(terms.sum(-1)), pack(y)))

    declared = {"mul_mat_sum": {"f16": "f16"}}
    assert used(sums.sum(-1), **declared) < 1 < used(sums.sum(-1))
    assert used(terms[..., 1:].sum(-1), **declared) > 1
    assert used(terms.sum(-1) * 1.01, mul_mat_sum={"bf16": "f16"}) > 1
