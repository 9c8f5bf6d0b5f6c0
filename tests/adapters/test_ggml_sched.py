"""`ggml?mode=sched`: a case runs through the real `ggml_backend_sched`, placed as llama.cpp places it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from marks import needs_wheel

from backends.ggml import GgmlBackend, cpu_arithmetic
from backends.ggml.placement import USAGES, Home, sched_homes
from backends.ggml.sched import SplitSession
from backends.ggml.session import GgmlSession
from conformance.backend.interface import YES, Support, Witness, no
from conformance.case.case import Case, Placement, Step
from conformance.ggml import types
from conformance.ggml.arithmetic import EXACT, requantising
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.library import Library
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Bytes, Tensor, computes, nbytes
from conformance.suite import FAMILIES
from conformance.suite import decoder as models

pytestmark = needs_wheel

TRAJECTORY = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=at254.d3.back2.d2@7"


@pytest.fixture(scope="module")
def sched() -> Iterator[GgmlBackend]:
    """The wheel's CPU behind its own scheduler."""
    made = GgmlBackend(mode="sched")
    yield made
    made.close()


@pytest.fixture(scope="module")
def direct() -> Iterator[GgmlBackend]:
    """The same device without."""
    made = GgmlBackend()
    yield made
    made.close()


def test_a_device_is_started_before_its_buffer_types_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """ggml-opencl's buffer types read a null pointer before."""
    started: list[int] = []
    start = Device.start

    def recorded(device: Device, threads: int, *, ref: bool = False) -> int:
        started.append(device.handle)
        return start(device, threads, ref=ref)

    monkeypatch.setattr(Device, "start", recorded)
    with closing(GgmlBackend(mode="sched")):
        assert len(started) == 1


def played(backend: GgmlBackend, case: Case) -> tuple[list[dict[Tensor, Bytes]], list[Bytes], Witness]:
    """Outputs of each step, caches at the end, witness."""
    with backend.open(case) as session:
        found = [dict(session.compute(s.graph, s.inputs, s.outputs)) for s in case.steps]
        return found, [session.read(t) for t in case.caches()], session.witness()


def test_a_trajectory_is_what_the_device_alone_gives(sched: GgmlBackend, direct: GgmlBackend) -> None:
    """Every output of every step and every cache are equal to the bit: one device, once with and once without."""
    case = models.make(TRAJECTORY)
    a, caches_a, witness = played(sched, case)
    b, caches_b, other = played(direct, case)
    for x, y in zip(a, b, strict=True):
        assert all(np.array_equal(x[t], y[t]) for t in x)
    assert all(np.array_equal(x, y) for x, y in zip(caches_a, caches_b, strict=True))
    assert witness.nodes == other.nodes == sum(witness.kernels.values())
    assert (witness.splits, witness.copies) == (1, 0)
    assert witness.placed["CPU"]["FLASH_ATTN_EXT"] == len(case.steps)


def test_fresh_memory_and_dropped_nodes_change_nothing(direct: GgmlBackend) -> None:
    """`memory=fresh` and `uncomputed=drop` give the bytes of the device alone."""
    case = models.make(TRAJECTORY)
    backend = GgmlBackend(mode="sched", memory="fresh", uncomputed="drop")
    a, caches_a, _ = played(backend, case)
    b, caches_b, _ = played(direct, case)
    backend.close()
    for x, y in zip(a, b, strict=True):
        assert all(np.array_equal(x[t], y[t]) for t in x)
    assert all(np.array_equal(x, y) for x, y in zip(caches_a, caches_b, strict=True))


def test_an_output_is_read_before_it_is_overwritten(sched: GgmlBackend) -> None:
    """An output that a later node of the same graph overwrites holds what it held when it ran."""
    g = Builder()
    x, y = g.new_tensor_1d(types.F32, 4), g.new_tensor_1d(types.F32, 4)
    first = g.add(x, y)
    second = g.scale_inplace(first, 3.0)
    graph = Graph([first, second])
    for node in graph:
        node.flags |= FLAG_COMPUTE
    ones = np.ones(4, np.float32).view(np.uint8)
    case = Case("test/overwritten@0", {}, [Step(graph, {x: ones, y: ones.copy()}, (first, second))])
    case.validate()
    (found,), _, _ = played(sched, case)
    assert found[first].view(np.float32).tolist() == [2.0] * 4
    assert found[second].view(np.float32).tolist() == [6.0] * 4


def test_weights_and_caches_lie_where_llama_cpp_puts_them(sched: GgmlBackend) -> None:
    """The token embedding leaves the device, which says so; other weights have usage WEIGHTS, caches have none."""
    case = models.make(TRAJECTORY)
    library = sched._library
    cpu = library.devices.by_name("CPU")
    default = cpu.buffer_type
    homes, notes = sched_homes(library, cpu, cpu, [default], default, case)
    caches = set(case.caches())
    assert {homes[t].usage for t in caches} == {USAGES["any"]}
    assert {homes[t].usage for t in homes if t not in caches} == {USAGES["weights"]}
    assert notes == ["token_embd.weight f32 is not on CPU, as only GET_ROWS reads it"]


