"""What is running is on disk: not even kill -9 of the whole run loses the case that it was at."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backend.registry import Spec
from conformance.cases import FAMILIES
from conformance.cgraph import casefile
from conformance.cgraph.errors import CaseFileError
from conformance.run.runner import Runner
from conformance.run.select import build
from conformance.run.writeahead import LEFT, RUNNING, Ahead, recover

SPEC = Spec("cpu")
OP = FAMILIES["ops"].ids("smoke")[0]
TRAJECTORY = FAMILIES["kv_growth"].ids("smoke")[0]

PROGRAM = """
import os, signal, sys
from pathlib import Path
from backends.cpu import CpuBackend
from conformance.backend.registry import Spec
from conformance.run.runner import Runner

class Killer(CpuBackend):
    def open(self, case):
        os.kill(os.getpid(), signal.SIGKILL)

runner = Runner(write_ahead=Path(sys.argv[1]))
spec = Spec("killer")
runner._backends[spec] = Killer()
runner.run(spec, [runner.case(i) for i in sys.argv[2:]])
"""


def _killed(folder: Path, *ids: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder), *ids], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("case_id", [OP, TRAJECTORY])
def test_a_killed_run_leaves_its_case(tmp_path: Path, case_id: str) -> None:
    """After kill -9 in the middle of a case the next run finds a case file of it, and its backend; told once."""
    _killed(tmp_path, case_id)
    (left,) = recover(tmp_path, build)
    assert (left.backend, left.cases, left.path.parent) == ("killer", 1, tmp_path / LEFT)
    assert casefile.read_one(left.path).id == case_id
    assert str(left.path) in left.sentence()
    assert recover(tmp_path, build) == []
    assert not list(tmp_path.glob(f"{RUNNING}*"))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_run_killed_in_a_batch_leaves_the_batch(tmp_path: Path) -> None:
    """Nobody knows which case of it it was, so all are kept, in one file."""
    ids = FAMILIES["ops"].ids("smoke")[:5]
    _killed(tmp_path, *ids)
    (left,) = recover(tmp_path, build)
    assert {c.id for c in casefile.read(left.path)} <= set(ids)


def test_what_runs_is_there_and_what_ran_is_gone(tmp_path: Path) -> None:
    """One-step cases that ids make again are named; trajectories, and what no id makes, are files."""
    known, unknown = build(OP), build(OP)
    trajectory = build(TRAJECTORY)
    ahead = Ahead(tmp_path, lambda c: c is not unknown)
    for case, is_file in ((known, False), (unknown, True), (trajectory, True)):
        with ahead.one(SPEC, case):
            files = list(tmp_path.glob(f"{RUNNING}*/*.gguf"))
            assert bool(files) is is_file
            assert [c.id for f in files for c in casefile.read(f)] == [case.id] * is_file
            assert len(list(tmp_path.glob(f"{RUNNING}*/*.json"))) == 1
            assert recover(tmp_path, build) == []  # the run is alive
        assert not list(tmp_path.glob(f"{RUNNING}*/0*"))
    ahead.close()
    assert not list(tmp_path.iterdir())


def test_what_fails_stays_where_no_id_makes_it_again(tmp_path: Path) -> None:
    """A trajectory that fails is kept as a file though nobody asked for failures to be saved."""

    def saved(case_id: str) -> str | None:
        runner = Runner(write_ahead=tmp_path)
        try:
            case = runner.case(case_id)
            case.demands = {"compiles": ">=1"}  # the reference compiles nothing
            return runner.run(SPEC, [case])[0].saved
        finally:
            runner.close()

    path = saved(TRAJECTORY)
    assert path is not None
    assert casefile.read_one(path).id == TRAJECTORY
    assert saved(OP) is None


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Where the folder should be is a file."""
    (tmp_path / "file").touch()
    ahead = Ahead(tmp_path / "file", lambda _: True)
    with pytest.raises(CaseFileError, match="cannot be written to"), ahead.one(SPEC, build(OP)):
        pass
