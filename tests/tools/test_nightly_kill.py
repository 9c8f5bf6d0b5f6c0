"""A nightly that is killed or interrupted, and started again, ends as if it had not been."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from night_script import NIGHTLY, PATIENCE, POSIX, ended, killed, results, until

pytestmark = POSIX

SMALL = ["--level", "smoke", "--family", "kv_growth", "--backend", "ggml"]


def _command(folder: Path) -> list[str]:
    return [*NIGHTLY, "-o", str(folder), *SMALL, "--part", "conformance", "--part", "report"]


def _far(folder: Path, rows: int) -> bool:
    journal = folder / "conformance.journal"
    return journal.exists() and journal.read_bytes().count(b"\n") > rows


def _check(folder: Path, tmp_path: Path) -> None:
    """The next start ends well, and its results are those of a plain run."""
    done = ended(_command(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    plain = ["run", *SMALL, "--json", str(tmp_path / "plain.json")]
    subprocess.run([sys.executable, "-m", "conformance.cli", *plain], check=True, capture_output=True, timeout=300)
    assert results(folder, "conformance.json") == results(tmp_path, "plain.json")
    assert (folder / "page" / "index.html").stat().st_size


def test_killed_it_goes_on(tmp_path: Path) -> None:
    """After two SIGKILLs in the middle of its cases each result is there once, and no process stays behind."""
    folder = tmp_path / "night"
    assert killed(_command(folder), lambda: _far(folder, 3))
    assert killed(_command(folder), lambda: _far(folder, 8))
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or ())])
    _check(folder, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """It says so by exit code and a line, leaves nothing running, and the next start goes on."""
    folder = tmp_path / "night"
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` hands on that it is ignored
    child = subprocess.Popen(_command(folder), stdout=subprocess.PIPE, text=True)
    signal.signal(number, before)
    with child as popen:
        until(lambda: _far(folder, 3))
        inner = psutil.Process(popen.pid).children(recursive=True)
        popen.send_signal(number)
        said, _ = popen.communicate(timeout=PATIENCE)
    assert popen.returncode == 5, said
    assert inner
    assert psutil.wait_procs(inner, timeout=PATIENCE)[1] == []
    assert f"interrupted; the same command continues in {folder}" in said
    assert "report: interrupted" in said
    if number is signal.SIGTERM:
        _check(folder, tmp_path)
