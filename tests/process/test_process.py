"""Child processes: nobody gets in through the current directory, and nothing outlives who started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from night_script import POSIX, lives, until

from conformance.ggml.errors import BackendError, ConformanceError, UsageError
from conformance.process import (
    Deadline,
    Worker,
    WorkerDiedError,
    WorkerTimeoutError,
    end_group,
    spawn,
    spawn_command,
    worker,
    worker_pid,
)
from conformance.process.memory import idle
from conformance.process.spawn import environment

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux finds what has left its group")
EVIL = (
    "json", "numpy", "conformance", "backends", "runpy", "encodings", "ctypes", "contextlib", "signal", "select",
    "launch", "resource", "importlib", "openvino", "gguf",
)  # fmt: skip
MARK = "import os; open(os.environ['EVIL_MARK'], 'a').write(__name__)"
LEAVES = """
import os, subprocess, sys, time
here = sys.argv[1]
def note(pid): open(os.path.join(here, str(pid)), "w").close()
note(os.getpid())
for _ in range(3):
    note(subprocess.Popen(["sleep", "600"]).pid)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    note(os.getpid())
    time.sleep(600)
os.wait()
while len(os.listdir(here)) < 5:
    time.sleep(0.01)
print("ready", flush=True)
"""
HANGS = LEAVES + "import ctypes; ctypes.PyDLL(None).sleep(600)  # in C code that holds the lock of the interpreter\n"
SERVICE = """
import os, sys, time
from conformance.process.service import Service
service = Service()
def answer(header, blobs):
    what = header["do"]
    print("said before", file=sys.stderr, flush=True)
    if what in ("hang", "exit", "abort"):
        if os.fork() == 0:
            time.sleep(600)
        {"hang": lambda: time.sleep(600), "exit": lambda: os._exit(3), "abort": os.abort}[what]()
    if what == "burn" and os.fork() == 0:
        while True:
            pass
    if what == "burn":
        time.sleep(600)
    if what == "close":
        os.closerange(3, 64)
        time.sleep(600)
    if what == "raise":
        return {"error": header["class"], "message": "the message"}, ()
    if what == "twice":
        service.send(header)
    return header, [bytes(n) for n in header.get("sizes", ())]
service.serve(answer)
"""


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which a module of the current directory notes that it was imported."""
    folder = tmp_path / "bad"
    folder.mkdir()
    for name in EVIL:
        (folder / f"{name}.py").write_text(MARK)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EVIL_MARK", str(tmp_path / "mark"))
    kept = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", "./", kept]))
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("module", "args", "request_", "reply"),
    [
        ("conformance.run.isolation.worker", ["cpu"], None, "'info'"),
        ("conformance.llama.zoo.worker", [], {}, "its process died .*KeyError"),
        ("conformance.llama.live.worker", [], {}, "its process died .*StopIteration"),
    ],
)
@pytest.mark.usefixtures("bad")
def test_nothing_of_the_current_directory_runs_in_a_module(
    module: str, args: list[str], request_: dict[str, object] | None, reply: str
) -> None:
    """Each worker is loaded as it is, though modules of every name it imports lie where it is started."""
    worker = Worker(module, args, deadline=Deadline(each=60))
    try:
        said = str(worker.ask(request_)[0])
    except WorkerDiedError as e:
        said = str(e)
    finally:
        worker.close()
    assert re.search(reply, said), said


@pytest.mark.skipif(os.name != "posix", reason="this system has no env")
def test_a_worker_under_another_command() -> None:
    """The command gets the worker's words, environment and pipes, and the worker's pid is its own."""
    worker = Worker(
        "conformance.run.isolation.worker", ["cpu"], deadline=Deadline(each=60), under=("env", "-u", "HOME")
    )
    try:
        assert "info" in worker.ask(None)[0]
        assert worker.pid != worker._child.pid
        assert worker.lives()
    finally:
        worker.close()


