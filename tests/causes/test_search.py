"""Causes: failures of several faults form as many groups, and each rule is true of its fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from trust.copies import Copies
from trust.faults import FOLDER, Bundle, Fault, read

from conformance.causes.cause import unique_ids
from conformance.causes.failure import failure_of
from conformance.causes.group import Group, Groups, Nodes, cause_of, join_all
from conformance.causes.rule import Rule
from conformance.causes.search import Search
from conformance.judge.cause import Cause, Condition, Neighbour
from conformance.judge.evidence import Fault as Where
from conformance.judge.evidence import Place
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process import FOREVER, OVER, Deadline
from conformance.run.session.select import build, case_ids
from conformance.suite.family import Level

FAULTS = {f.name: f for f in read([FOLDER])}
DECODER = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d3@1"
KERNEL = "conformance/backend/kernel.py"
READS = "            src = [None if s is None else strided(_buffer(s.root, buffers), s) for s in node.src]\n"


class _Runner(Copies):
    locates = True


class Found:
    """The groups of some cases on `cpu` with faults, and what they were found from."""

    def __init__(
        self, faults: Sequence[Fault], globs: Sequence[str], deadline: Deadline = FOREVER, *, level: Level = "smoke"
    ) -> None:
        bundle = Bundle("together", tuple(faults))
        self.runner = _Runner([bundle])
        ids = case_ids((), globs, level) or globs
        results = self.runner.run(bundle.spec, [self.runner.case(i) for i in ids])
        self.failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(self.runner.case(r.case), r))]
        passed = [self.runner.case(r.case) for r in results if r.verdict is Verdict.PASS]
        self.nodes = Nodes(self.failures, passed)
        self.said: list[str] = []
        self.search = Search(self.runner, bundle.spec, self.nodes, progress=self.said.append, deadline=deadline)
        self.groups: list[Group] = self.search.run(self.failures)

    @property
    def causes(self) -> list[Cause]:
        """Records of the groups."""
        return [cause_of(g, "cpu", self.nodes) for g in self.groups]


def _reads(code: str) -> Fault:
    """A fault in how each source `s` of a node is read: `code` is the expression for one."""
    new = f"            src = [None if s is None else ({code}) for i, s in enumerate(node.src)]\n"
    return Fault("reads", "", "cpu", ("ops",), KERNEL, READS, new)


RIGHT = "strided(_buffer(s.root, buffers), s)"
FROM_START = "strided(_buffer(s.root, buffers), s, 0)"
ROWS_TOGETHER = (
    "strided(_buffer(s.root, buffers), type(s)(s.type, s.ne, "
    "__import__('conformance.ggml.tensor').ggml.tensor.contiguous_nb(s.type, s.ne)), s.view_offs)"
)
ON_LEAVES = "s.root.op == 'NONE' and node.op"


@pytest.mark.parametrize(
    ("names", "globs", "expected"),
    [
        pytest.param(
            ("rope-factors-ignored", "expert-input-of-first-slot", "soft-max-sink-forgotten"),
            ("ops/ROPE-*", "ops/MUL_MAT_ID-*", "ops/SOFT_MAX-*"),
            {"ROPE": "src[2]", "MUL_MAT_ID": "src[1].ne[1]", "SOFT_MAX": "src[2]"},
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
        pytest.param(
            ("rope-backwards", "gate-and-up-exchanged"),
            (DECODER,),
            {"ROPE": "op", "GLU.SWIGLU": "op"},
            id="one behind the other in a trajectory",
        ),
    ],
)
def test_faults_together_are_as_many_causes(
    names: Sequence[str], globs: Sequence[str], expected: dict[str, str]
) -> None:
    """Each fault is one cause, and its conditions name what the fault is about."""
    found = sorted((c.op, {x.key for x in c.conditions}) for c in Found([FAULTS[n] for n in names], globs).causes)
    assert [op for op, _ in found] == sorted(op.strip() for op in expected), found
    for op, key in expected.items():
        assert any(op.strip() == o and key in keys for o, keys in found), (op, key, found)


def test_a_fault_of_a_type_is_one_cause_of_several_ops() -> None:
    """Ops that fail with one type, and only with it, share a cause."""
    (cause,) = Found([FAULTS["mxfp4-scale-doubled"]], ("ops/GET_ROWS-*", "ops/MUL_MAT-*")).causes
    assert cause.op == ""
    assert "mxfp4" in {c.value for c in cause.conditions}


def test_what_no_experiment_tells_apart_is_one_cause() -> None:
    """Every CPY into a cache fails, and no node property separates it from passing CPY nodes."""
    (group,) = Found([FAULTS["cache-not-kept"]], ("ops/CPY-f32+bf16-*", "ops/CPY-f16+q4_1-a=128x33x1@230")).groups
    assert group.rule.ops == ("CPY",)


def test_strides_and_offsets_are_two_causes() -> None:
    """Ops that ignore offsets pass with strides; ops that ignore strides pass with offsets."""
    offsets, rows = ("SQR", "SIN", "SUM_ROWS"), ("CLAMP", "COS")
    fault = _reads(
        f"{FROM_START} if {ON_LEAVES} in {offsets} else {ROWS_TOGETHER} if {ON_LEAVES} in {rows} else {RIGHT}"
    )
    globs = ["ops/SUM_ROWS-f32-ne=35x6x3x2,*", *(f"ops/{op}-f32-ne=18*" for op in ("SQR", "SIN", *rows))]
    found = Found([fault], globs, level="standard")
    ops = {tuple(sorted({f.features["op"] for f in g.failures})): g.rule for g in found.groups}
    assert set(ops) == {tuple(sorted(offsets)), tuple(sorted(rows))}, found.causes
    assert {c.key for c in ops[tuple(sorted(offsets))].rest} == {"src[0].offset view"}
    assert {str(c) for c in ops[tuple(sorted(rows))].rest} == {"src[0].layout = permuted or strided rows"}


def test_strides_of_two_operands_are_two_causes() -> None:
    """ADD ignores the strides of its second operand and CONT those of its first: no cause mixes both."""
    fault = _reads(f"{ROWS_TOGETHER} if {ON_LEAVES} == ('CONT', 'ADD')[i if i < 2 else 0] else {RIGHT}")
    globs = ("ops/ADD-f32*-a=16x6x4x2,*", "ops/CONT-f32-ne=10x6x4x2,*", "ops/SQR-f32-ne=18*")
    found = Found([fault], globs, level="standard")
    for group in found.groups:
        assert len({f.features["op"] for f in group.failures}) == 1, found.causes
    assert len(found.groups) == 2


def test_an_error_that_goes_with_its_view_is_no_cause_of_its_own() -> None:
    """Ops that read a view wrong and one that raises an error for it, in words of its own, are one cause."""
    raises = "(_ for _ in ()).throw(ConformanceError('cannot make a shape of 4 dimensions'))"
    fault = _reads(f"{raises} if s.view_offs and node.op == 'CUMSUM' else {FROM_START}")
    globs = ("ops/SQR-f32-ne=18*", "ops/SQRT-f32-ne=18*", "ops/SUM_ROWS-f32-ne=35x6x3x2,*", "ops/CUMSUM-f32-ne=18*")
    (group,) = Found([fault], globs, level="standard").groups
    assert {f.result.verdict for f in group.failures} == {Verdict.FAIL, Verdict.OVERCLAIM}


def test_one_error_in_the_same_words_is_one_cause() -> None:
    """Whatever the ops are."""
    raises = "(_ for _ in ()).throw(ValueError('this op was never finished'))"
    fault = _reads(f"{raises} if node.op in ('SQR', 'SIN') else {RIGHT}")
    globs = ("ops/SQR-f32-ne=18*", "ops/SIN-f32-ne=18*", "ops/COS-f32-ne=18*")
    (group,) = Found([fault], globs, level="standard").groups
    assert group.rule.conditions == (Condition("op", "SIN|SQR"),)


def test_a_rule_that_passing_nodes_meet_explains_nothing() -> None:
    """A case is taken without an experiment only if no node that the rule holds for passes."""
    wrong, right, other = case_ids((), ("ops/SQR-f32-*",), "standard")[:3]
    failure, another = (failure_of(build(i), Result(i, "", Verdict.FAIL)) for i in (wrong, other))
    assert failure is not None
    assert another is not None
    group = Group(failure.kind, Rule.of(["SQR"], ()), failure)
    assert group.explains(another, Nodes([failure, another], []))
    assert not group.explains(another, Nodes([failure, another], [build(right)]))


def test_a_relation_is_the_cause_where_each_run_alone_is_right() -> None:
    """Weights that a session does not take are a fault of what the relation does, and of no node."""
    forgets = Fault(
        "forgets", "", "cpu", ("relations",), KERNEL, "        held[:] = data\n", "        held[:] = held\n"
    )
    (group,) = Found([forgets], ("relations/weights-*",)).groups
    assert [c.key for c in group.rule.conditions] == ["relation"]


def test_whole_graphs_that_are_first_wrong_at_other_ops_are_other_causes() -> None:
    """Else every new bug of fusion or of memory would be the one that a build already has."""
    ids = ["ops/RMS_NORM_BACK-f32-ne=33x5,computed=a@504", "ops/SOFT_MAX_BACK-f32-ne=33x5,computed=b@204"]
    results = [
        Result(i, "", Verdict.FAIL, where=Place(Where.GRAPH, 0, 1, i[4:].partition("-")[0], "node_1"))
        for i in (*ids, ids[0].replace("=a@", "=ab@"))
    ]
    nodes = Nodes([], [])
    first, other, alike = (failure_of(build(r.case), r) for r in results)
    groups = [Group(f.kind, Rule(()), f, [f]) for f in (first, other) if f is not None]
    causes = [cause_of(g, "cpu", nodes) for g in groups]
    assert [c.op for c in causes] == ["RMS_NORM_BACK", "SOFT_MAX_BACK"]
    assert len({c.id for c in causes}) == 2
    assert "(each node alone is right, first at RMS_NORM_BACK)" in causes[0].sentence
    assert alike is not None
    assert [g.explains(alike, nodes) for g in groups] == [True, False]
    assert len(join_all(groups, nodes, set())) == 2


def test_two_searches_give_the_same_ids() -> None:
    """An id comes from the failures alone."""
    first, second = (Found([FAULTS["soft-max-sink-forgotten"]], ("ops/SOFT_MAX-*",)).causes for _ in range(2))
    assert [c.id for c in first] == [c.id for c in second]
    assert len(first) == 1


def test_a_search_without_time_states_no_condition_and_gives_the_same_id() -> None:
    """A cause says that its search did not finish; its id does not depend on how far it came."""
    whole, cut = (
        Found([FAULTS["soft-max-sink-forgotten"]], ("ops/SOFT_MAX-*",), deadline=d).causes for d in (FOREVER, OVER)
    )
    assert {c.search for c in whole} == {"complete"}
    assert {c.search for c in cut} == {"cut"}
    assert {c.id for c in cut} >= {c.id for c in whole}
    for c in cut:
        assert {x.key for x in c.conditions} <= {"op"}
        assert " when " not in c.sentence
        assert c.sentence.endswith("search stopped early, so there may be further conditions")


def test_a_condition_without_a_passing_neighbour_is_not_stated() -> None:
    """SQR is wrong with a view and raises an error without one: it never passes, so the view is no condition."""
    raises = "(_ for _ in ()).throw(ValueError('no view'))"
    fault = _reads(f"(({RIGHT} + 1) if s.view_offs else {raises}) if node.op == 'SQR' else {RIGHT}")
    causes = Found([fault], ("ops/SQR-f32-ne=18x6x3x2,vne=pad@659",)).causes
    assert causes
    assert {x.key for c in causes for x in c.conditions} == {"op"}, causes


def test_a_failure_that_needs_two_types_to_differ_names_both() -> None:
    """SUB is wrong for f16 with f32 and right for two sources of one type: each type is a condition."""
    mixed = "i == 0 and node.op == 'SUB' and node.src[0].type is not node.src[1].type"
    causes = Found(
        [_reads(f"({RIGHT} + 1) if {mixed} else {RIGHT}")], ("ops/SUB-f16+f32-a=16x1x4,b=1,va=pad@739",)
    ).causes
    said = {(x.key, x.value) for c in causes for x in c.conditions}
    assert said == {("op", "SUB"), ("src[0].type", "f16"), ("src[1].type", "f32")}, causes
    assert "when src0 is f16 (f32 passes) and src1 is f32 (f16 passes)" in causes[0].sentence


def test_a_condition_that_only_zeros_lack_is_not_stated() -> None:
    """FILL with 0 passes on a backend that writes only zeros: `c != 0` says nothing of the fault."""
    runs = "            kernel(node, strided(_buffer(node.root, buffers), node), src)\n"
    zeros = f"{runs}            if node.op == 'FILL':\n                _buffer(node.root, buffers)[:] = 0\n"
    fault = Fault("zeros", "", "cpu", ("ops",), KERNEL, runs, zeros)
    causes = Found([fault], ("ops/FILL-f32-ne=17x5x3,vne=off,c=-9.5@375",)).causes
    assert causes
    assert {x.key for c in causes for x in c.conditions} == {"op"}, causes


def test_each_failing_node_meets_the_conditions() -> None:
    """A condition that one of the failing nodes lacks is not stated."""
    strided, offset, plain = (
        failure_of(build(i), Result(i, "", Verdict.FAIL))
        for i in ("ops/SQR-f32-ne=18x6x3x2,vne=rows@705", "ops/SQR-f32-ne=18x6x3x2,vne=pad@659", "ops/SQR-f32-ne=18@1")
    )
    assert strided is not None
    assert offset is not None
    assert plain is not None
    layout = Condition("src[0].layout", "strided rows")
    rule = Rule.of(["SQR"], [layout])
    nodes = Nodes([strided, offset], [plain.case, build("ops/SQR-f32-ne=18x6x3x2,vne=off@1")])
    found = cause_of(Group(strided.kind, rule, strided, [strided, offset]), "cpu", nodes)
    assert found.conditions == rule.conditions
    assert "when src0 has strided rows (contiguous passes)" in found.sentence
    wide = cause_of(Group(strided.kind, rule, strided, [strided, plain]), "cpu", nodes)
    assert layout not in wide.conditions


def test_what_passes_beside_a_failure_differs_in_one_property() -> None:
    """A passing node of another shape, or without several properties of the failing one, shows no condition."""
    failed = failure_of(build("ops/SQR-f32-ne=18x6x3x2,vne=rows@705"), Result("x", "", Verdict.FAIL))
    assert failed is not None
    rule = Rule.of(["SQR"], [Condition("src[0].layout", "strided rows"), Condition("src[0].ne[1]", "> 2")])
    for passed in (
        "ops/SQR-f32-ne=18x6x3x2@1",
        "ops/SQR-f32-ne=18x2x3x2,vne=off@1",
        "ops/SQR-f32-ne=16x2x3x2,vne=rows@1",
    ):
        nodes = Nodes([failed], [build(passed)])
        assert (
            cause_of(Group(failed.kind, rule, failed, [failed]), "cpu", nodes).conditions
            == Rule.of(["SQR"], []).conditions
        )


def test_a_size_is_the_largest_that_passes() -> None:
    """The sentence names both sizes of a pair of otherwise equal nodes, and no size of another shape."""
    failed, other = (
        failure_of(build(i), Result("x", "", Verdict.FAIL))
        for i in ("ops/SQR-f32-ne=18x6x3x2@1", "ops/SQR-f32-ne=12x5@1")
    )
    assert failed is not None
    assert other is not None
    rule = Rule.of(["SQR"], [Condition("src[0].ne[0]", "> 16")])
    nodes = Nodes([failed, other], [build(f"ops/SQR-f32-ne={n}x6x3x2@1") for n in (3, 8)])
    found = cause_of(Group(failed.kind, rule, failed, [failed, other]), "cpu", nodes)
    assert found.shown == {Condition("src[0].ne[0]", "> 8"): Neighbour("8", "18")}
    assert "when src0.ne[0] > 8 (8 passes, 18 fails)" in found.sentence


def test_causes_of_one_error_have_ids_by_their_first_case() -> None:
    """The order of the causes and their sizes and rules do not matter."""
    a = Cause("ADD-1", "a", "x", Verdict.FAIL, "ADD", "", (), ("ops/b@1", "ops/c@1"))
    b = Cause("ADD-1", "b", "x", Verdict.FAIL, "ADD", "", (Condition("op", "ADD"),), ("ops/a@1",))
    assert [c.id for c in unique_ids([a, b])] == ["ADD-1-2", "ADD-1"]
    assert [c.id for c in unique_ids([b, a])] == ["ADD-1", "ADD-1-2"]


def test_every_failure_is_in_a_group_without_time() -> None:
    """Failures that went to the nearest group, as time was over, are counted in its sentence."""
    found = Found([FAULTS["kv-head-modulo"]], ("ops/FLASH_ATTN_EXT-*", "ops/MUL_MAT-*"), deadline=OVER)
    assert {f.case.id for f in found.failures} == {f.case.id for g in found.groups for f in g.failures}
    unsure = [g.unsure for g in found.groups if g.unsure]
    assert unsure
    assert any(f"{unsure[0]} of them not confirmed (time limit)" in c.sentence for c in found.causes)


def test_failures_without_analysis_are_grouped_by_op() -> None:
    """When time is over, what no known cause of its op fits is named by that op, apart from other ops."""
    ids = ("SQR-f32-ne=18x6x3x2", "SQRT-f32-ne=18x6x3x2", "SQR-f32-ne=12x5", "SQRT-f32-ne=12x5")
    failed = [failure_of(build(f"ops/{i}@1"), Result("x", "", Verdict.FAIL)) for i in ids]
    large, *_, small, root = [f for f in failed if f is not None]
    groups = Groups(nodes := Nodes([large, small, root], [build("ops/SQR-f32-ne=3x3@1")]))
    for op in ("SQR", "SQRT"):
        groups.add(Group(large.kind, Rule.of([op], [Condition("src[0].layout", "strided rows")]), large, [large]))
    found = [groups.nearest(f) for f in (small, root, small)]
    assert found[0] is found[2]
    said = [cause_of(g, "cpu", nodes).sentence for g in found if g is not None]
    assert [text.partition(":")[0] for text in said] == ["SQR", "SQRT", "SQR"]
    assert all("not analysed" in text for text in said)


def test_ctrl_c_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt ends the search and loses no failure."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("conformance.causes.experiment.shrink", interrupted)
    found = Found([FAULTS["kv-head-modulo"]], ("ops/FLASH_ATTN_EXT-*", "ops/MUL_MAT-*"))
    assert {f.case.id for f in found.failures} == {f.case.id for g in found.groups for f in g.failures}
    assert sum(text.startswith("interrupted") for text in found.said) == 1
    assert not any(text.startswith("second bug") for text in found.said), "a search is no finding"
