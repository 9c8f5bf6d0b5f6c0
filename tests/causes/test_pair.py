"""Pairs of groups: two are of one fault only where what they fail by says so."""

from __future__ import annotations

import pytest
from trust.copies import Copies
from trust.faults import FOLDER, Bundle, read

from conformance.causes.cause import Condition
from conformance.causes.failure import Failure, failure_of
from conformance.causes.form import Form
from conformance.causes.grouping.forms import common, is_soft_max_of
from conformance.causes.grouping.group import Group, cause_of
from conformance.causes.grouping.groups import Groups
from conformance.causes.grouping.nodes import Nodes
from conformance.causes.grouping.pair import joint, of_garbage, of_whole, one
from conformance.causes.grouping.search import Search
from conformance.causes.needs.whole import begin_alike
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.session.select import build, case_ids
from conformance.run.signature import Signature, innermost

FAULTS = {f.name: f for f in read([FOLDER])}
RESTORED = "relations/restored-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d2@345"
MASK, VISIBLE = ("src[1]", "given"), ("src[3]", "given")


class _Runner(Copies):
    locates = True


def _of(ops: str, *rest: tuple[str, str]) -> Form:
    return Form(tuple(Condition(*c) for c in (("op", ops), *rest)))


def _failure(case_id: str, verdict: Verdict = Verdict.FAIL, detail: str = "") -> Failure:
    found = failure_of(build(case_id), Result(case_id, "", verdict, error=Error(detail) if detail else None))
    assert found is not None
    return found


PROOF = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")


def test_a_relation_whose_runs_are_wrong_alike_has_a_cause_beside_theirs() -> None:
    """What a relation does is needed where its runs fail by the same number, and still differ."""
    bundle = Bundle("together", tuple(FAULTS[n] for n in ("state-write-forgotten", "rope-backwards")))
    runner = _Runner([bundle])
    (result,) = runner.run(bundle.spec, [runner.case(RESTORED)])
    assert result.verdict in FAILURES
    failure = failure_of(runner.case(RESTORED), result)
    assert failure is not None
    groups = Search(runner, bundle.spec, Nodes([failure], [])).run([failure])
    said = {(g.form.ops, *map(str, g.form.says)) for g in groups}
    assert {ops for ops, *_ in said} == {("ROPE",), ()}
    assert ((), "relation = restored") in said


def test_a_relation_of_runs_that_only_compute_has_no_cause_beside_that_of_a_node() -> None:
    """A store that is wrong leaves other numbers in a cache that is rewound than in one that is not."""
    fault = FAULTS["cache-first-row-only"]
    ids = ["relations/rewound-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p20.d4,back=3@961"]
    runner = _Runner([fault])
    (result,) = runner.run(fault.spec, [runner.case(i) for i in ids])
    failure = failure_of(runner.case(ids[0]), result)
    assert failure is not None
    (group,) = Search(runner, fault.spec, Nodes([failure], [])).run([failure])
    assert group.form.ops == ("SET_ROWS",)


@pytest.mark.parametrize(("name", "known"), [("restored", True), ("memory", False)])
def test_a_relation_is_no_cause_of_another(name: str, *, known: bool) -> None:
    """Caches written back and graphs rebuilt in the memory of others go other ways."""
    result = Result(RESTORED, "", Verdict.FAIL, where=Place(Fault.GRAPH))
    failure = failure_of(build(RESTORED), result)
    assert failure is not None
    assert Group(failure.kind, Form((Condition("relation", name),)), PROOF).explains(failure) is known
    assert not Group(("FAIL", ""), _of("SET_ROWS"), PROOF).explains(failure)


@pytest.mark.parametrize(("verdict", "known"), [("OVERCLAIM", True), ("FAIL", False)])
def test_an_error_of_a_relation_explains_the_same_words_elsewhere(verdict: str, *, known: bool) -> None:
    """A case that is no relation has none to compare; wrong numbers say nothing by themselves."""
    group = Group((verdict, "map::at"), Form((Condition("relation", "memory"),)), PROOF)
    result = Result(PROOF.case.id, "", Verdict(verdict), error=Error("map::at"))
    failure = Failure(PROOF.case, result, Signature(Verdict(verdict), "", "map::at"), None)
    assert failure.kind == group.kind
    assert group.explains(failure) is known


