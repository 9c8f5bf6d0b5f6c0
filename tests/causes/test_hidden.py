"""Faults behind others: what an explained failure hides is a cause of its own, and what needs the same is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from trust.copies import Copies
from trust.faults import FOLDER, Bundle, Fault, read

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.causes.cause import Condition
from conformance.causes.failure import Failure, failure_of
from conformance.causes.features import features, nodes_of
from conformance.causes.form import SEVERAL, Form, base_of, form_of, type_of
from conformance.causes.grouping import search as searching
from conformance.causes.grouping.forms import common, of_shared_types, of_types
from conformance.causes.grouping.group import GONE, Group
from conformance.causes.grouping.nodes import Nodes
from conformance.causes.grouping.pair import join_types, joint, may_share_types, of_what_is_kept, one
from conformance.causes.grouping.search import Search
from conformance.judge import evidence
from conformance.judge.evidence import Error, Place
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.session.select import build, case_ids
from conformance.run.shrink import Shrunk, shrink
from conformance.run.shrink.lanes import Lanes
from conformance.run.signature import innermost

Accept = Callable[[Case, Result], bool]
FAULTS = {f.name: f for f in read([FOLDER])}
DECODER = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d3@1"
BLOCKS = Fault(
    "blocks-negated",
    "",
    "cpu",
    ("ops",),
    "conformance/backend/kernel.py",
    "            src = [None if s is None else strided(_buffer(s.root, buffers), s) for s in node.src]\n",
    """            src = [None if s is None else strided(_buffer(s.root, buffers), s) for s in node.src]
            if node.op == "GET_ROWS" and node.src[0].type.blck_size > 1:
                src[0] = src[0][..., ::-1]
""",
)


class _Runner(Copies):
    locates = True


def _groups(faults: Sequence[Fault], ids: Sequence[str]) -> list[Group]:
    bundle = Bundle("together", tuple(faults))
    runner = _Runner([bundle])
    results = runner.run(bundle.spec, [runner.case(i) for i in ids])
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    nodes = Nodes(failures, [runner.case(r.case) for r in results if r.verdict is Verdict.PASS])
    return Search(runner, bundle.spec, nodes).run(failures)


def test_a_trajectory_has_a_cause_for_each_of_its_wrong_nodes() -> None:
    """Of two faults that show in one trajectory alone, the second is found behind the first."""
    groups = _groups([FAULTS["rope-backwards"], FAULTS["gate-and-up-exchanged"]], [DECODER])
    assert sorted(op for g in groups for op in g.form.ops) == ["GLU.SWIGLU", "ROPE"]
    assert [[f.case.id for f in g.failures] for g in groups] == [[DECODER], [DECODER]]


def test_types_that_are_needed_one_by_one_are_shrunk_for_the_first_two_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third type of one op, without which a failure is gone, joins the first two without being shrunk."""
    shrunk: list[str] = []

    def counted(
        runner: Copies, spec: Spec, case: Case, *, time_budget: float, accept: Accept, lanes: Lanes | None
    ) -> Shrunk:
        shrunk.append(case.id)
        return shrink(runner, spec, case, time_budget=time_budget, accept=accept, lanes=lanes)

    monkeypatch.setattr(searching, "shrink", counted)
    ids = case_ids(
        (), [f"ops/GET_ROWS-q{t}+i32-a=256x5,n=1@*" for t in ("2_K", "3_K", "4_0", "5_0", "5_K", "8_0")], "smoke"
    )
    (group,) = _groups([BLOCKS], ids)
    assert len(group.failures) > SEVERAL
    assert 0 < len(shrunk) < SEVERAL


def _failure(case_id: str) -> Failure:
    found = failure_of(build(case_id), Result(case_id, "", Verdict.FAIL))
    assert found is not None
    return found


@pytest.mark.parametrize(("told", "right", "kept"), [(True, False, True), (False, False, False), (False, True, True)])
def test_sizes_that_nobody_tried_are_no_conditions(told: bool, right: bool, kept: bool) -> None:
    """Where a search ended early, a form says sizes only if right nodes are told apart by them."""
    failures = [_failure(i) for i in case_ids((), ("ops/SQR-f32-ne=18x6x3x2*",), "smoke")]
    passed = [build(i) for i in case_ids((), ("ops/SQR-f32-ne=67*",), "standard")]
    size = Condition("src[0].ne[2]", "> 1")
    search = Search(_Runner([]), FAULTS["rope-backwards"].spec, Nodes(failures, passed if right else []))
    form = search._with_sizes(Form((Condition("op", "SQR"), size)), told=told)
    assert (size in form.conditions) is kept
    assert passed


