"""The scheduler: the same assignment, splits and copies as ggml's own, and the same results wherever a graph is cut."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import conform, conform_here
from ggml_sched import RealScheduler
from here import Here

from backends import xdna2
from backends.cpu import CpuBackend
from backends.xdna2 import Xdna2Backend
from conformance.backend import registry
from conformance.backend.interface import Backend, BufferType, Support, no
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, GGML_CPU, Mixed
from conformance.ggml.errors import GraphError, UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Result, Verdict
from conformance.run.execute import computed_nodes, execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.locate import TOGETHER
from conformance.run.runner import Runner
from conformance.run.scheduler.assign import (
    Home,
    Memory,
    Supports,
    UnassignedError,
    assign,
    labels,
    place,
    read_devices,
)
from conformance.run.scheduler.backend import SchedBackend, _SchedSession
from conformance.run.scheduler.plan import Share
from conformance.run.session.select import build, case_ids
from conformance.run.signature import signature_of

FAMILIES = ("kv_growth", "gqa", "multi_sequence", "captured", "zoo", "random")
IDS = [i for f in FAMILIES for i in case_ids([f], [], "smoke")]
ALL = (*FAMILIES, "weight_placement", "blocks", "alias", "relations")
SMALL = {f: case_ids([f], [], "smoke")[: {"captured": 1, "random": 8}.get(f, 3)] for f in ALL}
SMALL["weight_placement"] = case_ids(["weight_placement"], ["*/llama*"], "smoke")  # others read no weight whole
TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
SLOTS = "xdna2:k=16+32+64+128+256"


class Picky(CpuBackend):
    """The reference, taking only some nodes."""

    def __init__(self, takes: Callable[[Tensor], bool], *, is_host: bool = True) -> None:
        super().__init__()
        self._chosen, self._is_host = takes, is_host

    def supports_op(self, node: Tensor) -> Support:
        """View ops, and of the others those chosen."""
        if node.op not in VIEW_OPS and not self._chosen(node):
            return no("it does not like it")
        return super().supports_op(node)

    def buffer_types(self) -> Sequence[BufferType]:
        """Host memory, or its own."""
        return [BufferType("picky", is_host=self._is_host)]


class Refusing(Picky):
    """Refuses nodes by chance: by op and shape, the same in every run."""

    def __init__(self, seed: str = "0", part: str = "50") -> None:
        super().__init__(lambda n: zlib.crc32(f"{seed} {n.op} {n.ne}".encode()) % 100 >= int(part))


@pytest.fixture(autouse=True)
def _refusing() -> None:
    registry.provide("refusing", Refusing)


def over(*devices: Backend, buffers: str = "declared") -> SchedBackend:
    """A scheduler over backends that are open."""
    named = {f"d{i}": d for i, d in enumerate(devices)}
    return SchedBackend(",".join(named), buffers).attach(lambda spec: named[spec.name])


# -- against the real one --------------------------------------------------------------------------------------------


def _drawn(rng: random.Random) -> tuple[Graph, Supports, Home, Memory]:
    """A graph of some case, one to four devices with some answers, homes of weights and caches, and who reads whose."""
    case = build(rng.choice(IDS))
    graph = rng.choice(case.steps).graph
    n = rng.choice((1, 2, 2, 2, 3, 4))
    group = list(range(n))
    if rng.random() < 0.4:
        for b in range(n):
            group[b] = group[rng.randrange(b + 1)]
    same = tuple(tuple(group[a] == group[b] for a in range(n)) for b in range(n))
    also = rng.choice((0.0, 0.0, 0.3))
    extra = {(b, g): rng.random() < also for b in range(n) for g in range(n)}
    reads = tuple(tuple(same[b][a] or extra[b, group[a]] for a in range(n)) for b in range(n))
    likes = rng.choice((0.2, 0.5, 0.9))
    table = {
        (b, t): t.op in VIEW_OPS or rng.random() < (0.97 if b == n - 1 else likes) for b in range(n) for t in graph
    }

    def supports(b: int, t: Tensor) -> bool:
        return table.get((b, t), True)

    home = place(case, n, supports)
    if rng.random() < 0.5:
        home = Home({t: rng.randrange(n) for t in home.device_of}, home.weights)
    return graph, supports, home, Memory(reads, same)


@pytest.fixture(scope="module")
def real() -> Iterator[Callable[[Memory], RealScheduler]]:
    """Opens the real scheduler, or skips with the reason."""
    opened: list[RealScheduler] = []

    def open_(memory: Memory) -> RealScheduler:
        try:
            opened.append(RealScheduler(memory))
        except UnavailableError as e:
            pytest.skip(str(e))
        return opened[-1]

    yield open_
    for r in opened:
        r.close()


@pytest.mark.parametrize("chunk", range(6))
def test_it_assigns_cuts_and_copies_as_ggml_does(chunk: int, real: Callable[[Memory], RealScheduler]) -> None:
    """Each node has the same device and each split the same copies as in ggml.

    Real graphs, up to four devices that answer at random, weights anywhere, buffer types shared, apart, and
    readable by some.
    """
    compared = 0
    for seed in range(1000 * chunk, 1000 * chunk + 30):
        graph, supports, home, memory = _drawn(random.Random(seed))  # noqa: S311  # no secret
        try:
            mine = assign(graph, supports, home, memory)
        except UnassignedError:
            continue
        found = real(memory).split(graph, supports, home)
        assert {n: mine.device[n] for n in graph} == found.device, seed
        assert len(mine.splits) == found.n_splits, seed
        assert {(t, s.device) for s in mine.splits for t in s.inputs} == found.copies, seed
        compared += 1
    assert compared > 10


_ABORTS = """
import os, random, sys
os.environ["GGML_NO_BACKTRACE"] = "1"
sys.path[:0] = {paths!r}
from test_scheduler import RealScheduler, UnassignedError, _drawn, assign
graph, supports, home, memory = _drawn(random.Random({seed}))
try:
    assign(graph, supports, home, memory)
