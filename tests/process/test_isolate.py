"""A backend in a process of its own: what it does reaches us, what happens to it does not."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_wheel
from planted_adapter import planted_adapter

from conformance.backend.interface import Backend, describe
from conformance.backend.registry import Spec, create
from conformance.case.case import JSON, Case, Step
from conformance.ggml import errors
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.errors import (
    BY_NAME,
    BackendCrashError,
    BackendError,
    BackendTimeoutError,
    CaseFileError,
    ConformanceError,
    GraphError,
    UnavailableError,
    UsageError,
)
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, Bytes, Tensor, new_tensor
from conformance.ggml.types import F32, I32
from conformance.process import FOREVER, Deadline, service
from conformance.process.launcher.launch import children
from conformance.process.worker import unpack_error
from conformance.run.execute import Memory, execute
from conformance.run.isolation.isolate import IsolatedBackend, Isolation, Workers, open_backend
from conformance.run.isolation.replies import unpack_arithmetic
from conformance.run.isolation.worker import pack_error

ADAPTER = '''
import ctypes, os, signal, sys, time
import numpy as np
import psutil
from conformance.backend.interface import YES, Backend, BufferType, DeviceInfo, Session, Witness, no
from conformance.ggml import errors
from conformance.ggml.arithmetic import Arithmetic, Mixed

class FakeSession(Session):
    """Does what the name of the output says."""
    def __init__(self, case):
        self.held = dict(case.persistent)
        self.nodes = 0
        self.graphs = []
    def write(self, tensor, data):
        self.held[tensor] = data
    def read(self, tensor):
        return self.held[tensor]
    def compute(self, graph, inputs, outputs):
        what, _, rest = graph.nodes[0].name.partition(" ")
        if what == "signal":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), int(rest))
        if what == "exit":
            os._exit(int(rest))
        if what == "sleep":
            time.sleep(float(rest))
        if what == "raise":
            field = ("field",) if rest == "CaseFileError" else ()
            raise getattr(errors, rest)(*field, "message")
        if what == "where":
            raise errors.BackendError(f"on {sorted(os.sched_getaffinity(0))}")
        if what == "bug":
            return 1 / 0
        if what == "print":
            print("noise on sys.stdout")
            os.write(1, b"noise on descriptor 1" * 100)
            assert sys.stdin.read() == ""
        self.nodes += len(graph)
        if what == "graph":
            self.graphs = list(dict.fromkeys([*self.graphs, graph]))
            return {t: np.full(4, len(self.graphs), "<f4").view("u1") for t in outputs}
        return {t: sum((data.view("<f4") for data in inputs.values()), np.zeros(4, "<f4")).view("u1") for t in outputs}
    def witness(self):
        return Witness("fake", "eager", nodes=self.nodes, notes=["seen"])

class Fake(Backend):
    batch = 7
    def __init__(self, mode=""):
        if mode == "unavailable":
            raise errors.UnavailableError("no such thing here")
        if mode == "abort":
            os.abort()
        if mode == "hang":
            time.sleep(60)
        self.mode = mode
        self.threads = 1 if mode == "one thread" else None
        self.fragile = mode == "emulated"
        self.by_case = mode != "shared, but always alike"
    def info(self):
        return DeviceInfo("fake", "dev", self.mode, {"fake": "1"})
    def supports_op(self, node):
        return YES if node.op == "ADD" else no(f"only ADD, {node.op} found")
    def buffer_types(self):
        return [BufferType("a"), BufferType("b", False, 64, 2**40)]
    def arithmetic_in(self, case):
        if self.mode == "dies of a case":
            os.abort()
        if not self.mode.startswith("shared"):
            return self.arithmetic()
        half = Arithmetic("half", operands="f16")
        return Mixed("two", nodes={s.graph.nodes[0]: half for s in case.steps[1:]})
    def open(self, case):
        return FakeSession(case)
'''


@pytest.fixture(autouse=True)
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter, called `fake`."""
    with planted_adapter(tmp_path_factory.mktemp("fake"), monkeypatch, "fake", ADAPTER, "Fake"):
        yield