@pytest.mark.parametrize(
    ("attention", "soft_max", "one_"),
    [
        ((VISIBLE, ("src[0].ne[1]", "> 1")), (MASK, ("src[0].ne[0]", "> 1")), True),
        ((VISIBLE, ("max_bias", "!= 0")), (MASK, ("max_bias", "!= 0")), True),
        ((("src[4]", "given"),), (("src[2]", "given"),), True),
        ((VISIBLE,), (("src[2]", "given"),), False),
        ((VISIBLE, ("src[1].type", "f16")), (MASK,), False),
        ((("src[0].ne[1]", "> 1"),), (("src[0].ne[1]", "> 1"),), False),
    ],
)
def test_an_attention_that_needs_what_soft_max_needs_has_its_fault(
    attention: tuple[tuple[str, str], ...], soft_max: tuple[tuple[str, str], ...], *, one_: bool
) -> None:
    """Mask, sinks and bias are the soft max's; K, V and sizes are not."""
    assert is_soft_max_of(_of("FLASH_ATTN_EXT", *attention), _of("SOFT_MAX", *soft_max)) is one_


def test_matrices_count_along_either_dimension() -> None:
    """What needs two matrices along ne[2], and two along ne[3], is one form, which holds for both."""
    both = common(_of("SET_ROWS", ("src[0].ne[2]", "> 1")), _of("SET_ROWS", ("src[0].ne[3]", "> 1")))
    assert both == _of("SET_ROWS", ("src[0].ne[2]*ne[3]", "> 1"))
    ids = case_ids((), ("ops/SET_ROWS-f32+f32+i64-a=256x5x2x2*", "ops/SET_ROWS-f32+f32+i64-a=256x9x2,*"), "smoke")
    assert all(both.holds(_failure(i).features) for i in ids)
    assert not both.holds(_failure(case_ids((), ("ops/SET_ROWS-q2_K*",), "smoke")[0]).features)


@pytest.mark.parametrize(("op", "is_one"), [("CONT", True), ("CPY", False)])
def test_damage_of_one_op_is_one_whatever_the_signal(op: str, *, is_one: bool) -> None:
    """Which signal ends a process whose memory is damaged goes by chance of sizes."""
    a = Group(("CRASH", "its process died (SIGSEGV)"), _of("CONT", ("src[0].type", "q4_1")), PROOF)
    b = Group(("CRASH", "its process died (SIGABRT): the heap is damaged"), _of(op, ("src[0].type", "q6_K")), PROOF)
    assert (joint(a, b, last=True) is not None and one(a, b, last=True)) is is_one
    assert not one(a, b, last=False)


@pytest.mark.parametrize("more", [("src[1].type", "f16"), ("src[2]", "given")])
def test_damage_in_the_conditions_of_an_error_about_shapes_may_say_more(more: tuple[str, str]) -> None:
    """An operand that does not fit damages the heap in some of the conditions in which it is refused."""
    error = Group(("OVERCLAIM", "Argument shapes are inconsistent"), _of("SOFT_MAX", MASK), PROOF)
    damage = Group(("CRASH", "its process died (SIGSEGV)"), _of("SOFT_MAX", MASK, more), PROOF)
    assert joint(damage, error, last=True) is not None
    assert joint(Group(damage.kind, _of("SOFT_MAX", more), PROOF), error, last=True) is None


def test_sizes_join_ops_only_where_they_tell() -> None:
    """Two ops that fail with rows of two and are wrong without as often share nothing."""
    wrong = case_ids((), ("ops/SQR-f32-ne=18x6x3x2*", "ops/SQRT-f32-ne=18x6x3x2*"), "smoke")
    right = case_ids((), ("ops/SQR-f32-ne=67*", "ops/SQRT-f32-ne=67*"), "standard")
    nodes = Nodes([_failure(i) for i in wrong], [build(i) for i in right])
    tells, idle = ("src[0].ne[2]", "> 2"), ("src[0].ne[0]", "> 1")
    for size, told in ((tells, True), (idle, False)):
        parts = [_of(op, size) for op in ("SQR", "SQRT")]
        assert nodes.joins(_of("SQR|SQRT", size), *parts, others=[_of("CPY")]) is told


