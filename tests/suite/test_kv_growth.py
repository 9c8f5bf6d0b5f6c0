"""The family `kv_growth`: what its cases do, that right backends pass them, and that faults do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import EXACT, GGML_CPU
from conformance.ggml.tensor import f32_bits, strided
from conformance.judge.judge import Chain, Judged, judge_trajectory
from conformance.judge.verdict import Result, Verdict
from conformance.run import judgement, locate
from conformance.run.execute import Execution, StepValues, execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.suite import LEVELS
from conformance.suite.decoders import KV_GROWTH as FAMILY

_TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"


def _case(keys: str, run: str, seed: int = 1) -> Case:
    return FAMILY.build(f"kv_growth/llama-{keys},run={run}@{seed}")


def _imitating() -> Backend:
    return open_backend(Spec("cpu")).computing_in(GGML_CPU)


def _n_kv(step: Step) -> int:
    """Cells that full attention reads; 0 in a step that only moves positions."""
    return next((t.ne[0] for t in step.inputs if t.name == "attn_inp_kq_mask"), 0)


def _judged(case: Case, right: list[StepValues], got: list[StepValues]) -> list[Judged]:
    want, found = ([{**v.outputs, **v.caches} for v in values] for values in (right, got))
    return list(judge_trajectory(case, want, found, GGML_CPU))


def test_levels_hold_one_another() -> None:
    """Ids are different from each other, and a level has all those of the ones below it."""
    below: tuple[str, ...] = ()
    for level in LEVELS:
        ids = tuple(FAMILY.ids(level))
        assert len(set(ids)) == len(ids)
        assert ids[: len(below)] == below
        below = ids


def test_standard_cases_are_legal() -> None:
    """Cases up to `standard` are what ggml accepts, with a cache that is written and outputs to check."""
    for case_id in FAMILY.ids("standard")[::3]:
        case = FAMILY.build(case_id)
        case.validate()
        assert case.caches()
        assert all(s.outputs for s in case.steps)


def test_smoke_crosses_256() -> None:
    """Every smoke case reads one n_kv first and another later."""
    for case_id in FAMILY.ids("smoke"):
        assert len({_n_kv(s) for s in FAMILY.build(case_id).steps} - {0}) > 1, case_id


def test_full_crosses_fifteen_times_by_decoding() -> None:
    """From nothing to 4,096: n_kv has 16 values, and each new one comes with a step of one token per sequence."""
    case = FAMILY.build(next(i for i in FAMILY.ids("full") if "ctx=4096" in i and "seqs=1" in i))
    sizes = [_n_kv(s) for s in case.steps]
    grown = [k for k in range(1, len(sizes)) if sizes[k] != sizes[k - 1]]
    assert len(grown) == 15
    assert all(len(case.steps[k].note["tokens"]) == 1 for k in grown)
    assert case.steps[-1].note["tokens"][-1][1] == 4095


@pytest.mark.parametrize(
    "keys", ["w=f32", "w=q8_0", "w=bf16,cache=bf16", "w=q4_0,cache=q8_0,head=32", "w=q4_0,l=4,fa=0"]
)
def test_flipped_roundings_are_no_faults(keys: str) -> None:
    """The real ggml and the reference in its arithmetic agree over seeds, freely and step by step, flips included."""
    runner = Runner()
    cases = [_case(keys, "at253.p2.d3", seed) for seed in range(4)]
    try:
        results = runner.run(Spec("ggml"), cases)
    finally:
        runner.close()
    assert [r.detail for r in results if r.verdict is not Verdict.PASS] == []


Edit = Callable[[dict[str, NDArray[Any]]], None]


def _own_hidden(v: dict[str, NDArray[Any]]) -> None:
    row = v["attn_inp_kq_mask"].reshape(-1)
    row[np.flatnonzero(row == 0)[-1]] = -np.inf


def _n_kv_stale(v: dict[str, NDArray[Any]]) -> None:
    v["attn_inp_kq_mask"][..., 256:] = -np.inf


def _shift(name: str) -> Edit:
    def edit(v: dict[str, NDArray[Any]]) -> None:
        v[name] += 1

    return edit


def _position_zero(v: dict[str, NDArray[Any]]) -> None:
    v["inp_pos"][...] = 0


FAULTS: dict[str, Edit] = {
    "the token does not see itself": _own_hidden,
    "n_kv is stale": _n_kv_stale,
    "position one on": _shift("inp_pos"),
    "position reset": _position_zero,
    "K one row late": _shift("attn_inp_k_idxs"),
    "V one row late": _shift("attn_inp_v_idxs"),
}


def _faulty(case: Case, k: int, edit: Edit) -> Case:
    """The case with other inputs in step `k`: what a backend with that fault would have computed from."""
    steps = list(case.steps)
    inputs = {t: data.copy() for t, data in steps[k].inputs.items()}
    edit({t.name: strided(data, t) for t, data in inputs.items()})
    steps[k] = Step(steps[k].graph, inputs, steps[k].outputs)
    return Case(case.id, case.persistent, steps)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("keys", ["w=f32", "w=f32,fa=0", "w=q4_0,cache=q8_0,head=32"])
def test_faults_are_seen_in_the_logits(keys: str, fault: str) -> None:
    """One step gone wrong past 256 cells is over budget by its logits alone, whatever the weights' type."""
    for seed in range(3):
        case = _case(keys, "at257.d2", seed)
        backend = _imitating()
        right = execute(backend, case).steps
        wrong = execute(backend, _faulty(case, 1, FAULTS[fault])).steps
        assert any(j.used > 1 and j.tensor.op == "MUL_MAT" for j in _judged(case, right, wrong)), (fault, seed)


