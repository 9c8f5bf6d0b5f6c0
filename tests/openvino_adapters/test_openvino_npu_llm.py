"""`npu?path=llm`: a decoder that OpenVINO makes static itself gives the reference's logits; all else has a reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from here import Here
from numpy.typing import NDArray

from backends.openvino.npu import OpenVinoNpu, llm
from backends.openvino.npu.decoder import Run, UnfitError, decoder
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.tensor import Tensor, strided
from conformance.judge.verdict import Result, Verdict
from conformance.llama.captured import FAMILY as CAPTURED
from conformance.run.execute import execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite.decoder import make

TINY = "l=2,embd=32,heads=2,kv=1,ff=32,vocab=32,ctx=256"
LLM = Spec.parse("npu?path=llm&requant=none")


def _case(run: str, more: str = "") -> Case:
    return make(f"kv_growth/llama-{TINY}{more},run={run}@1")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all tests; some change the adapter."""
    r = Here()
    yield r
    r.close()


def _run(runner: Runner, case: Case, spec: Spec = LLM) -> Result:
    return runner.run(spec, [case])[0]


# -- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "more"),
    [
        ("p70.d3.p20.d2.back9.d3.p3.reset.p5.d2", ""),  # a prompt in the middle, back, and from the start
        ("d2.p9.reset.d1.p2", ""),  # one token at the start is no prompt to OpenVINO
        ("o20.d1.o11", ""),  # logits of all tokens
        ("p70.d2", ",ubatch=32,rope=neox"),
        ("p9.d2", ",write=cpy,cache=bf16"),
        ("p9.d2", ",w=q4_0,tied=1"),
        ("p9.d2", ",w=f16,freqs=1"),
    ],
)
def test_a_sequence_that_grows_and_goes_back_is_the_references(runner: Runner, run: str, more: str) -> None:
    """Prompts of any length anywhere, decoding, going back and starting again give the reference's logits."""
    result = _run(runner, _case(run, more))
    assert result.verdict is Verdict.PASS, result.sentence()
    assert result.budget_used is not None
    assert result.budget_used < 0.5
    assert result.witness is not None
    assert (result.witness["compiles"], result.witness["state"]) == (1, "NPUW_LLM")


@pytest.mark.parametrize("requant", ["npu", "none"])
def test_a_captured_sequence_passes(runner: Runner, requant: str) -> None:
    """A sequence recorded from llama.cpp passes, weights as they are and as an NPU stores them."""
    result = _run(runner, CAPTURED.build("captured/llama-fa-1seq@0"), Spec.parse(f"npu?path=llm&requant={requant}"))
    assert result.verdict is Verdict.PASS, result.sentence()


@pytest.mark.parametrize(
    ("relation", "verdict", "why"),
    [("memory", Verdict.PASS, ""), ("apart", Verdict.UNSUPPORTED, "it supports the case, but no node of it alone")],
)
def test_a_graph_is_what_it_holds_and_a_node_no_decoder(
    runner: Runner, relation: str, verdict: Verdict, why: str
) -> None:
    """A graph that is rebuilt in the memory of another is read anew; nodes apart are no whole case, and no fault."""
    case = build(f"relations/{relation}-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d3@1")
    result = _run(runner, case)
    assert result.verdict is verdict, result.detail
    assert why in result.detail


def test_names_are_never_read(runner: Runner) -> None:
    """What a leaf is follows from the ops that read it."""
    case = _case("p9.d2")
    names = itertools.count()
    for t in {t for s in case.steps for t in s.graph.tensors()} | set(case.persistent):
        t.name = f"x{next(names)}"
    assert _run(runner, case).verdict is Verdict.PASS


def test_in_float32_it_is_exact_to_rounding() -> None:
    """Nothing rounds but what the case rounds: functions folded would bring NMSE 5e-8."""
    case = _case("p40.d3", ",cache=bf16")
    (found,) = [execute(OpenVinoNpu(path="llm", requant="none"), case)]
    runner = Runner()
    want = runner.oracle.expect([case], OpenVinoNpu(requant="none").arithmetic())[0].steps
    for step, got, right in zip(case.steps, found.steps, want, strict=True):
        a, b = (v.outputs[step.outputs[0]].view(np.float32).astype(np.float64) for v in (got, right))
        assert np.sum((a - b) ** 2) / np.sum(b**2) < 1e-9
    runner.close()


# -- caches -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_said_and_not_counted(runner: Runner) -> None:
    """The result says that caches were not judged; a case that asks for nothing else checked nothing."""
    case = _case("p9.d2")
    assert "4 caches cannot be read: only outputs are judged" in _run(runner, case).detail
    blind = Case(case.id, case.persistent, [Step(s.graph, s.inputs, ()) for s in case.steps])
    result = _run(runner, blind)
    assert result.verdict is Verdict.VACUOUS
    assert "no output to check; 4 caches cannot be read" in result.detail


