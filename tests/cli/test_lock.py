"""The locks of CI, of the nightly and of the container: they pin what pyproject.toml asks for, on every Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
EXTRAS: dict[str, tuple[str, ...]] = {"requirements.txt": ("test",), "action-requirements.txt": ()}
"""Lock -> the extras of the project in it."""
TEXTS = {name: (ROOT / "ci" / name).read_text(encoding="utf-8") for name in EXTRAS}


def _entries(lock: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^\s*#.*\n", "", TEXTS[lock])).strip().splitlines()


def _environment(python: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "test",
    }


def _pinned(lock: str, environment: dict[str, str]) -> dict[str, str]:
    """Package -> the one version that is installed there."""
    found: dict[str, str] = {}
    for line in _entries(lock):
        requirement = Requirement(line.partition(" --hash=")[0])
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in found
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            found[name] = pin.version
    return found


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", EXTRAS)
def test_the_lock_is_within_the_ranges_of_the_project(lock: str, python: str, machine: str) -> None:
    """Each dependency, those of the tests and of the build too, has one version, which pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [
        *project["project"]["dependencies"],
        *(text for extra in EXTRAS[lock] for text in project["project"]["optional-dependencies"][extra]),
        *project["build-system"]["requires"],
    ]
    environment = _environment(python, machine)
    pinned = _pinned(lock, environment)
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement}: the lock has {version}"


@pytest.mark.parametrize("lock", EXTRAS)
def test_every_pin_has_hashes(lock: str) -> None:
    """What is installed is what was looked at when the lock was made, whoever serves it."""
    entries = _entries(lock)
    assert len(entries) > 20
    for line in entries:
        assert re.search(r" --hash=sha256:[0-9a-f]{64}", line), line


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_lock_names_no_machine(text: str) -> None:
    """Neither an index nor a path: it installs from wherever pip is told to."""
    assert "://" not in text
    assert not re.search(r"(?m)^\s*(-|[^#\n]*@ )", re.sub(r"(?m)^\s+--hash.*$", "", text))
    assert not re.search(r"/(tmp|root|home|opt|Users|work)\b", text)


@pytest.mark.parametrize("path", [".ci/run", ".github/workflows/nightly.yml"])
def test_ci_and_nightly_install_the_lock(path: str) -> None:
    """Both install what the lock pins, with its hashes, and the project without looking for anything else."""
    text = (ROOT / path).read_text(encoding="utf-8")
    locked = [line for line in text.splitlines() if "--require-hashes" in line]
    assert locked
    assert all("-r ci/requirements.txt" in line for line in locked)
    projects = [line for line in text.splitlines() if "pip install" in line and line not in locked]
    assert projects
    assert all("--no-deps" in line or "'.[test]'" in line for line in projects)