def _param(op: str, i: int, value: float) -> Callable[[Case], None]:
    """Another number in a node of that op."""

    def edit(case: Case) -> None:
        for node in (n for s in case.steps for n in s.graph if n.op == op):
            node.op_params = (*node.op_params[:i], f32_bits(value), *node.op_params[i + 1 :])

    return edit


def _weights(name: str, value: float) -> Callable[[Case], None]:
    """All elements of the weights so called have one value."""

    def edit(case: Case) -> None:
        for t, data in case.persistent.items():
            if name in t.name:
                data.view(np.float32)[:] = value

    return edit


def _inputs(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Case], None]:
    """An input holds something else."""

    def edit(case: Case) -> None:
        for step in case.steps:
            for t in [t for t in step.inputs if t.name.startswith(name)]:
                step.inputs[t] = step.inputs[t].copy()
                values = strided(step.inputs[t], t)
                values[...] = change(values)

    return edit


def _no_window(mask: NDArray[Any]) -> NDArray[Any]:
    """What lies left of the first cell that is seen is seen too."""
    seen = np.maximum.accumulate(mask[..., ::-1] == 0, axis=-1)[..., ::-1]
    return np.where(seen, 0, mask)


FORGOTTEN: dict[str, tuple[str, Callable[[Case], None]]] = {
    "softcap of attention": ("gemma2-run=at20.d2", _param("FLASH_ATTN_EXT", 2, 0)),
    "softcap of logits": ("llama-logitcap=3,run=at20.d2", _param("SCALE", 0, 1)),
    "scaled embeddings": ("gemma2-softcap=0,logitcap=0,run=at20.d2", _param("SCALE", 0, 1)),
    "sinks": ("gpt-oss-run=at20.d2", _weights("attn_sinks", -1e9)),
    "biases of Q, K and V": ("gpt-oss-run=at20.d2", _weights("attn_k.bias", 0)),
    "bias of attention's output": ("gpt-oss-run=at20.d2", _weights("attn_output.bias", 0)),
    "bias of the router": ("gpt-oss-run=at20.d2", _weights("ffn_gate_inp.bias", 0)),
    "biases of experts": ("gpt-oss-run=at20.d2", _weights("ffn_down_exps.bias", 0)),
    "bias of the choice": ("llama-experts=8,gating=sigmoid,probsbias=1,run=at20.d2", _weights("exp_probs_b", 0)),
    "bias of a norm": ("llama-norm=layer,run=at20.d2", _weights("attn_norm.bias", 0)),
    "norm of K": ("qwen3-run=at20.d2", _weights("attn_k_norm", 1)),
    "norm behind": ("gemma2-run=at20.d2", _weights("post_ffw_norm", 1)),
    "slopes of ALiBi": ("llama-alibi=8,rope=none,run=at20.d2", _param("FLASH_ATTN_EXT", 1, 0)),
    "window": ("gpt-oss-run=at40.d2", _inputs("attn_inp_kq_mask", _no_window)),
    "state of the convolution": ("lfm2-run=at20.d2", _weights("cache_r", 0)),
    "row of the state": ("lfm2-seqs=2,run=at20.d2", _inputs("rs_s_copy", lambda rows: rows[..., ::-1].copy())),
    "shift of K": ("llama-run=at40.shift9.d2", _inputs("leaf_", np.zeros_like)),
}
"""What a backend may leave out -> a trajectory with it, and one without."""


