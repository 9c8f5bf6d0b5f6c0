"""Limits of an isolated backend hold whatever it forks, and nothing that it says makes this process large."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from night_script import lives, until
from planted_adapter import planted_adapter

from conformance.backend.interface import Witness, describe
from conformance.backend.registry import Spec
from conformance.backend.strict import MAX_TEXT
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, UnavailableError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes
from conformance.ggml.types import F32
from conformance.run.isolation.isolate import IsolatedBackend, Isolation, Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planted adapter forks and finds its wire in /proc")

ADAPTER = '''
import os, subprocess, sys, time
import numpy as np
from conformance.backend.interface import DeviceInfo, Witness
from conformance.backend.kernel import KernelBackend, KernelSession

class Loud(Exception):
    def __str__(self): raise RuntimeError

def wires():
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                yield fd
        except OSError:
            pass

def forks(_):
    """A grandchild that holds the wire, and a worker that hangs."""
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)

def dies(_):
    """A grandchild that holds the wire of a worker that has gone."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)

def leaves(folder):
    for _ in range(20):
        popen = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(os.path.join(folder, str(popen.pid)), "w").close()

def forked_leak(_):
    if os.fork() == 0:
        held = []
        while True:
            held.append(np.ones(16 << 20, np.uint8))
            time.sleep(0.01)
    time.sleep(600)

def shares(_):
    """Children that hold what their parent holds, and nothing more."""
    global HELD
    HELD = np.ones(250 << 20, np.uint8)
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
    time.sleep(1)

def header(text):
    for fd in wires():
        try:
            os.write(fd, len(text).to_bytes(4, "little") + text.encode())
        except OSError:
            pass
    time.sleep(600)

def says(n):
    raise RuntimeError("x" * int(n))

def cannot_say(_):
    raise Loud

WHAT = {f.__name__: f for f in (forks, dies, leaves, forked_leak, shares, header, says, cannot_say)}
WHAT |= {"exit": lambda s: sys.exit(int(s)), "interrupt": lambda _: (_ for _ in ()).throw(KeyboardInterrupt)}

class EvilSession(KernelSession):
    kernels_said = {}
    def compute(self, graph, inputs, outputs):
        what, _, rest = graph.nodes[0].name.partition(" ")
        if what in WHAT:
            WHAT[what](rest)
        found = super().compute(graph, inputs, outputs)
        if what == "shape":
            return {t: data[: int(rest)] for t, data in found.items()}
        if what == "dtype":
            return {t: data.view("<f4") for t, data in found.items()}
        if what == "nothing":
            return {}
        self.said = what
        return found
    def witness(self):
        w = Witness("cpu", "eager", nodes=2)
        if self.said == "numpy":
            w.kernels, w.seconds, w.nodes = {"X": np.int64(3)}, {"cpu": np.float32(0.5)}, np.int32(2)
        if self.said == "bytes":
            w.kernels = {b"X": 3}
        if self.said == "wrong":
            w.nodes = "two"
        if self.said == "notes":
            w.notes = ["n" * 50_000_000]
        return w

def add(node, dst, src):
    dst[...] = src[0] + src[1]

def mul(node, dst, src):
    dst[...] = src[0] * src[1]

class Evil(KernelBackend):
    name = "evil"
    def kernels(self):
        return {"ADD": add, "MUL": mul}
    def info(self):
        return DeviceInfo("evil", "CPU", "sums and products")
    def __init__(self, mode=""):
        super().__init__()
        self.mode = mode
        if mode == "exit":
            sys.exit(0)
        if mode == "batch":
            self.batch = "many"
        if mode == "stages":
            self.stages = ["run", 7]
    def supports(self, graph):
        return super().supports(graph)[: 1 if self.mode == "few" else None]
    def open(self, case):
        return EvilSession(self.name, self.kernels(), case)
