"""Learning that ends early loses nothing: the next start goes on, with the same device and no other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from conformance.backend import profile, registry
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import Kernel, KernelBackend, Raw, Sources
from conformance.cli import checks, main
from conformance.ggml.tensor import Tensor
from conformance.run.learn import left

KEYS = {
    "SQR-f32": ["ops/SQR-f32-ne=10x5@1"],
    "MUL-f32+f32": ["ops/MUL-f32+f32-a=10x5x4x3,b=10x5x4x3@1"],
    "ADD-f32+f32": ["ops/ADD-f32+f32-a=10x5x4x3,b=10x5x4x3@1"],
    "SUB-f32+f32": ["ops/SUB-f32+f32-a=10x5x4x3,b=10x5x4x3@1"],
}
"""The device refuses the first of them."""


class Device(KernelBackend):
    """Some ops in NumPy; `ends` is called before the third."""

    name = "interrupted-device"
    version = "1.0"
    ran: ClassVar[list[str]] = []
    ends: ClassVar[Callable[[], None] | None] = None

    def info(self) -> DeviceInfo:
        """A device of one version."""
        return DeviceInfo("interrupted-device", "interrupted-device", "in NumPy", {"ggml": self.version})

    def kernels(self) -> dict[str, Kernel]:
        """All but SQR."""
        return {"MUL": self._compute, "ADD": self._compute, "SUB": self._compute}

    def _compute(self, node: Tensor, dst: Raw, src: Sources) -> None:
        self.ran.append(node.op)
        if len(self.ran) == 2 and Device.ends is not None:
            Device.ends()
        x, y = src[0], src[1]
        assert x is not None
        assert y is not None
        dst[...] = {"MUL": x * y, "ADD": x + y, "SUB": x - y}[node.op]


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.provide("interrupted-device", Device)
    monkeypatch.setattr(checks, "plain", lambda _: KEYS)
    monkeypatch.setattr(Device, "ran", [])
    monkeypatch.setattr(Device, "ends", None)


def _learn(path: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["precision", "interrupted-device", "-o", str(path), *words])


def _interrupt() -> None:
    raise KeyboardInterrupt


def _unfinished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile that Ctrl-C left."""
    monkeypatch.setattr(Device, "ends", _interrupt)
    path = folder / "profile.toml"
    assert _learn(path).exit_code == 5
    monkeypatch.setattr(Device, "ends", None)
    return path