def test_an_error_of_a_part_is_one_of_whatever_leaf() -> None:
    """An error at a part of an input and at a part of a weight shares the part; wrong numbers share nothing then."""
    a, b = (
        Form((Condition("op", op), Condition("src[0].shows", f"a part of {leaf}")))
        for op, leaf in (("CONT", "an input"), ("MUL_MAT", "a weight"))
    )
    both = common(a, b, of_any_leaf=True)
    assert both is not None
    assert Condition("src[0].shows", "a part of a weight|a part of an input") in both.conditions
    assert common(a, b) is None


STORES_F16 = (
    "ops/FILL-f16*",
    "ops/UNARY.XIELU-f16*",
    "ops/ROPE-f16-ne=64*",
    "ops/IM2COL-f16+f32+f16*",
    "ops/CPY-f32+f16*",
)


def test_a_type_that_several_kernels_store_wrong_is_one_cause() -> None:
    """F16 that is cut off shows in ops of many kernels, of some in the result alone, and not with every value."""
    (group,) = _groups([FAULTS["f16-truncated"]], case_ids((), STORES_F16, "smoke"))
    assert group.form.rest == {Condition("a type", "f16")}
    assert len({base_of(op) for op in group.form.ops}) >= SEVERAL


def test_types_are_shared_where_nothing_else_is_said() -> None:
    """Forms of types, sizes and values share a type wherever it stands; a layout or another type is something else."""

    def of(op: str, *rest: tuple[str, str]) -> Form:
        return Form(tuple(Condition(*c) for c in (("op", op), *rest)))

    rows = of("GET_ROWS", ("a type", "q4_0|q5_0"))
    copy = of("CPY", ("src[0].type", "q4_0"), ("src[0].ne[1]", "> 2"), ("src[0].holds", "infinities"))
    assert of_shared_types(rows, copy) == of("GET_ROWS|CPY", ("a type", "q4_0|q5_0"))
    assert of_shared_types(rows, of("CPY", ("src[0].type", "q4_0"), ("src[0].layout", "permuted"))) is None
    assert of_shared_types(rows, of("CPY", ("src[0].type", "q8_0"))) is None
    assert of_shared_types(rows, of("CPY")) is None


def test_an_op_that_is_right_with_a_type_has_another_fault() -> None:
    """Where rows are wrong with Q4_0 and Q8_0, and products with Q4_0 alone, these are two faults."""
    wrong = case_ids((), ("ops/GET_ROWS-q4_0+*", "ops/GET_ROWS-q8_0+*", "ops/MUL_MAT-q4_0+*"), "smoke")
    right = case_ids((), ("ops/MUL_MAT-q8_0+*",), "smoke")
    nodes = Nodes([_failure(i) for i in wrong], [build(i) for i in right])
    both = Form((Condition("op", "GET_ROWS|MUL_MAT"), Condition("a type", "q4_0|q8_0")))
    assert not nodes.fail_with_each_type(both, both)
    assert nodes.fail_with_each_type(Form((both.conditions[0], Condition("a type", "q4_0"))), both)


def test_failures_of_a_third_cause_join_nothing() -> None:
    """SQR is wrong where it has rows, SQRT in F16 for another reason: that both have rows then says little."""
    wrong = case_ids((), ("ops/SQR-f32-ne=18x6x3x2*",), "smoke")
    others = case_ids((), ("ops/SQRT-f16*",), "standard")
    right = case_ids((), ("ops/SQRT-f32*",), "standard")[:3]
    nodes = Nodes([_failure(i) for i in (*wrong, *others)], [build(i) for i in right])
    rows, third = ("src[0].ne[1]", "> 1"), _of("SQRT", ("src[0].type", "f16"))
    a, b, both = (_of(op, rows) for op in ("SQR", "SQRT", "SQR|SQRT"))
    assert nodes.joins(both, a, b)
    assert not nodes.joins(both, a, b, others=[third])


