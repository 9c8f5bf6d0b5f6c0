"""`conform check-model` on a library that loses outputs: no right model is called wrong, and no innocent node named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faulty_ggml
import pytest
from click.testing import CliRunner
from commands import conform
from marks import needs_wheel
from planted_adapter import installed

from conformance.cli import main

pytestmark = needs_wheel
PROBE = "probe: requested with every other node, "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of llama in Q4_1."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    made = CliRunner().invoke(main, ["capture", "llama", "--model", "--weight-type", "q4_1", "-o", str(path)])
    assert made.exit_code == 0, made.output
    return path


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter `faulty-ggml` is installed."""
    with installed(tmp_path, monkeypatch, "faulty-ggml", "faulty_ggml:FaultyGgml", faulty_ggml.__file__):
        yield


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("none", 0, "right"),
        ("loses", 0, "right"),
        ("loses large-eps", 1, "wrong from layer 0 on: RMS_NORM"),
        ("loses forgets", 1, "cannot locate the node"),
    ],
)
def test_a_node_is_named_only_where_it_is_wrong_alone(model: Path, fault: str, code: int, said: str) -> None:
    """Right logits are right, with the probe as a note; a wrong node is named; else the probe says why none is."""
    call = (str(model), "--tokens", "3,14,15,92", "--decode", "3", "--budget", "9m")
    ran = conform("check-model", *call, "--backend", f"faulty-ggml?fault={fault}")
    assert (ran.returncode, said in ran.stdout) == (code, True), ran.stdout + ran.stderr
    probed = fault != "none" and said != "wrong from layer 0 on: RMS_NORM"
    assert (PROBE in ran.stdout, "requested alone, " in ran.stdout) == (probed, probed), ran.stdout


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("embedding products", 1, "wrong from layer 0 on: MUL_MAT Vcur-"),
        ("embedding products loses", 1, "wrong from layer 0 on: MUL_MAT Vcur-"),
        ("embedding forgets loses", 1, "cannot locate the node"),
    ],
)
def test_a_small_error_is_no_culprit_of_a_large_one(model: Path, fault: str, code: int, said: str) -> None:
    """An embedding that is off by little is a note beside what is far off, also where that cannot be located."""
    call = (str(model), "--tokens", "3,14,15,92", "--decode", "3", "--budget", "9m")
    ran = conform("check-model", *call, "--backend", f"faulty-ggml?fault={fault}")
    assert (ran.returncode, said in ran.stdout) == (code, True), ran.stdout + ran.stderr
    noted = "over its budget, by too little to explain the result: GET_ROWS embd" in ran.stdout
    assert noted == ("loses" in fault), ran.stdout
    assert (PROBE in ran.stdout) == ("forgets" in fault), ran.stdout
