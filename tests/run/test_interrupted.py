"""A running case is on disk: kill -9 of the whole run does not lose it."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.ggml.errors import CaseFileError
from conformance.judge.verdict import Request
from conformance.report.runs import read_runs
from conformance.run.runner import Runner
from conformance.run.session import interrupted
from conformance.run.session.folder import LEFT, default_folder
from conformance.run.session.interrupted import left_in, recover
from conformance.run.session.journal import PREFIX, Beside, Contents, Continued, Journal, whole
from conformance.run.session.select import build
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
from conformance.run.session.journal import Journal

class Killer(CpuBackend):
    def open(self, case):
        os.kill(os.getpid(), signal.SIGKILL)

runner = Runner(journal=Journal(Path(sys.argv[1])))
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
    (left,) = recover(tmp_path)
    assert (left.backend, left.cases, left.path.parent) == ("killer", 1, tmp_path / LEFT)
    assert casefile.read_one(left.path).id == case_id
    assert str(left.path) in left.sentence()
    assert recover(tmp_path) == []
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_run_of_another_backend_tells_nothing(tmp_path: Path) -> None:
    """It leaves the journal; the next run with the backend takes it."""
    journal = tmp_path / f"{PREFIX}1.jsonl"
    journal.write_text(_text({**STARTED, "backend": "cpu"}))
    assert recover(tmp_path, {"ggml"}) == []
    assert journal.exists()
    (left,) = recover(tmp_path, {"ggml", "cpu"})
    assert (left.backend, journal.exists()) == ("cpu", False)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_run_killed_in_a_batch_leaves_the_batch(tmp_path: Path) -> None:
    """Nobody knows which case of it it was, so all are kept, in one file."""
    ids = FAMILIES["ops"].ids("smoke")[:5]
    _killed(tmp_path, *ids)
    (left,) = recover(tmp_path)
    assert {c.id for c in casefile.read(left.path)} <= set(ids)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_the_oldest_cases_of_killed_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case files of killed runs have a limit of bytes; the newest files are kept in any case."""
    _killed(tmp_path, TRAJECTORY)
    (first,) = recover(tmp_path)
    monkeypatch.setattr(interrupted, "KEEP_BYTES", first.path.stat().st_size * 2)
    old = [first.path.with_name(f"{n}.gguf") for n in range(3)]
    for n, path in enumerate(old):
        path.write_bytes(first.path.read_bytes())
        os.utime(path, (n, n))
    _killed(tmp_path, TRAJECTORY)
    (second,) = recover(tmp_path)
    assert {p for p in (*old, first.path, second.path) if p.exists()} == {first.path, second.path}


def test_what_runs_is_there_and_what_ran_is_gone(tmp_path: Path) -> None:
    """A case that its id makes again is named in the journal; any other is a file while it runs."""
    case = build(OP)
    journal = Journal(tmp_path)
    assert not list(tmp_path.iterdir())
    for as_file in (False, True):
        with journal.running(SPEC, [case], whole=as_file):
            (path,) = tmp_path.glob(f"{PREFIX}*")
            (running,) = Contents.parse(path.read_bytes()).innermost
            assert running.cases == (() if as_file else ((case.id, case.generator),))
            assert [c.id for f in tmp_path.glob(f"{LEFT}/*") for c in casefile.read(f)] == [case.id] * as_file
            assert recover(tmp_path) == []  # the run is alive
        assert Contents.parse(path.read_bytes()).innermost == []
        assert not list(tmp_path.glob(f"{LEFT}/*"))
    journal.end(written=False)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_the_innermost_cases_ended_the_run(tmp_path: Path) -> None:
    """A case that runs alone within its batch is told alone; after it the batch is."""
    first, second = map(build, FAMILIES["ops"].ids("smoke")[:2])
    journal = Journal(tmp_path)

    def cut() -> list[list[str]]:
        (path,) = tmp_path.glob(f"{PREFIX}*")
        return [[i for i, _ in each.cases] for each in Contents.parse(path.read_bytes()).innermost]

    with journal.running(SPEC, [first, second]):
        with journal.running(SPEC, [second]):
            assert cut() == [[second.id]]
        assert cut() == [[first.id, second.id]]
    assert cut() == []
    journal.end(written=False)


def test_what_fails_stays_where_no_id_makes_it_again(tmp_path: Path) -> None:
    """A failing trajectory is saved as a file even without --save-failures."""

    def saved(case_id: str) -> str | None:
        runner = Runner(journal=Journal(tmp_path))
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
    journal = Journal(tmp_path / "file")
    for as_file in (False, True):
        with (
            pytest.raises(CaseFileError, match="cannot be written to"),
            journal.running(SPEC, [build(OP)], whole=as_file),
        ):
            pass


