"""The action, the workflow around it and the container file: their scripts, run here as they stand with stand-ins."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from workflow_steps import Machine, read, steps

from conformance.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ACTION = ROOT / "action.yml"
CALLED = ROOT / ".github" / "workflows" / "test-build.yml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONTAINER = ROOT / "ci" / "container" / "Containerfile"
GIVEN = {
    "inputs.build": "build/my llama", "inputs.against": "", "inputs.devices": "", "inputs.budget": "20m",
    "inputs.level": "smoke", "inputs.folder": "report",
}  # fmt: skip
VENV = """
mkdir -p "$3/bin"
cp "$(command -v pip)" "$3/bin/pip"
cp "$(command -v conform)" "$3/bin/conform"
"""


def _act(folder: Path, code: int, summary: str | None, **given: str) -> tuple[Machine, int]:
    """Run the action's steps with a `conform` that ends with `code` and leaves `summary`; its last exit code."""
    values = {**GIVEN, **{f"inputs.{k}": v for k, v in given.items()}, "steps.release.outputs.code": str(code)}
    machine = Machine(folder, values)
    machine.stand_in("python3", VENV)
    machine.stand_in("pip")
    if summary is not None:
        (folder / "made.md").write_text(summary, encoding="utf-8")
    write = f'mkdir -p report && cp "{folder}/made.md" report/summary.md' if summary is not None else ""
    machine.stand_in("conform", f"{write}\nexit {code}")
    last = 0
    for step in steps(read(ACTION)):
        if "run" in step:
            done = machine.run(step)
            last = done.returncode
            assert step["name"] == "Verdict" or last == 0, (step["name"], done.stderr)
    return machine, last


def _words(machine: Machine) -> str:
    (call,) = (c for c in machine.calls if c.startswith("conform "))
    return call


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "no cause is new"),
        (1, "**causes are new**"),
        (2, "it did not come to its end, exit code 2"),
        (3, "no cases ran, or none passed on a device"),
        (5, "no cause is new so far, and cases were left out: a larger budget, or a lower level, run all of them"),
    ],
)
def test_the_action_ends_as_the_release_does(tmp_path: Path, code: int, says: str) -> None:
    """Summary and comment say what `conform build test` answers, and the last step ends with its code."""
    machine, last = _act(tmp_path, code, "# Summary\n\nnew: 1\n")
    assert last == code
    assert machine.outputs == {"code": str(code)}
    comment = (tmp_path / "report" / "comment.md").read_text(encoding="utf-8")
    assert comment == f"<!-- ggml-conformance -->\nggml-conformance: {says}.\n\n# Summary\n\nnew: 1\n"
    assert machine.summary.read_text(encoding="utf-8") == comment


def test_the_action_hands_its_words_on(tmp_path: Path) -> None:
    """Base and devices become options; a path with a space stays one word."""
    machine, _ = _act(tmp_path, 0, "", against="npm:x@1", devices="Vulkan0 CPU")
    given = "conform build test build/my llama --budget 20m --level smoke -o report"
    assert _words(machine) == f"{given} --against npm:x@1 --device Vulkan0 --device CPU"
    (tmp_path / "again").mkdir()
    machine, _ = _act(tmp_path / "again", 0, "")
    assert _words(machine) == given


def test_the_action_installs_what_is_pinned(tmp_path: Path) -> None:
    """Everything from the index has a hash; the suite itself is built without one."""
    machine, _ = _act(tmp_path, 0, "")
    installs = [c for c in machine.calls if c.startswith("pip ")]
    suite = tmp_path / "suite"
    assert installs == [
        f"pip install --quiet --require-hashes -r {suite}/ci/action-requirements.txt",
        f"pip install --quiet --no-deps --no-build-isolation {suite}",
    ]
    assert (ROOT / "ci" / "action-requirements.txt").is_file()


def test_a_release_that_left_nothing_is_said(tmp_path: Path) -> None:
    """No summary: the comment says how it ended, and the folder is there for the artifact."""
    _act(tmp_path, 2, None)
    assert (tmp_path / "report" / "comment.md").read_text(encoding="utf-8").endswith("exit code 2.\n\n")


def test_a_long_summary_fits_a_comment(tmp_path: Path) -> None:
    """A comment has at most 65,536 characters: the summary is cut, and never within a character."""
    _act(tmp_path, 1, "é" * 50_000 + "x")
    comment = (tmp_path / "report" / "comment.md").read_bytes()
    assert len(comment.decode()) < 65_536
    assert comment.decode().endswith("é")


