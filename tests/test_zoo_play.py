"""`conform zoo`: llama.cpp on a device against its own CPU run, cell by cell."""

from __future__ import annotations

import importlib.util
import json
from math import inf
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from conformance.cases.zoo.library import WHEEL
from conformance.cases.zoo.play import RUNS, Device, Played, compare, nmse, play
from conformance.cli import main

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec(WHEEL) is None, reason=f"{WHEEL} has no wheel for this machine"
)


def test_what_a_cell_says() -> None:
    """Within tolerance PASS, beyond FAIL with the first such batch, a NaN or another shape is infinitely wrong."""
    ones = np.ones((1, 4), np.float32)
    reference = Played("PASS", results=[ones, ones])
    assert compare(Played("PASS", results=[ones, ones]), reference).verdict == "PASS"
    wrong = compare(Played("PASS", results=[ones, ones * 1.1]), reference)
    assert (wrong.verdict, wrong.step) == ("FAIL", 1)
    assert nmse(ones * np.float32(np.nan), ones) == inf
    assert nmse(np.ones((2, 4), np.float32), ones) == inf
    assert compare(Played("CRASH", "SIGABRT"), reference).verdict == "CRASH"


@needs_wheel
def test_a_device_that_is_the_cpu_agrees() -> None:
    """The wheel's CPU device, chosen by name, gives its own logits in every run."""
    found = play("zoo/llama-real=1,set=block_count:1@1", [Device("CPU too", "", "CPU")], RUNS)
    assert {p.verdict for p in found.values()} == {"PASS"}
    assert max(p.nmse or 0.0 for p in found.values()) < 1e-4


@needs_wheel
def test_the_command(tmp_path: Path) -> None:
    """A row per architecture, a cell per run, every cell in the JSON; a device that is absent is an ERROR."""
    out = tmp_path / "zoo.json"
    command = ["zoo", "--backend", "ggml?device=NONE9", "--arch", "llama", "--runs", "1", "--json", str(out)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert (row["architecture"], row["verdict"]) == ("llama", "ERROR")
    assert "no device 'NONE9'" in row["detail"]


def test_only_ggml_libraries_run_llama_cpp() -> None:
    """Another adapter is refused before anything runs."""
    result = CliRunner().invoke(main, ["zoo", "--backend", "cpu"])
    assert result.exit_code == 2
    assert "llama.cpp runs on ggml's own backends only" in result.output
