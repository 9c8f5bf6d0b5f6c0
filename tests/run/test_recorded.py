"""Verdicts on recordings: held against what the recorder's arithmetic costs on that graph, and node by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from marks import needs_wheel
from stand_in import StandIn, doubled

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.cli import main
from conformance.ggml.errors import BackendCrashError, BackendError
from conformance.judge.verdict import Result, Verdict
from conformance.llama.captured import FAMILY as CAPTURED
from conformance.llama.zoo import family as zoo
from conformance.llama.zoo.family import Request
from conformance.run import recorded
from conformance.run.runner import Runner

SPEC = Spec("stand-in")
LAYERS = "set=block_count:2+embedding_length:256+attention.head_count:4+attention.head_count_kv:2"
TOKENS = "feed_forward_length:512"


def emptied(case: Case) -> Case:
    """The same case with one weight of zeros."""
    return replace(
        case,
        persistent={t: np.zeros_like(d) if t.name == "blk.0.ffn_up.weight" else d for t, d in case.persistent.items()},
    )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two layers of Q4_K, recorded without nodes, as `conform capture` does."""
    request, arch, keys, _ = zoo.read(f"zoo/llama-w=q4_K,{LAYERS}+{TOKENS}@3", "")
    model = tmp_path_factory.mktemp("model") / "two.gguf"
    zoo.make_model(model, request, arch, keys)
    wanted = Request(
        id="model/two@0", stream="two@0", model=str(model), plan="p6.d2", by_reference=True, family="model"
    )
    return zoo.record_model(wanted)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """A runner that keeps failures."""
    runner = Runner(save_failures=tmp_path / "failures")
    yield runner
    runner.close()


def _run(runner: Runner, backend: Backend, case: Case) -> Result:
    runner._backends[SPEC] = backend
    (result,) = runner.run(SPEC, [case])
    return result


@needs_wheel
@pytest.mark.parametrize("name", ["cpu", "ggml", "openvino-stateless"])
def test_a_recording_without_nodes_passes_and_one_doubled_scale_fails(runner: Runner, case: Case, name: str) -> None:
    """Right backends pass whatever their arithmetic; one block scale of one layer fails, and its MUL_MAT is named."""
    (right,) = runner.run(Spec(name), [case])
    assert right.verdict is Verdict.PASS, right.detail
    result = _run(runner, StandIn(name, doubled), case)
    assert result.verdict is Verdict.FAIL
    assert result.where is not None
    assert result.where.step is not None
    assert result.where.node is not None
    node = case.steps[result.where.step].graph.nodes[result.where.node]
    assert node.op == "MUL_MAT"
    assert node.src[0] is not None
    assert node.src[0].name == "blk.1.ffn_up.weight"


@needs_wheel
def test_what_the_recorders_arithmetic_costs_is_allowed_and_no_more(runner: Runner, case: Case) -> None:
    """A recording far from exact fails no exact backend: the limit follows the graph, and a wrong recording fails."""
    far = replace(case, tolerance={"nmse": 1e-12})
    (result,) = runner.run(Spec("openvino-stateless"), [far])
    assert result.verdict is Verdict.PASS, result.detail
    assert result.nmse is not None
    assert result.nmse_exact is not None
    assert result.nmse > 100 * result.nmse_exact
    for step in far.steps:
        step.expected = dict(step.expected)
    (logits,) = far.steps[1].outputs
    spoilt = far.steps[1].expected[logits].copy()
    spoilt.view(np.float32)[:] *= 1.1
    far = replace(far, steps=[replace(s) for s in far.steps])
    far.steps[1].expected = {**far.steps[1].expected, logits: spoilt}
    (result,) = runner.run(Spec("openvino-stateless"), [far])
    assert result.verdict is Verdict.FAIL
    assert "step 1" in result.detail


@pytest.mark.parametrize("error", [BackendError("bad optional access"), BackendCrashError("SIGSEGV"), KeyError("x")])
def test_nodes_that_cannot_be_judged_leave_the_verdict(runner: Runner, error: Exception) -> None:
    """A backend that throws in the isolated graph keeps the verdict of its free run; the detail says what and why."""
    case = CAPTURED.build("captured/llama-fa-1seq@0")
    backend = StandIn("cpu", fails=lambda c: error if "#" in c.id and c.id.endswith(("#3", "#4")) else None)
    result = _run(runner, backend, case)
    assert result.verdict is Verdict.PASS, result.detail
    assert "node by node: not judged at steps 3, 4: " in result.detail
    assert str(error) in result.detail


def test_a_fault_that_cannot_be_located_stays_a_fault(runner: Runner) -> None:
    """A free run that failed stays FAIL where every later look throws."""
    case = CAPTURED.build("captured/llama-fa-1seq@0")
    opened: list[str] = []

    def fails(c: Case) -> Exception | None:
        opened.append(c.id)
        return BackendError("no second time") if len(opened) > 1 else None

    result = _run(runner, StandIn("cpu", emptied, fails), case)
    assert result.verdict is Verdict.FAIL
    assert "no second time" in result.detail


@needs_wheel
def test_the_reproduce_line_of_a_case_by_reference_works(case: Case, tmp_path: Path) -> None:
    """A failure whose weights stay in the model is saved beside a link to it, and `conform repro` reads it."""
    runner = Runner(save_failures=tmp_path / "failures")
    try:
        result = _run(runner, StandIn("cpu", doubled), case)
    finally:
        runner.close()
    assert result.saved is not None
    saved = casefile.read_one(result.saved)
    assert saved.references
    again = CliRunner().invoke(main, ["repro", result.saved, "--backend", "ggml"])
    assert again.exit_code == 0, again.output


@needs_wheel
def test_a_step_too_large_is_said_and_not_held(runner: Runner, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the nodes' values would not fit, the free run's verdict stands, and the detail names the step."""
    monkeypatch.setattr(recorded, "WHOLE_BYTES", 250_000)
    (result,) = runner.run(Spec("cpu"), [case])
    assert result.verdict is Verdict.PASS, result.detail
    assert "node by node: not judged at step 0: its nodes' values take " in result.detail


def test_layouts_are_the_kinds_of_steps() -> None:
    """A prompt and a decode are two layouts; further decodes are no more."""
    case = CAPTURED.build("captured/llama-fa-1seq@0")
    kinds = recorded.layouts(case)
    assert kinds[0] == 0
    assert 1 < len(kinds) < len(case.steps)