except UnassignedError:
    RealScheduler(memory).split(graph, supports, home)
print("no abort")
"""


def test_where_no_device_is_left_ggml_aborts() -> None:
    """What is an error in words here is a failed assertion or an abort there."""
    seeds = []
    for seed in range(200):
        drawn = _drawn(random.Random(seed))  # noqa: S311  # no secret
        try:
            assign(*drawn)
        except UnassignedError:
            seeds.append(seed)
        if len(seeds) == 2:
            break
    for seed in seeds:
        script = _ABORTS.format(paths=[str(Path(__file__).parent), *filter(None, sys.path)], seed=seed)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == -6, done
        assert "cannot run the operation" in done.stderr or "GGML_ASSERT" in done.stderr


# -- the same results ------------------------------------------------------------------------------------------------


def _equal(case: Case, backend: Backend) -> None:
    """Every computed node of every step, and every cache after it, as on the reference alone: to the bit."""
    steps = range(len(case.steps))
    want, got = (execute(b, case, every_node=steps).steps for b in (CpuBackend(), backend))
    for a, b in zip(want, got, strict=True):
        for t, data in (*a.outputs.items(), *a.caches.items()):
            assert np.array_equal(data, b.outputs[t] if t in b.outputs else b.caches[t]), t


def _one_step(case_id: str) -> Case:
    case = build(case_id)
    return Case(case.id, case.persistent, case.steps[:1])


@pytest.mark.parametrize(
    "case_id",
    [
        f"kv_growth/llama-{TINY},run=p5@0",
        f"kv_growth/llama-{TINY},fa=0,write=cpy,run=at30.d1@0",
        f"kv_growth/llama-{TINY},seqs=2,w=q4_0,cache=q8_0,head=32,run=at20.d1@0",
        "kv_growth/lfm2-l=2,run=p4@0",
        "ops/OPT_STEP_ADAMW-f32-ne=33x3@917",
        "ops/OPT_STEP_SGD-f32-ne=33x3@246",
        *(SMALL[f][0] for f in ALL if f not in {"kv_growth", "captured"}),
    ],
)
def test_cut_at_every_node(case_id: str) -> None:
    """Nodes before the cut on one device, the rest on another, for every cut: every value to the bit."""
    case = _one_step(case_id)
    nodes = case.steps[0].graph.nodes
    for i in range(len(nodes) + 1):
        before = frozenset(nodes[:i])
        _equal(case, over(Picky(before.__contains__), Picky(frozenset(nodes[i:]).__contains__)))


@pytest.mark.parametrize("devices", ["xdna2,cpu", "openvino-stateless,cpu"])
def test_parameters_and_moments_of_an_optimiser_keep_their_bytes(devices: str) -> None:
    """A parameter is a leaf among the nodes; AdamW also writes its moments, which the next device reads."""
    done = conform("run", "--backend", f"sched?devices={devices}", "--case", "ops/OPT_STEP_*", "--level", "standard")
    assert (done.returncode, "FAIL" in done.stdout) == (0, False), done.stdout
    assert " PASS" in done.stdout


@pytest.mark.parametrize("case_id", [f"kv_growth/llama-{TINY},run=p5@0", "kv_growth/gpt-oss-l=1,run=at30.d1@0"])
def test_a_split_for_every_node(case_id: str) -> None:
    """Neighbours on different devices: as many splits as nodes that compute, every value to the bit."""
    case = _one_step(case_id)
    turn = {n: i % 2 for i, n in enumerate(n for n in case.steps[0].graph if n.op not in VIEW_OPS)}
    backend = over(Picky(lambda n: turn[n] == 0), Picky(lambda n: turn[n] == 1))
    _equal(case, backend)
    shared = backend.plan(case).graphs[case.steps[0].graph]
    assert len(shared.assignment.splits) == len(turn)


@pytest.mark.parametrize("case_id", [i for f in ALL for i in SMALL[f]])
@pytest.mark.parametrize("buffers", ["declared", "apart"])
def test_devices_that_refuse_by_chance_change_nothing(case_id: str, buffers: str) -> None:
    """Three devices of which two refuse by chance give every cache and output of every trajectory family to the bit."""
    case = build(case_id)
    want = execute(CpuBackend(), case).steps
    got = execute(over(Refusing("1"), Refusing(case_id, "30"), CpuBackend(), buffers=buffers), case).steps
    for a, b in zip(want, got, strict=True):
        assert all(np.array_equal(data, b.outputs[t]) for t, data in a.outputs.items())
        assert all(np.array_equal(data, b.caches[t]) for t, data in a.caches.items())


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all; a test changes an adapter."""
    r = Here()
    yield r
    r.close()


