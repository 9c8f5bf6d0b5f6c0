"""Dozens of adapters, each wrong in one way in one method: each costs its own cases a verdict, and nothing else."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hostile_adapter
import numpy as np
import pytest
from click.testing import CliRunner
from hostile_adapter import BACKEND, SESSION
from planted_adapter import installed, planted_adapter

from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.cli import main
from conformance.ggml.arithmetic import GGML_CPU
from conformance.ggml.ops.build import Builder
from conformance.ggml.types import F32
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process.memory import resident
from conformance.report.runfile import record
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner
from conformance.run.session.select import available

CPU = Spec("cpu")
GENTLE = ("raise", "sysexit", "generator", "own", "none", "odd", "text", "long", "shape", "mutate", "scribble")
"""Ways that neither end nor hold the process."""
METHODS = (*BACKEND, *SESSION)
HARMLESS = {
    (m, w) for m in METHODS for w in ("mutate", "scribble", "none", "odd", "text", "long", "shape", "flood", "fork")
}
"""What may pass or be refused: nothing was spoiled, or nobody asks that method for a value."""
UNASKED = frozenset({"close", "write", "clock", "info", "buffer_types"})
"""Methods that no case needs."""
LIMIT = 3.0
MARK = f"hostile-{os.getpid()}"


@pytest.fixture(autouse=True)
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter, installed by its entry point for this process and for workers."""
    monkeypatch.setenv("HOSTILE_MARK", MARK)
    with installed(tmp_path, monkeypatch, "hostile", "hostile_adapter:Hostile", hostile_adapter.__file__):
        yield


def spec(at: str, how: str) -> Spec:
    """The adapter that does `how` in `at`."""
    return Spec("hostile", (("at", at), ("how", how)))


def cases() -> list[Case]:
    """A sum, a product with a weight, and two steps."""
    return [case("sum", 1), case("product", 1), case("steps", 2)]


def case(name: str, steps: int) -> Case:
    """`(x + w) * x` and a cache that is multiplied by x, `steps` times."""
    b = Builder()
    w, cache = b.new_tensor_2d(F32, 8, 3), b.new_tensor_2d(F32, 8, 3)
    rng = np.random.Generator(np.random.PCG64(len(name)))
    made = Case(f"hostile/{name}@0", {w: _bytes(rng), cache: _bytes(rng)}, [])
    for _ in range(steps):
        g = Builder()
        x = g.new_tensor_2d(F32, 8, 3)
        out = g.mul(g.add(x, w), x)
        graph = g.build_forward_expand(out)
        graph.nodes.append(g.mul_inplace(cache, x))
        graph.nodes[-1].flags = out.flags
        made.steps.append(Step(graph, {x: _bytes(rng)}, (out,)))
    return made


