"""The wheel is whole: it holds what any command reads, and from an empty folder everything works with it alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = "pytest_ggml_conformance.py"
LARGEST = 15 << 20
CASE = "ops/RMS_NORM-f32-ne=33x4,eps=0.0@426"


def _run(command: list[str], folder: Path, **more: str) -> str:
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=240, env={**outside, **more}
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without an index; nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    config = folder / "dist.cfg"
    config.write_text(f"[build]\nbuild_base = {folder / 'build'}\n[egg_info]\negg_base = {folder}\n", encoding="utf-8")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    command = [sys.executable, "-m", "pip", "wheel", *offline, "-w", str(folder), str(ROOT)]
    _run(command, folder, DIST_EXTRA_CONFIG=str(config))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and of what is installed here all but this project."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = (p for p in folder.rglob("site-packages") if p.is_dir())
    lent = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]  # plain: no .pth in them counts
    (packages / "lent.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    _install(python, wheel, folder)
    return python


def _install(python: Path, what: Path, folder: Path) -> None:
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--ignore-installed")
    _run([sys.executable, "-m", "pip", "--python", str(python), "install", *offline, str(what)], folder)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder with nothing in it."""
    return tmp_path


def _conform(python: Path, folder: Path, *words: str) -> str:
    return _run([str(python.with_name("conform")), *words], folder)


def _pytest(python: Path, folder: Path, *words: str) -> str:
    """As the script `pytest` does, which does not put the current directory on the path."""
    start = "import sys, pytest; sys.path[:] = [p for p in sys.path if p]; sys.exit(pytest.console_main())"
    return _run([str(python), "-c", start, "-p", "no:cacheprovider", *words], folder)


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """What git has under the packages is in the wheel, to the byte, and of the rest of the tree nothing is."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "conformance", "backends", OUTSIDE], cwd=ROOT, capture_output=True, check=False
    )
    tracked = {p for p in listed.stdout.decode().split("\0") if p and (ROOT / p).is_file()}
    if listed.returncode:
        pytest.skip("git has no list of this tree")
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if ".dist-info/" not in n}
        assert tracked <= names
        assert {n.partition("/")[0] for n in names} == {"conformance", "backends", OUTSIDE}
        for name in tracked:
            assert z.read(name) == (ROOT / name).read_bytes(), name
    assert wheel.stat().st_size < LARGEST


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --backend cpu --backend ggml --case ops/ADD-f32*", "PASS"),
        ("run --backend cpu --case captured/llama-fa-1seq@0", "1 PASS"),
        ("list cases --family captured --family blocks --family zoo", "captured/llama-fa-1seq@0"),
        ("show captured/llama-fa-1seq@0 --step 0", "result_output"),
        ("capture", "llama"),
        ("capture llama --model -o m.gguf", "m.gguf"),
        ("run --backend ggml --case arch/llama-real=1@1", "1 PASS"),
        ("perf gate --gate no-such-gate", "no gate matches"),
        ("golden --help", "golden"),
        ("nightly --help", "conformance, seeded"),
        ("nightly --level smoke --backend cpu --case", "No such option"),
    ],
)
def test_a_command_needs_nothing_but_the_wheel(python: Path, empty: Path, words: str, said: str) -> None:
    """From an empty folder each command finds what it reads inside the package."""
    done = subprocess.run(
        [str(python.with_name("conform")), *words.split()],
        cwd=empty, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert said in text, text
    assert "Traceback" not in text
    assert done.returncode == (2 if said.startswith(("no ", "No ")) else 0), text


def test_golden_outputs_come_along(python: Path, empty: Path) -> None:
    """The golden corpus of the wheel is read from the wheel; what the checkout has is not needed."""
    program = (
        "from conformance import shipped; from conformance.run import golden; from conformance.case import casefile;"
        "print(shipped.golden(), len(casefile.index(shipped.golden() / golden.OPS)),"
        " len(golden.requantised(shipped.golden())))"
    )
    where, n, requantised = _run([str(python), "-c", program], empty).split()
    assert Path(where).is_relative_to(python.parents[1])
    assert int(n) > 300
    assert int(requantised) == 3


def test_workers_of_pytest_run_the_installed_suite(python: Path, empty: Path) -> None:
    """`pytest --pyargs conformance` in an empty folder, where each worker reads the command line by itself.

    CI runs the whole of it so.
    """
    pytest.importorskip("xdist")
    chosen = ("--backend", "cpu", "--case", CASE, "--json", "r.json")
    said = _pytest(python, empty, *chosen, "--pyargs", "conformance.test_suite", "-n", "1")
    assert "cpu: 1 PASS" in said
    assert json.loads((empty / "r.json").read_text())["totals"]["PASS"] == 1


def test_an_adapter_runs_beside_the_wheel(python: Path, empty: Path) -> None:
    """What `conform new-adapter` writes installs beside the wheel, and its test and the suite run."""
    _conform(python, empty, "new-adapter", "my-npu")
    _install(python, empty / "my-npu", empty)
    assert "1 passed" in _pytest(python, empty, "my-npu")
    assert "PASS" in _conform(python, empty, "run", "--backend", "my-npu", "--case", "ops/ADD-f32*")


THEIRS = """
import sys
def pytest_addoption(parser):
    for name in ("backend", "case", "family", "level", "seed", "json", "shard", "time-limit", "config", "perf"):
        parser.addoption(f"--{name}")
def pytest_configure(config):
    assert config.getoption("backend") == "theirs"
def pytest_unconfigure(config):
    assert "conformance.plugin" not in sys.modules
"""
TEST = """
import conformance
def test_it(request):
    assert conformance.THEIRS
    assert not {n for n in __import__("sys").modules if n in ("numpy", "backends", "conformance.plugin")}
"""


def test_the_installed_suite_leaves_other_runs_alone(python: Path, empty: Path) -> None:
    """Other projects' pytest runs have no option, module or summary of this project.

    Another plugin may have options of these names, and a package of theirs may be called `conformance`.
    """
    (empty / "conftest.py").write_text(THEIRS)
    (empty / "conformance").mkdir()
    (empty / "conformance" / "__init__.py").write_text("THEIRS = True\n")
    (empty / "conformance" / "test_it.py").write_text(TEST)
    for words in (["conformance"], ["--pyargs", "conformance"], []):
        said = _pytest(python, empty, "--strict-config", "-W", "error", "-p", "no:xdist", "-p", "no:benchmark",
                       "--backend", "theirs", "-o", "pythonpath=.", *words)  # fmt: skip
        assert "1 passed" in said
        assert "= conformance =" not in said