@pytest.mark.usefixtures("bad")
def test_nothing_of_the_current_directory_runs_in_a_script(tmp_path: Path) -> None:
    """A script under another interpreter finds what is installed there and nothing else."""
    script = tmp_path / "script.py"
    script.write_text("import json, runpy, sys; print(json.dumps(sys.path))")
    with spawn(script, python=Path(sys.executable), stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        assert str(Path.cwd()) not in popen.stdout.read().decode()
        end_group(popen, 30)
    assert popen.returncode == 0


def test_entries_of_the_path_that_mean_here() -> None:
    """Empty entries and dots leave PYTHONPATH, others stay in their order."""
    given = os.pathsep.join(["", "a", ".", f".{os.sep}", "b"])
    assert environment({"PYTHONPATH": given, "X": "1"}) == {"PYTHONPATH": os.pathsep.join(["a", "b"]), "X": "1"}
    assert environment({"PYTHONPATH": os.pathsep}) == {}


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 6)", -6)]
)
def test_a_child_ends_as_it_ended(code: str, status: int) -> None:
    """The supervisor hands on exit codes and signals."""
    if status < 0 and os.name != "posix":
        pytest.skip("signals are POSIX")
    popen = spawn_command([sys.executable, "-c", code])
    end_group(popen, 60)
    assert popen.returncode == status


@POSIX
def test_a_wait_that_ctrl_c_broke_can_be_repeated() -> None:
    """The interrupt may come while `Popen.wait` holds its lock and before it would release it."""
    popen = spawn_command([sys.executable, "-c", ""])
    assert popen._waitpid_lock.acquire(False)
    end_group(popen, 60)
    assert popen.returncode == 0


def test_a_program_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    """It is said, with 127 as of a shell."""
    popen = spawn_command(["/no/such/program"])
    end_group(popen, 60)
    assert popen.returncode == 127
    assert "could not be started: No such file" in capfd.readouterr().err


def _noted(folder: Path) -> list[int]:
    return [int(p.name) for p in folder.iterdir()]


@LINUX
@pytest.mark.parametrize("end", ["by itself", "asked", "killed"])
def test_ending_one_ends_all_that_it_started(tmp_path: Path, end: str) -> None:
    """Children and a daemon that left the group are gone, whether the child ended, was ended or was killed."""
    with spawn_command(
        [sys.executable, "-c", LEAVES + ("" if end == "by itself" else "time.sleep(600)"), str(tmp_path)],
        stdout=subprocess.PIPE,
    ) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == b"ready\n"
        if end == "killed":
            os.kill(worker_pid(popen) or 0, signal.SIGKILL)
        end_group(popen, 0 if end == "asked" else 60)
    assert popen.returncode == (0 if end == "by itself" else -signal.SIGKILL)
    assert len(_noted(tmp_path)) == 5
    assert not any(map(lives, _noted(tmp_path)))