def test_of_ops_that_share_a_size_each_must_fail_by_it() -> None:
    """SQR is wrong wherever it has rows; SQRT is wrong once, and right with as many rows: the many do not hide it."""
    wrong = case_ids((), ("ops/SQR-f32-*",), "standard")
    (one, *right) = case_ids((), ("ops/SQRT-f32*",), "standard")
    nodes = Nodes([_failure(i) for i in (*wrong, one)], [build(i) for i in right])
    rows, type_ = ("src[0].ne[1]", "> 1"), ("src[0].type", "f32")
    a, both = _of("SQR", rows), _of("SQR|SQRT", rows)
    b = next(
        f
        for f in (_of("SQRT", (k, v)) for k, v in _failure(one).features.items())
        if nodes.share(f) > nodes.share(_of("SQRT", rows))
    )
    assert not nodes.joins(both, a, b, others=[_of("CPY", type_)])


def test_what_a_store_writes_does_not_count_where_blocks_are_read() -> None:
    """CPY from Q4_0 and from Q5_0 is wrong, and to Q4_0; that it is right to Q5_0 says nothing of reading."""
    wrong = case_ids((), ("ops/CPY-q4_0+f32-*", "ops/CPY-q5_0+f32-*", "ops/CPY-f32+q4_0-a=256x3x2,form=cast*"), "smoke")
    right = case_ids((), ("ops/CPY-f32+q5_1-a=256x3x2,form=cast*",), "smoke")
    nodes = Nodes([_failure(i) for i in wrong], [build(i) for i in right])
    types = Condition("a type", "q4_0|q5_0|q5_1")
    copy, reads = (Form((Condition("op", ops), types)) for ops in ("CPY", "CPY|GET_ROWS|MUL_MAT"))
    assert [nodes.fail_with_each_type(copy, whole) for whole in (reads, copy)] == [True, False]


def _of(ops: str, *rest: tuple[str, str]) -> Form:
    return Form(tuple(Condition(*c) for c in (("op", ops), *rest)))


def test_sub_ops_of_one_op_without_conditions_share_it() -> None:
    """Two functions of UNARY that are always wrong are one cause, and so is what GLU gates by; another gate is another,
    and so is a function in some conditions.
    """
    assert common(_of("UNARY.GELU"), _of("UNARY.GELU_QUICK")) == _of("UNARY.GELU|UNARY.GELU_QUICK")
    assert common(_of("UNARY.GELU"), _of("GLU.GEGLU")) == _of("UNARY.GELU|GLU.GEGLU")
    assert common(_of("UNARY.GELU"), _of("GLU.SWIGLU")) is None
    assert common(_of("UNARY.GELU"), _of("UNARY.GELU_QUICK", ("src[0].ne[0]", "> 2"))) is None


@pytest.mark.parametrize(
    ("message", "said", "one"),
    [
        ("Argument shapes are inconsistent", ("src[1]", "given"), True),
        ("Argument shapes are inconsistent", ("src[2]", "given"), False),
        ("bad optional access", ("src[1]", "given"), False),
    ],
)
def test_damage_and_an_error_about_shapes_are_one_in_the_same_conditions(
    message: str, said: tuple[str, str], *, one: bool
) -> None:
    """A mask that is taken too large damages the heap, or does not fit, as sizes have it."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    damage = Group(("CRASH", "its process died (SIGSEGV)"), _of("SOFT_MAX", ("src[1]", "given")), proof)
    error = Group(("OVERCLAIM", message), _of("SOFT_MAX", said, ("src[0].ne[1]", "> 1")), proof)
    assert (joint(damage, error, last=True) is not None) is one
    assert joint(damage, error, last=False) is None


def test_a_cast_is_told_from_a_copy() -> None:
    """CPY that makes a tensor of its own is another form than CPY into one."""
    forms = []
    for glob in ("ops/CPY-f32+f16-a=*,form=cast*", "ops/CPY-f32+f32-a=12x5x4x2,vb=*"):
        case = build(case_ids((), (glob,), "standard")[0])
        forms += [form_of(case, k, n) for k, _, n in nodes_of(case) if n.op == "CPY"]
    cast, copy = forms
    assert [Condition("in place", v) in f.conditions for f, v in ((cast, "no"), (copy, "yes"))] == [True, True]


def test_types_of_stores_are_one_whether_cast_or_copy() -> None:
    """A type that CPY stores wrong is said of a cast as of a copy into a tensor; of others, "in place" stays."""
    type_ = ("src[1].type", "q4_0")
    assert type_of(_of("CPY", type_, ("in place", "no"))) == "q4_0"
    assert type_of(_of("ADD", type_, ("in place", "yes"))) == ""


@pytest.mark.parametrize(("ops", "type_", "one"), [("MUL_MAT", "q5_0", True), ("OUT_PROD", "q5_0", False)])
def test_types_of_other_ops_share_a_type_that_both_know(ops: str, type_: str, *, one: bool) -> None:
    """Groups of types of the same ops are one; those of ops of which only some are the same need a type in common."""
    assert may_share_types(_of("MUL_MAT", ("a type", "q4_0")), _of(ops, ("a type", type_))) is one
    assert not may_share_types(_of("CPY", ("src[0].type", "q4_0")), _of("CPY", ("src[1].type", "q8_0")))
    assert may_share_types(_of("MUL_MAT", ("a type", "q4_0")), _of(f"MUL_MAT|{ops}", ("a type", "q4_0|q5_0")))


@pytest.mark.parametrize(("other", "causes"), [("q5_1", 1), ("q8_0", 2)])
def test_types_of_as_many_bits_that_many_ops_read_wrong_are_one_cause(other: str, causes: int) -> None:
    """Q5_0 and Q5_1 are read by the same lines; Q8_0 is another type."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    groups = [Group(("FAIL", ""), _of("MUL_MAT|GET_ROWS|CPY", ("a type", t)), proof) for t in ("q5_0", other)]
    assert len(join_types(groups)) == causes


