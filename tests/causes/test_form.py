"""Forms: a form holds for the node that it was read from, and what two forms share holds wherever one of them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from conformance.case.case import Case, Step
from conformance.causes.cause import Condition
from conformance.causes.features import features, nodes_of
from conformance.causes.form import Form, form_of
from conformance.causes.grouping.forms import common, is_product_of, stores_among_several, twins
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, Tensor, nbytes, new_tensor
from conformance.ggml.types import F32, I32
from conformance.judge.verdict import Result, Verdict
from conformance.run.session.select import build, case_ids
from conformance.run.shrink import measure, simplify
from conformance.run.shrink.cuts import Recorded

Made = tuple[list[Tensor], list[Tensor]]
"""Nodes and outputs."""
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


def test_ops_of_one_kernel_share_sizes_only_where_neither_says_more() -> None:
    """NORM that needs its eps and TOP_K of long rows are two faults, though one module has both."""
    long = ("src[0].ne[0]", "> 1")
    plain = Form((Condition("op", "TOP_K"), Condition(*long)))
    assert common(Form((Condition("op", "NORM"), Condition(*long), Condition("eps", "!= 0"))), plain) is None
    assert common(Form((Condition("op", "NORM"), Condition(*long))), plain) is not None


@pytest.mark.parametrize(
    ("case_id", "said"),
    [
        pytest.param(
            "ops/FLASH_ATTN_EXT-f32+f32-q=32x3x4,k=32x16x2,mask=16x3,hide=junk,max_bias=8.0@201", False, id="mask"
        ),
        pytest.param("ops/FLASH_ATTN_EXT-f32+f16-q=64x3x4,k=64x64x2@1", True, id="K and V"),
        pytest.param("ops/ADD-bf16+bf16-a=17x3x2@1", True, id="sources that are of one type"),
    ],
)
def test_a_type_is_a_condition_only_where_the_op_takes_a_simpler_one(case_id: str, said: bool) -> None:
    """The mask of an attention is F16 always, so that it is says nothing."""
    ((k, _, node),) = nodes_of(build(case_id))
    types = [c for c in form_of(build(case_id), k, node).conditions if c.key.endswith("].type")]
    assert bool(types) is said


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
    """A case that still fails with I64 says so."""
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


def _of(op: str, *rest: tuple[str, str]) -> Form:
    return Form(tuple(Condition(*c) for c in (("op", op), *rest)))


def test_values_that_arithmetic_treats_apart_are_no_fault_of_two_kernels() -> None:
    """ARGMAX and CPY of infinities are two causes; DIV and MUL of them, in one file, are one."""
    held = ("src[0].holds", "infinities")
    assert common(_of("ARGMAX", held), _of("CPY", held)) is None
    assert common(_of("DIV", held), _of("MUL", held)) == _of("DIV|MUL", held)
    assert common(_of("ARGMAX", held, ("src[0].type", "f16")), _of("CPY", held, ("src[0].type", "f16"))) is not None


def test_an_op_and_its_gradient_are_twins_where_one_is_always_wrong() -> None:
    """ROPE_BACK turns the other way: what ROPE does to some positions it does to all."""
    positions = ("src[1].holds", "numbers beyond U8")
    assert twins(_of("ROPE", positions), _of("ROPE_BACK", ("src[0].ne[0]", "> 1"))) == _of("ROPE|ROPE_BACK")
    assert twins(_of("ROPE", positions), _of("ROPE_BACK", ("n_dims", "less than ne[0]"))) is None
    assert twins(_of("ROPE", positions), _of("RMS_NORM_BACK")) is None


@pytest.mark.parametrize(
    ("other", "type_", "among"), [("SET_ROWS", "q5_0", True), ("SET_ROWS", "q8_0", False), ("GET_ROWS", "q5_0", False)]
)
def test_a_store_of_a_type_is_among_stores_of_several(other: str, type_: str, *, among: bool) -> None:
    """CPY that is wrong with three types has SET_ROWS with one of them, and no op that reads."""
    copy = _of("CPY", ("src[1].type", "q4_0|q5_0|q6_K"))
    assert stores_among_several(_of(other, ("src[2].type", type_)), copy) is among


@pytest.mark.parametrize(
    ("case_id", "key", "value"),
    [
        ("ops/ROPE-f32-ne=32x3x4,mode=IMROPE,sections=6x5x5x0,from=2000,to=9000@900", "src[1].holds", "U8"),
        ("ops/ROPE-f32-ne=48x3x4,n_dims=32,mode=NEOX@1", "n_dims", "less than ne[0]"),
        ("ops/ROPE-f32-ne=48x3x4,mode=NEOX@1", "n_dims", "ne[0]"),
    ],
)
def test_positions_and_turns_are_told(case_id: str, key: str, value: str) -> None:
    """Positions that a byte does not hold, and how much of a row ROPE turns, which only a part makes a condition."""
    case = build(case_id)
    ((k, _, node),) = nodes_of(case)
    assert value in features(case, k, node)[key]
    assert any(c.key == key for c in form_of(case, k, node).conditions) is (value != "ne[0]")


@pytest.mark.parametrize(
    ("case_id", "said"),
    [
        ("ops/ADD-f32+f32-a=13x5x3x2,b=1x5x1x2@612", True),
        ("ops/MUL-f32+f32-a=13x5x3x2,b=1x5x1x2@1", True),
        ("ops/ADD-f32+f32-a=16x6x4x2,va=off@708", False),
        ("ops/MUL_MAT-f32+f32-a=33x7,b=33x3@1", False),
    ],
)
def test_a_broadcast_operand_is_told(case_id: str, *, said: bool) -> None:
    """Where it repeats to the shape of the other; operands of one shape, and of ops that repeat none, are not."""
    case = build(case_id)
    k, _, node = list(nodes_of(case))[-1]
    assert (Condition("src[1].broadcast", "yes") in form_of(case, k, node).conditions) is said


def test_all_of_a_weight_in_another_shape_is_told() -> None:
    """A view of a part, and a leaf, are not `reshaped`."""
    case = build("weight_placement/parts-w=q4_0,buffer=1@100")
    layouts = [features(case, k, n)["src[0].layout"] for k, _, n in nodes_of(case) if k == 0 and n.op == "MUL_MAT"]
    assert layouts == ["contiguous", "reshaped"]
    assert "reshaped" not in {
        value
        for i in ("ops/MUL_MAT-f32+f32-a=256x6x2x2,b=256x3x2x2,va=part.p0213,vb=off@866", "ops/MUL-f16+f32-a=67x3@1")
        for value in features(build(i), 0, next(n for _, _, n in nodes_of(build(i)))).values()
    }


def test_an_index_of_64_bits_and_a_turn_of_a_part_shrink() -> None:
    """SET_ROWS takes indices of 32 bits, and ROPE turns all of a row, if the case fails so, too."""
    rows, turns = (
        Recorded(build(i), [])
        for i in ("ops/SET_ROWS-f16+f32+i64-a=33x6,n=4@1", "ops/ROPE-f32-ne=48x3x4,n_dims=32,mode=NEOX@1")
    )
    result = Result("", "", Verdict.FAIL)
    made = [n for c in simplify.types(rows, result) for _, _, n in nodes_of(c)]
    assert any(n.src[1] is not None and n.src[1].type is I32 for n in made)
    assert 48 in [n.params.n_dims for c in simplify.parameters(turns, result) for _, _, n in nodes_of(c)]
    smaller = [c for c in simplify.types(rows, result) if measure(c) < measure(rows.case)]
    assert len(smaller) == len(list(simplify.types(rows, result)))


@pytest.mark.parametrize(
    ("attention", "product", "one"),
    [
        ((("src[1].ne[1]", "> 512"),), (("src[0].ne[1]", "> 512"),), True),
        ((("src[0].ne[2]", "> 2"), ("src[1].ne[2]", "> 1")), (("src[0].ne[2]", "> 1"), ("src[1].ne[2]", "> 2")), True),
        ((("src[0].ne[3]", "> 1"), ("src[3]", "given")), (("src[0].ne[3]", "> 1"),), True),
        ((("src[1].ne[1]", "> 512"),), (("src[1].ne[1]", "> 512"),), False),
        ((("src[1].ne[1]", "> 512"), ("src[4]", "given")), (("src[0].ne[1]", "> 512"),), False),
        ((("src[1].ne[1]", "> 512"),), (("src[0].ne[1]", "> 512"), ("src[0].type", "q4_0")), False),
        ((), (), False),
    ],
)
def test_an_attention_is_a_product_of_k_and_q(
    attention: tuple[tuple[str, str], ...], product: tuple[tuple[str, str], ...], *, one: bool
) -> None:
    """Wrong in the same sizes of K and Q, and in nothing else but what a mask is, both are wrong by the product."""
    assert is_product_of(_of("FLASH_ATTN_EXT", *attention), _of("MUL_MAT", *product)) is one


def _case_of(make: Callable[[Builder], Made], *leaves: Tensor, kept: Tensor | None = None) -> Case:
    """A case of the nodes and outputs that `make` gives."""
    nodes, outputs = make(Builder())
    for i, n in enumerate(nodes):
        n.name, n.flags = f"node_{i}", n.flags | FLAG_COMPUTE
    persistent = {} if kept is None else {kept: np.zeros(nbytes(kept), np.uint8)}
    inputs = {t: np.zeros(nbytes(t), np.uint8) for t in leaves}
    case = Case("test/form@0", persistent, [Step(Graph(nodes), inputs, tuple(outputs))])
    case.validate()
    return case


def test_what_a_node_before_wrote_is_told() -> None:
    """GET_ROWS of a cache into which the step wrote, unless it reads what the store gives."""
    for reads_it in (False, True):
        cache, new = new_tensor(F32, 8, 4, name="cache"), new_tensor(F32, 8, 4, name="new", flags=FLAG_INPUT)
        rows = new_tensor(I32, 2, name="rows", flags=FLAG_INPUT)

        def make(b: Builder, c: Tensor = cache, n: Tensor = new, r: Tensor = rows, *, it: bool = reads_it) -> Made:
            store = b.cpy(n, c)
            found = b.get_rows(store if it else c, r)
            return [store, found], [found]

        case = _case_of(make, new, rows, kept=cache)
        said = {str(c) for c in form_of(case, 0, case.steps[0].graph.nodes[1]).says}
        assert ("src[0].written = by a node before, whose result it does not read" in said) is not reads_it


def test_a_view_by_no_op_and_an_output_that_a_view_shows_are_told() -> None:
    """CONT of what `ggml_view_tensor` gives; a result of which a permutation is the output, or that one reads."""
    x = new_tensor(F32, 4, 3, name="x", flags=FLAG_INPUT)

    def make(b: Builder) -> Made:
        turned = b.transpose(x)
        again = b.view_tensor(turned)
        copy = b.cont(again)
        shown = b.permute(copy, 1, 0, 2, 3)
        return [turned, copy, shown], [shown]

    case = _case_of(make, x)
    node = case.steps[0].graph.nodes[1]
    said = {str(c) for c in form_of(case, 0, node).says}
    assert {"src[0].view = by no op", "output = shown by a view"} <= said
    case.steps[0] = replace(case.steps[0], outputs=(node,))
    assert "output = and read later" in {str(c) for c in form_of(case, 0, node).says}
