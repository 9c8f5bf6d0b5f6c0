"""The workflow that publishes: its steps, run here as they stand with stand-ins for the tools; and the version."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from workflow_steps import Machine, read, steps

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
DRY = "github.event_name != 'push' && '--dry-run' || ''"
BUILD = """
[ "$2" = build ] || { echo 1.2.3; exit; }
mkdir -p dist && touch dist/x-1.2.3.tar.gz && cp made.whl dist/x-1.2.3-py3-none-any.whl
"""


def _machine(folder: Path, *, size: int = 0, dry: str = "") -> Machine:
    machine = Machine(folder, {DRY: dry})
    (folder / "CHANGELOG.md").touch()
    with zipfile.ZipFile(folder / "made.whl", "w") as z:
        z.writestr("x-1.2.3.dist-info/METADATA", "")
        z.writestr("data", b"0" * size)
    machine.stand_in("python", BUILD)
    for tool in ("pip", "twine", "check-wheel-contents", "towncrier", "uv"):
        machine.stand_in(tool)
    machine.stand_in("unzip", 'exec "$(command -v python3)" -c \'import sys,zipfile; z=zipfile.ZipFile(sys.argv[2]); '
                     'print(z.read("x-1.2.3.dist-info/METADATA").decode())\' "$@"')  # fmt: skip
    return machine


def _run(machine: Machine) -> list[tuple[str, int]]:
    """Name and exit code of each step, until one fails."""
    ended: list[tuple[str, int]] = []
    for step in steps(read(RELEASE)):
        if "run" in step:
            ended.append((step["name"], machine.run(step).returncode))
            if ended[-1][1]:
                break
    return ended


def test_each_step_of_a_release_runs(tmp_path: Path) -> None:
    """A tag: both distributions are built, checked, and published with the workflow's identity."""
    machine = _machine(tmp_path)
    assert {code for _, code in _run(machine)} == {0}
    assert "twine check --strict dist/x-1.2.3-py3-none-any.whl dist/x-1.2.3.tar.gz" in machine.calls
    assert "check-wheel-contents dist/x-1.2.3-py3-none-any.whl" in machine.calls
    assert machine.calls[-1].startswith("uv publish --trusted-publishing always dist/")


def test_a_release_has_the_changes_of_its_version(tmp_path: Path) -> None:
    """From the changelog, in which they are before the tag; what has no part there gets a draft."""
    others = "# Changes\n\n## {} (2027-01-02)\n- new\n\n## 1.2.2\n- old\n"
    for version, drafts in (("1.2.3", False), ("1.2.4", True)):
        folder = tmp_path / version
        folder.mkdir()
        machine = _machine(folder)
        (folder / "CHANGELOG.md").write_text(others.format(version), encoding="utf-8")
        _run(machine)
        assert ("towncrier build --draft --version 1.2.3" in machine.calls) is drafts
        if not drafts:
            assert (folder / "changelog.md").read_text(encoding="utf-8") == "## 1.2.3 (2027-01-02)\n- new\n\n"


def test_started_by_hand_it_publishes_nothing(tmp_path: Path) -> None:
    """Without a tag the last step is a dry run."""
    machine = _machine(tmp_path, dry="--dry-run")
    assert {code for _, code in _run(machine)} == {0}
    assert machine.calls[-1].startswith("uv publish --trusted-publishing always --dry-run dist/")


def test_a_wheel_that_is_too_large_stops_it(tmp_path: Path) -> None:
    """Over 15 MiB nothing is published."""
    machine = _machine(tmp_path, size=15 << 20)
    assert _run(machine)[-1][0] == "What they hold, and how large they are"
    assert not any(call.startswith("uv") for call in machine.calls)


def test_a_source_distribution_makes_the_same_wheel(tmp_path: Path) -> None:
    """A clone without tags gives a source distribution, and that a complete wheel.

    The wheel, made where there is no git, has its version and every file that git has under the packages.
    """
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-tags", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
    (tmp_path / "dist").mkdir()
    _python(clone, "import setuptools.build_meta as b; b.build_sdist('../dist')")
    (sdist,) = (tmp_path / "dist").iterdir()
    version = re.sub(r"\.tar\.gz$", "", sdist.name).partition("-")[2]
    assert re.fullmatch(r"1\.0\.[0-9]+\.dev[0-9]+\+g[0-9a-f]+(\.d[0-9]+)?", version)
    _python(tmp_path, f"import tarfile; tarfile.open({str(sdist)!r}).extractall('.', filter='data')")
    _python(next(tmp_path.glob("ggml_conformance-*")), "import setuptools.build_meta as b; b.build_wheel('../dist')")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == f"ggml_conformance-{version}-py3-none-any.whl"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "conformance", "backends"], cwd=clone, capture_output=True, check=True
    )
    with zipfile.ZipFile(wheel) as z:
        assert set(listed.stdout.decode().split("\0")) - {""} <= set(z.namelist())


def _python(folder: Path, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_the_one_that_the_changelog_describes() -> None:
    """The tree, the newest part of the changelog, the citation, the container and the instructions name one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["tool"]["setuptools_scm"]["fallback_version"]
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0] == version
    assert read(ROOT / "CITATION.cff")["version"] == version
    assert f"ARG VERSION={version}\n" in (ROOT / "ci" / "container" / "Containerfile").read_text(encoding="utf-8")
    assert f"git tag v{version} " in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_each_change_has_a_kind() -> None:
    """A file in changes/ is `ISSUE.KIND.md` or `+NAME.KIND.md` of a kind that towncrier knows, and says something."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    kinds = "|".join(k["directory"] for k in table["type"])
    for path in (ROOT / table["directory"]).glob("[!.]*"):  # .gitignore keeps the folder
        assert re.fullmatch(rf"(\+[a-z0-9-]+|[0-9]+)\.({kinds})\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip()
    assert table["start_string"] in (ROOT / table["filename"]).read_text(encoding="utf-8")