'''


@pytest.fixture(autouse=True)
def evil(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter, called `evil`."""
    with planted_adapter(tmp_path_factory.mktemp("evil"), monkeypatch, "evil", ADAPTER, "Evil"):
        yield


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[IsolatedBackend]:
    """The adapter in a process that may hold 600 MiB; where one hangs, ten seconds are enough to know."""
    limit = 10.0 if "limit" in request.node.name else 120.0
    backend = IsolatedBackend(Spec("evil"), Workers(Isolation(limit, 600 << 20)))
    yield backend
    backend.close()


def case(name: str) -> Case:
    """`(a + b) * b`, its first node named."""
    b = Builder()
    x, y = b.new_tensor_2d(F32, 8, 3), b.new_tensor_2d(F32, 8, 3)
    first = b.add(x, y)
    first.name = name
    out = b.mul(first, y)
    inputs = {t: np.arange(24, dtype="<f4").view(np.uint8) for t in (x, y)}
    return Case(f"evil/{name[:40] or 'good'}@0", {}, [Step(b.build_forward_expand(out), inputs, (out,))])


def run(backend: IsolatedBackend, name: str = "") -> tuple[Bytes, Witness]:
    """The output of a case, and the witness."""
    tried = case(name)
    step = tried.steps[0]
    with backend.open(tried) as session:
        return session.compute(step.graph, step.inputs, step.outputs)[step.outputs[0]], session.witness()


def test_a_grandchild_that_holds_the_wire_is_no_way_past_the_time_limit(backend: IsolatedBackend) -> None:
    """The wait ends at the limit, though the wire stays open in a process that the worker forked."""
    with pytest.raises(BackendTimeoutError, match="no answer within 10 s"):
        run(backend, "forks")
    run(backend)


def test_a_grandchild_that_holds_the_wire_of_the_dead_ends_with_it(backend: IsolatedBackend) -> None:
    """A worker that has gone is a crash at once, whoever it left behind, and an exit with 0 is none in a request."""
    with pytest.raises(BackendCrashError, match="exit status 0 in the middle of it"):
        run(backend, "dies")
    run(backend)


def test_what_an_adapter_leaves_running_is_gone_after_a_green_run(tmp_path: Path, backend: IsolatedBackend) -> None:
    """Twenty processes, each leader of a session of its own, end with the backend."""
    run(backend, f"leaves {tmp_path}")
    pids = [int(p.name) for p in tmp_path.iterdir()]
    assert len(pids) == 20
    assert all(map(lives, pids))
    backend.close()
    until(lambda: not any(map(lives, pids)))


def test_the_memory_of_a_forked_child_counts(backend: IsolatedBackend) -> None:
    """A child that grows costs the worker as if it had grown itself."""
    with pytest.raises(BackendCrashError, match="out of memory: it held"):
        run(backend, "forked_leak")
    run(backend)


def test_memory_that_children_share_counts_once(backend: IsolatedBackend) -> None:
    """Four forks of a worker that holds 250 MiB are not 1.25 GiB."""
    run(backend, "shares")


@pytest.mark.parametrize(
    "text",
    [
        '{"blobs":[3221225472]}',
        '{"blobs":[-1,97]}',
        '{"blobs":[]}',
        '{"blobs":"x"}',
        "[" * 60,
        '{"error":"BackendError","message":"","blobs":[3221225472]}',
    ],
)
def test_a_header_of_a_stranger_allocates_nothing(backend: IsolatedBackend, text: str) -> None:
    """What is no answer to what was asked is a crash, before anything of the size it names is there."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BackendCrashError, match="something else wrote on its pipe"):
        run(backend, f"header {text}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    run(backend)


def test_a_long_text_arrives_short(backend: IsolatedBackend) -> None:
    """Fifty megabytes of an exception are a few kilobytes and say how many they were; so are those of a note."""
    with pytest.raises(BackendError, match=r"… \(50 MB in all\)") as found:
        run(backend, "says 50000000")
    assert MAX_TEXT <= len(str(found.value)) < 2 * MAX_TEXT
    _, witness = run(backend, "notes")
    assert len(witness.notes[0]) < 2 * MAX_TEXT
    with pytest.raises(BackendError, match="it cannot be shown"):
        run(backend, "cannot_say")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape 8", r"compute: MUL .*: 96 bytes expected, 8 found"),
        ("dtype", r"compute: MUL .*: 96 bytes as a uint8 array expected, float32\[24\] found"),
        ("nothing", r"compute: the bytes of MUL .* expected, none found"),
        ("exit 0", r"the adapter called sys.exit\(0\)"),
        ("interrupt", "KeyboardInterrupt"),
        ("bytes", r"Witness.kernels: texts as keys expected, b'X' found"),
        ("wrong", r"witness.nodes: a whole number expected, 'two' found"),
    ],
)
def test_a_wrong_answer_is_that_cases_error(backend: IsolatedBackend, name: str, words: str) -> None:
    """It says what was expected and what came, and the process lives on."""
    before = backend._process
    with pytest.raises(BackendError, match=words) as found:
        run(backend, name)
    assert type(found.value) is BackendError
    run(backend)
    assert backend._process is before


def test_numbers_of_numpy_are_numbers(backend: IsolatedBackend) -> None:
    """A witness with NumPy's integers and floats arrives with Python's."""
    _, witness = run(backend, "numpy")
    assert (witness.kernels, witness.seconds, witness.nodes) == ({"X": 3}, {"cpu": 0.5}, 2)
    told = describe(Witness("d", "p", nodes=np.int64(4), kernels={"a": np.int8(1)}))  # type: ignore[arg-type, dict-item]  # what adapters do
    assert (type(told["nodes"]), told["kernels"]) == (int, {"a": 1})
    with pytest.raises(BackendError, match=r"Witness.seconds\['x'\]: .*finite number.* expected, nan found"):
        describe(Witness("d", "p", seconds={"x": float("nan")}))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("exit", "its constructor raised SystemExit: 0"),
        ("batch", "opening the backend: batch: a whole number expected, 'many' found"),
        ("stages", "opening the backend: stages: a list of texts expected"),
    ],
)
def test_a_backend_that_says_what_it_is_not(mode: str, words: str) -> None:
    """What a worker says first is looked at, and its process ends with the error."""
    with pytest.raises((BackendError, UnavailableError), match=words):
        IsolatedBackend(Spec("evil", (("mode", mode),)))


def test_too_few_answers_of_supports_are_an_error() -> None:
    """A list that is no answer for each node is the adapter's error, in words."""
    backend = IsolatedBackend(Spec("evil", (("mode", "few"),)))
    try:
        with pytest.raises(BackendError, match="supports: an answer for each of 2 nodes expected, 1 found"):
            backend.supports(case("").steps[0].graph)
    finally:
        backend.close()
