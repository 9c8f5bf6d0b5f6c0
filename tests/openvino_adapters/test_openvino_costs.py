"""Costs that the OpenVINO backends promise: kept as they are, missed with a fault that costs time only."""

from __future__ import annotations

from contextlib import closing

import pytest
from trust.copies import load
from trust.faults import FOLDER, read

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, create
from conformance.run.execute import execute
from conformance.run.judgement import unmet
from conformance.run.session.select import build

BLOCKS = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,ctx=768,run=at200.p9.p20.d1.p250.d1.p240.d1@1"
SINKS = BLOCKS.replace("llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32", "gpt-oss-l=2,embd=32,ff=32,vocab=32")
RAGGED = (
    "multi_sequence/llama-l=1,embd=32,heads=4,kv=2,head=16,ff=32,vocab=32,seqs=4,ctx=256,unified=0,fa=0,"
    "run=p3+5+2+4.p1+0+2+0.p0+3+0+0.p2+0+0+1@1"
)
IN_TURN = "alias/differs=eps,of=decoder@1"
NAMES = ("openvino-stateless", "openvino-stateful", "npu")
WHERE = {
    "ov-state-given-back": (
        "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,seqs=3,unified=1,run=at84.d4.rm1.d3@1"
    ),
    "ov-weights-unpacked": "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,head=32,w=q4_0,run=at9.d2@1",
    "ov-multiple-of-constant": (
        "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,seqs=4,write=cpy,fa=0,run=at253.p2+3+1+4.d3@1"
    ),
}
"""Fault -> the trajectory that shows it, where that is another."""
FAULTS = {f.name: f for f in read([FOLDER / "costs.toml"]) if "kv_growth" in f.families}


def cost(backend: Backend, spec: Spec, case_id: str = BLOCKS) -> str:
    """What a trajectory (default: three blocks of cells) says of its cost, in words; empty where nothing is wrong."""
    case = build(case_id)
    with closing(backend):
        return unmet(case, spec, execute(backend, case).witness)


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("openvino-stateless", {"appends", "packs", "layers", "lifts"}),
        ("openvino-stateful", {"fuses", "resumes", "packs", "layers", "lifts"}),
        ("npu", {"static"}),
    ],
)
def test_each_declares_what_it_is_judged_by(name: str, declared: set[str]) -> None:
    """An ability that is no longer declared would no longer be demanded."""
    pytest.importorskip("openvino")
    with closing(create(Spec(name))) as backend, backend.open(build(BLOCKS)) as session:
        assert set(session.witness().promises) == declared


@pytest.mark.parametrize("name", NAMES)
def test_promises_are_kept(name: str) -> None:
    """Trajectories cost what they are entitled to, also with what an earlier session compiled and packed."""
    pytest.importorskip("openvino")
    spec = Spec(name)
    for case_id in (BLOCKS, *WHERE.values()):
        case = build(case_id)
        with closing(create(spec)) as backend:
            for _ in range(2):
                assert not unmet(case, spec, execute(backend, case).witness), case_id


@pytest.mark.parametrize(
    ("name", "case_id"),
    [(n, c) for n in NAMES for c in (SINKS, RAGGED, IN_TURN) if (n, c) != ("npu", RAGGED)],
)
def test_other_trajectories_are_entitled_to_what_they_cost(name: str, case_id: str) -> None:
    """Sinks, two masks that grow apart, two tokens beside two KV heads, and two decoders in turn."""
    pytest.importorskip("openvino")
    spec = Spec(name)
    assert not cost(create(spec), spec, case_id)


def test_the_npu_refuses_what_it_has_no_price_for() -> None:
    """Sequences of different lengths, each in a stream of its own."""
    pytest.importorskip("openvino")
    case = build(RAGGED)
    answers = [bool(s) for step in case.steps for s in create(Spec("npu")).supports(step.graph)]
    assert not (all(answers) and create(Spec("npu")).supports_case(case))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_cost_alone_is_seen(name: str) -> None:
    """Nothing is wrong with its numbers; the witness misses the demand."""
    pytest.importorskip("openvino")
    fault = FAULTS[name]
    assert "the case demands" in cost(load(fault), fault.spec, WHERE.get(name, BLOCKS))


@pytest.mark.parametrize("text", ["openvino-stateless?dynamic=off", "openvino-stateful?dynamic=off"])
def test_who_promises_nothing_is_not_charged(text: str) -> None:
    """A user who switches lifting off gets a program for each size, and no verdict for it."""
    pytest.importorskip("openvino")
    spec = Spec.parse(text)
    backend = create(spec)
    with backend.open(build(BLOCKS)) as session:
        assert "lifts" not in session.witness().promises
    assert not cost(backend, spec)
