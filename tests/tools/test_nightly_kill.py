"""A nightly that is killed at any moment and started again ends as if it had not been."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import night_parts
import pytest
from night_script import NIGHTLY, PATIENCE, POSIX, ended, killed, lives, night, results, until, words_of

from conformance.judge.outcome import Why
from conformance.nightly import Night

pytestmark = POSIX


@pytest.mark.parametrize("seed", range(2))
def test_killed_anywhere_it_ends_as_if_it_had_not_been(tmp_path: Path, seed: int) -> None:
    """After SIGKILLs at random points each result is there once.

    No case that was written down runs again.
    """
    chance = random.Random(seed)  # noqa: S311  # where to kill, and the same each time
    command = words_of(tmp_path, "work", "fine", "history")
    ran = tmp_path / "ran"
    kills = 0
    for _ in range(4):
        size = ran.stat().st_size if ran.exists() else 0
        more = chance.randrange(0, 40)
        pause = chance.choice([0.0, 0.0, 0.3])

        def _far(limit: int = size + more, pause: float = pause) -> bool:
            far = (ran.stat().st_size if ran.exists() else 0) >= limit
            if far:
                time.sleep(pause)
            return far

        kills += killed(command, _far)
    last = ended(command)
    assert last.returncode == 0, last.stdout
    assert kills > 0
    ids = [f"f/{n}@1" for n in range(night_parts.CASES)]
    assert results(tmp_path, "work.json") == {(i, "fake", "PASS"): 1 for i in ids}
    journal = (tmp_path / "work.journal").read_text().splitlines()
    assert len(journal) == 1 + night_parts.CASES
    begun = Counter(ran.read_text().split())
    assert set(begun) == set(ids)
    assert begun.total() <= night_parts.CASES + kills, "only a case that a kill caught may have begun twice"
    assert json.loads((tmp_path / "work.json").read_text())["run"] == json.loads(journal[0])["run"]
    assert set((tmp_path / "imported").read_text().splitlines()[-1].split()) == {"work.json", "fine.json"}


def test_a_kill_leaves_no_process_behind(tmp_path: Path) -> None:
    """SIGKILL of the nightly alone ends what it had started; the next start waits for that, and does the part again."""
    pid = tmp_path / "pid"
    command = words_of(tmp_path, "sleeps")
    assert killed(command, pid.exists)
    first = int(until(pid.read_text))
    until(lambda: not lives(first))
    pid.unlink()
    assert killed(command, pid.exists)
    assert Night.read(tmp_path).parts["sleeps"].why is Why.INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """It says so by exit code and a line, leaves nothing running, and the next start goes on."""
    pid = tmp_path / "pid"
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` hands on that it is ignored
    command = words_of(tmp_path, "fine", "sleeps", "history")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    signal.signal(number, before)
    with child as popen:
        inner = int(until(lambda: pid.exists() and pid.read_text()))
        popen.send_signal(number)
        said, _ = popen.communicate(timeout=PATIENCE)
    assert popen.returncode == 5
    assert not lives(inner)
    assert f"interrupted; the same command continues in {tmp_path}" in said
    assert "history: interrupted" in said
    again = night(tmp_path, "fine")
    assert "fine: fine, in an earlier start" in again.stdout


def test_a_real_night_killed_and_gone_on_with(tmp_path: Path) -> None:
    """The real parts over a small family: killed in the middle of its cases, its results are those of a plain run."""
    small = ["--level", "smoke", "--family", "gqa", "--backend", "ggml"]
    command = [*NIGHTLY, "-o", str(tmp_path / "night"), *small, "--part", "conformance"]
    journal = tmp_path / "night" / "conformance.journal"
    assert killed(command, lambda: journal.exists() and journal.read_bytes().count(b"\n") > 3)
    done = ended(command)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = ["run", *small, "--json", str(tmp_path / "plain.json")]
    subprocess.run([sys.executable, "-m", "conformance.cli", *plain], check=True, capture_output=True, timeout=300)
    assert results(tmp_path / "night", "conformance.json") == results(tmp_path, "plain.json")
