"""Each thing that the witness of an OpenVINO session says is what an independent look finds."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import conformance.backend.measure
from backends.openvino import OpenVinoStateless
from backends.openvino.compile import Compiler
from backends.openvino.state import OpenVinoStateful
from conformance.backend.interface import Session, Witness
from conformance.case.case import Case, Step
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import computes, nbytes, nelements, new_tensor
from conformance.ggml.types import F32, Q4_0
from conformance.suite.decoder import make

B = Builder()
MODEL = "l=2,embd=64,heads=2,kv=1,ff=64,vocab=64,w=q4_0"
WORD = 4
"""Bytes of a float32."""
BLOCK = 20
"""Bytes that a block of Q4_0 is stored as: 32 quants of 4 bits and a float32 scale."""


def _case(run: str, more: str = "fa=1") -> Case:
    return make(f"kv_growth/llama-{MODEL},{more},run={run}@1")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every model that is compiled from now on."""
    found: list[Any] = []
    own = Compiler.model

    def watched(self: Compiler, model: Any, *, served: bool = True) -> Any:  # noqa: ANN401  # openvino's have no types
        found.append(own(self, model, served=served))
        return found[-1]

    monkeypatch.setattr(Compiler, "model", watched)
    return found


def _steps(session: Session, case: Case) -> list[Witness]:
    """The witness after each step."""
    out = []
    for step in case.steps:
        session.compute(step.graph, step.inputs, step.outputs)
        out.append(deepcopy(session.witness()))  # a session has one, which goes on counting
    return out


def _n_kv(step: Step) -> int:
    """Cells that the step's attention looks at."""
    return next(n.src[1].ne[1] for n in step.graph if n.op == "FLASH_ATTN_EXT" and n.src[1] is not None)


@pytest.mark.parametrize("ov", [OpenVinoStateless, OpenVinoStateful])
def test_compiles_and_hits_are_what_was_compiled_and_what_was_not(
    compiled: list[Any], ov: type[OpenVinoStateless]
) -> None:
    """After each step: as many compiles as models were made; all other steps are hits; the path says which it was."""
    case = _case("p3.d2.p5.d2.p250.d3")
    with ov().open(case) as session:
        before = 0
        for k, step in enumerate(case.steps):
            session.compute(step.graph, step.inputs, step.outputs)
            w = session.witness()
            assert w.compiles == len(compiled)
            assert w.compiles + w.cache_hits == k + 1
            assert w.path == ("translated" if len(compiled) > before else "cached")
            before = len(compiled)


@pytest.mark.parametrize("ov", [OpenVinoStateless, OpenVinoStateful])
def test_nodes_device_and_layers_are_openvinos_own(compiled: list[Any], ov: type[OpenVinoStateless]) -> None:
    """Nodes counted from the graphs, device and layer types from the compiled models; an RMS or ROPE is a layer."""
    case = _case("p3.d2")
    with ov().open(case) as session:
        w = _steps(session, case)[-1]
    assert w.nodes == sum(computes(n) for step in case.steps for n in step.graph)
    assert w.device == ", ".join(sorted({d for m in compiled for d in m.get_property("EXECUTION_DEVICES")}))
    own = Counter(
        n.get_rt_info()["layerType"].astype(str) for m in compiled for n in m.get_runtime_model().get_ordered_ops()
    )
    assert w.kernels == own
    ops = Counter(n.op for n in case.steps[0].graph)
    assert (w.kernels["RMS"], w.kernels["RoPE"]) == (len(compiled) * ops["RMS_NORM"], len(compiled) * ops["ROPE"])
    attentions = len(compiled) * ops["FLASH_ATTN_EXT"]
    assert w.kernels.get("ScaledDotProductAttention", 0) == (attentions if ov is OpenVinoStateful else 0)


def test_the_template_is_the_graph_but_for_its_sizes() -> None:
    """One for all decode steps, another for prompts and for a graph with one op_param changed; none of it by name."""
    case, renamed, other = _case("p3.d2.p5.d1"), _case("p3.d2.p5.d1"), _case("p3.d2.p5.d1")
    for t in {t for step in renamed.steps for t in step.graph.tensors()}:
        t.name = "x"
    for step in other.steps:
        for n in step.graph:
            if n.op == "ROPE":
                n.op_params = (*n.op_params[:5], int(np.float32(20000.0).view(np.int32)), *n.op_params[6:])
    found = []
    for c in (case, renamed, other):
        with OpenVinoStateless().open(c) as session:
            found.append([w.template for w in _steps(session, c)])
    own, _, another = found
    assert own == [own[0], own[1], own[1], own[0], own[1]]
    assert own[0] != own[1]
    assert found[1] == own
    assert not set(own) & set(another)