def test_a_type_that_two_groups_have_counts_once() -> None:
    """Q4_0 of two places and Q6_K are two types, too few to be what all types share."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    forms = (("a type", "q4_0"), ("src[1].type", "q4_0"), ("a type", "q6_K"))
    groups = join_types([Group(("FAIL", ""), _of("GET_ROWS", c), proof) for c in forms])
    assert {t for g in groups for t in type_of(g.form).split("|")} == {"q4_0", "q6_K"}
    assert len(groups) > 1


@pytest.mark.parametrize(("verdict", "one"), [("FAIL", False), ("ERROR", True)])
def test_blocks_that_are_read_and_stored_wrong_are_two_causes(verdict: str, *, one: bool) -> None:
    """Wrong numbers of Q4_0 that CPY stores and of Q4_0 that GET_ROWS reads have two causes; one error may have one."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    stored = Group((verdict, "unknown type"), _of("CPY", ("src[1].type", "q4_0")), proof)
    read = Group((verdict, "unknown type"), _of("GET_ROWS", ("src[0].type", "q4_0")), proof)
    assert (joint(stored, read, last=True) is not None) is one


def test_types_that_a_store_is_wrong_with_are_kept() -> None:
    """Casts to two types share more than that they are casts: any of the types."""
    a, b = (_of("CPY", ("in place", "no"), ("src[0].ne[0]", "> 31"), ("src[1].type", t)) for t in ("q4_0", "q8_0"))
    assert common(a, b) is None
    assert of_types([a, b]) == _of("CPY", ("src[1].type", "q4_0|q8_0"))


CUT = "ScatterUpdate Check 'idxValue < srcDimAxis' and the mode is ScatterElementsUpdate: ScatterUpdate node "


@pytest.mark.parametrize(("form", "one"), [(("relation", "memory"), True), (("nodes", "SET_ROWS"), False)])
def test_an_error_that_comes_without_the_relation_is_one_cause(form: tuple[str, str], *, one: bool) -> None:
    """The same words, but for a name and where they were cut off, in a relation and elsewhere."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    reads = Form((Condition("a node reads", "a part of a cache"),))
    a = Group(("OVERCLAIM", f"{CUT}'cache' has indices that point to no element"), reads, proof)
    b = Group(("OVERCLAIM", f"{CUT}'cache_k_l' has indices that point to no elem"), Form((Condition(*form),)), proof)
    assert (joint(a, b, last=True) == reads) is one


@pytest.mark.parametrize(("verdict", "one"), [("CRASH", True), ("OVERCLAIM", False)])
def test_an_assertion_is_one_cause_wherever_it_fails(verdict: str, *, one: bool) -> None:
    """An assertion has one place in the source; an exception's words may come from many."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    said = (verdict, "ggml-backend.cpp:#: a tensor in a buffer (X) that cannot run the operation")
    steps = Form((Condition("steps", "> 1"),))
    both = joint(Group(said, steps, proof), Group(said, _of("CPY", ("src[1].type", "bf16")), proof), last=True)
    assert (both == steps) is one