def test_an_interrupt_keeps_what_was_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start measures the rest only, and writes the profile that a start without an interrupt writes."""
    whole = tmp_path / "whole.toml"
    assert _learn(whole).exit_code == 0
    Device.ran.clear()
    path = _unfinished(tmp_path, monkeypatch)
    begun = profile.read(tmp_path / "profile.toml.partial")
    assert (set(begun.entries), begun.refused, begun.others) == ({"MUL-f32+f32"}, ("SQR-f32",), True)
    assert not path.exists()
    Device.ran.clear()
    ended = _learn(path)
    assert (ended.exit_code, Device.ran) == (0, ["ADD", "SUB"]), ended.output
    assert "2 of 4 keys were measured by an earlier start" in ended.output
    assert profile.read(path) == profile.read(whole)
    assert not profile.read(path).others
    assert not (tmp_path / "profile.toml.partial").exists()


def test_a_kill_keeps_what_was_learnt(tmp_path: Path) -> None:
    """A process that is killed within a kernel leaves a whole profile of the keys before."""
    path = tmp_path / "profile.toml"
    code = (
        "import os, signal, sys; import test_learn_resume as t; from conformance.cli import checks, main;"
        "t.registry.provide('interrupted-device', t.Device); checks.plain = lambda _: t.KEYS;"
        "t.Device.ends = staticmethod(lambda: os.kill(os.getpid(), signal.SIGKILL)); main(sys.argv[1:])"
    )
    words = ["precision", "interrupted-device", "-o", str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, timeout=120, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["profile.toml.partial"]
    ended = _learn(path)
    assert (ended.exit_code, Device.ran) == (0, ["ADD", "SUB"]), ended.output


def test_a_time_that_is_over_leaves_a_profile_to_go_on_with(tmp_path: Path) -> None:
    """No key begins after it; exit code 5, and how many keys are left."""
    path = tmp_path / "profile.toml"
    ended = _learn(path, "--budget", "0.000001s")
    assert (ended.exit_code, Device.ran) == (5, []), ended.output
    assert "4 of 4 keys are not measured" in ended.output
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: replace(c, device="Vulkan0"), "begun with device Vulkan0, but this is interrupted-device"),
        (lambda c: replace(c, description="another driver"), "begun with description another driver"),
        (lambda c: replace(c, versions={"ggml": "0.9"}), "begun with versions {'ggml': '0.9'}"),
        (lambda c: replace(c, suite="0.0.1"), "begun with suite 0.0.1"),
        (lambda c: replace(c, build="00ff"), "begun with build 00ff"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    change: Callable[[profile.Profile], profile.Profile], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device, driver, version, suite or build: exit code 2, and the file stays."""
    path = _unfinished(tmp_path, monkeypatch)
    partial = tmp_path / "profile.toml.partial"
    partial.write_text(change(profile.read(partial)).to_toml(), encoding="utf-8")
    before = partial.read_bytes()
    ended = _learn(path)
    assert (ended.exit_code, said in ended.output) == (2, True), ended.output
    assert "remove it to start again" in ended.output
    assert partial.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], ""),
        (lambda _: "\x00\x01", ""),
        (lambda _: "[[fault]]\n", "fault: is unknown"),
        (lambda text: re.sub(r"refused = .*", "refused = 3", text), "refused: a list of texts expected, 3 found"),
        (lambda text: re.sub(r"build = .*", "build = 3", text), "build: a text expected, 3 found"),
        (lambda text: text.replace("residual = ", "residual = -1 # "), "a finite number from 0 expected"),
    ],
)  # fmt: skip
def test_a_damaged_profile_is_refused(
    damage: Callable[[str], str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 with a line that names the file and what to do."""
    path = _unfinished(tmp_path, monkeypatch)
    partial = tmp_path / "profile.toml.partial"
    partial.write_text(damage(partial.read_text("utf-8")), encoding="utf-8")
    ended = _learn(path)
    assert (ended.exit_code, said in ended.output) == (2, True), ended.output
    assert "profile.toml.partial" in ended.output
    assert "remove it to start again" in ended.output
    assert "Traceback" not in ended.output


def test_other_cases_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry by cases that the suite has no more tells nothing of those that it has."""
    path = _unfinished(tmp_path, monkeypatch)
    monkeypatch.setattr(checks, "plain", lambda _: {**KEYS, "MUL-f32+f32": ["ops/MUL-f32+f32-a=11x5x4x3,b=11x5x4x3@1"]})
    Device.ran.clear()
    assert _learn(path).exit_code == 0
    assert sorted(Device.ran) == ["ADD", "MUL", "SUB"]
    assert profile.read(path).entries["MUL-f32+f32"].cases == ("ops/MUL-f32+f32-a=11x5x4x3,b=11x5x4x3@1",)


def test_each_op_has_its_turn() -> None:
    """The first key of each op comes before the second of any, in the order of the keys."""
    keys: dict[str, list[str]] = {
        k: [] for k in ("MUL_MAT-f32+f32", "MUL_MAT-f16+f32", "MUL_MAT-q4_0+f32@9", "ROPE-f32", "ADD-f32+f32")
    }
    empty = profile.Profile("", "", "")
    assert list(left(empty, keys)) == ["MUL_MAT-f32+f32", "ROPE-f32", "ADD-f32+f32", "MUL_MAT-f16+f32",
                                       "MUL_MAT-q4_0+f32@9"]  # fmt: skip
