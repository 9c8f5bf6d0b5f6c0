"""Causes: failures of several faults fall into as many groups, and what is said of each is true of its fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from trust.copies import Copies
from trust.faults import FOLDER, Bundle, Fault, read

from conformance.backend.registry import Spec
from conformance.causes.cause import Cause, Condition
from conformance.causes.failure import failure_of
from conformance.causes.form import SEVERAL, base_of
from conformance.causes.grouping.group import cause_of
from conformance.causes.grouping.nodes import Nodes
from conformance.causes.grouping.search import Search
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.session.select import build, case_ids

FAULTS = {f.name: f for f in read([FOLDER])}


class _Runner(Copies):
    locates = True


def _causes(names: Sequence[str], globs: Sequence[str]) -> list[Cause]:
    """Of the cases of `ops` at smoke that `globs` match, with all these faults planted together."""
    return _causes_of(Bundle("together", tuple(FAULTS[n] for n in names)), case_ids((), globs, "smoke"))


def _causes_of(plant: Bundle | Fault, ids: Sequence[str]) -> list[Cause]:
    runner = _Runner([plant])
    return _grouped(runner, plant.spec, runner.run(plant.spec, [runner.case(i) for i in ids]))


def _grouped(runner: _Runner, spec: Spec, results: Sequence[Result]) -> list[Cause]:
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    nodes = Nodes(failures, [runner.case(r.case) for r in results if r.verdict is Verdict.PASS])
    groups = Search(runner, spec, nodes).run(failures)
    return [cause_of(g, str(spec), nodes) for g in groups]


@pytest.mark.parametrize(
    ("names", "globs", "expected"),
    [
        pytest.param(
            ("rope-factors-ignored", "expert-input-of-first-slot", "soft-max-sink-forgotten"),
            ("ops/ROPE-*", "ops/MUL_MAT_ID-*", "ops/SOFT_MAX-*"),
            {"ROPE": "src[2]", "MUL_MAT_ID": "src[2].ne[0]", "SOFT_MAX": "src[2]"},
            id="in three kernels",
        ),
        pytest.param(
            ("flash-attn-sink-forgotten", "softcap-before-scale"),
            ("ops/FLASH_ATTN_EXT-*",),
            {"FLASH_ATTN_EXT": "src[4]", "FLASH_ATTN_EXT ": "logit_softcap"},
            id="in one kernel",
        ),
        pytest.param(
            ("soft-max-sink-forgotten", "soft-max-scale-forgotten"),
            ("ops/SOFT_MAX-*",),
            {"SOFT_MAX": "src[2]", "SOFT_MAX ": "scale"},
            id="in one node",
        ),
        pytest.param(
            ("position-restarts-at-256", "rope-whole-head"),
            ("ops/ROPE-*",),
            {"ROPE": "src[1].holds", "ROPE ": "n_dims"},
            id="of positions and of what is turned",
        ),
    ],
)
def test_faults_together_are_as_many_causes(
    names: Sequence[str], globs: Sequence[str], expected: dict[str, str]
) -> None:
    """Each fault is one cause, and its conditions name what the fault is about."""
    found = sorted((c.op, {x.key for x in c.conditions}) for c in _causes(names, globs))
    assert [op for op, _ in found] == sorted(op.strip() for op in expected)
    for op, key in expected.items():
        assert any(op.strip() == o and key in keys for o, keys in found), (op, key, found)


def test_a_fault_of_a_type_is_one_cause_of_many_ops() -> None:
    """Ops that fail with one type, and only with it, share a cause."""
    (cause,) = _causes(("mxfp4-scale-doubled",), ("ops/GET_ROWS-*", "ops/MUL_MAT-*"))
    assert cause.op == ""
    assert "mxfp4" in {c.value for c in cause.conditions}


def test_a_node_that_is_wrong_by_itself_is_no_fault_of_what_is_kept() -> None:
    """What a run from end to end is too coarse to show is wrong in each node, on a backend opened anew, too."""
    fault = FAULTS["f16-truncated"]
    (result,) = _Runner([fault]).run(fault.spec, [build("zoo/qwen3-seqs=2,nodes=1,set=block_count:1@425")])
    assert result.verdict is Verdict.FAIL
    assert result.where is not None
    assert (result.where.fault, result.where.op) == ("node", "SET_ROWS")
    assert "opened anew" not in result.detail


def test_stores_and_computed_results_of_a_type_are_one_cause() -> None:
    """Ops that write where another tensor lies, and ops with results of their own, are wrong with one type."""
    globs = ("ops/SET_ROWS-f16+*", "ops/CPY-*f16*", "ops/SQR-f16*", "ops/COS-f16*", "ops/FILL-f16*")
    (cause,) = _causes(("f16-truncated",), globs)
    assert cause.conditions[1:] == (Condition("a type", "f16"),)


def test_what_flushes_subnormal_numbers_is_one_cause_of_any_kernels() -> None:
    """Whether an operand is subnormal or a result: how the processor computes is at fault, and no op."""
    old = "    x = np.asarray(values, np.float64)\n    near ="
    new = "    x = np.asarray(values, np.float64)\n    x = np.where(np.abs(x) < 2.0**-126, 0.0, x)\n    near ="
    flush = Fault("bf16-flushed", "", "cpu", ("ops",), "backends/cpu/values.py", old, new)
    (cause,) = _causes_of(flush, case_ids((), ("ops/*-bf16*data=range*", "ops/*-f32*data=range*"), "standard"))
    ops = {op for c in cause.conditions if c.key == "op" for op in c.value.split("|")}
    assert len({base_of(op) for op in ops}) >= SEVERAL
    assert Condition("a type", "bf16") in cause.conditions
    assert "subnormal numbers are zero" in cause.sentence


def test_an_id_is_the_same_twice() -> None:
    """A cause has the same id in two runs."""
    first, second = (_causes(("soft-max-sink-forgotten",), ("ops/SOFT_MAX-*",)) for _ in range(2))
    assert [c.id for c in first] == [c.id for c in second]
    assert len(first) == 1


def test_every_failure_is_in_a_cause() -> None:
    """No time to shrink anything leaves no failure without a cause."""
    fault = FAULTS["kv-head-modulo"]
    runner = _Runner([fault])
    ids = case_ids((), ("ops/FLASH_ATTN_EXT-*", "ops/MUL_MAT-*"), "smoke")
    results = runner.run(fault.spec, [runner.case(i) for i in ids])
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    groups = Search(runner, fault.spec, Nodes(failures, []), seconds=0).run(failures)
    assert {f.case.id for f in failures} == {f.case.id for g in groups for f in g.failures}
    assert failures


def test_a_cause_says_what_nobody_had_time_for() -> None:
    """Failures that went to the nearest cause, as time was over, are counted in its sentence; with time none are."""
    fault = FAULTS["kv-head-modulo"]
    runner = _Runner([fault])
    ids = case_ids((), ("ops/FLASH_ATTN_EXT-*",), "smoke")
    results = runner.run(fault.spec, [runner.case(i) for i in ids])
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    nodes = Nodes(failures, [])
    groups = Search(runner, fault.spec, nodes, seconds=0).run(failures)
    unsure = sum(g.unsure for g in groups)
    assert 0 < unsure < len(failures)
    assert any(f"{g.unsure} of them put here as time was over" in cause_of(g, "", nodes).sentence for g in groups)
    assert not any(g.unsure for g in Search(runner, fault.spec, nodes).run(failures))


def test_ctrl_c_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt ends the search and loses no failure."""
    fault = FAULTS["kv-head-modulo"]
    runner = _Runner([fault])
    ids = case_ids((), ("ops/FLASH_ATTN_EXT-*", "ops/MUL_MAT-*"), "smoke")
    results = runner.run(fault.spec, [runner.case(i) for i in ids])
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    said: list[str] = []

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("conformance.causes.grouping.search.shrink", interrupted)
    groups = Search(runner, fault.spec, Nodes(failures, []), progress=said.append).run(failures)
    assert {f.case.id for f in failures} == {f.case.id for g in groups for f in g.failures}
    assert sum(text.startswith("interrupted") for text in said) == 1
    runner.close()