@pytest.mark.parametrize(("leaf", "one"), [("an input", True), ("a cache", False)])
def test_words_of_an_op_are_those_of_a_whole_case_only_where_it_shows_such_a_part(leaf: str, *, one: bool) -> None:
    """The same check stops views of inputs, and a graph that has none."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    said = ("OVERCLAIM", "Check 'elements_equal': Reshape")
    node = Group(said, _of("SQR", ("src[0].shows", f"a part of {leaf}")), proof)
    whole = Group(said, Form(()), proof)
    assert (joint(node, whole, last=True) == node.form) is one
    assert node.may_be_in(proof) is one


@pytest.mark.parametrize(("parts", "alike"), [(("a weight", "an input"), True), (("a cache", "an input"), False)])
def test_parts_of_a_cache_are_told_from_parts_of_inputs_by_what_is_right(parts: Sequence[str], *, alike: bool) -> None:
    """An error at views of inputs is none of views of caches, where these are right in nearly every trajectory."""
    wrong = [
        _failure(f"ops/{i}") for i in ("SQR-f32-ne=18x6x3x2,vne=rows@705", "ADD_ID-f32+f32-a=33x3x5,va=pad,vb=pad@1")
    ]
    shown = ("an operand shows", "|".join(f"a part of {leaf}" for leaf in parts))
    nodes = Nodes(wrong, [build(DECODER)])
    assert nodes.show_alike(_of("SQR|ADD_ID|FLASH_ATTN_EXT", shown)) is alike
    assert nodes.show_alike(_of("SQR", ("an operand shows", "a part of an input")))


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_by_what_is_kept_is_one_cause_whatever_tensor_it_names(*, kept: bool) -> None:
    """A model that was compiled for other sizes stops at the first node that shows it; elsewhere names tell faults."""
    case_id = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d2@1"
    steps = Form((Condition("steps", "> 1"),))

    def of(name: str) -> Group:
        said = f"[CPU] Reshape node '{name}' Check 'minusOneCount <= # && inputProduct == outputProduct'"
        where = Place(evidence.Fault.STALE if kept else evidence.Fault.UNLOCATED, 1)
        result = Result(case_id, "", Verdict.OVERCLAIM, where=where, error=Error(said))
        found = failure_of(build(case_id), result)
        assert found is not None
        return Group(("OVERCLAIM", said), steps, found)

    assert (joint(of("Qcur"), of("model.norm"), last=True) == steps) is kept


def test_an_output_that_is_read_later_is_one_cause() -> None:
    """Memory that another node wrote meanwhile holds numbers, or none."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    a, b = (
        Group(("FAIL", k), _of(op, ("output", "and read later")), proof) for k, op in (("", "ADD"), ("nan", "MUL_MAT"))
    )
    both = joint(a, b, last=True)
    assert both is not None
    assert one(a, b, last=True)


def test_an_error_of_a_kernel_says_nothing_of_its_operands() -> None:
    """What a kernel of the engine raises is one message, whatever the node and its sources are."""
    words = "ValueError: destination is read-only"
    said = {
        innermost(Error(f"{node}: its kernel failed on src {src}: {words}", words))
        for node, src in (("CLAMP a (view) f16[40, 5, 1, 1]", "f16[40, 5, 1, 1]"), ("ADD b f32[2]", "f32[2], f32[2]"))
    }
    assert said == {words}


def test_a_result_that_a_node_reads_of_itself_is_no_output_that_others_read() -> None:
    """A cast is its own source, as ggml makes it."""
    case = build(case_ids((), ("ops/CPY-f32+f16-a=*,form=cast*",), "smoke")[0])
    ((k, _, node),) = nodes_of(case)
    assert node in node.src
    assert "output" not in features(case, k, node)


def test_what_passes_without_a_view_is_no_fault_of_values() -> None:
    """A mask that is read from its beginning is found although the form of another fault of masks holds for it."""
    names = ("mask-large-is-hidden", "mask-from-its-beginning")
    groups = _groups([FAULTS[n] for n in names], case_ids((), ("ops/FLASH_ATTN_EXT-*",), "smoke"))
    assert len(groups) == len(names)
    assert ["src[3].offset" in {c.key for c in g.form.conditions} for g in groups] == [False, True]


