"""The entry point that pytest loads in every run: it asks for the suite only where the suite is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sessions_of_pytest import ROOT, session

from pytest_ggml_conformance import HOME, is_asked


@pytest.mark.parametrize(
    ("words", "pyargs", "asked"),
    [
        (["conformance"], False, True),
        (["cpu", "conformance/test_suite.py::test_case[a/b]"], False, True),
        ([str(HOME / "test_suite.py")], False, True),
        (["conformance"], True, True),
        (["conformance.test_suite"], True, True),
        (["tests"], False, False),
        (["."], False, False),
        ([], True, False),
        (["conformances", "backends", "tests"], True, False),
        (["x" * 5000, "a\0b"], True, False),
    ],
)
def test_the_suite_is_asked_for_by_its_name(words: list[str], *, pyargs: bool, asked: bool) -> None:
    """A path inside the package or, with --pyargs, its name; nothing else."""
    assert is_asked(words, pyargs=pyargs, folder=ROOT) is asked


def test_another_folder_of_the_same_name_is_not_the_suite(tmp_path: Path) -> None:
    """`pytest conformance` in somebody else's project is theirs."""
    (tmp_path / "conformance").mkdir()
    assert not is_asked(["conformance"], pyargs=False, folder=tmp_path)


def test_the_entry_point_imports_next_to_nothing() -> None:
    """It imports nothing of the project and no third-party package."""
    program = "import sys; before = set(sys.modules); import pytest_ggml_conformance; print(set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for name in ("conformance", "backends", "numpy", "pytest", "openvino"):
        assert f"'{name}'" not in done.stdout


@pytest.mark.parametrize("more", [(), ("-p", "pytest_ggml_conformance"), ("--pyargs",), ("--noconftest",)])
def test_the_plugin_is_loaded_once(more: tuple[str, ...]) -> None:
    """The entry point and the suite's conftest both ask for it; its options are there once, wherever they stand."""
    if "--noconftest" in more:
        more = (*more, "-p", "conformance.plugin")
    words = ("--level", "smoke", *more, "conformance", "--backend", "cpu")
    done = session(*words, "--case", "ops/RMS_NORM-f32-ne=33x4,eps=0.0@426", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu: 1 PASS" in done.stdout