@pytest.fixture
def backend() -> Iterator[IsolatedBackend]:
    """The fake, isolated, with a time limit that no healthy request meets."""
    with_limit = IsolatedBackend(Spec("fake"), Workers(Isolation(30)))
    yield with_limit
    with_limit.close()


def add(name: str = "", *, steps: int = 1) -> Case:
    """A case of ADD nodes over two inputs of four floats and a weight."""
    weight = new_tensor(F32, 4, name="w")
    made = []
    for k in range(steps):
        a, b = new_tensor(F32, 4, name="a"), new_tensor(F32, 4, name="b")
        node = Tensor(F32, a.ne, a.nb, "ADD", src=(a, b), flags=FLAG_COMPUTE, name=name)
        made.append(Step(Graph([node]), {a: floats(k + 1.0), b: floats(10.0)}, (node,), {node: floats(99)}))
    return Case(f"fake/add({name})@0", {weight: floats(5.0)}, made)


def floats(*values: float) -> Bytes:
    """Four float32 as bytes."""
    return np.resize(np.array(values, "<f4"), 4).view(np.uint8)


def run(backend: Backend, case: Case) -> list[float]:
    """The first element of every step's output."""
    with backend.open(case) as session:
        found = [session.compute(s.graph, s.inputs, s.outputs)[s.outputs[0]] for s in case.steps]
    return [float(f.view("<f4")[0]) for f in found]


def test_answers_are_the_adapters_own(backend: IsolatedBackend) -> None:
    """Records, supports, reads, writes, outputs and the witness cross the wire unchanged."""
    case = add(steps=3)
    weight = next(iter(case.persistent))
    assert backend.batch == 7
    assert backend.info().versions == {"fake": "1"}
    assert [b.name for b in backend.buffer_types()] == ["a", "b"]
    assert backend.buffer_types()[1].max_size == 2**40
    assert backend.supports_op(case.steps[0].outputs[0])
    refused = backend.supports_op(Tensor(F32, weight.ne, weight.nb, "MUL", src=(weight, weight)))
    assert not refused
    assert refused.reason == "only ADD, MUL found"
    with backend.open(case) as session:
        assert session.read(weight).tobytes() == floats(5.0).tobytes()
        session.write(weight, floats(6.0))
        assert session.read(weight).tobytes() == floats(6.0).tobytes()
        for k, step in enumerate(case.steps):
            assert session.compute(step.graph, step.inputs, step.outputs)[step.outputs[0]].view("<f4")[0] == k + 11
        assert session.witness().nodes == 3
        assert session.witness().notes == ["seen"]


def test_the_arithmetic_of_each_node_arrives(backend: IsolatedBackend) -> None:
    """Nodes that devices share round as the adapter says of each, and all alike where it says nothing of a case."""
    case = add(steps=2)
    assert backend.arithmetic_in(case) == EXACT
    shared = IsolatedBackend(Spec("fake", (("mode", "shared"),)))
    found = shared.arithmetic_in(case)
    shared.close()
    (first,), (second,) = (s.graph for s in case.steps)
    assert (found.name, found.at(first), found.at(second)) == ("two", EXACT, Arithmetic("half", operands="f16"))


def test_nobody_asks_about_a_case_where_the_answer_does_not_go_by_it() -> None:
    """An adapter that needs the case in one of its modes costs no round trip in the others."""
    backend = IsolatedBackend(Spec("fake", (("mode", "shared, but always alike"),)))
    assert backend.arithmetic_in(add(steps=2)) == EXACT
    backend.close()


def test_a_process_that_dies_of_the_question_leaves_the_devices_own_arithmetic() -> None:
    """A case that ends the process wherever it is asked about can be recorded, and made smaller."""
    backend = IsolatedBackend(Spec("fake", (("mode", "dies of a case"),)))
    assert backend.arithmetic_in(add()) == EXACT
    assert backend.supports_op(add().steps[0].graph.nodes[0])
    backend.close()


