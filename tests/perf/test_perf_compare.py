"""Base against head: two environments with builds of this package."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

import backends
import conformance
from conformance.cli import main
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, UsageError
from conformance.perf import measure
from conformance.perf.compare import Build

SCHEME = "venv" if "venv" in sysconfig.get_scheme_names() else sysconfig.get_default_scheme()
"""How a virtual environment is laid out; Python 3.10 has no name for it."""
UNIT = "load"
OPEN = {"level": "smoke", "unit": UNIT, "backend": "cpu"}
TIMED = """
_open = CpuBackend.open
def _timed(self, case):
    session = _open(self, case)
    session.clock = lambda: {}
    return session
CpuBackend.open = _timed
"""


def environment(folder: Path, *, package: bool = True) -> Path:
    """A virtual environment in which this build's dependencies are installed, and with `package` the build itself."""
    venv.create(folder, with_pip=False)
    here = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", SCHEME, vars=here))
    if package:
        # dependencies may lie in an environment that ours builds on
        packages = [p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"}]
        (site / "here.pth").write_text("\n".join([*packages, str(Path(conformance.__file__).parents[1])]) + "\n")
    return folder


def timed(folder: Path, seconds: float) -> Path:
    """An environment with a copy of this build whose `cpu` says by its own clock that it always takes `seconds`."""
    environment(folder)
    site = Path(sysconfig.get_path("purelib", SCHEME, vars={"base": str(folder), "platbase": str(folder)}))
    for package in (conformance, backends):
        source = Path(str(package.__path__[0]))
        shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (site / "backends" / "cpu" / "__init__.py").open("a", encoding="utf-8") as f:
        f.write(TIMED.format(seconds))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build."""
    return timed(tmp_path_factory.mktemp("base"), 1e-6)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes twice as long."""
    return timed(tmp_path_factory.mktemp("head"), 2e-6)


def invoke(*args: str | Path) -> tuple[int, str]:
    """`conform perf compare` with few seconds."""
    few = ["--backend", "cpu", "--unit", UNIT]
    result = CliRunner().invoke(main, ["perf", "compare", *map(str, args), *few])
    return result.exit_code, result.output


def test_a_build_that_became_slower(base: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that takes twice as long regressed; as base it makes the other one fine. Both sides' seconds are kept."""
    monkeypatch.setattr(measure, "LIFE", 0.02)
    out = tmp_path / "out.json"
    code, said = invoke(base, head, "--budget", "40", "--json", out)
    assert code == 1, said
    assert "0 fine, 1 regressed, 0 undecided, 0 not run" in said
    document = json.loads(out.read_text())
    (gate,) = document["gates"]
    assert (gate["against"], gate["answer"]) == ("baseline", "regressed")
    assert gate["estimate"] == pytest.approx(2.0)
    (measured,) = document["builds"]["measured"]
    assert len(measured["base"]) == len(measured["head"]) == gate["rounds"]
    code, said = invoke(head, base, "--budget", "40")
    assert (code, "1 fine" in said) == (0, True), said


@pytest.mark.parametrize("fault", ["no python", "no package"])
def test_an_environment_without_a_build(fault: str, base: Path, tmp_path: Path) -> None:
    """A folder that is no environment, or one without this package, is one clear error and exit code 2."""
    folder = environment(tmp_path / "bare", package=False) if fault == "no package" else tmp_path
    code, said = invoke(base, folder)
    assert code == 2
    assert str(folder) in said
    assert ("a virtual environment expected" if fault == "no python" else "pip install ggml-conformance") in said


def test_what_a_build_lacks(base: Path) -> None:
    """A unit that a build does not have is answered in words, and the next one is measured."""
    build = Build(base)
    try:
        assert "no unit x" in build.ask("open", **{**OPEN, "unit": "x"})["missing"]
        assert build.ask("open", **OPEN)["verdict"] == "PASS"
        assert build.ask("run")["seconds"] > 0
        assert build.ask("renew") == {}
        assert build.ask("run")["seconds"] > 0
        with pytest.raises(BackendError, match="not installed"):
            build.ask("open", **{**OPEN, "backend": "nobody"})
    finally:
        build.close()


def test_a_build_that_dies(base: Path) -> None:
    """A process that ended, or that does not answer, is an error that says so."""
    build = Build(base)
    os.kill(build._worker.pid, 9)
    with pytest.raises(BackendCrashError, match=r"its process died \(SIGKILL"):
        build.ask("run")
    build.close()
    build = Build(base)
    build._worker.time_limit = 0.0
    with pytest.raises(BackendTimeoutError, match="no answer within 0 s"):
        build.ask("open", **OPEN)
    build.close()


def test_a_build_too_old(base: Path, tmp_path: Path) -> None:
    """A build that has nothing to measure with is refused, with what it lacks."""
    folder = environment(tmp_path / "old")
    site = Path(sysconfig.get_path("purelib", SCHEME, vars={"base": str(folder), "platbase": str(folder)}))
    (site / "conformance").mkdir()
    (site / "conformance" / "__init__.py").write_text("")
    with pytest.raises(UsageError, match=r"can be measured expected, and it says: ModuleNotFoundError: .*perf"):
        Build(folder)
    assert base != folder
