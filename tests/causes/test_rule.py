"""Rules and experiments: a rule is true of its own node, and removing a property changes nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from conformance.case.case import Case, Step
from conformance.causes import ablate
from conformance.causes.failure import is_flaky
from conformance.causes.features import OPERANDS, features, nodes_of
from conformance.causes.group import Group, needing_same
from conformance.causes.rule import Rule, common, is_size, meets, property_of, rule_of
from conformance.causes.wording import clause
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, Tensor, nbytes, new_tensor
from conformance.ggml.types import F32, I32
from conformance.judge.cause import Condition
from conformance.judge.verdict import Result, Verdict
from conformance.run.oracle import Oracle
from conformance.run.session.select import build, case_ids
from conformance.run.shrink import cuts

Made = tuple[list[Tensor], list[Tensor]]
"""Nodes and outputs."""
FAIL = Result("ops/x@1", "ggml", Verdict.FAIL)
DECODER = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d3@1"


def _of(op: str, *rest: tuple[str, str]) -> Rule:
    return Rule.of(op.split("|"), [Condition(*c) for c in rest])


ROWS, TWO_TYPES = _of("ROPE", ("src[0].ne[1]", "> 2")), ("src[0].type", "q4_0|q8_0")


def test_groups_that_need_the_same_are_joined_within_a_kernel() -> None:
    """A shared op is no reason to join others: one cause would hold ops that have nothing in common."""

    def joined(*rules: Rule) -> Rule | None:
        kind, needs = ("FAIL", "wrong results"), ablate.Needs(known=True)
        a, b = (Group(kind, rule, cast("Any", SimpleNamespace(features={})), needs=needs) for rule in rules)
        return needing_same(a, b, cast("Any", SimpleNamespace(passed=lambda _: 1)))

    strided, large = ("src[0].layout", "strided rows"), ("src[0].ne[1]", "> 2")
    assert joined(_of("DIAG|SET", strided), _of("ROLL|SET", large)) is None
    assert joined(_of("ROPE|ROPE_BACK", strided), _of("ROPE", large)) == _of("ROPE|ROPE_BACK")
    assert joined(_of("UNARY.EXP", strided), _of("UNARY.ABS", large)) is None


@pytest.mark.parametrize("case_id", case_ids((), (), "smoke")[::9])
def test_a_rule_holds_for_its_own_node(case_id: str) -> None:
    """Whatever a node has is true of it."""
    case = build(case_id)
    for k, _, node in nodes_of(case):
        assert rule_of(case, k, node).holds(features(case, k, node)), node


@pytest.mark.parametrize("case_id", case_ids((), (), "smoke")[::9])
def test_each_property_has_words(case_id: str) -> None:
    """`OPERANDS` (features.py) words the properties of operands, wording.py those of nodes."""
    case = build(case_id)
    for k, _, node in nodes_of(case):
        for condition in itertools.starmap(Condition, features(case, k, node).items()):
            name = property_of(condition)
            assert name == condition.key or name in OPERANDS or is_size(condition), f"{name}: add it to OPERANDS"
        named = {f.name for f in DECLARATIONS[node.op].fields}
        bare = [c for c in rule_of(case, k, node).rest if property_of(c) == c.key and c.key not in named]
        assert not [c for c in bare if clause(c) == f"{c.key} = {c.value}"], "add it to wording.py"


def test_each_property_of_an_operand_is_removed_by_a_pass_of_its_own() -> None:
    """`makers` (ablate.py) treats a property that it does not name as a parameter of the op."""
    parameters = ablate.makers("a parameter")
    assert [name for name in OPERANDS if ablate.makers(name) == parameters] == [], "add it to `makers` of ablate.py"


def test_the_rule_over_two_holds_for_both() -> None:
    """The nodes of either rule meet what both have in common."""
    rules = []
    for case_id in case_ids((), ("ops/ROPE-*", "ops/MUL_MAT-*", "ops/GET_ROWS-*", "ops/CPY-*"), "smoke"):
        case = build(case_id)
        k, _, node = list(nodes_of(case))[-1]
        rules.append((rule_of(case, k, node), features(case, k, node)))
    shared = [(c, a, b) for i, (ra, a) in enumerate(rules) for rb, b in rules[:i] if (c := common(ra, rb)) is not None]
    assert shared
    assert all(c.holds(a) and c.holds(b) for c, a, b in shared)


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (_of("ROPE", ("src[0].ne[1]", "> 1")), _of("MUL_MAT", ("src[0].ne[1]", "> 2")), None),
        (_of("NORM", ("eps", "!= 0")), _of("RMS_NORM", ("eps", "!= 0")), _of("NORM|RMS_NORM", ("eps", "!= 0"))),
        (_of("ROPE", ("src[2]", "given")), _of("SOFT_MAX", ("src[2]", "given")), None),
        (_of("ROPE", ("src[0].ne[1]", "> 31")), ROWS, ROWS),
        (
            _of("GET_ROWS", ("src[0].type", "q4_0")),
            _of("FLASH_ATTN_EXT", ("src[1].type", "q4_0")),
            _of("FLASH_ATTN_EXT|GET_ROWS", ("any source.type", "q4_0")),
        ),
        (
            _of("GET_ROWS", ("src[0].type", "q4_0")),
            _of("CPY", ("result.type", "q4_0")),
            _of("CPY|GET_ROWS", ("any operand.type", "q4_0")),
        ),
        (_of("CPY", ("src[0].type", "q4_0")), _of("CPY", ("src[0].type", "q8_0")), _of("CPY", TWO_TYPES)),
        (_of("CPY", ("src[0].type", "q4_0")), _of("ADD", ("src[0].type", "q8_0")), None),
        (
            _of("SQR", ("src[0].offset view", "yes")),
            _of("ADD", ("src[1].offset view", "yes")),
            _of("ADD|SQR", ("any source.offset view", "yes")),
        ),
        (_of("SQR", ("src[0].offset view", "yes")), _of("SIN", ("src[0].layout", "strided rows")), None),
    ],
)  # fmt: skip
def test_what_two_rules_share(a: Rule, b: Rule, both: Rule | None) -> None:
    """Of several ops what operands, results or outputs have in common; of one op any of two types, and lower sizes."""
    assert common(a, b) == both == common(b, a)


@pytest.mark.parametrize(
    ("case_id", "said"),
    [
        pytest.param(
            "ops/FLASH_ATTN_EXT-f32+f32-q=32x3x4,k=32x16x2,mask=16x3,hide=junk,max_bias=8.0@201", False, id="mask"
        ),
        pytest.param("ops/FLASH_ATTN_EXT-f32+f16-q=64x3x4,k=64x64x2@1", True, id="K and V"),
        pytest.param("ops/ADD-bf16+bf16-a=17x3x2@1", True, id="sources that are of one type"),
        pytest.param("ops/CONT-i64-ne=256x3x2@126", True, id="64 bits"),
    ],
)
def test_a_type_is_a_condition_only_where_the_op_takes_a_simpler_one(case_id: str, said: bool) -> None:
    """The mask of an attention is F16 always, so that it is says nothing."""
    (k, _, node), *_ = nodes_of(build(case_id))
    types = [c for c in rule_of(build(case_id), k, node).conditions if c.key.endswith("].type")]
    assert bool(types) is said


@pytest.mark.parametrize(
    ("case_id", "said", "is_there"),
    [
        ("ops/ADD-f32+f32-a=13x5x3x2,b=1x5x1x2@612", "src[1] broadcast", True),
        ("ops/ADD-f32+f32-a=16x6x4x2,va=off@708", "src[1] broadcast", False),
        ("ops/ADD-f32+f32-a=16x6x4x2,va=off@708", "src[0] offset view", True),
        ("ops/SQR-f32-ne=18x6x3x2,vne=rows@705", "src[0].layout = strided rows", True),
        ("ops/ADD_ID-f32+f32-a=33x3x5,n_expert=2,va=off,vb=pad@54", "src[0].view of = part of an input", True),
        ("ops/ADD_ID-f32+f32-a=33x3x5,n_expert=2,va=off,vb=pad@54", "src[1].view of = part of a weight", True),
        (DECODER, "src[1].view of = part of a cache", True),
        ("ops/ROPE-f32-ne=48x3x4,n_dims=32,mode=NEOX@1", "n_dims = less than ne[0]", True),
        ("ops/ROPE-f32-ne=48x3x4,mode=NEOX@1", "n_dims = ne[0]", False),
        ("ops/SCALE-f32-ne=24x6x2,vne=off,inplace=leaf,s=1.25@296", "in place", True),
    ],
)
def test_what_a_rule_says_of_a_node(case_id: str, said: str, *, is_there: bool) -> None:
    """In the words that people use."""
    case = build(case_id)
    found = {str(c) for k, _, node in nodes_of(case) for c in rule_of(case, k, node).conditions}
    assert (said in found) is is_there, found


def test_what_a_leaf_holds_is_a_condition_of_any_that_holds_more() -> None:
    """Subnormal numbers alone are in what holds them and more."""
    case = build("ops/DIV-bf16+bf16-a=67x3,data=range@203")
    held = [features(case, k, n).get("src[0].holds", "") for k, _, n in nodes_of(case)]
    assert "numbers beyond F16, subnormal numbers" in held
    subnormal = Condition("src[0].holds", "subnormal numbers")
    assert [meets(subnormal, {"src[0].holds": h}) for h in held] == ["subnormal" in h for h in held]
    assert meets(Condition("any source.holds", "numbers beyond F16"), {"src[1].holds": max(held, key=len)})


def test_a_crash_that_says_why_is_no_damage() -> None:
    """Damaged memory shows as wrong numbers too; an assertion in its process does not."""
    assert is_flaky("CRASH", "its process died (SIGSEGV)")
    assert is_flaky("CRASH", "its process died (SIGABRT): the heap is damaged")
    assert not is_flaky("CRASH", "its process died (SIGABRT): ggml-backend.cpp:#: pre-allocated tensor")


@pytest.mark.parametrize(
    "case_id",
    [
        "ops/SQR-f32-ne=18x6x3x2,vne=rows@705",
        "ops/IM2COL-f32+f32+f32-a=3x5x4,b=20x5x1,k=1x0x3x0x2x0,vb=off@56",
    ],
)
def test_without_a_view_all_else_stays(case_id: str) -> None:
    """The leaf in the view's place has what the view showed: the reference gives the same results."""
    case, oracle = build(case_id), Oracle()
    node = list(nodes_of(case))[-1][2]
    rule = Rule((Condition("op", node.op), Condition("any source.view of", "part of an input")))
    recorded = cuts.record(case, oracle.reference_in(EXACT))
    (flat,) = ablate.drop(rule, recorded, FAIL, node)
    assert not any(rule.holds(features(flat, k, n)) for k, _, n in nodes_of(flat))
    assert [n.op for _, _, n in nodes_of(flat)] == [n.op for _, _, n in nodes_of(case)]
    (before, after) = (oracle.expect([c], EXACT)[0].steps[0].outputs.values() for c in (case, flat))
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(("gone", "stays"), [("offset view", "strided rows"), ("layout", "offset view")])
def test_an_offset_and_strides_go_one_by_one(gone: str, stays: str) -> None:
    """A view that has both keeps one without the other."""
    case = build("ops/SQR-f32-ne=18x6x3x2,vne=pad@659")
    (k, _, node), *_ = nodes_of(case)
    (own,) = (c for c in rule_of(case, k, node).rest if c.key.endswith(gone))
    made = next(ablate.drop(Rule.of(["SQR"], [own]), cuts.record(case, Oracle().reference_in(EXACT)), FAIL, node))
    ((j, _, other),) = nodes_of(made)
    left = str(sorted(map(str, rule_of(made, j, other).rest)))
    assert stays in left
    assert str(own) not in left