@LINUX
def test_a_supervisor_that_is_killed_takes_the_child_along(tmp_path: Path) -> None:
    """The kernel ends the child with its supervisor, though it hangs in C code."""
    with spawn_command([sys.executable, "-c", HANGS, str(tmp_path)], stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        child = worker_pid(popen) or 0
        popen.kill()
        until(lambda: not lives(child))
        end_group(popen)
    for pid in filter(lives, _noted(tmp_path)):  # what nobody is left to end
        os.kill(pid, signal.SIGKILL)


@LINUX
def test_a_kill_of_the_starter_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL of whoever started a child ends the child, which hangs with its interpreter's lock held, and its own."""
    code = (
        "import subprocess, sys, time\n"
        "from conformance.process import spawn_command\n"
        f"p = spawn_command([sys.executable, '-c', {HANGS!r}, sys.argv[1]], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print('ready', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"ready\n"
        starter.kill()
    assert len(_noted(tmp_path)) == 5
    until(lambda: not any(map(lives, _noted(tmp_path))))


@LINUX
def test_a_kill_of_a_run_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL of `conform run` takes its workers and their supervisors along."""
    command = [sys.executable, "-m", "conformance.cli", "run", "--backend", "xdna2", "--level", "full"]
    with subprocess.Popen([*command, "--family", "ops"], stdout=subprocess.DEVNULL, cwd=tmp_path) as popen:
        below = until(lambda: _below(popen.pid))
        popen.kill()
    until(lambda: not any(map(lives, below)))


def _below(pid: int) -> list[int]:
    from conformance.process.launcher.launch import descendants  # noqa: PLC0415  # Linux

    found = descendants(pid)
    return found if len(found) > 1 else []


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A service that does what a request asks for."""
    (tmp_path / "service_of_test.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    return "service_of_test"


@POSIX
@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"do": "hang"}, WorkerTimeoutError, "no answer within 3 s.*its process was ended: said before"),
        ({"do": "abort"}, WorkerDiedError, r"its process died \(SIGABRT\): said before"),
        ({"do": "exit"}, WorkerDiedError, r"its process died \(exit status 3 in the middle of it\): said before"),
        ({"do": "close"}, WorkerDiedError, "it closed its pipe and was killed"),
        ({"do": "raise", "class": "UsageError"}, UsageError, "^the message$"),
        ({"do": "raise", "class": "TypeError"}, BackendError, "^the message$"),
        ({"do": "blobs", "sizes": [3]}, WorkerDiedError, "something else wrote on its pipe"),
    ],
)
def test_what_becomes_of_a_worker_is_an_error(
    service: str, request_: dict[str, object], error: type[ConformanceError], words: str
) -> None:
    """A worker that hangs, dies, closes its pipe or sends other sizes is an error.

    The error has its last words; an exception of ours travels as the same class. The call returns although
    a grandchild keeps the streams open.
    """
    worker = Worker(service, deadline=Deadline(each=3.0 if request_["do"] == "hang" else 60.0), patience=0.1)
    try:
        with pytest.raises(error, match=words) as found:
            worker.ask(request_)
        assert type(found.value) is error
        if issubclass(error, WorkerDiedError):
            with pytest.raises(WorkerDiedError):
                worker.ask({"do": "echo"})
        else:
            assert worker.ask({"do": "echo"})[0] == {"do": "echo"}
    finally:
        worker.close()