def test_a_cache_can_neither_be_read_nor_written() -> None:
    """Asking for it is an error, not a guess."""
    case = _case("p9.d2")
    with OpenVinoNpu(path="llm", requant="none").open(case) as session:
        assert session.opaque() == frozenset(case.caches())
        t = case.caches()[0]
        with pytest.raises(BackendError, match="does not expose"):
            session.read(t)
        with pytest.raises(BackendError, match="cannot set caches"):
            session.write(t, case.persistent[t])
        weight = next(w for w in case.persistent if w not in session.opaque())
        assert (session.read(weight) == case.persistent[weight]).all()


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "more", "why"),
    [
        ("at20.d2", "", "begins at position 20 with 0 tokens before it"),
        ("p9.d2", ",seqs=2,unified=1", "positions are not consecutive"),
        ("p9.d2", ",seqs=2", "2 streams"),
        ("p9.d2", ",fa=0", "attention by SOFT_MAX"),
        ("p9.d2", ",cache=q8_0,head=32", "log rows are float32"),
        ("d3", "", "no step has more than one token"),
    ],
)
def test_what_it_cannot_do_is_unsupported_with_the_reason(runner: Runner, run: str, more: str, why: str) -> None:
    """Nothing that the path cannot do is run, and the reason is the true one."""
    result = _run(runner, _case(run, more))
    assert result.verdict is Verdict.UNSUPPORTED, result.sentence()
    assert why in result.detail


def _leaf(case: Case, k: int, name: str) -> tuple[Step, Tensor]:
    step = case.steps[k]
    return step, next(t for t in step.inputs if t.name == name)


def test_a_mask_that_is_not_causal_is_refused(runner: Runner) -> None:
    """OpenVINO makes its own mask, so another one must not be run with it."""
    case = _case("p9.d2")
    step, mask = _leaf(case, 1, "attn_inp_kq_mask")
    step.inputs[mask] = step.inputs[mask].copy()
    strided(step.inputs[mask], mask)[0, 0, 0, 3] = -np.inf
    assert "the mask is not causal" in _run(runner, case).detail


def test_a_decoder_that_changes_on_the_way_is_refused(runner: Runner) -> None:
    """Two steps that differ in one parameter are two decoders."""
    case = _case("p9.d2")
    norm = next(n for n in case.steps[2].graph if n.op == "RMS_NORM")
    norm.op_params = (norm.op_params[0] + 1, *norm.op_params[1:])
    assert "steps differ in more than the number of tokens" in _run(runner, case).detail


def test_an_output_inside_is_refused(runner: Runner) -> None:
    """Only logits come out."""
    case = _case("p9.d2")
    s = case.steps[1]
    inner = next(n for n in s.graph if n.op == "ROPE")
    case.steps[1] = Step(s.graph, s.inputs, (inner,))
    assert "NPUW_LLM returns only logits" in _run(runner, case).detail


def test_another_graph_than_the_cases_is_an_error() -> None:
    """A session runs what it was opened for."""
    case, other = _case("p9.d2"), _case("p7.d2")
    with OpenVinoNpu(path="llm", requant="none").open(case) as session, pytest.raises(UnfitError):
        session.compute(other.steps[0].graph, other.steps[0].inputs, other.steps[0].outputs)


def test_a_single_op_is_no_decoder() -> None:
    """It has no token ids and no cache."""
    case = _case("p9.d2")
    graph = type(case.steps[0].graph)(case.steps[0].graph.nodes[:1])
    with pytest.raises(UnfitError):
        decoder(graph, {}, (), set())


def test_more_than_the_model_was_made_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence beyond the capacity is an error with its numbers, never a wrong number."""
    monkeypatch.setattr("backends.openvino.npu.llm.sizes_for", lambda *_: (64, 128))
    with pytest.raises(BackendError, match="prompts of 64 tokens and for 120 in all"):
        execute(OpenVinoNpu(path="llm", requant="none"), _case("p60.p61"))


@pytest.mark.parametrize(("path", "stage"), [("dynamic", "run"), ("llm", "translate")])
def test_odd_options_are_refused(path: str, stage: str) -> None:
    """A path there is not, and a stage that this one has not."""
    with pytest.raises(UsageError, match="path"):
        OpenVinoNpu(path=path, stage=stage)


# -- planted faults ---------------------------------------------------------------------------------------------------


def _ahead(first: int, end: int) -> NDArray[np.int64]:
    return np.arange(first, end, dtype=np.int64) + (first > 0)


def test_a_position_off_by_one_fails(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the path shows in the logits, though nobody sees the caches."""
    monkeypatch.setattr(llm.Machine, "positions", staticmethod(_ahead))
    result = _run(runner, _case("p20.d3"))
    assert result.verdict is Verdict.FAIL, result.sentence()
    assert "step 1: MUL_MAT" in result.detail


def test_cells_left_behind_and_seen_again_fail(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's own mask keeps what a shorter one does not overwrite: going back shows it."""
    run = llm.Machine._run  # the fault is planted inside

    def short(self: Any, step: Run, at: int, end: int, mask: NDArray[np.int64], found: Any) -> None:  # noqa: ANN401  # as it is
        run(self, step, at, end, mask[: step.first + end] if step.first else mask, found)

    case = _case("p20.d5.back5.d2")
    monkeypatch.setattr(llm.Machine, "_run", short)
    assert _run(runner, case).verdict is Verdict.FAIL


# -- in a process of its own ------------------------------------------------------------------------------------------


def test_isolated_it_refuses_the_same_and_hides_the_same() -> None:
    """What only the whole case tells, and which caches cannot be read, travel from the other process."""
    backend = open_backend(LLM)
    try:
        assert "begins at position 20" in backend.supports_case(_case("at20.d2")).reason
        case = _case("p9.d2")
        assert backend.supports_case(case)
        found = execute(backend, case)
        assert found.opaque == frozenset(case.caches())
        for got, right in zip(found.steps, execute(OpenVinoNpu(path="llm", requant="none"), case).steps, strict=True):
            assert all((got.outputs[t] == data).all() for t, data in right.outputs.items())
    finally:
        backend.close()