@pytest.mark.parametrize("nodes", [[[0]], [[0], [2]], [[0], []], [[0], [-1]], [[0], ["0"]], None])
def test_an_arithmetic_of_other_nodes_is_refused(nodes: JSON) -> None:
    """What a process says of nodes that are not the case's, or of kinds that it did not name, is an error."""
    kinds: JSON = [describe(EXACT), describe(EXACT)]
    with pytest.raises(BackendError, match=r"^nodes: "):
        unpack_arithmetic({"arithmetics": kinds, "mixed": "two", "nodes": nodes}, add(steps=2))


def test_other_inputs_than_the_cases_own(backend: IsolatedBackend) -> None:
    """A step can be run again with other bytes, for all of its inputs or for one."""
    case = add()
    step = case.steps[0]
    a, b = step.inputs
    with backend.open(case) as session:
        for inputs, expected in (
            ({a: floats(2.0), b: floats(3.0)}, 5.0),
            ({a: step.inputs[a], b: floats(4.0)}, 5.0),
            (step.inputs, 11.0),
        ):
            found = session.compute(step.graph, inputs, step.outputs)[step.outputs[0]]
            assert found.view("<f4")[0] == expected


def test_strangers_are_refused_here(backend: IsolatedBackend) -> None:
    """A graph or tensor of another case is an error on this side, by name, and the session lives on."""
    case, other = add(), add()
    with backend.open(case) as session:
        with pytest.raises(GraphError, match="graphs of the opened case"):
            session.compute(other.steps[0].graph, other.steps[0].inputs, other.steps[0].outputs)
        with pytest.raises(GraphError, match="not a tensor of its graph"):
            session.compute(case.steps[0].graph, case.steps[0].inputs, other.steps[0].outputs)
        with pytest.raises(GraphError, match="not a persistent tensor"):
            session.read(next(iter(other.persistent)))
    assert run(backend, case) == [11.0]


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_a_death_is_reported_and_the_next_case_runs(backend: IsolatedBackend, number: signal.Signals) -> None:
    """The signal's name and the last words reach the message; its sessions stay dead, a new one works."""
    case = add(f"signal {int(number)}")
    step = case.steps[0]
    session = backend.open(case)
    with pytest.raises(BackendCrashError, match=rf"computing steps\[0\] of .*{number.name}.*last words"):
        session.compute(step.graph, step.inputs, step.outputs)
    with pytest.raises(BackendCrashError, match=number.name):
        session.read(next(iter(case.persistent)))
    session.close()
    assert run(backend, add()) == [11.0]


def test_an_exit_is_a_death(backend: IsolatedBackend) -> None:
    """A library that calls exit() did not answer either."""
    with pytest.raises(BackendCrashError, match="exit status 3"):
        run(backend, add("exit 3"))
    assert run(backend, add()) == [11.0]


DYING = """
import ctypes
from backends.ggml import GgmlBackend

class Dying(GgmlBackend):
    def open(self, case):
        log = self._library.log.callback
        log(2, b"loading kernels\\n", None)
        log(4, b"kernel mul_mm: ", None)
        log(5, b"symbol f16 not found\\n", None)
        ctypes.CDLL(None).exit(1)
"""


