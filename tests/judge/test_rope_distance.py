"""What ggml's float32 angles cost is within the budget of a recording, for an exact backend too."""

from __future__ import annotations

import numpy as np
import pytest

from backends.cpu import CpuBackend
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT, GGML_CPU
from conformance.ggml.ops.build import Builder
from conformance.ggml.types import F32, I32
from conformance.judge.budget import budget_of


@pytest.mark.parametrize("ext_factor", [0.0, 1.0])
def test_an_exact_rope_is_within_the_budget_of_a_recording(ext_factor: float) -> None:
    """Positions up to 32,768, with YaRN and without: exact and float32 angles differ by a quarter of the budget."""
    b = Builder()
    x, pos = b.new_tensor_3d(F32, 128, 8, 64), b.new_tensor_1d(I32, 64)
    out = b.rope_ext(x, pos, None, 128, 2, 32768, 10000.0, 0.25, ext_factor, 1.0, 32.0, 1.0)
    rng = np.random.Generator(np.random.PCG64(7))
    inputs = {
        x: rng.standard_normal((64, 8, 128)).astype("<f4").reshape(-1).view(np.uint8),
        pos: np.linspace(0, 32768, 64).astype("<i4").view(np.uint8),
    }
    case = Case("rope/distance@0", {}, [Step(b.build_forward_expand(out), inputs, (out,))])
    found = []
    for arithmetic in (EXACT, GGML_CPU):
        with CpuBackend().computing_in(arithmetic).open(case) as session:
            values = session.compute(case.steps[0].graph, inputs, (out,))[out]
        found.append(values.reshape(-1).view("<f4").astype(np.float64))
    exact, rounded = found
    nmse = ((exact - rounded) ** 2).sum() / (rounded**2).sum()
    assert 0 < nmse < budget_of(out, GGML_CPU, same=False).nmse / 2
