"""The `npu` adapter: chunks of tokens and padded caches give what whole graphs give; what it refuses has a reason."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.openvino import OpenVinoStateless
from backends.openvino.axes import FixedError
from backends.openvino.npu import OpenVinoNpu
from backends.openvino.npu.axes import follow
from backends.openvino.npu.chunks import indexed, sized
from backends.openvino.npu.compile import NpuCompiler, npu_compiler
from backends.openvino.state import OpenVinoStateful
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT, GGML_CPU, requantising
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import nbytes, new_tensor
from conformance.ggml.types import F16, F32, I32, I64, Q3_K, Q8_0
from conformance.llama.captured import FAMILY as CAPTURED
from conformance.run import recorded
from conformance.run.execute import StepValues, execute
from conformance.suite.decoder import make

openvino: Any = importlib.import_module("openvino")  # after the adapter, which keeps its telemetry from the network
o: Any = importlib.import_module("openvino.opset15")
B = Builder()
TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,cache=f32"


@pytest.fixture(scope="module")
def npu() -> OpenVinoNpu:
    """Small chunks, weights as they are."""
    return OpenVinoNpu(chunk="16", requant="none")


def _case(run: str, more: str = "", ctx: int = 96) -> Case:
    return make(f"kv_growth/llama-{TINY},ctx={ctx}{more},run={run}@1")


def _close(case: Case, found: list[StepValues], expected: list[StepValues]) -> None:
    for k, (got, want) in enumerate(zip(found, expected, strict=True)):
        for t, data in {**want.outputs, **want.caches}.items():
            a, b = ({**v.outputs, **v.caches}[t].view(t.type.dtype or "<u2") for v in (got, want))
            assert np.allclose(a, b, rtol=1e-4, atol=1e-5), f"{case.id} step {k}: {t}"
            assert data.any() or not b.any()


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", ",fa=0", ",write=cpy", ",fa=0,write=cpy", ",rope=neox,mixed=0"])
def test_a_prompt_in_chunks_is_the_whole_prompt(npu: OpenVinoNpu, more: str) -> None:
    """Chunks of 16, the last one not full, leave the logits and every byte of the caches that the reference leaves."""
    case = _case("p40.d2.p16.p17", more)
    ran = execute(npu, case)
    _close(case, ran.steps, execute(CpuBackend(), case).steps)
    assert ran.witness.compiles == 2
    assert not any("own size" in note for note in ran.witness.notes)


@pytest.mark.parametrize(("run", "more"), [("o20", ""), ("o20", ",fa=0"), ("o9", ""), ("o9", ",fa=0")])
def test_every_node_of_a_prompt_is_put_together_again(npu: OpenVinoNpu, run: str, more: str) -> None:
    """Values along tokens, cells and picked outputs are those of the whole graph, node by node.

    Scores before the mask meet cells that a later chunk fills; a graph that is asked for them runs whole.
    """
    case = _case(run, more)
    every = (0,)
    got, want = (execute(b, case, every_node=every).steps for b in (npu, CpuBackend()))
    assert len(got[0].outputs) > 20
    _close(case, got, want)


def test_picked_outputs_may_lie_in_any_chunk(npu: OpenVinoNpu) -> None:
    """Logits of tokens in different chunks come back in the order asked for, also where a chunk has none."""
    case = _case("p8.rm0.add0.p5+40+9", ",seqs=3,unified=1")
    assert max(s.outputs[0].ne[1] for s in case.steps) > 1
    _close(case, execute(npu, case).steps, execute(CpuBackend(), case).steps)


def test_one_model_decodes_at_every_length() -> None:
    """n_kv crosses 256 and 512: one model for prompts, one for single tokens, whatever the caches' windows are."""
    case = make("kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,ctx=768,run=p250.d10.p248.d8@1")
    assert len({n.ne for s in case.steps for n in s.graph if n.op == "FLASH_ATTN_EXT"}) > 1
    backend = OpenVinoNpu()
    w = execute(backend, case).witness
    assert (w.compiles, w.cache_hits) == (2, len(case.steps) - 2)


