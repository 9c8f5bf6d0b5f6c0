"""Steps of GitHub's workflows, run here as they stand, with stand-ins for programs that take long or need a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def read(path: Path) -> dict[str, Any]:
    """A workflow or an action; the test is skipped where PyYAML is not installed."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def steps(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All steps of a workflow or an action, in order."""
    jobs = found["jobs"].values() if "jobs" in found else [found["runs"]]
    return [step for job in jobs for step in job.get("steps", ())]


class Machine:
    """A folder with a `bin` of stand-ins, in which steps run one after the other."""

    def __init__(self, folder: Path, given: Mapping[str, str]) -> None:
        """`given`: expression, as `inputs.build`, -> its value."""
        if shutil.which("bash") is None:
            pytest.skip("bash is not installed")
        self.folder, self._given = folder, given
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.output, self.summary = folder / "output", folder / "summary"
        for f in (self.output, self.summary, folder / "calls"):
            f.touch()

    def stand_in(self, name: str, body: str = "") -> None:
        """A program that writes down its words, and does what `body` (bash) says."""
        path = self._bin / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "{self.folder}/calls"\n{body}\n', encoding="utf-8")
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """The words of each stand-in that was called."""
        return (self.folder / "calls").read_text(encoding="utf-8").splitlines()

    @property
    def outputs(self) -> dict[str, str]:
        """What steps wrote to GITHUB_OUTPUT."""
        return dict(line.split("=", 1) for line in self.output.read_text(encoding="utf-8").splitlines())

    def run(self, step: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run a step as GitHub's runner does: bash -e, `env` of the step, files for what it hands on."""
        env = {k: self.value(str(v)) for k, v in step.get("env", {}).items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=60,
            env={
                "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.folder),
                "GITHUB_OUTPUT": str(self.output), "GITHUB_STEP_SUMMARY": str(self.summary),
                "GITHUB_ACTION_PATH": str(self.folder / "suite"), "RUNNER_TEMP": str(self.folder), **env,
            },
        )  # fmt: skip

    def value(self, text: str) -> str:
        """`text` with the values of its expressions; KeyError for one that the test does not give."""
        return EXPRESSION.sub(lambda m: self._given[m[1]], text)
