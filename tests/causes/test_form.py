"""Forms: a form holds for the node that it was read from, and what two forms share holds wherever one of them does."""

from __future__ import annotations

import pytest

from conformance.causes.cause import Condition
from conformance.causes.features import features, nodes_of
from conformance.causes.form import Form, common, form_of
from conformance.run.session.select import build, case_ids

CASES = case_ids((), (), "smoke")[::9]


@pytest.mark.parametrize("case_id", CASES)
def test_a_form_holds_for_its_own_node(case_id: str) -> None:
    """Whatever a node has is true of it."""
    case = build(case_id)
    for k, _, node in nodes_of(case):
        assert form_of(case, k, node).holds(features(case, k, node)), node


def test_what_two_forms_share_holds_for_both() -> None:
    """The nodes of either form meet what both have in common."""
    forms = []
    for case_id in case_ids((), ("ops/ROPE-*", "ops/MUL_MAT-*", "ops/GET_ROWS-*"), "smoke"):
        case = build(case_id)
        k, _, node = list(nodes_of(case))[-1]
        forms.append((form_of(case, k, node), features(case, k, node)))
    shared = [(c, a, b) for i, (fa, a) in enumerate(forms) for fb, b in forms[:i] if (c := common(fa, fb)) is not None]
    assert shared
    assert all(c.holds(a) and c.holds(b) for c, a, b in shared)


def test_ops_of_other_kernels_share_no_sizes() -> None:
    """Two ops that fail with two rows each are two faults; with one block type they are one."""

    def of(op: str, *rest: tuple[str, str]) -> Form:
        return Form(tuple(Condition(*c) for c in (("op", op), *rest)))

    assert common(of("ROPE", ("src[0].ne[1]", "> 1")), of("MUL_MAT", ("src[0].ne[1]", "> 2"))) is None
    both = common(of("GET_ROWS", ("src[0].type", "q4_0")), of("CPY", ("src[1].type", "q4_0")))
    assert both == of("GET_ROWS|CPY", ("a type", "q4_0"))
    wider = common(of("ROPE", ("src[0].ne[1]", "> 31")), of("ROPE", ("src[0].ne[1]", "> 2")))
    assert wider == of("ROPE", ("src[0].ne[1]", "> 2"))


def test_what_several_ops_share_spreads_to_others() -> None:
    """What three ops share of an operand explains a fourth; what two share, or a size, does not."""
    part = Condition("src[0].shows", "a part of a leaf")
    found = {"op": "SQRT", "src[0].shows": "a part of a leaf", "src[0].ne[0]": "7"}

    def of(ops: str, condition: Condition) -> Form:
        return Form((Condition("op", ops), condition))

    assert of("ADD|MUL|DIV", part).spreads
    assert of("ADD|MUL|DIV", part).beside(found)
    assert not of("ADD|MUL", part).spreads
    assert not of("ADD|MUL|DIV", Condition("src[0].ne[0]", "> 2")).spreads


def test_an_operand_that_shows_a_part_is_told_wherever_it_stands() -> None:
    """The same view as the first or as the second operand is one condition."""
    a, b = (
        Form((Condition("op", op), Condition(f"src[{i}].shows", "a part of a leaf")))
        for op, i in (("ADD", 0), ("SUB", 1))
    )
    shared = common(a, b)
    assert shared is not None
    assert Condition("an operand shows", "a part of a leaf") in shared.conditions
    assert shared.of_extent


def test_an_integer_of_64_bits_is_a_condition() -> None:
    """A case that fails with I64 says so: nothing simpler takes its place."""
    case = build("ops/CONT-i64-ne=256x3x2@126")
    (k, _, node), *_ = nodes_of(case)
    assert Condition("src[0].type", "i64") in form_of(case, k, node).conditions


def test_a_form_of_a_simpler_type_names_the_type_that_it_was_shrunk_from() -> None:
    """SCALE of BF16 was shrunk to F16: the form holds for both, for no third type, and keeps what else it says."""
    f16, bf16, f32 = (
        next(features(c, k, n) for c in [build(f"ops/SCALE-{t}-ne=40x5,s=0.7@1")] for k, _, n in nodes_of(c))
        for t in ("f16", "bf16", "f32")
    )
    form = Form((Condition("op", "SCALE"), Condition("src[0].type", "f16"), Condition("src[0].ne[1]", "> 2")))
    wider = form.with_types(bf16)
    assert [wider.holds(f) for f in (f16, bf16, f32)] == [True, True, False]
    assert str(wider.conditions[1]) == "src[0].type = f16 or bf16"
    assert wider.conditions[2] == form.conditions[2]
    assert form.with_types(f16) == form


def test_what_is_read_wrong_explains_no_store() -> None:
    """Several ops that read Q4_0 wrong explain a copy from Q4_0, and none to it; of F16, which is no block, both."""
    reads = Form((Condition("op", "MUL_MAT|GET_ROWS|ADD"), Condition("a type", "q4_0")))
    copy = {"op": "CPY", "src[0].type": "q4_0", "src[1].type": "f32", "result.type": "f32"}
    store = {"op": "CPY", "src[0].type": "f32", "src[1].type": "q4_0", "result.type": "q4_0"}
    assert reads.beside(copy)
    assert not reads.beside(store)
    assert Form((Condition("op", "MUL_MAT|GET_ROWS|ADD"), Condition("a type", "q4_0|f32"))).beside(store)