def test_an_error_takes_no_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that comes again is the case's own; a wrong number may be another's damage, and is seen afresh."""
    for fault, globs, renewed in (
        ("leaf-overwritten", ("ops/CLAMP-*inplace=input*", "ops/ADD-*inplace=input*"), False),
        ("soft-max-sink-forgotten", ("ops/SOFT_MAX-*sinks*",), True),
    ):
        times: list[None] = []
        monkeypatch.setattr(_Runner, "renew", lambda _, times=times: times.append(None))
        assert _groups([FAULTS[fault]], case_ids((), globs, "smoke"))
        assert bool(times) is renewed


def test_that_stores_write_in_place_says_nothing_of_them() -> None:
    """SET_ROWS and CPY into a tensor always do; CLAMP and SET_ROWS share it."""
    place = ("in place", "yes")
    assert common(_of("SET_ROWS", place), _of("CPY", place)) is None
    assert common(_of("SET_ROWS", place), _of("CLAMP", place)) is not None


@pytest.mark.parametrize(("key", "one"), [("beside", True), ("src[0].layout", False)])
def test_what_is_kept_between_nodes_and_between_steps_is_one_cause(key: str, *, one: bool) -> None:
    """Nodes that are wrong beside another, and cases that are wrong by what a backend kept."""
    proof = _failure("ops/SQR-f32-ne=18x6x3x2,vne=rows@705")
    whole = Group(("FAIL", "stale"), Form((Condition("steps", "> 1"),)), proof)
    node = Group(("FAIL", ""), _of("CPY", ("in place", "no"), (key, "another node")), proof)
    assert (of_what_is_kept(node, whole) == whole.form) is one
    assert of_what_is_kept(node, node) is None


def test_a_node_that_is_wrong_beside_one_that_it_does_not_read_is_a_fault_of_what_is_kept() -> None:
    """Two masks of one name and shape in one step, and the same mask in two steps."""
    ids = [
        "kv_growth/gemma2-l=2,embd=32,heads=2,kv=1,ff=32,vocab=32,ubatch=64,run=at40.d1@748",
        "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,fa=0,run=p9.d2.back3.d2@457",
    ]
    (group,) = _groups([FAULTS["mask-stale"]], ids)
    assert group.kind == ("FAIL", evidence.Fault.STALE)
    assert {f.case.id for f in group.failures} == set(ids)


def test_what_smaller_cases_show_only_behind_others_is_a_fault_of_what_is_kept() -> None:
    """Buffers that are found by name are wrong in any op; a smaller case in a process of its own has only its own."""
    ids = [i for i in case_ids(("alias",), (), "smoke") if "differs=axes" in i or "differs=eps" in i]
    groups = _groups([FAULTS["state-not-reset"]], ids)
    assert [(g.kind, g.form.ops) for g in groups if g.kind[1] != GONE] == [(("FAIL", evidence.Fault.STALE), ())]


def test_no_variant_of_a_failure_writes_outside_of_its_memory() -> None:
    """Property: where a shorter source no longer holds the part that ACC writes, the case does not run: the reference
    would write beyond its result, in the suite's own process.
    """
    fault = FAULTS["view-offset-ignored"]
    runner = _Runner([fault])
    case = build("ops/ACC-f32-a=10x6x4x2,b=10x2x4x2,at=0x3,vb=off@3")
    (result,) = runner.run(fault.spec, [case])
    failure = failure_of(case, result)
    assert failure is not None
    made = list(Search(runner, fault.spec, Nodes([failure], []))._variants(failure))
    assert made
    for variant in made:
        variant.validate()


def test_time_that_is_over_mixes_no_relations() -> None:
    """Property: a failure of a relation that nobody looks at goes to none of another relation."""
    apart, *weights = (
        i for r, n in (("apart", 1), ("weights", 2)) for i in case_ids((), (f"relations/{r}-*",), "standard")[:n]
    )
    failures = [_failure(i) for i in (weights[0], apart, weights[1])]
    spec = FAULTS["mask-stale"].spec
    groups = Search(_Runner([FAULTS["mask-stale"]]), spec, Nodes(failures, []), seconds=0.0).run(failures)
    assert sorted(sorted(f.case.id for f in g.failures) for g in groups) == [[apart], sorted(weights)]


def test_a_fault_of_view_offsets_is_one_cause_of_what_views_show() -> None:
    """Views of inputs, weights and caches are wrong by their offset, whichever operand has it; where a view shows rows
    that are not there, it is an error.
    """
    globs = ("ops/ADD_ID-*vb=*", "ops/DIAG-*vne=*", "ops/CONT-*vne=*", "alias/differs=offset*", "ops/SCALE-*")
    rows = "blocks/mamba-seqs=2,nodes=2,run=p3.d1,block=recurrent@899"
    ids = (*case_ids((), globs, "smoke"), rows)
    (group,) = _groups([FAULTS["view-offset-in-elements"]], ids)
    assert group.form.rest == {Condition("an operand's offset", "yes")}
    assert {f.result.verdict for f in group.failures} == {Verdict.FAIL, Verdict.OVERCLAIM}
