"""A device that declares nothing: judged by upstream's limits, and the user is told how to measure it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faulty_ggml
import pytest
from commands import conform
from marks import needs_wheel
from planted_adapter import installed

from conformance.ggml.arithmetic import GGML_CPU, UNDECLARED, Mixed
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F16, F32, Q8_0
from conformance.judge.budget import budget_of
from conformance.run.session.precision import undeclared

pytestmark = needs_wheel
CASE = "ops/FLASH_ATTN_EXT-f32+q8_0-q=64x9x4,k=64x32x2,mask=32x9@641"
LEARN = "conform precision 'faulty-ggml?fault=gpu rounds' -o PROFILE.toml"


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter `faulty-ggml` is installed."""
    with installed(tmp_path, monkeypatch, "faulty-ggml", "faulty_ggml:FaultyGgml", faulty_ggml.__file__):
        yield


@pytest.mark.parametrize(
    ("fault", "code", "advised"),
    [("gpu rounds", 0, True), ("gpu errs", 1, True), ("rounds", 1, False), ("none", 0, False)],
)
def test_a_device_that_declares_nothing_is_judged_by_upstreams_limits(fault: str, code: int, advised: bool) -> None:
    """An NMSE of 1e-6 in FLASH_ATTN_EXT is a GPU's rounding and ggml's CPU's fault; 2.5e-3 is a fault of both."""
    ran = conform("run", "--backend", f"faulty-ggml?fault={fault}", "--case", CASE)
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert ("conform precision" in ran.stdout) is advised, ran.stdout
    assert fault != "gpu rounds" or LEARN in ran.stdout, ran.stdout


def test_upstreams_limits_excuse_no_moved_value() -> None:
    """What copies values stays equal to the bit; what stores them in another type may be off."""
    b = Builder()
    x, blocks = new_tensor(F32, 64, 4), new_tensor(Q8_0, 64, 4)
    assert budget_of(b.cont(b.transpose(x)), UNDECLARED).nmse == 0
    assert budget_of(b.get_rows(x, new_tensor(b.argmax(x).type, 4)), UNDECLARED).nmse == 0
    assert budget_of(b.cpy(x, new_tensor(F16, 64, 4)), UNDECLARED).nmse > 0
    assert budget_of(b.mul_mat(blocks, x), UNDECLARED).nmse > budget_of(b.mul_mat(blocks, x), GGML_CPU).nmse


def test_a_scheduler_beside_such_a_device_is_told() -> None:
    """One node of a shared graph on a device that declares nothing is enough."""
    x = new_tensor(F32, 4)
    assert undeclared(Mixed("both", nodes={x: GGML_CPU, new_tensor(F32, 4): UNDECLARED}))
    assert not undeclared(Mixed("one", nodes={x: GGML_CPU}))
    assert not undeclared(GGML_CPU)