@POSIX
@pytest.mark.parametrize(
    ("what", "seconds", "ceiling", "words"),
    [
        ("burn", 2.0, 1000.0, r"no answer within 2 s"),
        ("hang", 0.2, 1000.0, r"no answer within 0\.2 s"),
        ("hang", 0.2, 0.5, r"no answer within 0\.2 s"),
    ],
)
def test_a_request_ends_at_its_limit(
    service: str, what: str, seconds: float, ceiling: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends if a child of the worker uses the time, if it makes no progress, or at the ceiling."""
    tried = Worker(service, deadline=Deadline(each=60), patience=0.1)
    try:
        tried.ask({"do": "echo"})
        monkeypatch.setattr(worker, "CEILING", ceiling)
        with pytest.raises(WorkerTimeoutError, match=words) as found:
            tried.ask({"do": what}, deadline=Deadline(each=seconds))
        assert str(found.value).startswith(found.value.how)
    finally:
        tried.close()


@POSIX
def test_the_time_left_is_wall_time(service: str) -> None:
    """It ends a request on any machine."""
    tried = Worker(service, deadline=Deadline(each=60), patience=0.1)
    try:
        with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.1 s, its process was ended"):
            tried.ask({"do": "burn"}, deadline=Deadline(each=60).within(0.1))
    finally:
        tried.close()


class Machine:
    """Stands for the clocks of a machine with a child of two threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.idle = 0.0, 0.0
        self.used = {(1, 1): 50.0, (1, 2): 5.0}
        monkeypatch.setattr(time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(worker, "_used", lambda _: dict(self.used))
        monkeypatch.setattr(worker, "_idle", lambda: self.idle)
        self.clock = worker._Clock(1, 10.0)
        self.passes(1.0)

    def passes(self, seconds: float, *processor: float, idle: float = 0.0) -> None:
        """Let time pass in which the threads used the `processor`, and the machine was `idle`; check the limit."""
        self.wall += seconds
        self.idle += idle
        for key, more in zip(list(self.used), processor, strict=False):
            self.used[key] += more
        self.clock.check()


def test_load_takes_no_time_from_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine only the processor time of the busiest thread counts, which may have ended."""
    machine = Machine(monkeypatch)
    for _ in range(10):
        machine.passes(9.0, 0.4, 0.7)
    del machine.used[1, 1]
    with pytest.raises(worker.Late, match=r"no answer within 10 s of processor time \(\d+ s on a busy machine\)"):
        machine.passes(9.0, 3.1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no processor affinity")
def test_only_processors_of_this_process_count_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container or taskset may give it one of many; idle time of the others helps no child."""
    each = [SimpleNamespace(idle=10.0**i, iowait=1.0) for i in range(4)]
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: each if percpu else None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert idle() == 1.0 + 100.0 + 2.0


def test_a_child_that_waits_on_an_idle_machine_uses_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a processor is idle, nothing but the child itself keeps it from running: wall time counts."""
    machine = Machine(monkeypatch)
    machine.passes(9.0, 0.1, 0.1, idle=8.0)
    with pytest.raises(worker.Late, match=r"no answer within 10 s$"):
        machine.passes(1.0, 0.1, 0.1, idle=1.0)


def test_a_child_that_uses_no_processor_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock ends on a busy machine too; a polling thread uses less than `POLLING` of a processor."""
    machine = Machine(monkeypatch)
    machine.passes(8.0, worker.POLLING)
    with pytest.raises(worker.Late, match="no answer within 10 s, and no processor time used for 10 s"):
        machine.passes(1.0, worker.POLLING)


@POSIX
def test_a_worker_answers_with_header_and_bytes(service: str) -> None:
    """Headers and blobs go both ways; a service may send several replies to one request."""
    worker = Worker(service, deadline=Deadline(each=60), patience=0.1)
    try:
        reply, blobs = worker.ask({"do": "blobs", "sizes": [2, 0, 100_000]}, sizes=[2, 0, 100_000])
        assert (reply["do"], [bytes(b[:1]) for b in blobs]) == ("blobs", [b"\0", b"", b"\0"])
        assert worker.ask({"do": "twice"})[0] == worker.ask(None)[0] == {"do": "twice"}
    finally:
        worker.close()


@pytest.mark.parametrize("polls", [True, False])
def test_a_wire_waits_no_longer_than_it_may(polls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes go both ways in any size; reading and writing end at the deadline and at the end."""
    if polls and not worker.POLLS:
        pytest.skip("this system cannot wait for a pipe")
    monkeypatch.setattr(worker, "POLLS", polls)
    with ExitStack() as stack:
        ends = [os.fdopen(fd, mode, 0) for fd, mode in zip(os.pipe() + os.pipe(), ("rb", "wb") * 2, strict=True)]
        for end in ends:
            stack.callback(end.close)
        tried = worker.Wire(ends[0], ends[3])
        tried.write(b"to them")
        assert ends[2].read(7) == b"to them"
        ends[1].write(b"to us")
        held = bytearray(5)
        view = memoryview(held)
        while view:
            view = view[tried.readinto(view) :]
        assert held == b"to us"
        tried.deadline = Deadline.after(0.05)
        with pytest.raises(worker.Late):
            tried.readinto(memoryview(held))
        with pytest.raises(worker.Late):
            tried.write(bytes(64 << 20))
        tried.deadline = Deadline.after(60)
        ends[1].close()
        assert tried.readinto(memoryview(held)) == 0


def test_a_wire_looks_while_it_waits() -> None:
    """What it is told to look at is looked at again and again, and what that raises ends the wait."""
    seen: list[int] = []

    def look() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise KeyError

    with ExitStack() as stack:
        ends = [os.fdopen(fd, mode, 0) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]
        for end in ends:
            stack.callback(end.close)
        tried = worker.Wire(ends[0], ends[1], look, 0.01)
        with pytest.raises(KeyError):
            tried.readinto(memoryview(bytearray(1)))


def test_the_nightly_is_there_without_sighup() -> None:
    """Windows has no SIGHUP; the module of the command is imported all the same."""
    code = "import signal; del signal.SIGHUP; from conformance.cli import nightly; print(len(nightly.SIGNALS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr
