"""Stages: a wrong translation and a wrong kernel are told apart, by verdict, by option and by words."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from click.testing import CliRunner
from here import Here
from sessions_of_pytest import session

from backends.openvino import OpenVinoStateless, bind
from backends.openvino import emit as table
from backends.openvino.emit import elementwise
from backends.openvino.rewrite import DEVICE, EXPANSIONS, Interpreted
from conformance import shipped
from conformance.backend.registry import Spec, adapter
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.cli import main
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import nbytes, new_tensor
from conformance.ggml.types import F32
from conformance.judge.verdict import Result, Verdict
from conformance.llama.captured import GOLDEN
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.run.session import select
from conformance.run.session.settings import read_waivers
from conformance.suite import FAMILIES

Ov: TypeAlias = Any
"""Something of OpenVINO's, which ships no type information, or a piece of the adapter over it."""
openvino: Any = importlib.import_module("openvino")  # after the adapter, which keeps its telemetry from the network
o: Ov = importlib.import_module("openvino.opset15")
B = Builder()
ROOT = Path(__file__).resolve().parents[2]
IDS = FAMILIES["ops"].ids("smoke")
RUN = Spec("openvino-stateless")
TRANSLATE = select.staged(RUN, "translate")


@pytest.fixture
def runner() -> Iterator[Runner]:
    """A runner of its own, of adapters that a test changes."""
    runner = Here()
    yield runner
    runner.close()


def _case(steps: int = 1) -> Case:
    """`sqr(x) * w` per step: two nodes, so that a culprit has to be found."""
    w = new_tensor(F32, 8, name="w")
    rng = np.random.Generator(np.random.PCG64(1))
    case = Case("test/stages@0", {w: rng.standard_normal(8).astype("<f4").view(np.uint8)}, [])
    for _ in range(steps):
        x = new_tensor(F32, 8, 3, name="x")
        out = B.mul(B.sqr(x), w)
        case.steps.append(Step(B.build_forward_expand(out), {x: rng.standard_normal(24).astype("<f4").view(np.uint8)}))
        case.steps[-1].outputs = (out,)
        assert nbytes(x) == 96
    case.validate()
    return case


def _wrong_emitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQR translated as ABS."""

    def emit(e: Ov, node: Ov) -> None:
        e.store(node, o.abs(e.number(node.src[0])))

    monkeypatch.setitem(table.EMITTERS, "SQR", emit)


def _wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled computes another model than what was given to be compiled."""
    right = openvino.Core.compile_model

    def compile_model(self: Ov, model: Ov, *args: Ov) -> Ov:
        for node in model.get_ordered_ops():
            if node.get_type_name() == "Multiply":
                a, b = node.input_values()
                node.output(0).replace(o.add(a, b).output(0))
        return right(self, model, *args)

    monkeypatch.setattr(openvino.Core, "compile_model", compile_model)


def _one(runner: Runner, spec: Spec, case: Case) -> Result:
    (result,) = runner.run(spec, [case])
    return result


def test_both_stages_are_right_where_nothing_is_wrong(runner: Runner) -> None:
    """A right case passes at both, and each result's backend and witness name the stage."""
    compiled, interpreted = (_one(runner, spec, _case(2)) for spec in (RUN, TRANSLATE))
    assert (compiled.verdict, interpreted.verdict) == (Verdict.PASS, Verdict.PASS)
    assert interpreted.backend == "openvino-stateless?stage=translate"
    assert compiled.witness is not None
    assert interpreted.witness is not None
    assert (compiled.witness["stage"], interpreted.witness["stage"]) == ("run", "translate")
    assert interpreted.witness["path"] == "interpreted"
    assert (interpreted.witness["compiles"], interpreted.witness["device"]) == (0, DEVICE)
    assert interpreted.witness["kernels"]["Multiply"] >= 1


