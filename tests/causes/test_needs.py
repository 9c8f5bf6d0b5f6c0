"""What a failure needs: a form is tested by taking it away, and joins what other words tell apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from trust.copies import Copies
from trust.faults import Bundle, Fault

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.causes.cause import Condition
from conformance.causes.failure import Failure, by_chance, failure_of
from conformance.causes.features import features, nodes_of
from conformance.causes.form import Form, form_of, meets
from conformance.causes.grouping.group import UNSEEN, Group, cause_of
from conformance.causes.grouping.nodes import Nodes
from conformance.causes.grouping.search import Search
from conformance.causes.needs import cure
from conformance.causes.needs.whole import said_alike, whole_form
from conformance.ggml.arithmetic import EXACT
from conformance.judge import evidence
from conformance.judge.evidence import Error, Place
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.oracle import Oracle
from conformance.run.session.select import build, case_ids
from conformance.run.shrink import cuts
from conformance.run.signature import innermost

PART = Form(
    (
        Condition("op", "SQR|SQRT|ADD"),
        Condition("an operand shows", "a part of an input|a part of a leaf written in place"),
    )
)
DECODER = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
VIEWED = (
    "ops/SQR-f32-ne=18x6x3x2,vne=rows@705",
    "ops/IM2COL-f32+f32+f32-a=3x5x4,b=20x5x1,k=1x0x3x0x2x0,vb=off@56",
)

READS = "            src = [None if s is None else strided(_buffer(s.root, buffers), s) for s in node.src]\n"
FROM_THE_START = """            part = [s is not None and s.root.op == "NONE" and sorted(s.root.ne) != sorted(s.ne)
                    for s in node.src]
            if any(part) and node.op == {throws!r}:
                raise ConformanceError("cannot make a shape of 4 dimensions")
            if node.op == {own!r}:
                raise ConformanceError("this op was never finished here")
            src = [None if s is None else strided(_buffer(s.root, buffers), s, 0 if p else None)
                   for s, p in zip(node.src, part)]
"""


WRITES = "        held[:] = data\n"
FORGETS = "        held[:] = held\n"


class _Runner(Copies):
    locates = True


def _fault(*, throws: str = "", own: str = "") -> Fault:
    """An operand that shows a part is read from the start of its leaf; the op `throws` an error then, `own` always."""
    new = FROM_THE_START.format(throws=throws, own=own)
    return Fault("from-the-start", "", "cpu", ("ops",), "conformance/backend/kernel.py", READS, new)


def _groups(fault: Fault, globs: Sequence[str]) -> list[Group]:
    bundle = Bundle("together", (fault,))
    runner = _Runner([bundle])
    results = runner.run(bundle.spec, [runner.case(i) for i in case_ids((), globs, "smoke")])
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    nodes = Nodes(failures, [runner.case(r.case) for r in results if r.verdict is Verdict.PASS])
    return Search(runner, bundle.spec, nodes).run(failures)


OPS = (
    "ops/SQR-f32-ne=18*",
    "ops/SQRT-f32-ne=18*",
    "ops/SUM_ROWS-f32*",
    "ops/CUMSUM-f32-ne=18*",
    "ops/CLAMP-f32-ne=18*",
)


def test_an_error_that_goes_with_its_view_is_no_cause_of_its_own() -> None:
    """Ops that read a view wrong and one that throws at it, in words of its own, are one cause."""
    (group,) = _groups(_fault(throws="CUMSUM"), OPS)
    assert {f.case.id.partition("-")[0] for f in group.failures} >= {"ops/CUMSUM", "ops/SQR"}
    assert {f.result.verdict for f in group.failures} == {Verdict.FAIL, Verdict.OVERCLAIM}


def test_an_error_that_stays_without_the_view_is_a_cause_of_its_own() -> None:
    """An op that throws with a view and without one has a fault of its own, though some of its cases have views."""
    groups = _groups(_fault(own="CUMSUM"), OPS)
    assert len(groups) == 2
    (own,) = (g for g in groups if g.kind[0] == Verdict.OVERCLAIM)
    assert {f.case.id.partition("-")[0] for f in own.failures} == {"ops/CUMSUM"}
    assert not cause_of(own, "cpu", Nodes([], [])).conditions[1:]


def test_a_relation_is_needed_where_each_run_by_itself_is_right() -> None:
    """Weights that a session does not take are a fault of what the relation does, and of no node."""
    forgets = Fault("forgets", "", "cpu", ("relations",), "conformance/backend/kernel.py", WRITES, FORGETS)
    (group,) = _groups(forgets, ("relations/weights-*",))
    assert [c.key for c in group.form.conditions] == ["relation"]


@pytest.mark.parametrize("case_id", VIEWED)
def test_without_a_view_all_else_stays(case_id: str) -> None:
    """The leaf in the view's place has what the view showed: the reference gives the same results."""
    case, oracle = build(case_id), Oracle()
    node = list(nodes_of(case))[-1][2]
    form = Form((Condition("an operand shows", "a part of an input"),))
    recorded = cuts.record(case, oracle.reference_in(EXACT))
    (flat,) = cure.without(form, recorded, Result("", "", Verdict.FAIL), node)
    assert not any(form.holds(features(flat, k, n)) for k, _, n in nodes_of(flat))
    assert [n.op for _, _, n in nodes_of(flat)] == [n.op for _, _, n in nodes_of(case)]
    (before, after) = (oracle.expect([c], EXACT)[0].steps[0].outputs.values() for c in (case, flat))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("case_id", case_ids((), ("ops/*inplace=*",), "smoke")[::6])