def test_symbols_are_the_sizes_of_the_last_step() -> None:
    """None before two graphs of a template differ; then n_kv of the step is among them, and changes with it."""
    case = _case("at250.d12")
    with OpenVinoStateless().open(case) as session:
        witnesses = _steps(session, case)
    sizes = [_n_kv(step) for step in case.steps]
    assert len(set(sizes)) > 1
    for size, w in zip(sizes, witnesses, strict=True):
        assert (size in w.symbols.values()) if size != sizes[0] else not w.symbols


def test_views_are_counted_by_how_they_were_read() -> None:
    """A view along its parent's dimensions is a slice; one with strides that are not multiples of them is a gather."""
    a = new_tensor(F32, 12, 6)
    along = B.cont(B.view_2d(a, 4, 5, a.nb[1], 2 * WORD))
    across = B.cont(B.view_2d(a, 3, 9, 7 * WORD, WORD))
    seen = []
    for outs in ((along,), (across,), (along, across)):
        graph = B.build_forward_expand(*outs)
        step = Step(graph, {a: np.arange(72, dtype=np.float32).view(np.uint8)}, outs)
        with OpenVinoStateless().open(Case("views", {}, [step])) as session:
            seen.append(_steps(session, Case("views", {}, [step]))[0].views)
    assert seen == [{"slice": 1}, {"gather": 1}, {"gather": 1, "slice": 1}]


@pytest.mark.parametrize(
    ("ov", "more", "state"),
    [
        (OpenVinoStateless, "fa=1", "bound"),
        (OpenVinoStateless, "fa=0", "bound"),
        (OpenVinoStateful, "fa=1", "fused"),
        (OpenVinoStateful, "fa=0", "slots"),
    ],
)
def test_the_state_is_where_the_caches_are(
    compiled: list[Any], ov: type[OpenVinoStateless], more: str, state: str
) -> None:
    """Variables in the model or none; fused ones feed the attention kernel."""
    case = _case("p3.d2", more)
    with ov().open(case) as session:
        w = _steps(session, case)[-1]
    assert w.state == state
    variables = {len(m.create_infer_request().query_state()) for m in compiled}
    assert all(bool(n) == (state != "bound") for n in variables)
    assert ("ScaledDotProductAttention" in w.kernels) == (state == "fused")


def test_bytes_are_those_of_the_weights() -> None:
    """Encoded once, 20 bytes for 32 weights; a constant and a packed copy of each in every model that multiplies."""
    w = new_tensor(Q4_0, 256, 64)
    steps = []
    for n in (2, 3, 5):
        x = new_tensor(F32, 256, n)
        graph = B.build_forward_expand(out := B.mul_mat(w, x))
        steps.append(Step(graph, {x: np.ones(256 * n, np.float32).view(np.uint8)}, (out,)))
    case = Case("bytes", {w: np.zeros(nbytes(w), np.uint8)}, steps)
    held = nelements(w) // 32 * BLOCK
    with OpenVinoStateless().open(case) as session:
        found = _steps(session, case)
    assert [f.bytes["weights"] for f in found] == [held] * 3
    assert [f.compiles for f in found] == [1, 2, 2]
    for f in found:
        # besides, each model has a few sizes and axes
        assert f.compiles * held <= f.bytes["constants"] <= f.compiles * (held + 256)
        assert f.bytes["packed copies"] == f.compiles * held


def test_the_peak_is_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a compile touches and gives back is seen; what a step takes without compiling is not."""
    if conformance.backend.measure.resident() is None:
        pytest.skip("this system does not tell")
    own, size = Compiler.model, 96 << 20

    def greedy(self: Compiler, model: Any, *, served: bool = True) -> Any:  # noqa: ANN401  # as above
        touched = np.ones(size, np.uint8)
        del touched
        return own(self, model, served=served)

    case = _case("p3")
    with OpenVinoStateless().open(case) as session:
        plain = _steps(session, case)[0].peak_compile_bytes
    monkeypatch.setattr(Compiler, "model", greedy)
    with OpenVinoStateless().open(case) as session:
        peak = _steps(session, case)[0].peak_compile_bytes
    assert plain is None or plain < size
    assert peak is not None
    assert size * 0.9 <= peak <= size * 1.5