def test_what_a_translation_was_at_is_one_error() -> None:
    """Two checks of one translation, as they are thrown and passed on."""
    checks = {"requires static size": "a[3].is_static()", "range is out of bounds": "b >= 0 && b <= c"}
    passed_on = "GGML OpenVINO backend ov::Exception: Check '{}' failed at openvino/op/cpy.cpp:155: "
    passed_on += "FrontEnd API failed with OpConversionFailure: CPY conv state cache update {}"
    said = [innermost(Error(passed_on.format(check, words))) for words, check in checks.items()]
    assert said == [f"CPY conv state cache update {w}" for w in checks]
    a, b = (("OVERCLAIM", s) for s in said)
    assert begin_alike(a, b)
    assert not begin_alike(a, ("OVERCLAIM", "CPY conv state of another kind is missing here"))
    assert joint(Group(a, Form(()), PROOF), Group(b, Form(()), PROOF), last=True) is not None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            ("FAIL", "kept, not finite"),
            "wrong numbers (by what the backend kept, not finite) (1 fail)",
        ),
        (("OVERCLAIM", "map::at"), "OVERCLAIM: map::at (1 fail)"),
        (
            ("FAIL", "relation, graph"),
            "wrong numbers (two runs differ, each node by itself is right)",
        ),
    ],
)
def test_the_sentence_of_no_single_node_says_so(kind: tuple[str, str], said: str) -> None:
    """It says what went wrong once, and counts no nodes that are right."""
    group = Group(kind, Form(()), PROOF, [PROOF])
    assert cause_of(group, "cpu", Nodes([], [])).sentence.startswith(f"a case as a whole: {said}")


FORMS = (
    Form(()),
    Form((Condition("nodes", "ROPE, CPY"), Condition("a type", "f16"))),
    Form((Condition("op", "ADD"),)),
    Form((Condition("op", "ADD"), Condition("src[0].type", "f16"))),
)


@pytest.mark.parametrize(
    ("kind", "ids"), [(("OVERCLAIM", "map::at"), 2), (("FAIL", ""), 3), (("CRASH", "its process died (SIGSEGV)"), 3)]
)
def test_an_id_is_from_what_a_search_finds_each_time(kind: tuple[str, str], ids: int) -> None:
    """Of an error the words and the op; of wrong numbers and damage the conditions, too; of a graph how it fails."""
    made = [cause_of(Group(kind, form, PROOF, [PROOF]), "cpu", Nodes([], [])).id for form in FORMS]
    assert len(set(made)) == ids
    assert made[0] == made[1]


def test_joined_errors_are_called_by_the_words_of_most() -> None:
    """Whichever was shrunk first; wrong numbers, and rows with words of their own, keep theirs."""
    rare, often = (_failure(PROOF.case.id, Verdict.OVERCLAIM, f"node '{name}' Check") for name in ("in_proj", "kqv"))
    assert rare.kind != often.kind
    group = Group(rare.kind, Form(()), rare, [rare, often, often])
    assert group.most_said == often.kind
    assert Group(often.kind, Form(()), often, [often, rare]).most_said == min(often.kind, rare.kind)
    assert Group(("OVERCLAIM", "not seen again"), Form(()), rare, [often]).most_said == ("OVERCLAIM", "not seen again")
    assert Group(("FAIL", "stale"), Form(()), PROOF, [PROOF]).most_said == ("FAIL", "stale")


def test_results_that_are_lost_are_one_cause_of_nodes_and_of_whole_cases() -> None:
    """What an output is beside that is all that both say, of any ops; a case as a whole that has such an output."""
    read, shown = (Group(("FAIL", kind), _of(op, ("output", how)), PROOF) for op, how, kind in (
        ("SCALE", "and read later", ""), ("SQR", "shown by a view", "not finite"),
    ))  # fmt: skip
    form = joint(read, shown, last=False)
    assert form == _of("SCALE|SQR", ("output", "and read later|shown by a view"))
    assert one(read, shown, last=False)
    for how, is_one in (("and read later", True), ("a view of a leaf", False)):
        whole = Group(("FAIL", "output"), Form((Condition("an output", how),)), PROOF)
        assert (of_whole(whole, read) == read.form) is is_one


def test_a_wrong_output_of_no_known_node_explains_only_what_shares_its_form() -> None:
    """That nobody knows the first wrong node is no word of a fault."""
    result = Result(PROOF.case.id, "", Verdict.FAIL, where=Place(Fault.OUTPUT, 0))
    failure = Failure(PROOF.case, result, Signature(Verdict.FAIL, "", "output"), None)
    for form, known in ((Form(()), False), (_whole("SQR"), True), (_whole("ADD, MUL"), False)):
        assert Group(("FAIL", "output"), form, failure).explains(failure) is known


def test_wrong_outputs_of_which_nothing_is_known_are_one_row() -> None:
    """They are looked at one by one, and stay together where nothing came of it."""
    unknown = [Group(("FAIL", "output"), Form(()), PROOF, [PROOF]) for _ in range(3)]
    known = Group(("FAIL", "output"), _whole("SQR"), PROOF, [PROOF])
    groups = Groups(Nodes([], []))
    groups.all = [unknown[0], known, *unknown[1:]]
    assert [len(g.failures) for g in groups.merged()] == [3, 1]


def _whole(ops: str) -> Form:
    return Form((Condition("nodes", ops),))


@pytest.mark.parametrize(("more", "is_one"), [((), True), ((("src[0].offset", "yes"),), False)])
def test_a_store_in_place_is_one_with_others_only_where_it_says_no_more(
    more: tuple[tuple[str, str], ...], *, is_one: bool
) -> None:
    """A store always writes in place, so what else it needs is its fault."""
    place = ("in place", "yes")
    assert (common(_of("UNARY.NEG", place), _of("CPY", place, *more)) is not None) is is_one


def test_groups_that_tell_nothing_are_one_only_where_they_say_the_same() -> None:
    """A type that is wrong for few values is none with whatever else its op is wrong by."""
    right = [build(i) for i in case_ids((), ("ops/SQR-f32-ne=18x6x3x2*",), "smoke")]
    a, b, c = (Group(("FAIL", ""), _of("SQR", *said), PROOF) for said in (
        (("src[0].ne[0]", "> 1"),), (("src[0].ne[1]", "> 1"),), (("src[0].type", "f32"), ("src[0].ne[2]", "> 1")),
    ))  # fmt: skip
    groups = Groups(Nodes([], right))
    groups.all = [a, b, c]
    assert not any(map(groups.tells, groups.all))
    groups.join()
    assert [g.form.says for g in groups.all] == [frozenset(), c.form.says]


def test_what_a_node_before_wrote_is_one_cause_wherever_it_is_read() -> None:
    """GET_ROWS of what was stored, and MUL_MAT with it, in whatever numbers it shows."""
    before = "by a node before, whose result it does not read"
    a = Group(("FAIL", ""), _of("GET_ROWS", ("src[0].written", before)), PROOF)
    b = Group(("FAIL", "not finite"), _of("MUL_MAT", ("src[1].written", before)), PROOF)
    form = joint(a, b, last=False)
    assert form == _of("GET_ROWS|MUL_MAT", ("an operand is written", before))
    assert form.holds({"op": "MUL_MAT", "src[1].written": before})


@pytest.mark.parametrize(("place", "is_one"), [("src[0].type", True), ("src[1].type", False)])
def test_damage_by_types_is_one_with_what_the_op_says_of_another_type(place: str, *, is_one: bool) -> None:
    """Blocks that are taken for floats damage the heap, or have another size."""
    damage = Group(("CRASH", "its process died (SIGSEGV)"), _of("CONT", ("src[0].type", "q4_1|q6_K")), PROOF)
    said = _of("CONT", (place, "mxfp4"), ("src[0].layout", "reshaped"))
    error = Group(("OVERCLAIM", "Requested output shape is incompatible with input shape"), said, PROOF)
    assert (joint(damage, error, last=True) is not None) is is_one
    assert joint(damage, error, last=False) is None


@pytest.mark.parametrize(
    ("type_", "place", "is_one"),
    [("q4_0", "src[0].type", True), ("q4_1", "src[0].type", True), ("q4_1", "src[1].type", False)],
)
def test_blocks_that_are_read_wrong_are_nan_by_chance(type_: str, place: str, *, is_one: bool) -> None:
    """One of the types that an op reads wrong, or one more beside several, is no cause of its own as it gives NaN."""
    several = Group(("FAIL", ""), _of("GET_ROWS", ("src[0].type", "mxfp4|q4_0|q8_0")), PROOF)
    nan = Group(("FAIL", "not finite"), _of("GET_ROWS", (place, type_)), PROOF)
    assert (of_garbage(nan, several) is not None) is is_one
    assert of_garbage(several, Group(nan.kind, _of("MUL_MAT", (place, type_)), PROOF)) is None


def test_one_more_type_beside_two_is_a_cause_of_its_own() -> None:
    """Two types may each have a fault of their own, and so may the third."""
    two = Group(("FAIL", ""), _of("GET_ROWS", ("src[0].type", "mxfp4|q4_0")), PROOF)
    assert of_garbage(two, Group(("FAIL", "not finite"), _of("GET_ROWS", ("src[0].type", "q4_1")), PROOF)) is None
    assert of_garbage(two, Group(("FAIL", "not finite"), _of("GET_ROWS", ("src[0].type", "q4_0")), PROOF)) is not None


@pytest.mark.parametrize(
    ("said", "is_one"),
    [
        ("[CPU] Multiply node 'gated' Check 'a == b': Eltwise shape infer input shapes mismatch", True),
        ("[CPU] Swish node 'x' Check 'a == b': Eltwise shape infer input shapes mismatch", True),
        ("[CPU] Add node 'kcur' Check 'a == b': Eltwise shape infer input shapes mismatch", False),
        ("[CPU] Multiply node Check 'a == c': Eltwise shape infer input shapes are others", False),
    ],
)
def test_one_check_at_several_ops_is_one_error_of_whole_graphs(said: str, *, is_one: bool) -> None:
    """The op and what its node is called may differ; where the op is the same, the name tells faults apart."""
    a = Group(
        ("OVERCLAIM", "[CPU] Add node 'x' Check 'a == b': Eltwise shape infer input shapes mismatch"), Form(()), PROOF
    )
    assert (joint(a, Group(("OVERCLAIM", said), Form(()), PROOF), last=True) is not None) is is_one


SCATTER = (
    "ScatterUpdate Check 'value < axis && (value >= # || mode == ScatterUpdateMode::ScatterElements)': ScatterUpdate"
)


@pytest.mark.parametrize(
    ("node", "other", "is_one"),
    [("'Qcur' ", "'node_' ", True), ("", "'cache' ", False)],
)
def test_a_node_that_is_called_as_a_tensor_and_one_that_is_not_have_two_errors(
    node: str, other: str, *, is_one: bool
) -> None:
    """The same check, of what shares its form: whatever a tensor is called, but where a translation names its nodes,
    one without a name is another place.
    """
    a, b = (
        Group(("OVERCLAIM", f"{SCATTER} node {name}has indices of no element"[:145]), _whole("ROPE, CPY"), PROOF)
        for name in (node, other)  # the longer one is cut off in its last word
    )
    assert (joint(a, b, last=True) is not None) is is_one


def test_an_op_that_damages_memory_in_more_conditions_than_it_is_wrong_in_has_one_fault() -> None:
    """A view by no op is wrong, and ends the process with values of two bytes; a type alone says nothing of it."""
    view, half = ("src[0].view", "by no op"), ("src[0].type", "f16")
    wrong, damage = ("FAIL", ""), ("CRASH", "its process died (SIGSEGV)")
    both = Group(damage, _of("CONT", view, half), PROOF)
    assert joint(Group(wrong, _of("CONT", view), PROOF), both, last=False) == _of("CONT", view)
    assert joint(Group(wrong, _of("CONT", half), PROOF), both, last=False) is None


@pytest.mark.parametrize("others", [0, 4])
def test_a_cause_whose_smallest_case_alone_another_explains_stays(others: int) -> None:
    """Stores at an offset are wrong whatever they store, of bf16, too, in which many ops are."""
    half, full = ("ops/CPY-bf16+bf16-a=12x5x4x2,vb=off@435", "ops/CPY-f32+f32-a=12x5x4x2,vb=off@368")
    groups = Groups(Nodes([_failure(half)], []))
    spread = Group(("FAIL", ""), _of("CPY|SQR|SQRT", ("a type", "bf16")), _failure(half))
    spread.failures = [_failure(half)]
    stores = Group(("FAIL", ""), _of("CPY", ("src[0].type", "bf16"), ("in place", "yes")), _failure(half))
    stores.failures = [_failure(half), *[_failure(full)] * others]
    groups.all = [spread, stores]
    groups._absorb(last=True)
    assert len(groups.all) == (2 if others else 1)