@needs_wheel
def test_errors_that_ggml_logs_before_an_exit_stand_in_the_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of ggml that logs why it cannot go on and calls exit(1) is quoted; its other log lines are not."""
    with planted_adapter(tmp_path, monkeypatch, "dying", DYING, "Dying"):
        dying = IsolatedBackend(Spec("dying"), Workers(Isolation(60)))
        said = r"exit status 1 in the middle of it\): kernel mul_mm: symbol f16 not found$"
        with pytest.raises(BackendCrashError, match=said) as crash:
            run(dying, add())
        dying.close()
    assert "loading kernels" not in str(crash.value)


def test_no_answer_in_time() -> None:
    """A hang is ended at the limit, with its own error, and the next case runs."""
    workers = Workers(Isolation(60))
    backend = IsolatedBackend(Spec("fake"), workers)
    workers.deadline = FOREVER.request(2)
    try:
        start = time.monotonic()
        with pytest.raises(BackendTimeoutError, match="within 2 s"):
            run(backend, add("sleep 60"))
        assert time.monotonic() - start < 10
        assert run(backend, add()) == [11.0]
    finally:
        backend.close()


@pytest.mark.parametrize("name", [n for n in sorted(BY_NAME) if not n.startswith(("BackendCrash", "BackendTime"))])
def test_errors_arrive_as_the_same_class(backend: IsolatedBackend, name: str) -> None:
    """Every error of the family travels by class and message, and ends neither process nor session."""
    with pytest.raises(getattr(errors, name)) as found:
        run(backend, add(f"raise {name}"))
    assert type(found.value).__name__ == name
    assert str(found.value) == ("field: message" if name == "CaseFileError" else "message")
    assert run(backend, add()) == [11.0]


def test_a_bound_ends_a_request_before_the_time_limit() -> None:
    """A request over the bound times out while it is set; without it the limit holds.

    A new process has all of the limit to begin.
    """
    workers = Workers(Isolation(30))
    backend = IsolatedBackend(Spec("fake"), workers)
    workers.deadline = FOREVER.request(0.2)
    for _ in range(2):
        with pytest.raises(BackendTimeoutError, match=r"computing .*no answer within 0\.2 s"):
            run(backend, add("sleep 600"))
    workers.deadline = FOREVER.request(600.0)
    assert run(backend, add("sleep 0.5")) == [11.0]
    backend.close()


@pytest.mark.parametrize(("mode", "emulated"), [("emulated", False), ("", True)])
def test_an_emulated_device_has_a_multiple_of_the_limit(mode: str, emulated: bool) -> None:
    """The adapter says that its device is one, or the limits of the run do."""
    workers = Workers(Isolation(60.0, emulated=emulated, emulated_limit=4.0))
    backend = IsolatedBackend(Spec("fake", (("mode", mode),)), workers)
    with pytest.raises(BackendTimeoutError, match=r"no answer within 4 s"):
        run(backend, add("sleep 600"))
    backend.close()


def test_an_emulated_device_may_have_a_limit_of_its_own() -> None:
    """A bound holds for both."""
    workers = Workers(Isolation(30, emulated_limit=60))
    own = [workers.isolation.deadline(emulated=e) for e in (False, True)]
    assert [d.each for d in own] == [30, 60]
    with workers.within(FOREVER.request(5)):
        assert [workers.timely("", d).each for d in own] == [5, 5]
        assert workers.timely("", own[0], opens=True).each == 30
    assert workers.timely("", own[0]).each == 30
    assert Isolation(30).deadline(emulated=True).each == 150


def test_no_process_starts_once_the_time_is_over() -> None:
    """A request in progress ends at that time; each later one, and each later backend, fails without a process."""
    workers = Workers(Isolation(60))
    backend = IsolatedBackend(Spec("fake"), workers)
    workers.deadline = Deadline.after(0.2)
    with pytest.raises(BackendTimeoutError, match="no answer within"):
        run(backend, add("sleep 600"))
    for _ in range(100):
        with pytest.raises(BackendTimeoutError, match="the time of the run is over"):
            run(backend, add())
    workers.deadline = FOREVER
    assert run(backend, add()) == [11.0]
    backend.close()
    with pytest.raises(BackendTimeoutError, match="opening the backend: the time of the run is over"):
        IsolatedBackend(Spec("fake"), Workers(Isolation(60, until=Deadline.after(-1))))


def test_a_bug_in_an_adapter_is_a_backend_error(backend: IsolatedBackend) -> None:
    """Any other exception names itself and the line it came from."""
    with pytest.raises(BackendError, match=r"ZeroDivisionError: division by zero \(.*fake_adapter.py:\d+\)"):
        run(backend, add("bug"))


def test_prints_do_not_touch_the_wire(backend: IsolatedBackend) -> None:
    """What a library prints or reads is no business of the wire's."""
    assert run(backend, add("print")) == [11.0]


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("unavailable", UnavailableError, "no such thing here"),
        ("abort", BackendCrashError, "opening the backend.*SIGABRT"),
        ("hang", BackendTimeoutError, "opening the backend.*within"),
    ],
)
def test_failing_to_open(mode: str, error: type[ConformanceError], words: str) -> None:
    """A backend that cannot be opened says so where it is opened."""
    with pytest.raises(error, match=words):
        IsolatedBackend(Spec("fake", (("mode", mode),)), Workers(Isolation(3 if mode == "hang" else 60)))