def test_apart_from_its_operand_an_op_gives_the_same(case_id: str) -> None:
    """What wrote in place has memory of its own, and its result is as before."""
    case, oracle = build(case_id), Oracle()
    (found,) = cure.apart(cuts.record(case, oracle.reference_in(EXACT)), Result("", "", Verdict.FAIL))
    found.validate()
    assert "yes" in {features(case, k, n)["in place"] for k, _, n in nodes_of(case)}
    assert {features(found, k, n)["in place"] for k, _, n in nodes_of(found)} == {"no"}
    (before, after) = (list(oracle.expect([c], EXACT)[0].steps[0].outputs.values()) for c in (case, found))
    assert np.array_equal(before[-1], after[-1])


def test_what_is_needed_stays_while_a_case_shrinks() -> None:
    """A case that passes without its type keeps a type that is no F32, F16 too; what it does not need may go."""
    case = build("ops/MUL_MAT-q4_1+f32-a=32x7,b=32x3@670")
    ((k, _, node),) = nodes_of(case)
    recorded = cuts.record(case, Oracle().reference_in(EXACT))

    def passes(candidate: Case) -> bool:
        return all(n.src[0] is not None and n.src[0].type.name == "f32" for _, _, n in nodes_of(candidate))

    found = features(case, k, node)
    needed = cure.needs(form_of(case, k, node), recorded, Result("", "", Verdict.FAIL), node, passes)
    assert needed.met(found)
    assert needed.met({**found, "src[0].type": "f16"})
    assert not needed.met({**found, "src[0].type": "f32"})
    assert not cure.needs(form_of(case, k, node), recorded, Result("", "", Verdict.FAIL), node, lambda _: False).some_of


def test_what_a_leaf_holds_is_a_condition_of_any_that_holds_more() -> None:
    """Subnormal numbers alone are in what holds them and more; a size does not matter."""
    case = build("ops/DIV-bf16+bf16-a=67x3,data=range@203")
    held = [features(case, k, n).get("src[0].holds", "") for k, _, n in nodes_of(case)]
    assert "numbers beyond F16, subnormal numbers" in held
    subnormal = Condition("src[0].holds", "subnormal numbers")
    assert [meets(subnormal, {"src[0].holds": h}) for h in held] == ["subnormal" in h for h in held]
    assert meets(Condition("an operand holds", "numbers beyond F16"), {"src[1].holds": max(held, key=len)})