def test_a_wrong_emitter_is_a_wrong_translation(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages fail, and the run says whose fault it is beside the culprit."""
    _wrong_emitter(monkeypatch)
    compiled, interpreted = (_one(runner, spec, _case()) for spec in (RUN, TRANSLATE))
    assert (compiled.verdict, interpreted.verdict) == (Verdict.FAIL, Verdict.FAIL)
    assert compiled.detail.endswith("; the translation itself is wrong")
    assert "SQR" in compiled.detail
    assert "translation" not in interpreted.detail


def test_a_wrong_kernel_is_no_wrong_translation(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only what was compiled is wrong, the translation passes and the run says so."""
    _wrong_kernel(monkeypatch)
    compiled, interpreted = (_one(runner, spec, _case()) for spec in (RUN, TRANSLATE))
    assert (compiled.verdict, interpreted.verdict) == (Verdict.FAIL, Verdict.PASS)
    assert compiled.detail.endswith("; the translation is right, so a kernel or fusion is at fault")


def test_a_wrong_result_of_a_right_model_is_a_kernels_fault(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a device that gives wrong values, in a trajectory."""
    wrong_from: list[Ov] = []

    class Wrong(bind.Request):
        def run(self, plan: Ov, memory: Ov, inputs: Ov) -> Ov:
            found = super().run(plan, memory, inputs)
            if not isinstance(self.compiled, Interpreted):
                wrong_from.append(self)
                for data in found.values():
                    data.view("<f4")[0] += 1
            return found

    monkeypatch.setattr(bind, "Request", Wrong)
    result = _one(runner, RUN, _case(3))
    assert wrong_from
    assert result.verdict is Verdict.FAIL
    assert result.detail.endswith("; the translation is right, so a kernel or fusion is at fault")


def test_a_compiler_that_refuses_a_right_translation_is_named(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OVERCLAIM, too, says at which node it was, and whether the translation was right."""

    def compile_model(*_: Ov) -> Ov:
        msg = "no such kernel"
        raise RuntimeError(msg)

    monkeypatch.setattr(openvino.Core, "compile_model", compile_model)
    result = _one(runner, RUN, _case())
    assert result.verdict is Verdict.OVERCLAIM
    where = "SQR node_0 f32[8, 3, 1, 1] of f32[8, 3, 1, 1] fails by itself"
    assert f"no such kernel; where: {where}; " in result.detail
    assert result.detail.endswith("; the translation is right, so the compiler or the device is at fault")


def test_an_emitter_that_raises_fails_at_both(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be translated is the translation's own failure."""

    def emit(_: Ov, node: Ov) -> None:
        raise BackendError(f"{node}: cannot")

    monkeypatch.setitem(table.EMITTERS, "SQR", emit)
    result = _one(runner, RUN, _case())
    assert result.verdict is Verdict.OVERCLAIM
    assert "; the translation itself fails: " in result.detail


def test_one_bad_case_of_a_batch_is_told_apart(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch as well: the wrong cases are wrong translations, the others pass."""
    _wrong_emitter(monkeypatch)
    ids = [i for i in IDS if i.startswith(("ops/SQR-", "ops/SQRT-"))]
    results = runner.run(RUN, [runner.case(i) for i in ids])
    wrong = [r for r in results if r.verdict is not Verdict.PASS]
    assert wrong
    assert all(r.case.startswith("ops/SQR-") and "the translation itself is wrong" in r.detail for r in wrong)
    assert any(r.verdict is Verdict.PASS for r in results)


def test_demands_are_of_a_run(runner: Runner) -> None:
    """A demand of what was compiled cannot be asked where nothing is, and the result says that it was not."""
    case = _case()
    case.demands = {"openvino-*": {"compiles": 1}}
    compiled, interpreted = (_one(runner, spec, case) for spec in (RUN, TRANSLATE))
    assert (compiled.verdict, interpreted.verdict) == (Verdict.PASS, Verdict.PASS)
    assert "demands apply to a run" in interpreted.detail


def test_smoke_cases_are_right_as_translated(runner: Runner) -> None:
    """Each second case passes at stage translate, or is refused or known to fail as in a run."""
    known = read_waivers(shipped.path("waivers", "openvino.toml")).entries
    cases = [runner.case(i) for i in IDS[::2]]
    size = runner.batch_size(TRANSLATE)
    results = [r for i in range(0, len(cases), size) for r in runner.run(TRANSLATE, cases[i : i + size])]
    bad = [r for r in results if r.verdict not in {Verdict.PASS, Verdict.UNSUPPORTED}]
    assert [r.sentence() for r in bad if not any(w.covers(r.case) for w in known)] == []
    assert sum(r.verdict is Verdict.UNSUPPORTED for r in results) < len(cases) / 10


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda p: p.stem)
def test_captured_trajectories_are_right_as_translated(runner: Runner, path: Path) -> None:
    """Whole trajectories run without compiling: free within their tolerance, and node by node."""
    (case,) = casefile.read(path)
    result = _one(runner, TRANSLATE, case)
    assert result.verdict is Verdict.PASS, result.detail


# -- choosing a stage -------------------------------------------------------------------------------------------------


def test_a_spec_is_put_at_a_stage_and_back() -> None:
    """The stage is one of the options, the others stay."""
    spec = Spec.parse("openvino-stateless?device=CPU")
    there = select.staged(spec, "translate")
    assert str(there) == "openvino-stateless?device=CPU&stage=translate"
    assert select.stage_of(there) == "translate"
    assert select.staged(there, "translate") == there
    assert select.staged(there, "run") == spec
    assert select.stage_of(spec) == "run"


def test_stages_of_an_isolated_backend_are_its_adapters() -> None:
    """A backend in its own process offers the stages that its adapter names."""
    backend = open_backend(RUN)
    try:
        assert backend.stages == adapter(RUN.name).stages == ("translate", "run")
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--stage", "translate", "--backend", "cpu"), "cpu does not have it; its stages: run"),
        (("--stage", "nope"), "no backend has it; stages: "),
        (("--stage", "nope", "--backend", "openvino-stateless"), "its stages: translate, run"),
        (("--backend", "openvino-stateless?stage=nope"), "stage: one of translate, run expected, 'nope' given"),
    ],
)
def test_a_stage_that_is_not_there_is_one_line(args: tuple[str, ...], says: str) -> None:
    """Wrong stages exit with 2 and say which there are."""
    result = CliRunner().invoke(main, ["run", "--case", IDS[0], *args], catch_exceptions=False)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_run_and_repro_take_a_stage(tmp_path: Path) -> None:
    """`conform run --stage` runs what has the stage and says what has not; a saved case repeats at it."""
    out = tmp_path / "r.json"
    result = CliRunner().invoke(main, ["run", "--stage", "translate", "--case", IDS[0], "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["schema"] == 1
    assert {r["backend"]: r["verdict"] for r in document["results"]}[str(TRANSLATE)] == "PASS"
    assert document["environment"]["unavailable"]["cpu"] == "has no stage translate"
    path = tmp_path / "c.gguf"
    casefile.write(path, [_case()])
    result = CliRunner().invoke(main, ["repro", str(path), "--stage", "translate", "--backend", RUN.name])
    assert result.exit_code == 0, result.output
    assert f"PASS test/stages@0 on {TRANSLATE}" in result.output


def test_pytest_takes_a_stage() -> None:
    """`pytest conformance --stage translate` runs the backends that have it, under their own ids."""
    run = session("-v", "--stage", "translate", "--case", IDS[0])
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"[{IDS[0]}-{TRANSLATE}] PASSED" in run.stdout
    assert "cpu: not available: has no stage translate" in run.stdout


def test_choose_leaves_named_stages_alone() -> None:
    """Without `--stage` each backend is at the stage that its own spec names."""
    specs, lacking = select.choose([str(TRANSLATE), "cpu"], None)
    assert (specs, lacking) == ([TRANSLATE, Spec("cpu")], {})
    with pytest.raises(UsageError, match="stages: run"):
        select.choose([str(TRANSLATE), "cpu"], "translate")


# -- the interpreter --------------------------------------------------------------------------------------------------


def _evaluate(x: Ov, *values: np.ndarray) -> Ov:
    """`x(*parameters)` interpreted, and the same compiled."""
    found = []
    for interpret in (True, False):
        parameters = [o.parameter(list(v.shape), v.dtype.type) for v in values]
        model = openvino.Model([o.result(x(*parameters))], parameters)
        accurate = {"EXECUTION_MODE_HINT": "ACCURACY"}
        run = Interpreted(model) if interpret else openvino.Core().compile_model(model, "CPU", accurate)
        request = run.create_infer_request()
        for i, v in enumerate(values):
            request.set_input_tensor(i, openvino.Tensor(v))
        request.infer()
        found.append(request.get_output_tensor(0).data.copy())
    return found


def _scatters(rng: np.random.Generator) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for shape in (
        (7, 8, 1),
        (3, 7, 8, 1),
        (7, 8, 32),
        (7,),
        (7, 1),
        (7, 8, 1, 1),
        (7, 7, 7),
        (7, 8, 1, 4),
        (1, 1, 7, 4, 1, 2),
    ):
        for axis in (a for a, n in enumerate(shape) if n == 7):
            some = (*shape[:axis], 4, *shape[axis + 1 :])
            yield axis, rng.standard_normal(shape).astype("<f4"), rng.standard_normal(some).astype("<f4")


def test_what_the_interpreter_lacks_is_expanded_to_the_same() -> None:
    """Each expansion computes what the compiled operation computes; what the interpreter has wrong is expanded, too."""
    rng = np.random.Generator(np.random.PCG64(2))
    q, k, v = (rng.standard_normal((2, 4, 3, 8)).astype("<f4") for _ in range(3))
    mask = np.where(rng.random((1, 1, 3, 3)) < 0.3, -np.inf, 0).astype("<f4")
    mask[..., 0] = 0
    edges = np.array([-50, -3, -1e-6, -0.0, 0.0, 1e-6, 2, 1.0, 1.5], "<f4")
    rows = o.constant(np.array([1, 5, 6, 2], np.int32))
    bounds = o.constant(np.array([-3, 0, 1, 1.5], "<f4"))
    tried: dict[str, list[tuple[Ov, tuple[np.ndarray, ...]]]] = {
        "ScaledDotProductAttention": [
            (o.scaled_dot_product_attention, (q, k, v)),
            (o.scaled_dot_product_attention, (q, k, v, mask)),
            (lambda *p: o.scaled_dot_product_attention(*p, o.constant(np.float32(0.7))), (q, k, v, mask)),
        ],
        "ScatterUpdate": [
            (lambda x, u, a=axis: o.scatter_update(x, rows, u, o.constant(np.int64(a))), (x, u))
            for axis, x, u in _scatters(rng)
        ],
        "Elu": [(lambda p: o.elu(p, 1.0), (edges,)), (lambda p: o.elu(p, 0.3), (edges,))],
        "Bucketize": [
            (lambda p, right=right: o.bucketize(p, bounds, "i32", right), (edges,)) for right in (True, False)
        ],
        "Roll": [
            (lambda p, by=by: o.roll(p, o.constant(np.array(by)), o.constant(np.array([1, 3]))), (q,))
            for by in ((1, -3), (0, 17))
        ],
        "AvgPool": [
            (lambda p, pad=pad: o.avg_pool(p, [1, 2], pad, pad, [2, 3], False, "floor"), (q,))
            for pad in ([0, 0], [1, 1])
        ],
        "Convolution": [
            (lambda x, w, by=by, pad=pad: o.convolution(x, w, by, pad, [0, 1], [2, 1]), (q, q[..., :2, :2]))
            for by, pad in (([1, 1], [0, 0]), ([1, 2], [2, 1]))
        ],
    }
    assert set(tried) == set(EXPANSIONS)
    for kind, trials in tried.items():
        for make, values in trials:
            interpreted, compiled = _evaluate(make, *values)
            np.testing.assert_allclose(interpreted, compiled, rtol=2e-6, atol=1e-6, err_msg=kind)


def test_what_cannot_be_interpreted_says_what_to_do() -> None:
    """An operation without evaluation and expansion is refused with a way out, before anything runs."""
    x, w = o.parameter([1, 1, 4, 4], np.float32), o.constant(np.ones((1, 1, 1, 2, 2), "<f4"))
    conv = o.group_convolution(x, w, [1, 1], [0, 0], [0, 0], [1, 1])
    with pytest.raises(BackendError, match="no GroupConvolution: write it as MatMul"):
        Interpreted(openvino.Model([o.result(conv)], [x]))


def test_the_interpreter_may_write_where_it_reads() -> None:
    """A tensor set as parameter and as result holds the result afterwards, whole, as with a compiled model."""
    p = o.parameter([4], np.float32)
    model = openvino.Model([o.result(o.multiply(p, o.constant(np.float32(2)))), o.result(o.abs(p))], [p])
    request = Interpreted(model).create_infer_request()
    held = openvino.Tensor(np.array([1, -2, 3, -4], "<f4"))
    request.set_input_tensor(0, held)
    request.set_output_tensor(0, held)
    request.infer()
    assert held.data.tolist() == [2, -4, 6, -8]
    assert request.get_output_tensor(1).data.tolist() == [1, 2, 3, 4]


def test_dynamic_models_are_interpreted() -> None:
    """Shapes that are known only when the parameters are bound."""
    p, n = o.parameter([-1, 2], np.float32), o.parameter([], np.int64)
    shape = o.concat([o.unsqueeze(n, o.constant(np.int64(0))), o.constant(np.array([1], np.int64))], 0)
    model = openvino.Model([o.result(o.reshape(p, shape, False))], [p, n])
    request = Interpreted(model).create_infer_request()
    for rows in (1, 3):
        request.set_input_tensor(0, openvino.Tensor(np.arange(2 * rows, dtype="<f4").reshape(rows, 2)))
        request.set_input_tensor(1, openvino.Tensor(np.array(2 * rows, np.int64)))
        request.infer()
        assert request.get_output_tensor(0).shape == [2 * rows, 1]


def test_the_adapter_offers_both_stages() -> None:
    """The class names its stages; `run` is the last and the default."""
    assert OpenVinoStateless.stages == ("translate", "run")
    assert elementwise.EMITTERS["SQR"] is table.EMITTERS["SQR"]


def _counter() -> Ov:
    """Appends its input to a variable that starts with one row of sevens, and gives the sum of all rows."""
    x = o.parameter([-1, 2], np.float32)
    start = o.constant(np.full((1, 2), 7, "<f4"))
    read = o.read_value(start, "log", np.float32, openvino.PartialShape([-1, 2]))
    whole = o.concat([read, x], 0)
    total = o.reduce_sum(whole, o.constant(np.int64(0)), True)
    return openvino.Model(results=[o.result(total)], sinks=[o.assign(whole, "log")], parameters=[x])


def test_variables_are_interpreted() -> None:
    """A stateful model gives what the compiled one gives: initial value, growth, state set, read and reset."""
    compiled = openvino.Core().compile_model(_counter(), "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    said = []
    for request in (Interpreted(_counter()).create_infer_request(), compiled.create_infer_request()):
        (state,) = request.query_state()
        assert state.name == "log"
        found = []
        for k in range(5):
            if k == 2:
                state.state = openvino.Tensor(np.array([[1, 2], [3, 4]], "<f4"))
            if k == 4:
                state.reset()
            request.set_input_tensor(0, openvino.Tensor(np.full((2, 2), k, "<f4")))
            request.infer()
            found.append((request.get_output_tensor(0).data.tolist(), state.state.data.tolist()))
        said.append(found)
    assert said[0] == said[1]
    assert said[0][0] == ([[7, 7]], [[7, 7], [0, 0], [0, 0]])