def test_opaque_caches_are_said_to_be(direct: GgmlBackend) -> None:
    """`caches=opaque` gives every cache as opaque; the default none."""
    case = models.make(TRAJECTORY)
    backend = GgmlBackend(mode="sched", caches="opaque")
    with backend.open(case) as session:
        assert session.opaque() == frozenset(case.caches())
    backend.close()
    with direct.open(case) as session:
        assert session.opaque() == frozenset()


def test_weights_of_a_repacking_buffer_are_read_as_written() -> None:
    """A buffer type of its own for weights goes with the scheduler; what it packs is read as it was written."""
    library = Library()
    device = library.devices.by_name("CPU")
    assert device.type == "CPU"
    if "CPU_REPACK" not in device.buffer_types():
        pytest.skip("this machine's ggml repacks nothing")
    case = models.make("kv_growth/llama-l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64,w=q4_0,run=p5.d1@3")
    backend = GgmlBackend(mode="sched", buffer="CPU_REPACK")
    with backend.open(case) as session:
        for s in case.steps:
            session.compute(s.graph, s.inputs, s.outputs)
        assert all(np.array_equal(session.read(t), d) for t, d in case.persistent.items() if t not in case.caches())
        assert "CPU_REPACK" in session.witness().bytes
    backend.close()


def test_what_is_written_beside_the_device_is_read(sched: GgmlBackend) -> None:
    """A tensor written in place in another host buffer type than the device's reads as it is, not as it was."""
    library = sched._library
    other = (ctypes.c_void_p * 10).from_buffer_copy((ctypes.c_void_p * 10).from_address(sched._device.buffer_type))
    g = Builder()
    x = g.new_tensor_1d(types.F32, 4)
    node = g.scale_inplace(x, 2.0)
    node.flags |= FLAG_COMPUTE
    case = Case("test/beside@0", {x: np.ones(4, np.float32).view(np.uint8)}, [Step(Graph([node]), {}, (node,))])
    backend = sched._device.start()
    homes = {x: Home(ctypes.addressof(other), USAGES["any"])}
    default = sched._device.buffer_type
    with GgmlSession(library, "CPU", backend, default, case, homes) as session:
        session.compute(case.steps[0].graph, {}, (node,))
        assert session.read(x).view(np.float32).tolist() == [2.0] * 4
    library.ggml.backend_free(backend)


def test_a_weight_that_must_lie_elsewhere_does() -> None:
    """`must` is heard by the scheduler too: the weight is in that buffer type, or the case is refused."""
    backend = GgmlBackend(mode="sched")
    names = [b.name for b in backend.buffer_types()]
    if "CPU_REPACK" not in names:
        pytest.skip("this machine's ggml repacks nothing")
    case = models.make("kv_growth/llama-l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64,w=q4_0,run=p5.d1@3")
    named = {t.name: t for t in case.persistent}
    place = Placement(names.index("CPU_REPACK"), must=True)
    with backend.open(replace(case, placement={named["blk.0.attn_q.weight"]: place})) as session:
        assert session.witness().bytes["CPU_REPACK"] >= nbytes(named["blk.0.attn_q.weight"])
    with pytest.raises(BackendError, match=r"token_embd.weight q4_0 must lie in CPU_REPACK, where .* refuses"):
        backend.open(replace(case, placement={named["token_embd.weight"]: place}))
    backend.close()


@pytest.mark.parametrize(("option", "value"), [("mode", "eager"), ("caches", "no"), ("uncomputed", ""), ("guard", "1")])
def test_a_wrong_option_names_the_right_ones(option: str, value: str) -> None:
    """A value that an option does not know is refused with those it knows, before any library is loaded."""
    with pytest.raises(UsageError, match=f"ggml: {option}: one of .* expected, {value!r} found"):
        GgmlBackend(**{option: value})


def test_nbytes_of_every_input_reach_the_graph(sched: GgmlBackend) -> None:
    """Steps whose graph is the same object are computed without building again, on new inputs."""
    g = Builder()
    x = g.new_tensor_1d(types.F32, 4)
    node = g.scale(x, 2.0)
    graph = Graph([node])
    node.flags |= FLAG_COMPUTE
    one, two = (np.full(4, v, np.float32).view(np.uint8) for v in (1.0, 2.0))
    assert one.nbytes == nbytes(x)
    case = Case("test/again@0", {}, [Step(graph, {x: one}, (node,)), Step(graph, {x: two}, (node,))])
    found, _, witness = played(sched, case)
    assert [f[node].view(np.float32)[0] for f in found] == [2.0, 4.0]
    assert witness.placed == {"CPU": {"SCALE": 2}}


def test_graphs_of_equal_sizes_that_read_other_nodes_share_no_plan(sched: GgmlBackend, direct: GgmlBackend) -> None:
    """Memory that only the second graph reads late is not given away early, as by the plan of the first."""
    case = FAMILIES["alias"].build("alias/differs=edge@43")
    for x, y in zip(played(sched, case)[0], played(direct, case)[0], strict=True):
        assert all(np.array_equal(x[t], y[t]) for t in x)