def test_options_of_any_text_arrive() -> None:
    """Option values may hold what separates options."""
    backend = IsolatedBackend(Spec("fake", (("mode", "a&b=c +%?ü\n"),)))
    assert backend.info().description == "a&b=c +%?ü\n"
    backend.close()
    with pytest.raises(UsageError, match="'colour' is unknown; its options: mode"):
        IsolatedBackend(Spec("fake", (("colour", "red"),)))


def test_many_deaths_leave_nothing_behind(backend: IsolatedBackend) -> None:
    """Processes, threads and descriptors are as many after a row of crashes as after one."""
    descriptors = Path("/proc/self/fd")
    before = set(children(os.getpid()))
    held = []
    for _ in range(8):
        with pytest.raises(BackendCrashError):
            run(backend, add("signal 9"))
        held.append((threading.active_count(), len(list(descriptors.iterdir())) if descriptors.is_dir() else 0))
    assert len(set(held)) == 1
    backend.close()
    assert set(children(os.getpid())) <= before


@pytest.mark.skipif(sys.platform != "linux", reason="processors are chosen on Linux only")
def test_one_thread_settles_on_one_processor() -> None:
    """One thread is on one processor, the same for any two backends in a turn, each in turn; more threads roam."""
    here = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        one, same, many = (IsolatedBackend(Spec("fake", (("mode", m),))) for m in ("one thread", "one thread", "many"))
        for backend in (one, same, many):
            stack.callback(backend.close)
        for turn in range(len(here) + 1):
            for backend, on in ((one, [here[turn % len(here)]]), (same, [here[turn % len(here)]]), (many, here)):
                backend.settle(turn)
                with pytest.raises(BackendError, match=re.escape(f"on {on}")):
                    run(backend, add("where"))


def test_several_at_a_time() -> None:
    """The death of one backend is nothing to another."""
    first, second = IsolatedBackend(Spec("fake")), IsolatedBackend(Spec("fake"))
    case = add()
    with second.open(case) as session:
        with pytest.raises(BackendCrashError):
            run(first, add("signal 6"))
        step = case.steps[0]
        assert session.compute(step.graph, step.inputs, step.outputs)[step.outputs[0]].view("<f4")[0] == 11
    first.close()
    second.close()
    with pytest.raises(BackendCrashError, match="closed"):
        second.open(case)


@pytest.mark.skipif(sys.platform != "linux", reason="children are found on Linux only")
def test_a_spare_starts_before_it_is_needed() -> None:
    """Where a process had to be replaced, the next one waits; one that dies as it waits is no crash; none outlives."""
    workers = Workers(ahead=True)
    backend = IsolatedBackend(Spec("fake"), workers)
    before = set(children(os.getpid()))
    for _ in range(3):
        with pytest.raises(BackendCrashError):
            run(backend, add("signal 6"))
        assert run(backend, add()) == [11]
        waiting = set(children(os.getpid())) - before
        assert len(waiting) == 2, "the one at work and the one that waits"
        os.kill(max(waiting), signal.SIGKILL)
    backend.close()
    workers.close()
    assert not set(children(os.getpid())) - before


@pytest.mark.skipif(sys.platform != "linux", reason="children are found on Linux only")
def test_an_unused_process_is_handed_on() -> None:
    """A run takes the process of a probe; one that computed, or died as it waited, is not taken again."""
    before, workers = set(children(os.getpid())), Workers()

    def pid(*, uses: bool) -> int:
        with closing(open_backend(Spec("fake"), workers)) as opened:
            assert isinstance(opened, IsolatedBackend)
            assert not uses or run(opened, add()) == [11]
            return opened.pid

    first = pid(uses=False)
    assert pid(uses=True) == first
    second = pid(uses=False)
    assert second != first
    supervisor = psutil.Process(second).parent()
    assert supervisor is not None
    os.kill(second, signal.SIGKILL)
    while supervisor.is_running() and supervisor.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert pid(uses=True) != second
    pid(uses=False)
    workers.close()
    assert not set(children(os.getpid())) - before


