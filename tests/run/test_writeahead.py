"""What is running is on disk: not even kill -9 of the whole run loses the case that it was at."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.ggml.errors import CaseFileError
from conformance.run.runner import Runner
from conformance.run.session import writeahead
from conformance.run.session.select import build
from conformance.run.session.writeahead import LEFT, RUNNING, Ahead, default_folder, recover
from conformance.suite import FAMILIES

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


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_the_oldest_cases_of_killed_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed runs left stays within its bytes, but for what was just found."""
    _killed(tmp_path, TRAJECTORY)
    (first,) = recover(tmp_path, build)
    monkeypatch.setattr(writeahead, "KEEP_BYTES", first.path.stat().st_size * 2)
    old = [first.path.with_name(f"{n}.gguf") for n in range(3)]
    for n, path in enumerate(old):
        path.write_bytes(first.path.read_bytes())
        os.utime(path, (n, n))
    _killed(tmp_path, TRAJECTORY)
    (second,) = recover(tmp_path, build)
    assert {p for p in (*old, first.path, second.path) if p.exists()} == {first.path, second.path}


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


RACER = """
import sys, time
from pathlib import Path
from conformance.backend.registry import Spec
from conformance.run.session.select import build
from conformance.run.session.writeahead import Ahead, recover
folder, case, end = Path(sys.argv[1]), build(sys.argv[3]), time.monotonic() + 2
lost = 0
while time.monotonic() < end:
    if sys.argv[2] == "recover":
        lost += len(recover(folder, build))
    else:
        ahead = Ahead(folder, lambda c: True)
        with ahead.one(Spec("cpu"), case):
            lost += not list(ahead._folder().glob("*.json"))
        ahead.close()
sys.exit(int(lost > 0))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_a_recovery_never_takes_a_live_run(tmp_path: Path) -> None:
    """Runs that begin and end while others recover lose nothing and are never told as killed."""
    roles = ["run", "recover", "run", "recover"]
    started = [subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), role, OP]) for role in roles]
    assert [p.wait(timeout=100) for p in started] == [0] * len(roles)
    assert not list(tmp_path.glob(f"{RUNNING}*"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners there")
@pytest.mark.parametrize("how", ["open to all", "a link", "a file", "fine"])
def test_the_folder_in_the_temporary_place_is_the_users_alone(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Made with mode 0700; one that others write to, a link or a file is not used, and the user is told."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    named = tmp_path / f"conformance-{getpass.getuser()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how == "open to all":
        named.mkdir()
        named.chmod(0o777)
    elif how == "a link":
        named.symlink_to(elsewhere)
    elif how == "a file":
        named.touch()
    folder = default_folder()
    assert (folder == named) is (how == "fine")
    assert folder.lstat().st_mode & 0o777 == 0o700
    assert bool(capfd.readouterr().err) is (how != "fine")
    assert default_folder() == folder
    with Ahead(folder, lambda _: True).one(SPEC, build(OP)):
        pass
    assert not list(elsewhere.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    """Neither `interrupted` nor a run's folder nor its files lead elsewhere: nothing foreign is read, moved or told."""
    folder, foreign = tmp_path / "runs", tmp_path / "foreign"
    for path in (folder, foreign):
        path.mkdir()
    said = json.dumps({"backend": "cpu; touch x", "ids": [[OP, build(OP).generator]]})
    (foreign / "1.json").write_text(said)
    (foreign / "lock").touch()
    (folder / f"{RUNNING}1-a").symlink_to(foreign)
    own = folder / f"{RUNNING}2-b"
    own.mkdir(mode=0o700)
    (own / "1.json").symlink_to(foreign / "1.json")
    own = folder / f"{RUNNING}3-c"
    own.mkdir(mode=0o700)
    (own / "1.json").write_text(said)
    (own / "1.gguf").symlink_to(foreign / "1.json")
    (folder / LEFT).symlink_to(foreign)
    assert recover(folder, build) == []
    assert sorted(p.name for p in foreign.iterdir()) == ["1.json", "lock"]
    own = folder / f"{RUNNING}4-d"
    own.mkdir(mode=0o700)
    (own / "1.json").write_text(said)
    (left,) = recover(folder, build)
    assert left.path.resolve().is_relative_to(folder)
    assert sorted(p.name for p in foreign.iterdir()) == ["1.json", "lock"]
    assert left.sentence().endswith("--backend 'cpu; touch x'")


@pytest.mark.parametrize(
    "said",
    ["[]", "5", '{"backend": 5, "ids": []}', '{"backend": "x", "ids": [[5, 1]]}', "{", '{"ids": 1}',
     '{"backend": "x", "ids": 5}', '{"backend": "x", "ids": [["ops", {}]]}'],
)  # fmt: skip
def test_what_was_left_may_be_anything(tmp_path: Path, said: str) -> None:
    """A file of another form is nothing to tell, and no traceback."""
    own = tmp_path / f"{RUNNING}1"
    own.mkdir(mode=0o700)
    (own / "1.json").write_text(said)
    assert recover(tmp_path, build) == []