@pytest.mark.parametrize("before", ["", "7"])
def test_one_comment_is_written_anew(tmp_path: Path, before: str) -> None:
    """Where a comment of ours is there it is replaced, else one is made."""
    given: Mapping[str, str] = {
        "github.token": "t", "github.repository": "o/n", "github.event.pull_request.number": "5",
    }  # fmt: skip
    machine = Machine(tmp_path, given)
    machine.stand_in("gh", f'case "$*" in *--jq*) echo "{before}" ;; esac')
    (comment,) = (s for s in steps(read(CALLED)) if s.get("name") == "Comment")
    assert machine.run(comment).returncode == 0
    assert machine.calls[0].startswith("gh api repos/o/n/issues/5/comments --paginate")
    assert machine.calls[1:] == [
        "gh api --method PATCH repos/o/n/issues/comments/7 -F body=@report/comment.md"
        if before
        else "gh api repos/o/n/issues/5/comments -F body=@report/comment.md"
    ]


def test_the_workflow_gives_the_action_what_it_takes() -> None:
    """Each word that the workflow hands to the action is an input of it."""
    (step,) = (s for s in steps(read(CALLED)) if s.get("uses") == "./suite")
    assert set(step["with"]) <= set(read(ACTION)["inputs"])
    assert {"build", "against", "artifact"} <= set(step["with"])


def test_the_driver_is_installed_as_it_stands(tmp_path: Path) -> None:
    """The step for lavapipe asks for the loader and the drivers."""
    machine = Machine(tmp_path, {})
    machine.stand_in("sudo", 'exec "$@"')
    machine.stand_in("apt-get")
    (driver,) = (s for s in steps(read(CALLED)) if s.get("name") == "A Vulkan driver for the CPU")
    assert machine.run(driver).returncode == 0
    assert "libvulkan1 mesa-vulkan-drivers" in machine.calls[-1]


def test_the_container_file_is_whole(tmp_path: Path) -> None:
    """What it copies is in the tree, both variants are there, it does not run as root, and its scripts run."""
    lines = [re.sub(r"^\s+|\s+$", "", x) for x in CONTAINER.read_text(encoding="utf-8").splitlines()]
    words = [shlex.split(x) for x in lines if x.startswith("COPY")]
    assert words
    assert all((ROOT / source).exists() for copy in words for source in copy[1:-1])
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", "\n".join(lines), re.MULTILINE)
    assert stages == [("${PYTHON}", "cpu"), ("cpu", "lavapipe")]
    for stage in "\n".join(lines).split("FROM ")[1:]:
        assert re.findall(r"^USER (\w+)$", stage, re.MULTILINE)[-1] == "conformance"
    machine = Machine(tmp_path, {})
    for tool in ("apt-get", "pip", "useradd", "mkdir", "chown", "rm"):
        machine.stand_in(tool)
    for script in (x.removeprefix("RUN ") for x in lines if x.startswith("RUN ")):
        done = machine.run({"run": script, "env": {"VERSION": "1.0"}})
        assert done.returncode == 0, done.stderr
    assert "pip install --require-hashes -r /suite/ci/action-requirements.txt" in machine.calls


def _copied() -> dict[str, Path]:
    """Each path below /suite of the image -> what it is copied from."""
    found: dict[str, Path] = {}
    for line in CONTAINER.read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY "):
            *sources, to = shlex.split(line)[1:]
            for source in sources:
                inside = to.removeprefix("/suite/") + ("" if (ROOT / source).is_dir() else Path(source).name)
                found[inside] = ROOT / source
    return found


def test_the_container_installs_the_whole_package(tmp_path: Path) -> None:
    """From what is copied setuptools finds the packages that it finds in the checkout, with their folders."""
    for inside, source in _copied().items():
        (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / inside).symlink_to(source)
    program = "from distutils.core import run_setup; d = run_setup('setup.py', stop_after='init'); import os\n"
    program += "print(sorted(d.packages), sorted(map(os.path.isdir, d.package_dir.values())))"
    command = [sys.executable, "-W", "ignore", "-c", f"import setuptools; {program}"]
    found = [
        subprocess.run(command, cwd=w, capture_output=True, text=True, check=True).stdout for w in (tmp_path, ROOT)
    ]
    assert found[0] == found[1]
    assert "'conformance.golden'" in found[0]
    assert "False" not in found[0]


def test_the_container_has_one_command() -> None:
    """Its entry is `conform build test`: a script that the package installs, and a command that it has."""
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", CONTAINER.read_text(encoding="utf-8"), re.MULTILINE)
    program, *words = json.loads(entry)
    assert (program, words) == ("conform", ["build", "test"])
    module, _, name = PROJECT["scripts"][program].partition(":")
    assert callable(getattr(import_module(module), name))
    done = CliRunner().invoke(main, [*words, "--help"])
    assert (done.exit_code, "--against" in done.output) == (0, True)


def test_the_sample_of_the_docs_calls_the_action(tmp_path: Path) -> None:
    """The workflow for a source tree is short, and gives inputs that the action has."""
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    sample = text.partition("```yaml\n")[2].partition("```")[0]
    assert len(sample.splitlines()) <= 15
    (tmp_path / "sample.yml").write_text(sample, encoding="utf-8")
    (step,) = (s for s in steps(read(tmp_path / "sample.yml")) if s.get("uses") == "./suite")
    assert set(step["with"]) <= set(read(ACTION)["inputs"])