def test_what_a_view_shows_a_part_of_is_told() -> None:
    """An input, a weight and a cache are different: a backend keeps the latter."""
    found: dict[str, str] = {}
    for case_id in (
        "ops/ADD_ID-f32+f32-a=33x3x5,n_expert=2,va=off,vb=pad@54",
        f"{DECODER},run=p9.d3@1",
    ):
        case = build(case_id)
        for k, _, n in nodes_of(case):
            found |= {f"{n.op} {key}": v for key, v in features(case, k, n).items() if key.endswith(".shows")}
    assert found["ADD_ID src[0].shows"] == "a part of an input"
    assert found["ADD_ID src[1].shows"] == "a part of a weight"
    assert found["FLASH_ATTN_EXT src[1].shows"] == "a part of a cache"
    in_place = build("ops/SCALE-f32-ne=24x6x2,vne=off,inplace=leaf,s=1.25@296")
    ((k, _, node),) = nodes_of(in_place)
    assert features(in_place, k, node)["src[0].shows"] == "a part of a leaf written in place"


def test_a_crash_that_says_why_is_no_damage() -> None:
    """Damaged memory shows as wrong numbers too; an assertion in its process does not."""
    assert by_chance("CRASH", "its process died (SIGSEGV)")
    assert by_chance("CRASH", "its process died (SIGABRT): the heap is damaged")
    assert not by_chance("CRASH", "its process died (SIGABRT): ggml-backend.cpp:#: pre-allocated tensor")
    case = build(VIEWED[0])
    group = Group(("FAIL", ""), PART, _failure(case, Result(case.id, "", Verdict.FAIL)))
    for died, said, explained in (("SIGSEGV", "", True), ("SIGABRT", "ggml.c:1: GGML_ASSERT(a) failed", False)):
        crash = Result(case.id, "", Verdict.CRASH, error=Error("its process died", said, died))
        assert group.explains(_failure(case, crash)) is explained


def _failure(case: Case, result: Result) -> Failure:
    found = failure_of(case, result)
    assert found is not None
    return found


def test_errors_of_two_ops_say_the_same_but_for_one_word() -> None:
    """The check of Multiply and of Subtract is one; another check, or a wrong number, is none of it."""
    a, b = (("OVERCLAIM", f"Check 'merge': opset#::{op}: Arguments do not have the same element type") for op in "AB")
    assert said_alike(a, b)
    assert not said_alike(a, ("OVERCLAIM", "Check 'rank': opset#::A: Axis is out of the tensor rank range"))
    assert not said_alike(("FAIL", a[1]), ("FAIL", b[1]))
    assert said_alike(
        ("OVERCLAIM", "Reshape node 'Qcur' Check"), ("OVERCLAIM", "Reshape node 'node_' Check"), named=True
    )


def test_a_case_as_a_whole_has_a_form() -> None:
    """Sequences in streams of their own are said, and not where there is one."""
    one, three = (whole_form(build(f"{DECODER},{n}run=p9.d3@1")).conditions for n in ("", "seqs=3,"))
    assert Condition("streams", "> 1") in three
    assert Condition("streams", "> 1") not in one
    assert Condition("a node reads", "a part of a cache") in one


def test_an_assertion_about_an_op_is_one_whatever_the_op() -> None:
    """Ggml's scheduler says of which op a buffer is not; the assertion is the same."""
    said = "ggml-backend.cpp:9: pre-allocated tensor (k (view)) in a buffer (D0) that cannot run the operation"
    assert len({innermost(Error("it died", f"{said} ({op})", "SIGABRT")) for op in ("PERMUTE", "CPY")}) == 1


def test_what_nobody_had_time_for_is_in_no_cause_of_another_condition() -> None:
    """A wrong number goes to a known cause of its op that it differs from in sizes alone, and else stands apart."""
    case = build(VIEWED[0])
    ((k, i, _),) = nodes_of(case)
    late = _failure(case, Result(case.id, "", Verdict.FAIL, where=Place(evidence.Fault.NODE, k, i, "SQR")))
    for condition, near in ((Condition("src[0].ne[0]", "> 4096"), True), (Condition("src[0].type", "f16"), False)):
        search = Search(_Runner([]), Spec("cpu"), Nodes([late], []), seconds=0)
        search.groups.all = [Group(("FAIL", ""), Form((Condition("op", "SQR"), condition)), late)]
        groups = search.run([late])
        (holder,) = (g for g in groups if late in g.failures)
        assert (holder.kind[1] == UNSEEN) == (not near)
        assert holder.unsure == 1