def test_special_values_give_way_to_values_that_differ() -> None:
    """Equal values of V would hide any fault of the weights over them."""
    case = build("ops/FLASH_ATTN_EXT-f32+f32-q=32x3x4,k=32x16x2,mask=16x3,hide=seen,sinks=1@66")
    ((_, _, node),) = nodes_of(case)
    rule = Rule.of([node.op], [Condition("src[2].holds", "infinities")])
    made = next(ablate.drop(rule, cuts.record(case, Oracle().reference_in(EXACT)), FAIL, node))
    ((_, _, other),) = nodes_of(made)
    assert other.src[2] is not None
    assert len(np.unique(made.persistent[other.src[2]].view("<f4"))) > 2


@pytest.mark.parametrize("case_id", case_ids((), ("ops/*inplace=*",), "smoke")[::6])
def test_apart_from_its_operand_an_op_gives_the_same(case_id: str) -> None:
    """What wrote in place has memory of its own, and its result is as before."""
    case, oracle = build(case_id), Oracle()
    node = next(n for k, _, n in nodes_of(case) if features(case, k, n)["in place"] == "yes")
    rule = Rule.of([features(case, 0, node)["op"]], [Condition("in place", "yes")])
    (found,) = ablate.drop(rule, cuts.record(case, oracle.reference_in(EXACT)), FAIL, node)
    found.validate()
    assert {features(found, k, n)["in place"] for k, _, n in nodes_of(found)} == {"no"}
    (before, after) = (list(oracle.expect([c], EXACT)[0].steps[0].outputs.values()) for c in (case, found))
    assert np.array_equal(before[-1], after[-1])


def test_what_is_needed_stays_while_a_case_shrinks() -> None:
    """A case that passes without its type keeps the type; what it does not need may go."""
    case = build("ops/MUL_MAT-q4_1+f32-a=32x7,b=32x3@670")
    ((k, _, node),) = nodes_of(case)
    recorded = cuts.record(case, Oracle().reference_in(EXACT))

    def passes(candidate: Case) -> bool:
        return all(n.src[0] is not None and n.src[0].type.name == "f32" for _, _, n in nodes_of(candidate))

    found, rule = features(case, k, node), rule_of(case, k, node)
    needed = ablate.needs(rule, recorded, FAIL, node, passes)
    assert needed.met(found)
    assert not needed.met({**found, "src[0].type": "f32"})
    assert not ablate.needs(rule, recorded, FAIL, node, lambda _: False).some_of


def test_needs_conflict_if_one_fails_without_what_the_other_needs() -> None:
    """A layout that one group needs and the other does not separates them; a type does not."""

    def of(alone: str = "", idle: str = "") -> ablate.Needs:
        given, spare = ([Condition(key, "yes") for key in keys.split("|") if key] for keys in (alone, idle))
        return ablate.Needs(tuple(frozenset({c}) for c in given), frozenset(spare), known=True)

    offset = of("src[0].offset view")
    assert offset.conflicts(of(idle="src[0].offset view"))
    assert of(idle="src[1].offset view").conflicts(offset)
    assert not offset.conflicts(of("src[0].layout", "src[1].layout"))
    assert not offset.conflicts(of("src[0].offset view", "src[1].offset view"))
    assert not of("src[0].offset view", "src[1].offset view").conflicts(offset)
    assert not of("src[0].type").conflicts(of(idle="src[0].type"))


