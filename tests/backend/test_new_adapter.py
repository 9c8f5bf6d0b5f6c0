"""`conform new-adapter`: what it writes is small, installs from outside the tree into a fresh environment, and runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from environments import environment, install

from conformance.backend import registry
from conformance.cli import main
from conformance.installed import entries

NAME = "my-npu"
MODULE = "my_npu_backend"
OPS = ("ADD", "MUL", "MUL_MAT", "RMS_NORM")


def _conform(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated package, outside the tree."""
    folder = tmp_path_factory.mktemp("outside") / NAME
    result = _conform("new-adapter", NAME, "-o", str(folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def python(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the package in it."""
    found = environment(tmp_path_factory.mktemp("environment"))
    install(found, package)
    return found


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_one_file_of_fifty_lines(package: Path) -> None:
    """The adapter is one file of at most 50 lines, with a project file, a README and a test."""
    assert sorted(p.name for p in package.iterdir()) == [
        "README.md",
        f"{MODULE}.py",
        "pyproject.toml",
        f"test_{MODULE}.py",
    ]
    lines = (package / f"{MODULE}.py").read_text().splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 120
    assert "$" not in "".join(p.read_text() for p in package.iterdir())


def test_its_own_test_passes(package: Path, python: Path) -> None:
    """The package's test, run as its README says, finds nothing missing."""
    assert "1 passed" in _run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"], package)


def test_the_suite_runs_against_it(python: Path, tmp_path: Path) -> None:
    """In the fresh environment the suite finds it by its name; each case of its ops that it takes is a PASS."""
    out = tmp_path / "r.json"
    conform = [str(python), "-c", "from conformance.cli import main; main()"]
    globs = [a for op in OPS for a in ("--case", f"ops/{op}-*")]
    level = ["--level", "standard"]
    _run([*conform, "run", "--backend", NAME, *globs, *level, "--json", str(out)], tmp_path)
    results = json.loads(out.read_text())["results"]
    assert {r["verdict"] for r in results} == {"PASS", "UNSUPPORTED"}
    passed = {op: sum(r["verdict"] == "PASS" and r["case"].startswith(f"ops/{op}-") for r in results) for op in OPS}
    assert all(n >= 5 for n in passed.values()), passed
    assert all(r["detail"] for r in results if r["verdict"] == "UNSUPPORTED")


def test_the_parent_environment_does_not_know_it(python: Path) -> None:
    """The environment is fresh: what was installed there is not installed here."""
    assert python.is_file()
    entries.cache_clear()
    assert NAME not in registry.names()


@pytest.mark.parametrize("name", ["Npu", "my_npu", "1npu", "npu?", "", "-npu", "../npu", "cpu"])
def test_a_name_that_cannot_be_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of another form, or of a backend that is there, is refused and nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = _conform("new-adapter", "--", name)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(package: Path) -> None:
    """A folder that holds anything is left alone."""
    before = {p.name: p.read_text() for p in package.iterdir() if p.is_file()}
    result = _conform("new-adapter", NAME, "-o", str(package))
    assert result.exit_code == 2
    assert "is not empty; name another folder with -o" in result.output
    assert {p.name: p.read_text() for p in package.iterdir() if p.is_file()} == before