def _bytes(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((3, 8)).astype("<f4").reshape(-1).view(np.uint8)


def told(results: list[Result]) -> list[tuple[str, str, float | None]]:
    """What of a result is the same on every run."""
    return [(r.case, r.verdict.value, r.nmse) for r in results]


class Bench:
    """One runner for many adapters, and what `cpu` gives before any of them."""

    def __init__(self) -> None:
        self.given = cases()
        self.runner = Runner(isolation=Isolation(LIMIT, 1 << 30))
        self.first = told(self.runner.run(CPU, self.given))

    def check(self, wicked: Spec) -> list[Result]:
        """Run the cases on the hostile adapter and on `cpu` again; what holds for every adapter."""
        begun = time.monotonic()
        found = self.runner.run(wicked, self.given)
        again = self.runner.run(CPU, self.given)
        if wicked in self.runner._backends:
            self.runner.end(str(wicked), self.runner._backends.pop(wicked))
        assert [(r.case, r.backend) for r in found] == [(c.id, str(wicked)) for c in self.given]
        assert {v for _, v, _ in self.first} == {"PASS"}
        assert told(again) == self.first
        assert all(r.detail for r in found if r.verdict in FAILURES)
        assert all(len(r.detail) < 100_000 for r in found)
        json.dumps(record([*found, *again]), allow_nan=False)
        assert time.monotonic() - begun < 60 + 20 * LIMIT
        return found

    def judge(self, at: str, how: str) -> None:
        """The verdicts that the fault must have."""
        found = self.check(spec(at, how))
        verdicts = {r.verdict for r in found}
        if at in UNASKED or (at, how) in HARMLESS:
            assert verdicts <= FAILURES | {Verdict.PASS, Verdict.UNSUPPORTED}
        else:
            assert verdicts <= FAILURES, [(r.verdict, r.detail) for r in found]


@pytest.fixture(scope="module")
def outside() -> Iterator[Bench]:
    """For all adapters."""
    bench = Bench()
    yield bench
    bench.runner.close()


ISOLATED = [
    *((at, GENTLE[(i + k) % len(GENTLE)]) for i, at in enumerate(METHODS) for k in (0, 4, 7)),
    *((at, "sysexit") for at in ("constructor", "info", "supports_op", "open", "compute", "witness", "session_close")),
    *((at, "exit") for at in ("constructor", "supports_op", "open", "compute", "close")),
    *((at, "fork") for at in ("constructor", "open", "compute")),
    *((at, "flood") for at in ("open", "compute")),
    ("supports", "hang"), ("compute", "hang"), ("compute", "stubborn"), ("close", "hang"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def held() -> Iterator[None]:
    """The suite's memory, descriptors and threads do not grow with adapters, and no process of theirs stays."""
    yield
    gc.collect()
    if Path("/proc").is_dir():
        assert not _marked()


def _marked() -> list[str]:
    found = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = p.read_bytes()
        except OSError:
            continue
        if text.endswith(f"{MARK}\0".encode()):
            found.append(p.parent.name)
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="it forks")
@pytest.mark.parametrize(("at", "how"), dict.fromkeys(ISOLATED))
def test_in_a_process_of_its_own(outside: Bench, at: str, how: str) -> None:
    """The same, and nothing of it is left: no process, no memory."""
    before = resident(os.getpid())
    outside.judge(at, how)
    after = resident(os.getpid())
    if before is not None and after is not None:
        assert after - before < 200 << 20
    deadline = time.monotonic() + 10
    while _marked() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = _marked()
    for pid in left:
        os.kill(int(pid), 9)
    assert not left


def test_a_broken_adapter_is_told_of_and_in_nobodys_way() -> None:
    """Whatever breaks while it is probed is why it is not available; the others are."""
    wicked = [spec(at, how) for at, how in (
        ("constructor", "raise"), ("constructor", "sysexit"), ("info", "own"), ("info", "none"),
        ("buffer_types", "odd"),
    )]  # fmt: skip
    have, lacking = available([*wicked, CPU], Workers(Isolation(20)))
    assert have == [CPU]
    assert list(lacking) == wicked
    words = ("raised", "expected", "iterable", "of another form", "died", "sys.exit")
    assert all(any(w in str(why) for w in words) for why in lacking.values()), lacking


@pytest.mark.parametrize(("at", "how"), [("constructor", "sysexit"), ("info", "own")])
def test_backends_lists_what_is_broken(at: str, how: str) -> None:
    """`conform list` says why it is not available; `conform run` that names it ends with 2 and that sentence."""
    named = f"hostile?at={at}&how={how}"
    listed = CliRunner().invoke(main, ["list", "backends", "cpu", named])
    assert listed.exit_code == 0, listed.output
    assert "not available" in listed.output
    ran = CliRunner().invoke(main, ["run", "--backend", named, "--case", "ops/ADD*"])
    assert (ran.exit_code, len(ran.output.strip().splitlines())) == (2, 1)
    assert "raised" in ran.output or "died" in ran.output


def test_an_arithmetic_cannot_take_anothers_name() -> None:
    """Two arithmetics of one name are two: an adapter cannot change what another is held against."""
    oracle = Oracle()
    try:
        mine = oracle.reference_in(replace(GGML_CPU, mul_mat={}))
        assert oracle.reference_in(GGML_CPU).arithmetic() == GGML_CPU
        assert mine.arithmetic() != GGML_CPU
    finally:
        oracle.close()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
REFERENCE = """
from hostile_adapter import Hostile
class Copies(Hostile):
    def open(self, case):
        if self.how == "import":
            from backends.cpu import CpuBackend
        elif self.how == "below a folder":
            import os
            folder = os.open(os.path.dirname({files!r}["golden"]), os.O_RDONLY)
            os.close(os.open("ops.gguf", os.O_RDONLY, dir_fd=folder))
            os.close(folder)
        else:
            open({files!r}[self.how], "rb").close()
        return super().open(case)
    def __init__(self, how="import"):
        super().__init__()
        self.how = how
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("import", "the reference (backends.cpu)"),
        ("golden", "the golden values"),
        ("kept", "expected values of earlier runs"),
        ("link", "the golden values"),
        ("hard link", "the golden values"),
        ("hard link of requantised", "the golden values"),
        pytest.param("root", "the golden values", marks=LINUX),
        pytest.param("below a folder", "the golden values", marks=LINUX),
    ],
)
def test_who_loads_the_answers_is_vacuous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, says: str) -> None:
    """An adapter of a third party that imports the reference, or opens a golden or kept value, has proven nothing."""
    golden = Path(__file__).parents[2] / "golden" / "ops.gguf"
    kept = tmp_path / "kept" / "ab" / "cd"
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.setenv("CONFORMANCE_EXPECTED", str(tmp_path / "kept"))
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(golden)
    own = tmp_path / "golden"  # a hard link needs the same file system
    shutil.copytree(golden.parent, own)
    hard.hardlink_to(own / ("requant.json" if how.endswith("requantised") else "ops.gguf"))
    if how.startswith("hard link"):
        monkeypatch.setenv("CONFORMANCE_GOLDEN", str(own))
    files = {
        "golden": str(golden), "kept": str(kept), "link": str(link), "hard link": str(hard),
        "hard link of requantised": str(hard),
        "root": f"/proc/self/root{golden}",
    }  # fmt: skip
    with planted_adapter(tmp_path, monkeypatch, "copies", REFERENCE.format(files=files), "Copies"):
        runner = Runner()
        try:
            found = runner.run(Spec("copies", (("how", how),)), cases())
        finally:
            runner.close()
    assert {r.verdict for r in found} == {Verdict.VACUOUS}
    assert all(f"the adapter loaded {says}, so nothing independent was tested" in r.detail for r in found)
