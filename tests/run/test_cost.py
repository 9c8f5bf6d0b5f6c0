"""What a case costs is known before it is computed, and what costs too much is not computed at all."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.cli import main
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, nbytes, new_tensor
from conformance.ggml.types import F32
from conformance.judge.compare import compare
from conformance.judge.verdict import Verdict
from conformance.run import cost
from conformance.run.execute import execute
from conformance.run.isolation.isolate import Isolation
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner
from conformance.run.session.journal import Journal
from conformance.run.session.select import build
from conformance.run.shrink import shrink
from conformance.suite import FAMILIES

LIMIT = 500 << 20
LARGE = (
    "ops/FLASH_ATTN_EXT-f16+f16-q=64x256x32,k=64x2048x8,mask=2048x256,hide=holes@643",
    "ops/MUL_MAT-f16+f32-a=4096x4096,b=4096x1@47",
    "ops/SET_ROWS-f32+f32+i64-a=1024x4096,n=512@747",
    "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,fa=0,seqs=4,ctx=4096,run=p250.5(d12.p244).d6@462",
)


def _case(*leaves: Tensor, nodes: list[Tensor]) -> Case:
    for n in nodes:
        n.flags |= FLAG_COMPUTE
    inputs = {t: np.zeros(nbytes(t), np.uint8) for t in leaves}
    return Case("ops/crafted@0", {}, [Step(Graph(nodes), inputs, (nodes[-1],))])


def repeated(n: int = 200_000_000) -> Case:
    """A file of some hundred bytes that takes gigabytes."""
    b, x = Builder(), new_tensor(F32, 1, name="x")
    y = b.repeat_4d(x, n, 1, 1, 1)
    return _case(x, nodes=[y, b.sum(y)])


def looping(n_iter: int = 1_315_859_240) -> Case:
    """A node that takes an hour whatever its size."""
    b, mixes = Builder(), new_tensor(F32, 24, 1, name="mixes")
    scale, base = new_tensor(F32, 3, name="scale"), new_tensor(F32, 24, name="base")
    return _case(mixes, scale, base, nodes=[b.dsv4_hc_comb(mixes, scale, base, 1e-5, n_iter)])


@pytest.mark.parametrize(("case", "option"), [(repeated(), "--memory-limit"), (looping(), "--time-limit")])
def test_what_costs_too_much_is_refused_at_once(case: Case, option: str, tmp_path: Path) -> None:
    """One line that names the limit, on backends of this process and on others, before any memory is taken."""
    runner = Runner(isolation=Isolation(memory_limit=LIMIT), journal=Journal(tmp_path))
    tracemalloc.start()
    try:
        for name in ("cpu", "xdna2"):
            (result,) = runner.run(Spec(name), [case])
            if result.verdict is Verdict.UNSUPPORTED:
                continue
            assert result.verdict is Verdict.VACUOUS
            assert "no reference: computing" in result.detail
            assert option in result.detail
        with pytest.raises(UsageError, match="cannot be shrunk"):
            shrink(runner, Spec("cpu"), case)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
        runner.close()


def test_the_same_from_a_file(tmp_path: Path) -> None:
    """`show` shows such a file, `repro` and `shrink` refuse it, with `--memory-limit` and `--time-limit`."""
    for case in (repeated(), looping()):
        path = tmp_path / "case.gguf"
        casefile.write(path, case)
        assert path.stat().st_size < 3000
        shown = CliRunner().invoke(main, ["show", str(path)])
        assert shown.exit_code == 0, shown.output
        limits = ["--memory-limit", "500M", "--time-limit", "5", "--backend", "cpu"]
        again = CliRunner().invoke(main, ["repro", str(path), *limits])
        assert again.exit_code == 1, again.output
        assert "VACUOUS" in again.output
        cut = CliRunner().invoke(main, ["shrink", str(path), *limits])
        assert (cut.exit_code, len(cut.output.splitlines())) == (2, 1), cut.output


def test_many_that_are_allowed_are_not_computed_at_once() -> None:
    """Cases that share a graph share its limit: together they are computed one by one where it would be too much."""
    cases = [repeated(4_000_000) for _ in range(40)]
    runner = Runner(isolation=Isolation(memory_limit=1 << 29))
    assert not runner.too_costly(cases[:1])
    assert runner.too_costly(cases)
    runner.close()


def test_a_batch_is_compared_one_case_at_a_time() -> None:
    """Merged cases hold their buffers together, but only one of them is compared at a time: that part is no sum."""
    b = Builder()
    x = new_tensor(F32, 1 << 20, name="x")
    one = _case(x, nodes=[b.neg(x)])
    need, eight = cost.estimate([one]), cost.estimate([one] * 8)
    assert need.bytes < eight.bytes < 4 * need.bytes
    assert eight.operations == 8 * need.operations


@pytest.mark.parametrize("case_id", LARGE)
def test_estimates_are_near_what_is_held(case_id: str) -> None:
    """The peak of computing a case and comparing all its nodes is no more than estimated, and no less than a third."""
    case = build(case_id)
    need = cost.estimate([case])
    oracle = Oracle()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        oracle.expect([case], EXACT)
        last = len(case.steps) - 1
        for node, data in execute(oracle.reference_in(EXACT), case, every_node=[last]).steps[last].outputs.items():
            compare(node, data, data ^ np.uint8(1))  # two that are equal take less
        held = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        oracle.close()
    assert need.bytes / 3 <= held <= need.bytes * 1.2, (need.bytes, held)


def test_every_case_of_the_suite_is_allowed() -> None:
    """The largest level of each family costs far less than 4 GB and the time limit.

    Except for buffers that are there to be larger.
    """
    for family in FAMILIES.values():
        ids = [i for i in family.ids("full") if "/large-" not in i]
        for case_id in ids[:: max(1, len(ids) // 3)]:
            assert not cost.refusal([build(case_id)], memory_limit=4 << 30, time_limit=Isolation().time_limit), case_id


def test_a_parameter_sizes_no_buffer_unseen() -> None:
    """What op_params alone make large is in the estimate: the padding of a pooled window and of IM2COL."""
    b, x = Builder(), new_tensor(F32, 8, 8, 1, 1, name="x")
    small = _case(x, nodes=[b.pool_2d(x, 0, 2, 2, 1, 1, 0, 0)])
    huge = _case(x, nodes=[b.pool_2d(x, 0, 40_000, 40_000, 2**30, 2**30, 20_000, 20_000)])
    assert cost.estimate([small]).bytes < 1 << 20
    assert cost.estimate([huge]).bytes > 1 << 33


def test_a_case_without_steps_is_vacuous() -> None:
    """A file may hold no step at all: nothing is checked, and that is said."""
    runner = Runner()
    (result,) = runner.run(Spec("cpu"), [Case("ops/none@0", {}, [])])
    runner.close()
    assert result.verdict is Verdict.VACUOUS