def test_a_token_that_sees_the_next_chunk_is_not_chunked(npu: OpenVinoNpu) -> None:
    """Without causality an early token needs late cells, so the graph runs whole; the numbers are right."""
    case = _case("p40")
    (mask,) = [t for t in case.steps[0].inputs if t.name == "attn_inp_kq_mask"]
    case.steps[0].inputs[mask] = np.zeros(nbytes(mask), np.uint8)
    ran = execute(npu, case)
    assert any("later tokens" in note for note in ran.witness.notes)
    _close(case, ran.steps, execute(CpuBackend(), case).steps)


def test_cells_that_no_mask_can_hide_are_not_padded(npu: OpenVinoNpu) -> None:
    """NaN in a cell beyond the graph's would reach every sum; the graph runs at its own size."""
    case = _case("p3", ctx=512)
    for t in case.caches():
        case.persistent[t].view(np.float32).reshape(t.shape)[..., 400, :] = np.nan
    ran = execute(npu, case)
    assert any("no mask hides" in note for note in ran.witness.notes)
    (logits,) = case.steps[0].outputs
    assert np.isfinite(ran.steps[0].outputs[logits].view(np.float32)).all()


def test_a_graph_at_its_own_size_is_itself() -> None:
    """Where every span is as long as its slots, what is made is what llama.cpp made."""
    case = _case("p16")
    graph = case.steps[0].graph
    small = sized(graph, follow(graph, case.persistent.keys(), 16))
    for t, twin in small.twin.items():
        assert (t.op, t.ne, t.view_offs) == (twin.op, twin.ne, twin.view_offs)
        assert twin is t or t not in case.persistent


def test_names_are_never_read() -> None:
    """A graph whose tensors all have one name gets the same axes."""
    case = _case("p20", ",fa=0")
    graph, persistent = case.steps[0].graph, case.persistent.keys()
    before = list(follow(graph, persistent, 16).axes.values())
    for t in graph.tensors():
        t.name = "x"
    assert list(follow(graph, persistent, 16).axes.values()) == before


@pytest.mark.parametrize("op", ["SUM_ROWS", "CUMSUM", "MEAN"])
def test_an_op_that_mixes_tokens_is_not_chunked(op: str) -> None:
    """A node that runs along tokens makes the graph keep its size; the reason names it."""
    case = _case("p20")
    graph = case.steps[0].graph
    rows = next(n for n in graph if n.op == "RMS_NORM")
    along = B.cont(B.transpose(rows))
    mixed = B.sum_rows(along) if op == "SUM_ROWS" else B.cumsum(along) if op == "CUMSUM" else B.mean(along)
    for t in (along, mixed):
        t.flags |= 16
    view = along.src[0]
    assert view is not None
    with pytest.raises(FixedError, match=op):
        follow(Graph([*graph, view, along, mixed]), case.persistent.keys(), 16)


def test_tokens_that_meet_tokens_are_not_chunked() -> None:
    """A chunk has only its own; the products with the others would be missing."""
    case = _case("p20")
    rows = next(n for n in case.steps[0].graph if n.op == "RMS_NORM")
    scores = B.mul_mat(rows, rows)
    scores.flags |= 16
    with pytest.raises(FixedError, match="all tokens with all tokens"):
        follow(Graph([*case.steps[0].graph, scores]), case.persistent.keys(), 16)


def test_a_cache_read_past_the_masks_is_not_chunked() -> None:
    """Nothing would keep an early chunk from what a later one writes."""
    case = _case("p20")
    cache = next(iter(case.caches()))
    total = B.sum_rows(cache)
    total.flags |= 16
    with pytest.raises(FixedError, match="without a mask"):
        follow(Graph([*case.steps[0].graph, total]), case.persistent.keys(), 16)


def test_a_store_that_no_token_makes_is_not_repeated() -> None:
    """Computed once per chunk it would be done more than once."""
    case = _case("p20")
    cache = next(iter(case.caches()))
    rows, ids = new_tensor(F32, cache.ne[0], 2), new_tensor(I64, 2)
    again = B.set_rows(cache, rows, ids)
    again.flags |= 16
    with pytest.raises(FixedError, match="do not depend on the tokens"):
        follow(Graph([*case.steps[0].graph, again]), case.persistent.keys(), 16)


