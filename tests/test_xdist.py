"""`pytest conformance -n 2`: each device is one worker's, and results, totals and record are those of a run without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backend.registry import Spec
from conformance.plugin import device

pytest.importorskip("xdist")

ROOT = Path(__file__).resolve().parents[1]


def _pytest(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "conformance", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_shared_run_says_what_a_run_alone_says(tmp_path: Path) -> None:
    """The same results, numbers and totals; only times, and how large a case's batch was, may differ. Each backend has
    one worker.
    """
    said = {}
    chosen = ("--backend", "cpu", "--backend", "ggml", "--case", "ops/*MUL_MAT-*", "-v")
    for n in ("0", "2"):
        path = tmp_path / f"{n}.json"
        run = _pytest(*chosen, "-n", n, "--json", str(path))
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
    run = _pytest("--backend", "cpu", "-n", "2", "-k", "no_such_case")
    assert run.returncode not in {0, 5}
    assert "nothing was executed" in run.stdout


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("cpu", "cpu"),
        ("ggml?device=CPU", "ggml"),
        ("openvino-stateless?device=GPU", "GPU"),
        ("openvino-stateful?device=GPU", "GPU"),
    ],
)
def test_two_backends_of_one_device_share_a_worker(text: str, group: str) -> None:
    """A device that an option names is one worker's whatever backend drives it; the processor is everybody's."""
    assert device(Spec.parse(text)) == group
