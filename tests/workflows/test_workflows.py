"""Workflows and the action: GitHub's own schema, a linter of their security, and rules of this tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workflow_steps import EXPRESSION, read, steps

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = sorted(ROOT.glob("action.yml"))
ALL = [*WORKFLOWS, *ACTIONS]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_they_fit_the_schema() -> None:
    """check-jsonschema, with the schemas that it brings."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    kinds = {"github-workflows": WORKFLOWS, "github-actions": ACTIONS, "github-issue-forms": FORMS,
             "citation-file-format": [ROOT / "CITATION.cff"]}  # fmt: skip
    assert all(kinds.values())
    for kind, files in kinds.items():
        schema = f"vendor.{kind}"
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_zizmor_finds_nothing() -> None:
    """No unpinned action, no credentials left behind, no expression in a script, no permission that is too wide."""
    zizmor = shutil.which("zizmor") or shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None:
        pytest.skip("zizmor is not installed")
    command = [zizmor, "--offline", "--no-progress", "--persona", "pedantic", *map(str, ALL)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.name)
def test_rules(path: Path) -> None:
    """Actions of others are pinned by hash, scripts hold no expression, and only a job that writes may write."""
    found = read(path)
    for step in steps(found):
        uses = step.get("uses", "./")
        assert uses.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", uses), uses
        assert not EXPRESSION.search(step.get("run", "")), step
    if "jobs" in found:
        assert "permissions" in found
        assert "write" not in found["permissions"].values()


def test_a_rule_that_is_broken_is_noticed(tmp_path: Path) -> None:
    """The linters are awake: a workflow with an expression in its script, and one without jobs, are refused."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    broken = tmp_path / "broken.yml"
    broken.write_text("name: x\non: push\npermissions: {}\n", encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(broken)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
