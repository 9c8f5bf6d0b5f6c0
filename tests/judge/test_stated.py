"""What a case states for its whole trajectory is what holds, but on a device that rounds the operands of products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.ggml.arithmetic import EXACT
from conformance.ggml.tensor import nbytes
from conformance.judge.judge import Chain, judge_step
from conformance.run.session.select import build

CASE = build("kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p3@1")


@pytest.mark.parametrize("nmse", [1e-9, 5e-4, 0.5])
@pytest.mark.parametrize("products", ["float32", "f16", "bf16"])
def test_the_wider_of_what_is_stated_and_of_rounded_products(nmse: float, products: str) -> None:
    """Float32 products never widen it; rounded ones do where they are worth more, and narrow it nowhere."""
    case = replace(CASE, tolerance={"nmse": nmse})
    arithmetic = replace(EXACT, products=products)
    chain = Chain(arithmetic)
    chain.enter(case.steps[0].graph)
    (logits,) = case.steps[0].outputs
    packed = {logits: np.zeros(nbytes(logits), np.uint8)}
    (judged,) = judge_step(case, 0, packed, packed, arithmetic)
    worth = 0.0 if products == "float32" else chain.budget(logits).nmse
    assert judged.budget.nmse == max(nmse, worth)
    assert worth < 0.1