def _case_of(make: Callable[[Builder], Made], *leaves: Tensor, kept: Tensor | None = None) -> Case:
    """Build a case of the nodes and outputs that `make` gives."""
    nodes, outputs = make(Builder())
    for i, n in enumerate(nodes):
        n.name, n.flags = f"node_{i}", n.flags | FLAG_COMPUTE
    persistent = {} if kept is None else {kept: np.zeros(nbytes(kept), np.uint8)}
    inputs = {t: np.zeros(nbytes(t), np.uint8) for t in leaves}
    case = Case("test/rule@0", persistent, [Step(Graph(nodes), inputs, tuple(outputs))])
    case.validate()
    return case


@pytest.mark.parametrize("reads_it", [False, True])
def test_a_shared_buffer_is_told(*, reads_it: bool) -> None:
    """GET_ROWS of a cache into which the step wrote, unless it reads what the store gives."""
    cache, new = new_tensor(F32, 8, 4, name="cache"), new_tensor(F32, 8, 4, name="new", flags=FLAG_INPUT)
    rows = new_tensor(I32, 2, name="rows", flags=FLAG_INPUT)

    def make(b: Builder) -> Made:
        store = b.cpy(new, cache)
        found = b.get_rows(store if reads_it else cache, rows)
        return [store, found], [found]

    case = _case_of(make, new, rows, kept=cache)
    said = {str(c) for c in rule_of(case, 0, case.steps[0].graph.nodes[1]).says}
    assert ("src[0] shared buffer" in said) is not reads_it


def test_a_bare_view_and_an_output_that_a_view_shows_are_told() -> None:
    """CONT of what `ggml_view_tensor` gives; a result of which a permutation is the output, or that one reads."""
    x = new_tensor(F32, 4, 3, name="x", flags=FLAG_INPUT)

    def make(b: Builder) -> Made:
        turned = b.transpose(x)
        copy = b.cont(b.view_tensor(turned))
        shown = b.permute(copy, 1, 0, 2, 3)
        return [turned, copy, shown], [shown]

    case = _case_of(make, x)
    node = case.steps[0].graph.nodes[1]
    assert {"src[0] bare view", "output = shown by a view"} <= {str(c) for c in rule_of(case, 0, node).says}
    case.steps[0] = replace(case.steps[0], outputs=(node,))
    assert "output = read by another node" in {str(c) for c in rule_of(case, 0, node).says}


def test_a_range_of_integers_implies_the_smaller_one() -> None:
    """A leaf with numbers beyond U16 also has some beyond U8: the clause names the larger range alone."""
    held = Condition("src[0].holds", "numbers beyond U8, numbers beyond U16")
    assert clause(held) == "src0 holds numbers beyond U16"
    assert clause(Condition("src[0].holds", "NaN, infinities")) == "src0 holds NaN, infinities"