RACER = """
import sys, time
from pathlib import Path
from conformance.backend.registry import Spec
from conformance.run.session.select import build
from conformance.run.session.interrupted import recover
from conformance.run.session.journal import Journal
folder, case, end = Path(sys.argv[1]), build(sys.argv[3]), time.monotonic() + 2
lost = 0
while time.monotonic() < end:
    if sys.argv[2] == "recover":
        lost += len(recover(folder))
    else:
        journal = Journal(folder)
        with journal.running(Spec("cpu"), [case]):
            lost += not journal._path.exists()
        journal.end(written=False)
sys.exit(int(lost > 0))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_a_recovery_never_takes_a_live_run(tmp_path: Path) -> None:
    """Runs that begin and end while others recover lose nothing and are never told as killed."""
    roles = ["run", "recover", "run", "recover"]
    started = [subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), role, OP]) for role in roles]
    assert [p.wait(timeout=100) for p in started] == [0] * len(roles)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


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
    with Journal(folder).running(SPEC, [build(OP)]):
        pass
    assert not list(elsewhere.iterdir())


def _text(starts: object) -> str:
    return f"{whole([])}{json.dumps(starts)}\n"


STARTED = {"starts": 1, "backend": "cpu; touch x", "cases": [[OP, build(OP).generator]]}


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    """Neither `interrupted` nor a journal nor a case file leads elsewhere: nothing foreign is read, moved or told."""
    folder, foreign = tmp_path / "runs", tmp_path / "foreign"
    for path in (folder, foreign):
        path.mkdir()
    (foreign / "1.jsonl").write_text(_text(STARTED))
    (folder / f"{PREFIX}1.jsonl").symlink_to(foreign / "1.jsonl")
    (folder / "link.gguf").symlink_to(foreign / "1.jsonl")
    file = {"starts": 1, "backend": "cpu", "file": str(folder / "link.gguf")}
    (folder / f"{PREFIX}2.jsonl").write_text(_text(file))
    (folder / f"{PREFIX}3.jsonl").mkdir()
    (folder / LEFT).symlink_to(foreign)
    assert recover(folder) == []
    assert [p.name for p in foreign.iterdir()] == ["1.jsonl"]
    (folder / f"{PREFIX}4.jsonl").write_text(_text(STARTED))
    (left,) = recover(folder)
    assert left.path.resolve().is_relative_to(folder)
    assert [p.name for p in foreign.iterdir()] == ["1.jsonl"]
    assert left.sentence().endswith("--backend 'cpu; touch x'")


@pytest.mark.parametrize(
    "starts",
    [[], 5, {"starts": 1, "backend": 5}, {"starts": 1}, {"starts": [], "backend": "x"},
     {"starts": 1, "backend": "x", "cases": [[5, 1]]}, {"starts": 1, "backend": "x", "cases": 5},
     {"starts": 1, "backend": "x", "cases": [["ops", {}]]}, {"starts": 1, "backend": "x", "file": "\0"},
     {"starts": 1, "backend": "x", "cases": []}],
)  # fmt: skip
def test_what_was_left_may_be_anything(tmp_path: Path, starts: object) -> None:
    """A journal of another form is nothing to tell, and no traceback."""
    (tmp_path / f"{PREFIX}1.jsonl").write_text(_text(starts))
    assert recover(tmp_path) == []


def test_the_next_run_with_a_file_tells_what_ended_the_last(tmp_path: Path) -> None:
    """The cases at which a run was killed are in its own file: that of --journal, or that beside --json."""
    case = build(OP)
    for make in (partial(Beside, tmp_path / "r.json"), partial(Continued, tmp_path / "j", options={})):
        told = []
        for _ in range(3):
            journal = make(folder=tmp_path)
            journal.begin(Request({"cpu": [OP]}))
            told += left_in(journal)
            if not told:
                context = journal.running(SPEC, [case])
                context.__enter__()  # left open, as a kill does
            journal._close(removes=False)
        (sentence,) = told
        (path,) = tmp_path.glob(f"{LEFT}/*.gguf")
        assert sentence == f"a run ended in the middle of a case: conform repro {path} --backend cpu"
        path.unlink()


def test_the_report_of_a_killed_run_names_what_ran(tmp_path: Path) -> None:
    """A case that had started is missing with that reason; those that had not are missing for the other."""
    journal = Beside(tmp_path / "r.json", folder=tmp_path)
    journal.begin(Request({"cpu": [OP, TRAJECTORY]}))
    context = journal.running(SPEC, [build(OP)])
    context.__enter__()  # left open, as a kill does
    journal._close(removes=False)
    (document,) = read_runs([tmp_path / "r.json.partial.jsonl"]).documents
    assert {m.case: m.reason for m in document.record.missing} == {
        OP: "it was running when the run was killed",
        TRAJECTORY: "the run ended before it",
    }
