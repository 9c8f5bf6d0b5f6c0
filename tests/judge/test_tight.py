"""Why arithmetic is declared: a fault that hides in ggml's usual tolerance is seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conformance.backend.registry import Spec
from conformance.case.case import Case
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
