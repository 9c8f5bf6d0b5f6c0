"""Known bugs: the columns that say what a fix names, and the causes that show them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.causes.features import features, nodes_of
from conformance.causes.rule import Rule
from conformance.ggml.errors import UsageError
from conformance.judge.cause import Cause, Condition
from conformance.judge.verdict import Verdict
from conformance.llama.release.causes import SharedCause
from conformance.report.compare import State
from conformance.run.session.select import build
from trust.past.sealed import VERDICTS, Kind, Sealed

BIASED = ("ops/SCALE-f32-ne=7x5x3x2,s=0.2,b=2.0@313", "ops/SCALE-f32-ne=67x4,vne=flat,s=-1.5,b=0.25@706")
PLAIN = ("ops/SCALE-f32-ne=67x4,s=-0.3@851", "ops/SCALE-bf16-ne=67x4,s=2.0@638")
ROWS = ("ops/SET_ROWS-f32+f16+i64-a=31x6,n=5@730", "ops/SET_ROWS-f16+f16+i64-a=31x6,n=5@806")
OTHERS = ("ops/SET_ROWS-f32+f32+i64-a=31x6,n=5@362", "ops/CONCAT-f16-a=12x6x4,dim=0,n=7@218")
CPU = "ggml?lib=x"
SCALE = {"op": ["SCALE"], "condition": ["b != 0"], "kind": ["wrong numbers"]}
SET_ROWS = {"op": ["SET_ROWS"], "condition": ["src[0].type = f16"], "kind": ["overclaim"]}
ANSWERS = st.sampled_from([v for v in Verdict if v not in (Verdict.PASS, Verdict.UNSUPPORTED)])


def _cause(
    cases: Sequence[str], rest: Sequence[Condition] = (), verdict: Verdict = Verdict.FAIL, ops: Sequence[str] = ()
) -> Cause:
    rule = Rule.of(ops, rest).conditions if ops else tuple(rest)
    op = ops[0] if len(ops) == 1 else ""
    return Cause("c", "its sentence names SET_ROWS", CPU, verdict, op, "", rule, tuple(cases))


def _found(cause: Cause, *backends: str) -> SharedCause:
    return SharedCause(cause, State.NEW, cases={b: list(cause.cases) for b in backends or (CPU,)})


def _sealed(columns: Mapping[str, Any]) -> Sealed:
    return Sealed.read(columns, "x")


def test_scale_with_a_bias_is_no_set_rows() -> None:
    """A new cause of the same pair of builds counts for its own bug alone; without the bias it counts for none."""
    biased, plain = _found(_cause(BIASED, ops=["SCALE"])), _found(_cause(PLAIN, ops=["SCALE"]))
    assert [_sealed(c).shows(biased) for c in (SCALE, SET_ROWS)] == [True, False]
    assert [_sealed(c).shows(plain) for c in (SCALE, SET_ROWS)] == [False, False]
    assert _sealed(SET_ROWS).shows(_found(_cause(ROWS, verdict=Verdict.CRASH, ops=["SET_ROWS"])))


def test_a_constructor_counts_for_its_op() -> None:
    """A node that `ggml_set_rows` builds otherwise is a fault of SET_ROWS, unless that needs what a node has."""
    found = _found(_cause(["functions/new-SET_ROWS@1"]))
    plain = {**SET_ROWS, "condition": [], "kind": ["wrong numbers"]}
    assert _sealed(plain).shows(found)
    assert not _sealed({**plain, "op": ["SCALE"]}).shows(found)
    assert not _sealed({**plain, "condition": ["src[0].type = f16"]}).shows(found)


def test_a_whole_graph_counts_for_the_op_of_its_first_wrong_node() -> None:
    """Not for another op of the graph, and for none if the first wrong node is unknown."""
    case = ["ops/RMS_NORM_BACK-f32-ne=33x5,computed=a@504"]
    columns = {op: {"op": [op], "kind": ["wrong numbers"]} for op in ("RMS_NORM_BACK", "UNARY")}
    for first, shown in (("RMS_NORM_BACK", [True, False]), ("UNARY", [False, True]), ("", [False, False])):
        found = _found(replace(_cause(case), op=first))
        assert [_sealed(c).shows(found) for c in columns.values()] == shown
    by_message = _found(replace(_cause(case), op="RMS_NORM_BACK", message="wrong numbers"))
    assert not any(_sealed(c).shows(by_message) for c in columns.values()), "its op is that of the case's id"


@given(ANSWERS, st.sampled_from(Kind))
def test_a_cause_has_the_kind_of_its_verdict(verdict: Verdict, kind: Kind) -> None:
    """With the right op and condition, the verdict decides."""
    columns = {**SCALE, "kind": [str(kind)]}
    assert _sealed(columns).shows(_found(_cause(BIASED, verdict=verdict, ops=["SCALE"]))) == (verdict in VERDICTS[kind])


@given(st.lists(st.sampled_from([*BIASED, *PLAIN, *ROWS, *OTHERS]), min_size=1, unique=True))
def test_each_failing_case_of_the_op_meets_the_condition(cases: list[str]) -> None:
    """Cases of other ops that the cause has as well neither help nor harm."""
    ops = sorted({case.partition("/")[2].partition("-")[0] for case in cases})
    found = _found(_cause(cases, ops=ops))
    assert _sealed(SCALE).shows(found) == (bool({*cases} & {*BIASED}) and not {*cases} & {*PLAIN})


def _last(case: Any) -> tuple[int, Any]:  # noqa: ANN401
    *_, (k, _, node) = nodes_of(case)
    return k, node


@given(st.sampled_from([*BIASED, *PLAIN, *ROWS, *OTHERS]), st.randoms(use_true_random=False))
def test_what_a_node_has_meets_the_condition_that_says_so(case: str, dice: random.Random) -> None:
    """A condition read from its own text is equal to it, and holds for the node; its opposite does not."""
    made = build(case)
    own = features(made, *_last(made))
    key = dice.choice([k for k in own if "ne[" in k or k.endswith((".type", ".layout"))])
    condition = Condition(key, own[key])
    for text, expected in ((f"{key} = {own[key]}", True), (f"{key} != {own[key]}", False)):
        columns = {"op": [own["op"]], "condition": [text], "kind": ["wrong numbers"]}
        assert _sealed(columns).shows(_found(_cause([case], ops=[own["op"]]))) is expected
    assert _sealed({**SCALE, "condition": [str(condition)]}).conditions == ((condition,),)


def test_a_node_that_is_not_to_blame_does_not_count() -> None:
    """A cause without a failing node counts if its smallest case computes nothing but the ops."""
    assert _sealed(SCALE).shows(_found(_cause(BIASED)))
    assert not _sealed(SCALE).shows(_found(_cause(["relations/threads-fa=0,heads=4,run=p33.d2@1", *BIASED])))


def test_a_case_that_cannot_be_built_shows_nothing() -> None:
    """Nor does a live case show an op."""
    for case in ("ops/NO_SUCH-f32@1", "scenario/llama-do=seq-cp@1"):
        assert not _sealed(SCALE).shows(_found(_cause([case], ops=["SCALE"])))


def test_threads_are_a_condition() -> None:
    """A bug of many threads is not seen with one."""
    sealed = _sealed({**SCALE, "condition": ["threads > 1"]})
    found = _cause(BIASED, ops=["SCALE"])
    many = f"{CPU}&threads=8"
    assert [sealed.shows(_found(found, *on)) for on in ((many,), (CPU,), (CPU, many))] == [True, False, False]


@pytest.mark.parametrize(
    ("component", "case", "backend", "shows"),
    [
        ("state", "scenario/llama-do=state-same@1", CPU, True),
        ("state", "scenario/llama-do=seq-cp@1", CPU, False),
        ("sequences", "scenario/llama-do=seq-cp@1", CPU, True),
        ("rpc", "arch/llama@1", f"{CPU}&device=RPC0&rpc=loopback", True),
        ("rpc", "arch/llama@1", CPU, False),
        ("tensor parallel", "arch/llama@1", f"{CPU}&device=CPU+CPU", True),
        ("files", "arch/llama@1", CPU, False),
    ],
)
def test_a_component_is_where_it_runs(component: str, case: str, backend: str, shows: bool) -> None:
    """By the case that tests it, or by a backend behind it."""
    found = _found(_cause([case]), backend)
    assert _sealed({"op": [component], "kind": ["wrong numbers"]}).shows(found) is shows


def test_a_kernel_is_no_component() -> None:
    """A failing node that fails without the component, too, is another bug."""
    found = _found(_cause(BIASED, ops=["SCALE"]), CPU, f"{CPU}&device=RPC0")
    assert not _sealed({"op": ["rpc", "threads"], "kind": ["wrong numbers"]}).shows(found)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"op": "SCALE"}, "x op: a list of texts expected, 'SCALE' found"),
        ({"op": []}, r"x op: a list of texts expected, \[\] found"),
        ({"op": ["SCALES"]}, "x op: an op of ggml, or one of state, .* expected, 'SCALES' found"),
        ({"op": ["any"], "condition": []}, "x condition: a condition beside op 'any' expected"),
        ({"kind": ["slow"]}, "x kind: one of wrong numbers, .* expected, 'slow' found"),
        ({"kind": None}, "x kind: a list of texts expected, nothing found"),
        ({"note": 3}, "x note: a text expected, 3 found"),
        ({"condition": ["bias"]}, "x condition: a property of a node, .* expected, 'bias' found"),
        ({"condition": ["src[0].sizes > 1"]}, "x condition: a property of a node"),
        ({"condition": ["b > x"]}, "x condition: KEY, KEY = A|B, .* expected, 'b > x' found"),
        ({"condition": ["any source.type != f16"]}, "x condition: KEY, KEY = A|B"),
        ({"condition": ["src[0].type = F16"]}, "x condition: one of .* expected, 'F16' found"),
    ],
)
def test_wrong_columns_are_refused(columns: Mapping[str, object], message: str) -> None:
    """The message names the key, what was expected and what came."""
    with pytest.raises(UsageError, match=message):
        _sealed({**SCALE, **columns})


@given(st.text())
def test_any_condition_is_read_or_refused(text: str) -> None:
    """No text ends in another error."""
    with suppress(UsageError):
        assert _sealed({**SCALE, "condition": [text]}).conditions
