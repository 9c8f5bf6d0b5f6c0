"""`pytest conformance -n 2`: each scope is one worker's, and results, totals and record are those of a run without."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import dying
import pytest
from sessions_of_pytest import PYTEST, ROOT, session

from conformance.backend.registry import Spec
from conformance.plugin import scope
from conformance.report.junit import junit
from conformance.report.runs import read_runs

pytest.importorskip("xdist")


def test_a_shared_run_says_what_a_run_alone_says(tmp_path: Path) -> None:
    """Results, numbers and totals are those of a run without xdist.

    Only times, and the sizes of batches, may differ. Each backend has one worker.
    """
    said = {}
    chosen = ("--backend", "cpu", "--backend", "ggml", "--case", "ops/ADD*-f32*", "--level", "smoke", "-v")
    for n in ("0", "2"):
        path = tmp_path / f"{n}.json"
        run = session(*chosen, "-n", n, "--json", str(path))
        assert run.returncode == 0, run.stdout + run.stderr
        document = json.loads(path.read_text())
        results = [{k: v for k, v in r.items() if k not in {"seconds", "witness"}} for r in document["results"]]
        said[n] = (document["totals"], sorted(results, key=lambda r: (r["backend"], r["case"])))
        line = next(line for line in run.stdout.splitlines() if line.startswith("ggml: "))
        assert f"{document['totals']['PASS'] // 2} PASS" in line
    assert said["0"] == said["2"]
    assert said["0"][0]["PASS"] > 10
    shared = [line for line in run.stdout.splitlines() if line.startswith("[gw")]
    workers = {(line[:4], b) for line in shared for b in ("cpu", "ggml") if f"-{b}]" in line or f"-{b}@" in line}
    assert len(workers) == 2


def test_nothing_executed_fails() -> None:
    """A shared run that deselects every case is no success either."""
    run = session("--backend", "cpu", "--case", dying.HARMLESS, "-n", "1", "-k", "no_such_case")
    assert run.returncode not in {0, 5}
    assert "no cases ran" in run.stdout


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`dying` is installed."""
    (tmp_path / "site").mkdir()
    with dying.installed(tmp_path / "site", monkeypatch):
        yield


def _died(out: Path, how: str, workers: int) -> tuple[int, Any, ET.Element]:
    """A shared run on a backend that takes its worker with it, and one that does not: exit status, record, JUnit."""
    words = ("--backend", f"dying?how={how}", "--backend", "ggml", "--max-worker-restart", "1")
    cases = ("--case", dying.DEADLY, "--case", dying.HARMLESS)
    command = [*PYTEST, "conformance", "-n", str(workers), *words, *cases, "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    return run.returncode, json.loads(out.read_text()), ET.fromstring(junit(read_runs([out])))  # noqa: S314  # our own


@pytest.mark.usefixtures("adapter")
def test_a_worker_that_dies_is_in_every_account(tmp_path: Path) -> None:
    """Exit status, record and JUnit agree: its test is CRASH, what nobody ran is missing, nothing is lost."""
    status, found, tree = _died(tmp_path / "r.json", "gone", 2)
    assert status == 1
    verdicts = [r["verdict"] for r in found["results"] if r["backend"] == "dying?how=gone"]
    assert "CRASH" in verdicts
    assert all(r["verdict"] == "PASS" for r in found["results"] if r["backend"] == "ggml")
    assert sum(found["asked"].values()) == len(found["results"]) + len(found["missing"])
    assert int(tree.get("errors", "")) == verdicts.count("CRASH") + len(found["missing"])


@pytest.mark.usefixtures("adapter")
def test_a_worker_that_died_once_stays_in_the_record(tmp_path: Path) -> None:
    """Another worker runs its tests again and all pass: the death is CRASH in the record all the same."""
    how = f"killed once&mark={tmp_path / 'mark'}"
    status, found, tree = _died(tmp_path / "r.json", how, 1)
    assert status == 1
    crashed = [r for r in found["results"] if r["verdict"] == "CRASH"]
    assert len(crashed) == 1
    assert "PASS when run again in another process" in crashed[0]["detail"]
    assert found["missing"] == []
    assert int(tree.get("errors", "")) == 1


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("cpu", "cpu graphs"),
        ("ggml?device=CPU", "ggml graphs"),
        ("openvino-stateless?device=GPU", "GPU"),
        ("openvino-stateful?device=GPU", "GPU"),
    ],
)
def test_two_backends_of_one_device_share_a_worker(text: str, group: str) -> None:
    """A device that an option names is one worker's whatever backend drives it; the processor is everybody's."""
    assert scope(Spec.parse(text), "alias/differs=eps@942") == group