def test_forgotten_backends_end_with_the_program() -> None:
    """Without close(), with a session open, the program still ends quietly and at once."""
    code = (
        "from conformance.backend.registry import Spec\n"
        "from conformance.run.isolation.isolate import IsolatedBackend\n"
        "from conformance.case.case import Case\n"
        "backend = IsolatedBackend(Spec('fake'))\n"
        "session = backend.open(Case('x', {}, []))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_reference_alone_is_here() -> None:
    """`open_backend` starts a process for whatever is under test; for the reference where it is told to."""
    assert type(open_backend(Spec("cpu"))) is type(create(Spec("cpu")))
    for outside in (open_backend(Spec("ggml")), open_backend(Spec("cpu"), own=True)):
        assert isinstance(outside, IsolatedBackend)
        outside.close()


def test_a_rebuilt_graph_is_rebuilt_in_the_memory_of_the_library(backend: IsolatedBackend) -> None:
    """There the graph of each step is the same object; values are as ever."""
    case = add(steps=3)
    same = add("graph", steps=3)
    for tried, expected in ((case, [11, 12, 13]), (same, [1, 1, 1])):
        found = execute(backend, tried, memory=Memory(tried)).steps
        assert [v.outputs[s.outputs[0]].view("<f4")[0] for v, s in zip(found, tried.steps, strict=True)] == expected
    assert run(backend, same) == [1, 2, 3]


def test_a_real_abort_reaches_the_message() -> None:
    """A library says yes to SQR of I32 and aborts: its own words arrive, and the same backend runs the next case."""
    backend = open_backend(Spec("ggml"))
    try:
        a = new_tensor(I32, 4, name="a")
        node = Tensor(I32, a.ne, a.nb, "SQR", src=(a,), flags=FLAG_COMPUTE)
        wrong = Case("fake/sqr@0", {}, [Step(Graph([node]), {a: floats(1.0)}, (node,))])
        assert backend.supports_op(node)
        with pytest.raises(BackendCrashError, match=r"computing steps\[0\] of fake/sqr@0: .*SIGABRT.*: .*fatal error"):
            run(backend, wrong)
        assert run(backend, add()) == [11.0]
    finally:
        backend.close()


header = st.dictionaries(
    st.text(max_size=8).filter(lambda k: k != "blobs"),
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), st.lists, max_leaves=5),
    max_size=4,
)


@given(header, st.lists(st.binary(max_size=70), max_size=4), st.booleans())
def test_frames_round_trip(head: dict[str, object], blobs: list[bytes], big: bool) -> None:
    """Any header and blobs come out as they went in, whatever follows them on the wire."""
    arrays = [np.frombuffer(b, np.uint8) for b in blobs] + [np.arange(100_000, dtype=np.uint8)] * big
    stream = io.BytesIO()
    service.send(stream, dict(head), arrays)
    service.send(stream, {"next": 1})
    stream.seek(0)
    found, data = service.receive(stream)
    assert found == head
    assert [d.tobytes() for d in data] == [a.tobytes() for a in arrays]
    assert service.receive(stream)[0]["next"] == 1


@given(st.integers(min_value=0))
def test_a_cut_wire_is_closed(at: int) -> None:
    """A stream that ends early ends in `Closed`, wherever it ends."""
    stream = io.BytesIO()
    service.send(stream, {"a": [1, 2]}, [np.arange(9, dtype=np.uint8)])
    whole = stream.getvalue()
    with pytest.raises(service.Closed):
        service.receive(io.BytesIO(whole[: at % len(whole)]))


def test_case_file_errors_keep_their_field() -> None:
    """The field of a `CaseFileError` is still apart on the other side."""
    again = unpack_error(pack_error(CaseFileError("steps[0].ne", "four expected")))
    assert isinstance(again, CaseFileError)
    assert (again.field, str(again)) == ("steps[0].ne", "steps[0].ne: four expected")