def test_the_split_that_is_asked_for_is_the_one_that_runs(sched: GgmlBackend) -> None:
    """With nothing in its memory the scheduler gives each node of each step to what computes it, and none runs."""
    case = models.make(TRAJECTORY)
    with closing(sched._scheduled(SplitSession, case, sched._device)) as session:
        split = [session.on_device(s.graph, s.outputs) for s in case.steps]
    assert split == [frozenset(n for n in s.graph if computes(n)) for s in case.steps]
    assert sum(map(len, split)) == played(sched, case)[2].nodes


def _shared(monkeypatch: pytest.MonkeyPatch, *on_device: Tensor) -> GgmlBackend:
    """A device of which the scheduler gives all other nodes to the CPU, and which refuses GELU."""
    backend = GgmlBackend(mode="sched")
    monkeypatch.setattr(backend, "_on_device", lambda c: [frozenset(on_device) & set(s.graph) for s in c.steps])
    own = backend._supported
    refuses = no("it has no GELU")

    def supported(graph: Graph, device: Device, name: str) -> list[Support]:
        answers = own(graph, device, name)
        return [refuses if n.op == "UNARY" and name != "CPU" else a for n, a in zip(graph, answers, strict=True)]

    monkeypatch.setattr(backend, "_name", "DEVICE0")
    monkeypatch.setattr(backend, "_supported", supported)
    monkeypatch.setattr(backend, "arithmetic", lambda: EXACT)
    return backend


def _scaled_gelu(name: str) -> Case:
    g = Builder()
    x = g.new_tensor_1d(types.F32, 4)
    scaled = g.scale(x, 2.0)
    nodes = [scaled, g.gelu(scaled)] if "scale" in name else [g.gelu(x)]
    for n in nodes:
        n.flags |= FLAG_COMPUTE
    return Case(f"test/{name}@0", {}, [Step(Graph(nodes), {x: np.ones(4, np.float32).view(np.uint8)}, (nodes[-1],))])


def test_a_case_that_the_cpu_alone_runs_tests_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with what the device says of a node, whatever cases it is asked about together with."""
    alone, shared = _scaled_gelu("gelu"), _scaled_gelu("scale")
    backend = _shared(monkeypatch, *shared.steps[0].graph.nodes[:1])
    together = Graph([n for c in (alone, shared) for n in c.steps[0].graph])
    assert all(backend.supports(together))
    assert backend.supports_case(shared) is YES
    assert backend.supports_case(alone) == no("it has no GELU")
    backend.close()


def test_each_node_rounds_as_what_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the device the CPU's tables count, and the device's own arithmetic where it computes all."""
    case = _scaled_gelu("scale")
    scaled, gelu = case.steps[0].graph
    backend = _shared(monkeypatch, scaled)
    found = backend.arithmetic_in(case)
    assert found.at(scaled) == EXACT
    assert found.at(gelu) == cpu_arithmetic(backend._library)
    monkeypatch.setattr(backend, "_on_device", lambda c: [frozenset(s.graph) for s in c.steps])
    assert backend.arithmetic_in(case) == EXACT
    backend.close()


def _embedded(n: int, *, whole: bool = True) -> Case:
    """GET_ROWS of a weight, or of a view of it, and SCALE: `n` nodes, in the middle a GELU that the device lacks."""
    g = Builder()
    w, ids = g.new_tensor_2d(types.Q4_0, 32, 9), g.new_tensor_1d(types.I32, 2)
    w.name = "token_embd.weight"
    read = w if whole else g.view_2d(w, 32, 4, w.nb[1], w.nb[1])
    x = g.get_rows(read, ids)
    for k in range(n - 1):
        x = g.gelu(x) if k == n // 2 else g.scale(x, 2.0)
    graph = g.build_forward_expand(x)
    weight = np.zeros(9 * w.nb[1], np.uint8)
    return Case("test/embedded@0", {w: weight}, [Step(graph, {ids: np.zeros(8, np.uint8)}, (x,))])


@pytest.mark.parametrize(("n", "lacks", "stored"), [(19, False, False), (20, False, True), (30, True, False)])
def test_few_nodes_at_a_time_read_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch, n: int, lacks: bool, stored: bool
) -> None:
    """From 20 nodes without one of the CPU between them the device stores the rows in its own form."""
    case, own = _embedded(n), requantising("channel8")
    nodes = case.steps[0].graph.nodes
    backend = _shared(monkeypatch, *(x for x in nodes if x.op != "UNARY" or not lacks))
    monkeypatch.setattr(backend, "arithmetic", lambda: own)
    found = backend.arithmetic_in(case).at(nodes[0])
    assert found.rows == (own.rows if stored else {})
    assert found.weights == own.weights
    backend.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_weight_whose_views_only_get_rows_reads_leaves_the_device(sched: GgmlBackend, whole: bool) -> None:
    """llama.cpp places it before it knows any view."""
    library = sched._library
    cpu = library.devices.by_name("CPU")
    default = cpu.buffer_type
    _, notes = sched_homes(library, cpu, cpu, [default], default, _embedded(3, whole=whole))
    assert notes == ["token_embd.weight q4_0 is not on CPU, as only GET_ROWS reads it"]