def test_a_single_op_runs_as_it_is(npu: OpenVinoNpu) -> None:
    """No attention, no tokens: one static model, as wide as the graph."""
    a, w = new_tensor(F32, 8, 40), new_tensor(F32, 8, 3)
    node = B.mul_mat(w, a)
    node.flags |= 16
    rng = np.random.default_rng(0)
    inputs = {t: rng.standard_normal(nbytes(t) // 4).astype(np.float32).view(np.uint8) for t in (a, w)}
    case = Case("x/y@0", {}, [Step(Graph([node]), inputs, (node,))])
    ran = execute(npu, case)
    assert any("own size" in note for note in ran.witness.notes)
    _close(case, ran.steps, execute(CpuBackend(), case).steps)


# -- stores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fa", ["", ",fa=0"])
def test_a_copy_into_a_window_stores_the_same_bytes_as_rows(fa: str) -> None:
    """CPY into rows, and CPY of a transpose into columns, become SET_ROWS that leave the same caches."""
    case = _case("p5.d1", f",write=cpy{fa}")
    cpu = CpuBackend()
    steps = []
    for s in case.steps:
        graph, rows = indexed(s.graph, case.persistent.keys())
        assert len(rows) == 2
        assert not any(n.op == "CPY" and n.view_src in case.persistent for n in graph)
        graph.validate()
        steps.append(replace(s, graph=graph, inputs={**s.inputs, **rows}))
    _close(case, execute(cpu, replace(case, steps=steps)).steps, execute(cpu, case).steps)


def test_a_copy_whose_result_is_read_is_left_alone() -> None:
    """Whoever reads the window reads it in its own shape."""
    cache, x = new_tensor(F16, 4, 8), new_tensor(F32, 8)
    copy = B.cpy(x, B.view_1d(cache, 8, 8))
    window = copy.src[1]
    assert window is not None
    graph = Graph([window, copy, B.cont(copy)])
    assert indexed(graph, {cache}) == (graph, {})


# -- refusals ---------------------------------------------------------------------------------------------------------


def _refusals(backend: OpenVinoNpu, case: Case) -> set[str]:
    return {s.reason for step in case.steps for s in backend.supports(step.graph) if not s}


def test_several_streams_are_refused(npu: OpenVinoNpu) -> None:
    """Structure says how many sequences the cache holds, with flash attention and without; one stream is fine."""
    for more in (",seqs=4", ",seqs=4,fa=0"):
        assert any("4 streams" in r for r in _refusals(npu, _case("p3.d1", more)))
    assert any("4 streams" in r for r in _refusals(npu, CAPTURED.build("captured/llama-fa-4seq-streams@0")))
    assert not _refusals(npu, _case("p3.d1", ",seqs=4,unified=1"))


def test_large_batches_are_refused(npu: OpenVinoNpu) -> None:
    """More than 512 tokens in one graph; 512 are taken."""
    many = ",ubatch=1024"
    assert any("513 tokens" in r for r in _refusals(npu, _case("p513", many, 1024)))
    assert not _refusals(npu, _case("p512", many, 1024))


@pytest.mark.parametrize("spec", ["npu", "stateless", "stateful"])
def test_a_cache_that_is_read_as_a_weight_is_refused(spec: str) -> None:
    """It would be requantised each time; what was overwritten in a type that only the host reads is refused as well."""
    make: dict[str, Any] = {"npu": OpenVinoNpu, "stateless": OpenVinoStateless, "stateful": OpenVinoStateful}
    for type_, more, why in (
        (Q8_0, {"requant": "npu"}, "requantised each time"),
        (Q8_0, {"requant": "none"}, ""),
        (Q3_K, {"requant": "none"}, "of the same graph wrote"),
    ):
        cache, x, ids = new_tensor(type_, 256, 4), new_tensor(type_, 256, 2), new_tensor(I32, 2)
        graph = B.build_forward_expand(B.cpy(x, B.view_2d(cache, 256, 2, cache.nb[1], 0)), B.get_rows(cache, ids))
        reasons = [s.reason for s in make[spec](**more).supports(graph) if not s]
        assert len(reasons) == bool(why)
        assert all(why in reason for reason in reasons)


@pytest.mark.parametrize("row", [-1, 96])
def test_a_cell_beyond_the_cache_is_an_error(npu: OpenVinoNpu, row: int) -> None:
    """Never a wrong number: the message names the capacity."""
    case = _case("p3")
    (ids,) = [t for t in case.steps[0].inputs if t.name == "attn_inp_k_idxs"]
    case.steps[0].inputs[ids] = np.array([0, 1, row], np.int64).view(np.uint8)
    with pytest.raises(BackendError, match="of 96: the context is over its capacity"):
        execute(npu, case)


@pytest.mark.parametrize("chunk", ["1", "0", "x", "-3", "5000"])
def test_odd_chunks_are_refused(chunk: str) -> None:
    """The message says what is legal."""
    with pytest.raises(UsageError, match=r"from 2 to 4096 expected"):
        OpenVinoNpu(chunk=chunk)


def test_unknown_modes_are_refused() -> None:
    """As every adapter does."""
    with pytest.raises(UsageError, match="requant"):
        OpenVinoNpu(requant="q2")


def test_without_the_plugin_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OpenVINO built without NPU support, on a machine without an NPU: the reason and what is here."""

    class Core:
        available_devices = ("CPU", "GPU.0")

        def get_versions(self, device: str) -> Mapping[str, object]:
            msg = f"Device with {device} name is not registered in the OpenVINO Runtime"
            raise RuntimeError(msg)

    monkeypatch.setattr("backends.openvino.npu.compile.openvino_core", lambda _: (openvino, Core()))
    with pytest.raises(UnavailableError, match=r"not registered .*devices found: CPU, GPU\.0"):
        npu_compiler()


def test_on_a_machine_with_an_npu_it_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is asked of the wrapper."""
    asked: list[tuple[str, Mapping[str, str]]] = []

    class Core:
        available_devices = ("CPU", "NPU")

        def compile_model(self, model: object, device: str, properties: Mapping[str, str]) -> object:
            asked.append((device, properties))
            return model

    monkeypatch.setattr("backends.openvino.npu.compile.openvino_core", lambda _: (openvino, Core()))
    x = o.parameter([2], openvino.Type.f32)
    c = npu_compiler()
    c.compiled([o.result(o.exp(x))], [x])
    assert asked == [("NPU", {})]
    assert c.label() == "NPU"


# -- what really runs -------------------------------------------------------------------------------------------------


def test_the_witness_says_what_ran_and_what_it_calls_itself(npu: OpenVinoNpu) -> None:
    """EXECUTION_DEVICES says NPU although the CPU ran."""
    if "NPU" in openvino.Core().available_devices:
        pytest.skip("there is an NPU here")
    w = execute(npu, _case("p3")).witness
    assert w.device == "CPU through the NPU plugin's wrapper"
    assert "EXECUTION_DEVICES says NPU" in w.notes
    info = npu.info()
    assert info.device == w.device
    assert "no NPU on this machine" in info.description
    assert "openvino NPU" in info.versions


def test_stage_translate_compiles_nothing() -> None:
    """The same static graphs, interpreted."""
    case = _case("p20.d1")
    ran = execute(OpenVinoNpu(chunk="16", requant="none", stage="translate"), case)
    assert (ran.witness.stage, ran.witness.compiles) == ("translate", 0)
    _close(case, ran.steps, execute(CpuBackend(), case).steps)


def _twice_and_moved() -> tuple[list[Any], list[Any]]:
    x, y = o.parameter([2, 3], openvino.Type.f32), o.parameter([4], openvino.Type.f32)
    shape = o.constant(np.array([6], np.int64))
    e = o.exp(x)
    outs = [e, o.reshape(e, shape, False), x, o.convert(y, openvino.Type.i32)]
    return [o.result(v) for v in outs], [x, y]


@pytest.fixture(scope="module")
def compiled() -> NpuCompiler:
    """The compiler that the adapter takes."""
    return npu_compiler()


def test_inputs_and_repeated_values_come_back(compiled: NpuCompiler) -> None:
    """Results that the wrapper cannot give, an input and a value twice, are right whether bound or not."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = np.array([1.5, -2.5, 3, 4], np.float32)
    request = compiled.compiled(*_twice_and_moved()).create_infer_request()
    bound = openvino.Tensor(np.zeros(6, np.float32))
    request.set_output_tensor(1, bound)
    request.set_input_tensor(0, openvino.Tensor(x))
    request.set_input_tensor(1, openvino.Tensor(y))
    request.infer()
    found: list[NDArray[Any]] = [request.get_output_tensor(i).data for i in range(4)]
    assert np.allclose(found[0], np.exp(x))
    assert np.array_equal(found[1], found[0].reshape(6))
    assert np.array_equal(bound.data, found[1])
    assert np.array_equal(found[2], x)
    assert np.array_equal(found[3], y.astype(np.int32))


def test_a_requantised_capture_is_held_against_the_same_weights() -> None:
    """Q4_0 in groups of 128 is far from the recording and near to the reference that stores weights so."""
    case = CAPTURED.build("captured/llama-fa-1seq@0")
    case = replace(case, steps=case.steps[:2])
    backend = OpenVinoNpu()
    ran = execute(backend, case).steps
    reference = CpuBackend().computing_in(backend.arithmetic())
    right = execute(reference, case).steps
    for k, (got, want) in enumerate(zip(ran, right, strict=True)):
        (logits,) = case.steps[k].outputs
        a, b, r = (
            v.view(np.float32) for v in (got.outputs[logits], want.outputs[logits], case.steps[k].expected[logits])
        )
        assert np.sum((a - b) ** 2) < 1e-6 * np.sum(b**2)
        assert np.sum((a - r) ** 2) > 1e-3 * np.sum(r**2)


def test_a_recording_judges_only_its_own_weights() -> None:
    """What ran with other weights is held against the reference with the same ones."""
    case = CAPTURED.build("captured/llama-fa-1seq@0")
    assert recorded.judges(case, EXACT)
    assert recorded.judges(case, GGML_CPU)
    assert not recorded.judges(case, requantising("npu"))


@pytest.mark.parametrize(("mode", "nmse"), [("npu", 5e-2), ("channel8", 1e-3)])
@pytest.mark.parametrize("name", ["llama-fa-1seq", "llama-fa-4seq-streams"])
def test_a_recording_still_bounds_what_other_weights_may_do(name: str, mode: str, nmse: float) -> None:
    """The weights that the reference requantises give the recorded model's logits and caches, but for coarser steps.

    Measured: at most 1.4e-2 with `npu`, 2.1e-4 with `channel8`. So what a requantising backend is held against is
    itself held against real ggml.
    """
    case = CAPTURED.build(f"captured/{name}@0")
    for step, got in zip(case.steps, execute(CpuBackend().computing_in(requantising(mode)), case).steps, strict=True):
        for t, data in {**got.outputs, **got.caches}.items():
            if t.type.dtype is not None and t in step.expected:
                a, b = (x.view(t.type.dtype).astype(np.float64) for x in (data, step.expected[t]))
                assert np.sum((a - b) ** 2) <= nmse * np.sum(b**2), t


# -- GPU --------------------------------------------------------------------------------------------------------------


def test_an_absent_gpu_is_unavailable_with_the_reason() -> None:
    """The same adapter takes `device=GPU`; without one it says what is here."""
    here = openvino.Core().available_devices
    if any(d.startswith("GPU") for d in here):
        assert OpenVinoStateless(device="GPU").info().device == "GPU"
        return
    with pytest.raises(UnavailableError, match=r"device 'GPU' is not here; devices found: .*CPU"):
        OpenVinoStateless(device="GPU")


def test_nothing_of_the_cpu_is_asked_of_another_device() -> None:
    """Properties that only the CPU plugin knows stay with it; precision is asked of whichever device it is."""
    from backends.openvino.compile import PROPERTIES, UNFUSED, Compiler  # noqa: PLC0415  # for this test alone

    asked: list[tuple[str, Mapping[str, object]]] = []
    core = SimpleNamespace(compile_model=lambda _, device, properties: asked.append((device, dict(properties))))
    for device in ("GPU", "GPU.1", "CPU"):
        Compiler(openvino, core, device, PROPERTIES["accuracy"]).model(None, served=False)
    assert [d for d, _ in asked] == ["GPU", "GPU.1", "CPU"]
    assert [UNFUSED.items() <= p.items() for _, p in asked] == [False, False, True]
    assert all(p["EXECUTION_MODE_HINT"] == "ACCURACY" for _, p in asked)