def _run(runner: Runner, spec: str, ids: Sequence[str]) -> list[Result]:
    results = runner.run(Spec.parse(spec), [runner.case(i) for i in ids])
    assert [r.detail for r in results if r.verdict is not Verdict.PASS] == []
    return results


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("spec", [f"sched?devices={SLOTS},cpu", f"sched?devices={SLOTS},cpu&buffers=apart"])
def test_trajectories_pass_on_the_npu_model_and_the_reference(runner: Runner, family: str, spec: str) -> None:
    """Freely, step by step and node by node, within the budgets of the devices that ran each node."""
    results = _run(runner, spec, SMALL[family])
    assert any("xdna2: K" in k for r in results for k in (r.witness or {})["kernels"])


def test_trajectories_pass_on_the_npu_model_and_the_real_ggml(runner: Runner) -> None:
    """Each node in the arithmetic of its own device: int8 by rows there, Q8_0 activations and F16 sums here."""
    _run(runner, f"sched?devices={SLOTS},ggml", [*SMALL["kv_growth"], *SMALL["captured"]])


def test_a_wrong_node_of_one_device_is_named(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong scale of one row fails the trajectory, and the NPU's first MUL_MAT is named, not what follows it."""
    right = xdna2._by_rows

    def wrong(x: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> tuple[object, object]:
        q, d = right(x)
        d = d.copy()
        d[0] *= np.float32(1.5)
        return q, d

    monkeypatch.setattr(xdna2, "_by_rows", wrong)
    spec = Spec.parse("sched?devices=xdna2:k=32,cpu")
    (result,) = runner.run(spec, [runner.case(f"kv_growth/llama-{TINY},run=p5@0")])
    assert result.verdict is Verdict.FAIL
    assert result.where is not None
    assert (result.where.op, result.where.name) == ("MUL_MAT", "Qcur-0")


@pytest.mark.parametrize("how", ["cache", "value"])
def test_a_wrong_copy_between_devices_is_named(runner: Runner, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Not the node that reads it: the value, the split that left it and the one that it reaches."""
    if how == "cache":
        case_id, split = "weight_placement/shared-w=f32,d=2048@138", 0
        monkeypatch.setattr(_SchedSession, "_bring", lambda *_: None)
    else:
        case_id, split = f"kv_growth/llama-{TINY},run=p5@0", 1
        right = _SchedSession._run

        def run(session: _SchedSession, share: Share, fed: Mapping[Tensor, Bytes], wanted: Sequence[Tensor]) -> object:
            late = [leaf for leaf in share.part.inputs if leaf.name == "attn_norm-0"]
            for leaf in late:
                fed[leaf] = fed[leaf] * 0  # type: ignore[index]  # a dict
            return right(session, share, fed, wanted)

        monkeypatch.setattr(_SchedSession, "_run", run)
    (result,) = runner.run(
        Spec.parse("sched?devices=xdna2:k=32,cpu" if split else "sched?devices=xdna2,cpu"), [build(case_id)]
    )
    where = result.where
    assert result.verdict is Verdict.FAIL
    assert where is not None
    assert where.fault is Fault.HANDOVER, result.detail
    assert where.source is not None
    assert where.target is not None
    assert (where.source.device, where.target.device) == ("cpu", "xdna2")
    assert where.target.split == split
    assert f"left by split {where.source.split} on cpu" in result.detail
    assert f"reaches split {split} on xdna2" in result.detail
    assert TOGETHER not in result.detail
    assert str(signature_of(result)) == "FAIL, handover"


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_witness_tells_splits_copies_and_shares() -> None:
    """Copies and their bytes are those ggml would make, the rest what ran here."""
    case = _one_step(f"kv_growth/llama-{TINY},run=p5@0")
    products = Picky(lambda n: n.op == "MUL_MAT")
    for buffers, copies in (("declared", 0), ("apart", None)):
        backend = over(products, CpuBackend(), buffers=buffers)
        witness = execute(backend, case).witness
        plan = backend.plan(case).graphs[case.steps[0].graph]
        inputs = [t for s in plan.assignment.splits for t in s.inputs]
        assert (witness.path, witness.splits) == ("split", len(plan.assignment.splits))
        assert witness.copies == (len(inputs) if copies is None else copies)
        assert witness.nodes == len(computed_nodes(case.steps[0]))
        assert witness.kernels["d0: MUL_MAT"] == sum(n.op == "MUL_MAT" for n in computed_nodes(case.steps[0]))
        assert set(witness.seconds) == {"d0", "d1"}
        assert any(n.startswith("nodes of the last graph: d1 0-") for n in witness.notes)
    assert witness.copies > 0
    assert witness.bytes["copied"] > 0


def test_no_device_left_is_said_with_every_reason() -> None:
    """Before anything runs: the node, its shapes, and what each device said."""
    case = _one_step(f"kv_growth/llama-{TINY},run=p5@0")
    backend = over(Xdna2Backend(k="32"), Picky(lambda n: n.op != "ROPE"))
    node = next(n for n in case.steps[0].graph if n.op == "ROPE")
    answer = backend.supports_op(node)
    assert not answer
    for words in ("ROPE Qcur-0", "of f32[16, 2, 5, 1], i32[5, 1, 1, 1]", "d0: ROPE: xdna2 has no", "d1: it does not"):
        assert words in answer.reason
    assert not backend.supports_case(case)
    with pytest.raises(UnavailableError, match=r"ROPE Qcur-0 .* no device supports it .*d0: .*; d1: "):
        backend.open(case)


def test_a_cache_whose_home_cannot_run_its_writer_is_said() -> None:
    """Memory apart, K stored by one device only and V by the other: ggml would abort on one of them."""
    case = _one_step(f"kv_growth/llama-{TINY},fa=0,write=cpy,run=p5@0")
    stores = [n for n in case.steps[0].graph if n.op == "CPY"]
    plan = Home({n.root: 0 for n in stores}, frozenset())
    apart = Memory(((True, False), (False, True)), ((True, False), (False, True)))
    with pytest.raises(UnassignedError, match="buffer's device does not support it") as e:
        assign(case.steps[0].graph, lambda b, n: n.op in VIEW_OPS or (b == 0) is (n is not stores[1]), plan, apart)
    assert e.value.node is stores[1]


def test_a_weight_lives_where_every_use_is_taken() -> None:
    """A tied embedding is looked up and multiplied: it is no weight of a device that only multiplies."""
    case = build(f"kv_growth/llama-{TINY},tied=1,run=p3@0")
    products = Picky(lambda n: n.op == "MUL_MAT")
    of = {t.name: b for t, b in over(products, CpuBackend()).plan(case).home.device_of.items()}
    assert of["token_embd.weight"] == 1
    assert of["blk.0.attn_q.weight"] == 0
    assert of["cache_k_l0"] == 1


def test_state_is_the_same_whichever_device_holds_it() -> None:
    """A cache that both devices write reads as one, and what is written reaches both."""
    case = build(f"kv_growth/llama-{TINY},run=p5.d2@0")
    turn = {n: i % 2 for s in case.steps for i, n in enumerate(s.graph)}
    backend = over(Picky(lambda n: turn.get(n) == 0), Picky(lambda n: turn.get(n) == 1))
    with backend.open(case) as session, CpuBackend().open(case) as right:
        for step in case.steps:
            for s in (session, right):
                s.compute(step.graph, step.inputs, step.outputs)
            for t in case.caches():
                assert np.array_equal(session.read(t), right.read(t))
        for t in case.persistent:
            data = np.flip(case.persistent[t]).copy()
            session.write(t, data)
            assert np.array_equal(session.read(t), data)
        with pytest.raises(GraphError, match="graphs of the opened case only"):
            session.compute(Graph([]), {}, ())
        stranger = next(iter(case.steps[0].inputs))
        with pytest.raises(GraphError, match="not a persistent tensor"):
            session.read(stranger)


@pytest.mark.parametrize(
    ("devices", "case_id"),
    [
        ("xdna2,cpu", "weight_placement/shared-w=f32,d=2048@138"),
        ("openvino-stateless,cpu", "weight_placement/shared-w=q4_K,d=256@494"),
    ],
)
def test_a_cache_that_one_device_writes_another_reads(runner: Runner, devices: str, case_id: str) -> None:
    """A cache's bytes are carried from step to step between devices.

    To the device that only multiplies, and from one that cannot store the type; the outputs and both caches are
    right.
    """
    (result,) = runner.run(Spec.parse(f"sched?devices={devices}"), [build(case_id)])
    assert result.verdict is Verdict.PASS, result.sentence()
    assert result.witness is not None
    assert "bytes of caches carried between devices" in result.witness["notes"][-1]


def test_nodes_round_as_their_device() -> None:
    """The arithmetic of a case lists each node's own; of one device alone it is that device's."""
    case = _one_step(f"kv_growth/llama-{TINY},run=p5@0")
    backend = over(Xdna2Backend(k="32"), CpuBackend().computing_in(GGML_CPU))
    arithmetic = backend.arithmetic_in(case)
    assert isinstance(arithmetic, Mixed)
    for node in case.steps[0].graph:
        if node.op not in VIEW_OPS:
            here = backend.plan(case).graphs[case.steps[0].graph].assignment.device[node]
            assert arithmetic.at(node) is backend.devices[here].arithmetic()
            assert (here == 0) is (node.op == "MUL_MAT")
    copy = Tensor(node.type, node.ne, node.nb)
    assert arithmetic.at(copy) is EXACT
    assert arithmetic.copied({copy: node}).at(copy) is arithmetic.at(node)
    assert over(CpuBackend(), CpuBackend()).arithmetic_in(case) is EXACT


# -- how it is named -------------------------------------------------------------------------------------------------


def test_devices_are_read_with_their_options() -> None:
    """Commas join devices, colons their options; what is escaped is part of a value."""
    specs = read_devices("xdna2:k=64+128:max_n=1,ggml:lib=a%2Cb%3Ac,cpu,cpu")
    assert specs == [
        Spec("xdna2", (("k", "64+128"), ("max_n", "1"))),
        Spec("ggml", (("lib", "a,b:c"),)),
        Spec("cpu"),
        Spec("cpu"),
    ]
    assert labels(specs) == ["xdna2", "ggml", "cpu#1", "cpu#2"]


@pytest.mark.parametrize("text", ["", "cpu,", ":k=1", "cpu:k", "cpu:=1", ",".join(["cpu"] * 17)])
def test_wrong_devices_are_refused(text: str) -> None:
    """With the form that was expected."""
    with pytest.raises(UsageError, match="devices"):
        SchedBackend(text)


def test_it_is_opened_by_name_and_not_listed() -> None:
    """Its devices are opened as any backend is; a run of all backends does not take it."""
    open_ = open_backend
    backend = open_(Spec.parse("sched?devices=xdna2:k=64+128,cpu"))
    assert isinstance(backend, SchedBackend)
    assert backend.info().device.startswith("functional model+")
    assert backend.buffer_types()[0].is_host
    backend.close()
    assert "sched" not in registry.names()
    with pytest.raises(UsageError, match="'nothing' is not installed"):
        open_(Spec.parse("sched?devices=nothing,cpu"))
    with pytest.raises(UsageError, match="option 'x' is unknown; its options: devices, buffers"):
        open_(Spec.parse("sched?x=1"))
    with pytest.raises(UsageError, match="buffers: one of declared, apart"):
        open_(Spec.parse("sched?buffers=x"))


def test_expected_values_are_of_this_sharing(runner: Runner) -> None:
    """The same devices with other options share a case out otherwise, and none is judged by another's values."""
    ids = [f"kv_growth/llama-{TINY.replace('ff=32', 'ff=64')},run=p5.d2@0"]
    for spec in ("xdna2:k=32", "xdna2:k=64", "xdna2:k=32+64", "xdna2:k=32:max_n=1"):
        _run(runner, f"sched?devices={spec},cpu", ids)
    names = {
        b.arithmetic_in(runner.case(ids[0])).name
        for b in (over(Xdna2Backend(k=k), CpuBackend()) for k in ("32", "64", "32+64"))
    }
    assert len(names) == 3


def test_splits_shows_the_table() -> None:
    """Every node that computes with its device; only a scheduler has one."""
    case = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p5@0"
    done = conform_here("show", case, "--scheduler", "sched?devices=xdna2:k=32,cpu&buffers=apart")
    assert done.exit_code == 0, done.output
    assert "xdna2" in done.output
    assert "FLASH_ATTN_EXT" in done.output
    refused = conform_here("show", case, "--scheduler", "cpu")
    assert refused.exit_code == 2
    assert "a scheduler such as" in refused.output
