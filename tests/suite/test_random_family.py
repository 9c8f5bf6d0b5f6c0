"""Random graphs: legal, of the size that the id says, the same template in every step, and fair to a right backend."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import nbytes
from conformance.judge.verdict import Verdict
from conformance.properties import case_ids
from conformance.run.runner import Runner
from conformance.suite import alias, random_graphs
from conformance.suite.family import LEVELS


@settings(max_examples=60)
@given(case_ids("random"))
def test_a_case_is_legal(case_id: str) -> None:
    """Every step validates, has as many nodes as the id says, the same ops in the same order, and an output."""
    case = random_graphs.build(case_id)
    case.validate()
    ops = [[n.op for n in step.graph] for step in case.steps]
    assert {len(nodes) for nodes in ops} == {int(case.params["nodes"])}
    assert all(nodes == ops[0] for nodes in ops)
    assert all(step.outputs or case.caches() for step in case.steps)


@settings(max_examples=60)
@given(case_ids("random"))
def test_no_difference_is_of_a_value_and_its_multiple(case_id: str) -> None:
    """It could be 0 but for rounding, for which no tolerance fits."""
    for node in random_graphs.build(case_id).steps[0].graph:
        if node.op == "SUB":
            a, b = (s for s in node.src if s is not None)
            while a.root.op in {"RMS_NORM", "L2_NORM", "SCALE"}:
                a = next(s for s in a.root.src if s is not None)
            assert a.root is not b.root


@settings(max_examples=40)
@given(case_ids("alias"))
def test_an_alias_differs_under_the_same_names(case_id: str) -> None:
    """A and B validate and have inputs of the same names."""
    case = alias.build(case_id)
    case.validate()
    names = {frozenset(t.name for t in step.inputs) for step in case.steps}
    assert len(names) == 1


def test_each_intermediate_value_has_further_uses() -> None:
    """Each is an output, is read at the end, and is read by the next node; the first and last graph are equal."""
    (case_id,) = (i for i in alias.ids("standard") if "of=tbo,RMS_NORM_MUL_ADD(" in i and "ne=[256,4,1,1]" in i)
    case = alias.build(case_id)
    chain = case.steps[0].graph.nodes
    uses: dict[int, set[str]] = {i: set() for i in range(len(chain) - 1)}
    for step in case.steps:
        nodes = step.graph.nodes
        own = [n for n in nodes if n.op != "CONT"]
        assert [n.op for n in own] == [n.op for n in chain]
        for i in uses:
            readers = [n for n in nodes if n.op == "CONT" and own[i] in n.src]
            uses[i] |= {"output"} if own[i] in step.outputs else set()
            uses[i] |= {"next" if nodes[nodes.index(own[i]) + 1] is n else "end" for n in readers}
            assert set(readers) <= set(step.outputs)
    assert all(own == {"output", "next", "end"} for own in uses.values())
    first, last = case.steps[0], case.steps[-1]
    assert first.graph.key(case.persistent) == last.graph.key(case.persistent)
    assert len(first.outputs) == len(last.outputs) == 1


@settings(max_examples=20)
@given(st.sampled_from([i for i in alias.ids("standard") if i.startswith(f"alias/{alias.PLACES},")]))
def test_graphs_at_two_places_differ_in_offsets_only(case_id: str) -> None:
    """Each root that is read or written has values at both places, and the third graph is the first again."""
    case = alias.build(case_id)
    case.validate()
    first, second, third = (step.graph for step in case.steps)
    assert first.key(case.persistent) == third.key(case.persistent) != second.key(case.persistent)
    own = [[(n.op, n.type, n.ne, n.nb, n.op != "VIEW" and n.op_params) for n in graph] for graph in (first, second)]
    assert own[0] == own[1]
    for a, b in zip(first, second, strict=True):
        moved = b.view_offs - a.view_offs
        assert moved == (nbytes(a.root) // 2 if a.root in case.persistent else 0)
    assert case.persistent.keys() <= {n.root for n in first}


def test_right_backends_agree() -> None:
    """On a hundred graphs that no level lists, ggml and the reference agree within every budget: no false alarm."""
    runner = Runner()
    ids = [
        f"{i.rpartition('@')[0]}@{seed}" for seed in (1_000_001, 1_000_002) for i in random_graphs.ids("standard")[::3]
    ]
    try:
        for case_id in ids:
            (result,) = runner.run(Spec("ggml"), [random_graphs.build(case_id)])
            assert result.verdict is Verdict.PASS, result.sentence()
    finally:
        runner.close()


def test_levels_grow() -> None:
    """Each level holds the one before, without repetition, and has the size it promises."""
    listed = [random_graphs.ids(level) for level in LEVELS]
    assert [len(ids) for ids in listed] == list(random_graphs.COUNTS.values())
    assert all(set(a) <= set(b) and len(set(b)) == len(b) for a, b in pairwise(listed))


def test_everything_is_there() -> None:
    """The standard level has views, permutes, in-place writes, stores into caches and every weight type."""
    ops: set[str] = set()
    in_place = False
    for case_id in random_graphs.ids("standard")[::3]:
        for node in random_graphs.build(case_id).steps[0].graph:
            ops.add(node.op)
            in_place |= node.view_src is not None and node.op in {"UNARY", "ADD", "MUL", "SCALE"}
    wanted = {"VIEW", "PERMUTE", "TRANSPOSE", "RESHAPE", "CONT", "SET_ROWS", "CPY", "MUL_MAT", "ROPE", "SOFT_MAX"}
    assert wanted <= ops
    assert in_place
    assert all(any(f"w={w}" in i for i in random_graphs.ids("standard")) for w in random_graphs.WEIGHTS)


@pytest.mark.parametrize(
    "case_id",
    ["random/nodes=1@1", "random/nodes=61@1", "random/steps=0@1", "random/w=q2_K@1", "random/@x", "x/nodes=9@1"],
)
def test_an_unreadable_id_is_refused(case_id: str) -> None:
    """A size out of range, an unknown type, no seed: usage errors."""
    with pytest.raises(UsageError):
        random_graphs.build(case_id)


@given(
    st.sampled_from(
        [
            "alias/differs=nothing@1",
            "alias/tokens=0@1",
            "alias/differs=eps@",
            "ops/differs=eps@1",
            "alias/differs=uses@1",
            "alias/differs=uses,of=tbo,NONE@1",
            "alias/differs=uses,of=x@1",
            "alias/differs=places@1",
            "alias/differs=places,of=tbo,ARANGE(type=f32,start=0.000000,stop=10.000000,step=1.000000)@0",
            "alias/differs=places,of=decoder,llama-run=p9@1",
            "alias/differs=places,of=tbo,OPT_STEP_SGD(type=f32,ne=[10,5,4,3])@1",
            "alias/differs=uses,of=decoder,llama-run=p9.d1@1",
        ]
    )
)
def test_an_unreadable_alias_is_refused(case_id: str) -> None:
    """As above."""
    with pytest.raises(UsageError):
        alias.build(case_id)