@pytest.mark.parametrize("what", FORGOTTEN)
def test_every_switch_shows_in_the_logits(what: str) -> None:
    """A model's switch that a backend does not follow is over budget by the logits alone."""
    keys, forget = FORGOTTEN[what]
    case = FAMILY.build(f"kv_growth/{keys}@1")
    right = execute(_imitating(), case).steps
    forget(case)
    wrong = execute(_imitating(), case).steps
    assert any(j.used > 1 and j.tensor.name == "result_output" for j in _judged(case, right, wrong))


@pytest.mark.parametrize("cache", ["f16", "q8_0", "q4_0"])
def test_a_late_row_is_seen_in_the_cache(cache: str) -> None:
    """One row of K in the wrong place is over the cache's own budget, whatever its type."""
    case = _case(f"head=32,cache={cache}", "at257.d2")
    backend = _imitating()
    wrong = execute(backend, _faulty(case, 1, FAULTS["K one row late"])).steps
    judged = _judged(case, execute(backend, case).steps, wrong)
    assert any(j.used > 1 and j.tensor.name.startswith("cache_k") for j in judged)


def test_a_step_is_judged_from_the_caches_it_found() -> None:
    """A cache that a step left wrong is that step's fault alone: the next one, right from there on, is not blamed."""
    case = _case(_TINY, "at254.d4")
    backend = _imitating()
    found = execute(backend, _faulty(case, 1, FAULTS["K one row late"])).steps
    wanted = list(locate.expected_steps(backend, case, found))
    pairs = zip(wanted, found, strict=True)
    equal = [all(np.array_equal(w.caches[t], f.caches[t]) for t in case.caches()) for w, f in pairs]
    assert equal == [True, False, True, True]
    ran = Execution(found, backend.open(case).witness(), 0.0)
    result = judgement.judge_each_step(Result(case.id, "", Verdict.PASS), backend, case, ran, GGML_CPU)
    assert result.verdict is Verdict.FAIL
    assert result.detail.startswith("step 1: ")


def test_budgets_do_not_grow_with_steps() -> None:
    """A hundred steps later a trajectory may be off by no more than after two."""
    case = _case(f"w=q4_0,cache=q8_0,head=32,{_TINY}", "p3.d100")
    chain = Chain(GGML_CPU)
    allowed = []
    for step in case.steps:
        chain.enter(step.graph)
        allowed.append(chain.budget(step.outputs[0]).nmse)
    assert allowed[1] > allowed[0]
    assert allowed[100] == allowed[2]


def test_exact_chains_stay_tight() -> None:
    """Without any rounding on the way a decoder's budget is float32's: nothing is added for what cannot flip."""
    case = _case(f"{_TINY},fa=0,cache=f32", "p9.d3")
    chain = Chain(EXACT)
    for step in case.steps:
        chain.enter(step.graph)
        assert chain.budget(step.outputs[0]).nmse < 1e-8
