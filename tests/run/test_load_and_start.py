"""A busy machine changes no verdict, and a device that does not start is reported once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import conform_here as conform
from planted_adapter import planted_adapter

ADAPTER = """
import os, time
from pathlib import Path
from backends.ggml import GgmlBackend

class Slow(GgmlBackend):
    delegates = ("ggml",)

    def __init__(self, how="", mark="", op=""):
        super().__init__()
        self.mark = Path(mark)
        self.how, self.op = how, op
        self.batch = 1
        if how == "opens once":
            self.once()

    def once(self):
        if not self.mark.exists():
            self.mark.touch()
            time.sleep(600)

    def open(self, case):
        if self.how == "dies" and f"/{self.op}" in case.id:
            with self.mark.open("a") as f:
                f.write("x")
            os.abort()
        if self.how == "hangs once":
            self.once()
        return super().open(case)
"""


@pytest.fixture(autouse=True)
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter, called `slow`."""
    with planted_adapter(tmp_path, monkeypatch, "slow", ADAPTER, "Slow"):
        yield


@pytest.mark.parametrize("how", ["opens once", "hangs once"])
def test_a_timeout_counts_only_if_it_is_repeated(how: str, tmp_path: Path) -> None:
    """A backend that answers at the second try passes, be it late as it opens or in a case."""
    backend = f"slow?how={how}&mark={tmp_path / 'mark'}"
    ran = conform("run", "--backend", backend, "--case", "ops/ADD-f32+f32-a=1x1x1@325", "--time-limit", "5")
    assert (ran.exit_code, (tmp_path / "mark").exists()) == (0, True), ran.output
    assert "1 PASS" in ran.output


def test_a_device_that_does_not_start_is_reported_once(tmp_path: Path) -> None:
    """After the first deaths and those of two other graphs no case runs any more, and the run fails."""
    ran = conform(
        "run", "--backend", f"slow?how=dies&mark={tmp_path / 'mark'}", "--case", "ops/SCALE-*", "--case", "ops/SQR-*"
    )
    assert ran.exit_code == 1
    assert ran.output.count("the device does not start: its first 4 cases and a small graph of ADD, MUL_MAT") >= 1
    assert ran.output.count("\nCRASH") + ran.output.startswith("CRASH") == 4, ran.output


def test_an_op_that_dies_in_its_first_cases_stops_no_other(tmp_path: Path) -> None:
    """A device that computes another graph has started: each case runs."""
    backend = f"slow?how=dies&op=SCALE&mark={tmp_path / 'mark'}"
    ran = conform("run", "--backend", backend, "--case", "ops/SCALE-*", "--case", "ops/SQR-*", "--level", "smoke")
    assert ran.exit_code == 1
    assert "does not start" not in ran.output
    assert "no result" not in ran.output
