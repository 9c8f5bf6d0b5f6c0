"""`conform release`, `bisect` and `backtest` from the shell: what is wrong is said in a line, and nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.builds.build import Build, DeviceOf
from conformance.cli import main
from conformance.cli import release as commands
from conformance.ggml.errors import UnavailableError
from conformance.report.runfile import write_json
from conformance.run.session.environment import header

CAUSE = {"id": "ADD-1", "smallest": "ops/ADD-f32+f32-a=10x5,b=10x5@1", "backend": "ggml?lib=x"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["release", "nowhere"], "/nowhere: no such file or folder"),
        (["release", "pypi:xllamacpp"], "with an exact version"),
        (["release", "{file}"], "cannot be loaded"),
        (["bisect", "ADD-1", "--in", "{file}", "--builds", "a"], "two at least, the oldest first"),
        (["bisect", "SUB-1", "--in", "{file}", "--builds", "a", "b"], "no cause SUB-1; it has ADD-1"),
        (["bisect", "ADD-1", "--in", "{file}", "--builds", "a", "b"], "/a: no such file or folder"),
        (["bisect", "ADD-1", "--in", "{toml}", "--builds", "a", "b"], "past.toml"),
        (["backtest", "--file", "{file}"], "release.json"),
        (["backtest", "--file", "{toml}", "--link", "zzz"], "no fault is left by --link zzz"),
        (["backtest", "--file", "{toml}", "--minutes", "0"], "0.0 is not in the range"),
    ],
)
def test_wrong_words_end_with_a_line(words: list[str], said: str, tmp_path: Path) -> None:
    """Exit code 2, and what was expected."""
    record, toml = tmp_path / "release.json", tmp_path / "past.toml"
    write_json(record, {**header("release"), "causes": [CAUSE]})
    toml.write_text(
        '[[fault]]\nlink = "https://x.y/1"\npackage = "a"\nbad = "1"\ngood = "2"\ndevice = "CPU"\nminutes = 1\n'
    )
    ran = CliRunner().invoke(main, [w.format(file=record, toml=toml) for w in words])
    assert (ran.exit_code, said in ran.output) == (2, True), ran.output
    assert json.loads(record.read_text())["causes"] == [CAUSE]


def test_a_build_that_cannot_be_had_is_no_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a backtest says what could not be tried and why; nothing tried is exit code 3."""

    def absent(name: str, *_: object) -> Build:
        raise UnavailableError(f"build {name}: not there")

    monkeypatch.setattr(commands, "probe", absent)
    toml, out = tmp_path / "past.toml", tmp_path / "out.json"
    toml.write_text(
        '[[fault]]\nlink = "https://x.y/1"\npackage = "a"\nbad = "1"\ngood = "2"\ndevice = "CPU"\nminutes = 1\n'
    )
    ran = CliRunner().invoke(main, ["backtest", "--file", str(toml), "--json", str(out)])
    assert ran.exit_code == 3, ran.output
    (row,) = json.loads(out.read_text())["faults"]
    assert (row["seen_before"], row["seen_after"], row["cause"]) == (False, False, None)
    assert row["error"] == "build pypi:a==1: not there"


def test_a_vulkan_driver_on_the_cpu_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a device shows only if it is named."""
    vulkan = DeviceOf("Vulkan0", "CPU", "llvmpipe", software=True, buffer_types=("Vulkan0",))

    def probe(name: str, environment: Mapping[str, str] | None = None) -> Build:
        devices = (vulkan,) if environment else ()
        return Build(name, Path("/x"), "0.26.0", "", devices, (), llama=False, left_out=())

    monkeypatch.setattr(commands, "probe", probe)
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "")  # what the test leaves behind is undone
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES")
    assert commands._probe("x").devices == (vulkan,)
    assert os.environ["GGML_VK_VISIBLE_DEVICES"] == "0"
