"""Relations: each holds on the reference, catches a fault of its kind, and is kept and repeated like any case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from conformance.backend.interface import YES, Backend, BufferType, DeviceInfo, Session, Support, Witness
from conformance.backend.registry import Spec, create
from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, BackendTimeoutError, GraphError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, computes
from conformance.judge.evidence import Fault
from conformance.judge.text import STALE
from conformance.judge.verdict import Result, Verdict
from conformance.run.runner import Runner
from conformance.suite import relations
from conformance.suite.relations import relation

SPEC = Spec("faulty")
TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
Values = dict[Tensor, Bytes]
Compute = Callable[[Graph, Mapping[Tensor, Bytes], Sequence[Tensor]], Values]


class Call:
    """One `compute`: what a fault may look at, and what lives as long as the session and the backend."""

    def __init__(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], session: dict[Any, Any], kept: dict[Any, Any]
    ) -> None:
        self.graph, self.inputs, self.session, self.kept = graph, inputs, session, kept

    def input(self, name: str) -> Tensor:
        """The input called `name`."""
        return next(t for t in self.inputs if t.name == name)


Tamper = Callable[[Call, Compute, Sequence[Tensor]], Values]


class FaultySession(Session):
    """The reference's session behind a fault."""

    def __init__(self, inner: Session, fault: Tamper, kept: dict[Any, Any]) -> None:
        self._inner, self._fault, self._kept = inner, fault, kept
        self._own: dict[Any, Any] = {}

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """As the reference, unless that is the fault."""
        if self._fault is not deaf:
            self._inner.write(tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """As the reference; noted for `unsettled`."""
        self._own["read"] = True
        return self._inner.read(tensor)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the fault wants it."""

        def right(g: Graph, i: Mapping[Tensor, Bytes], o: Sequence[Tensor]) -> Values:
            return {t: data.copy() for t, data in self._inner.compute(g, i, o).items()}

        return self._fault(Call(graph, inputs, self._own, self._kept), right, outputs)

    def witness(self) -> Witness:
        """As the reference."""
        return self._inner.witness()


class Faulty(Backend):
    """A faulty reference fails its relation; missing options are UNSUPPORTED.

    Options: a choice of buffer type, of threads that it does not have; and a translation that is as wrong.
    """

    fault: ClassVar[Tamper]
    stages = ("translate", "run")

    def __init__(self, buffer: str = "", threads: str = "1", stage: str = "run") -> None:
        del stage
        self._inner = create(Spec("cpu"))
        self._kept: dict[Any, Any] = {"buffer": buffer, "threads": int(threads)}

    def info(self) -> DeviceInfo:
        """A made-up device."""
        return DeviceInfo("faulty", "none", "the reference with a fault")

    def supports_op(self, node: Tensor) -> Support:
        """All."""
        del node
        return YES

    def buffer_types(self) -> Sequence[BufferType]:
        """Two."""
        return [BufferType("plain"), BufferType("packed")]

    def open(self, case: Case) -> Session:
        """The reference's session, behind the fault."""
        return FaultySession(self._inner.open(case), type(self).fault, self._kept)


def right(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """No fault."""
    return compute(call.graph, call.inputs, outputs)


def deaf(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """What is written to a cache from outside is not taken (`FaultySession.write`)."""
    return right(call, compute, outputs)


def off(found: Values, *, rows: slice = slice(None)) -> Values:
    """F32 results that are a tenth too large, all or some of their rows."""
    for t, data in found.items():
        if t.type.name == "f32":
            data.view("<f4").reshape(-1, t.ne[0])[rows] *= np.float32(1.1)
    return found


def large_batch(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """More than 16 tokens at once go wrong."""
    found = right(call, compute, outputs)
    return off(found) if call.input("inp_tokens").ne[0] > 16 else found


def batch_of_one(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """The batch is hard-coded: only the first row of the logits is right."""
    return off(right(call, compute, outputs), rows=slice(1, None))


def first_sequence(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """The first sequence is another than those after it."""
    return off(right(call, compute, outputs), rows=slice(0, 1))


def worn_out(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """What a session did before has an effect."""
    call.session["steps"] = call.session.get("steps", 0) + 1
    found = right(call, compute, outputs)
    return off(found) if call.session["steps"] > 3 else found


def padded_only(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """n_kv is taken to be a multiple of 256."""
    found = right(call, compute, outputs)
    return off(found) if call.input("attn_inp_kq_mask").ne[0] % 256 else found


def by_name(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """The mask is known by its name: without it nothing is masked."""
    found = right(call, compute, outputs)
    return found if any(t.name == "attn_inp_kq_mask" for t in call.inputs) else off(found)


def by_address(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """A graph at a known address is taken for the one that was there: its offsets and parameters are not looked at."""
    now = [(n.op, n.ne, n.view_offs) for n in call.graph]
    _, then = call.session.setdefault(id(call.graph), (call.graph, now))
    found = right(call, compute, outputs)
    return found if now == then else off(found)


def second_run(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """What was compiled once is wrong when it is used again."""
    key = tuple((n.op, n.ne) for n in call.graph)
    found = right(call, compute, outputs)
    return off(found) if call.kept.setdefault(key, call.session) is not call.session else found


def packed_weights(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """Weights in the other buffer type are read wrongly."""
    found = right(call, compute, outputs)
    return off(found) if call.kept["buffer"] == "packed" else found


def unsettled(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """What a step left in the device is lost unless somebody reads it before the next."""
    lost = not call.session.get("read", True)
    call.session["read"] = False
    found = right(call, compute, outputs)
    return off(found) if lost else found


def asked_first(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """A graph that was there before gives what it was asked for then."""
    _, then = call.session.setdefault(id(call.graph), (call.graph, tuple(outputs)))
    found = right(call, compute, outputs)
    return found if then == tuple(outputs) else off(found)


def last_part(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """Heads are shared out: a thread more than there are of them loses what it should have summed."""
    found = right(call, compute, outputs)
    return off(found, rows=slice(-1, None)) if call.kept["threads"] == 3 else found


def together(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """The kernel for several nodes is wrong, those for each alone are right."""
    found = compute(call.graph, call.inputs, outputs)
    return off(found) if sum(map(computes, call.graph)) > 1 else found


def at_eight(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """Eight threads wait for each other for ever: the process that runs them is ended."""
    if call.kept["threads"] == 8:
        raise BackendTimeoutError("planted: no answer within 2 s", words="no answer")
    return right(call, compute, outputs)


def by_names_and_ops(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """The key of a compiled graph has names and ops, not op_params: the first graph's are used."""
    params = call.kept.setdefault(tuple((n.name, n.op) for n in call.graph), [n.op_params for n in call.graph])
    own = [n.op_params for n in call.graph]
    try:
        for n, p in zip(call.graph, params, strict=True):
            n.op_params = p
        return right(call, compute, outputs)
    finally:
        for n, p in zip(call.graph, own, strict=True):
            n.op_params = p


PLANTED: dict[str, tuple[Tamper, str]] = {
    "chunked": (large_batch, f"{TINY},run=o24.d1,to=o7.o1.o16.d1"),
    "batch": (batch_of_one, f"{TINY},seqs=3,run=p5+9+2.d2"),
    "permuted": (first_sequence, f"{TINY},seqs=3,unified=1,run=p5.d2"),
    "reset": (worn_out, f"{TINY},run=p9.d2,before=p20.d1"),
    "rewound": (worn_out, f"{TINY},run=p20.d2,back=2"),
    "exact_n_kv": (padded_only, f"{TINY},run=p20.d2"),
    "renamed": (by_name, f"{TINY},run=p9.d2,how=none"),
    "memory": (by_address, f"{TINY},run=p9.d3"),
    "warm": (second_run, f"{TINY},run=p9.d2"),
    "buffers": (packed_weights, f"{TINY},run=p9.d2"),
    "restored": (deaf, f"{TINY},run=p9.d3,at=1"),
    "weights": (deaf, f"{TINY},run=p9.d2"),
    "unread": (unsettled, f"{TINY},run=p9.d2"),
    "apart": (together, "graph=tbo,ADD_RMS_NORM(type=f32,ne=[1,1,1,1],eps=0.000001,broadcast=0)"),
    "reused": (asked_first, f"{TINY},run=p9.d3"),
    "threads": (last_part, f"{TINY},run=p9.d2"),
    "after": (by_names_and_ops, "differs=eps"),
}
"""Relation -> a fault of the kind it is for, and the id it is found by."""


def id_of(name: str) -> str:
    """The id of a relation in `PLANTED`."""
    return f"relations/{name}-{PLANTED[name][1]}@5"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, Tamper], Result]:
    """Runs a case on the reference with a fault."""

    def runs(case: Case, fault: Tamper) -> Result:
        kind = type("Planted", (Faulty,), {"fault": staticmethod(fault)})
        runner = Runner()
        monkeypatch.setattr(runner, "open", lambda spec, **_: kind(**dict(spec.options)))
        try:
            (result,) = runner.run(SPEC, [case])
        finally:
            runner.close()
        return result

    return runs


@pytest.mark.parametrize("name", PLANTED)
def test_it_holds_on_the_reference(name: str, run: Callable[[Case, Tamper], Result]) -> None:
    """Without a fault every relation is a PASS that compared something."""
    result = run(relations.build(id_of(name)), right)
    assert result.verdict is Verdict.PASS, result.detail
    assert result.budget_used == 0.0
    assert result.steps > 1


@pytest.mark.parametrize("name", PLANTED)
def test_it_catches_a_fault_of_its_kind(name: str, run: Callable[[Case, Tamper], Result]) -> None:
    """The planted fault is a FAIL that names the relation, both runs and the tensor."""
    case = relations.build(id_of(name))
    result = run(case, PLANTED[name][0])
    assert result.verdict is Verdict.FAIL, result.detail
    assert relation.read(case).says in result.detail
    assert ": expected is from " in result.detail
    assert result.where is not None


KEPT = {worn_out, by_address, second_run, deaf, unsettled, asked_first, by_names_and_ops}
"""Faults of what a backend keeps; the others are of how it computes."""


@pytest.mark.parametrize("name", PLANTED)
def test_what_the_backend_kept_is_told_from_a_kernel(name: str, run: Callable[[Case, Tamper], Result]) -> None:
    """As in trajectories: right alone on a backend opened anew, and wrong in the run, which is named with its step."""
    fault = PLANTED[name][0]
    result = run(relations.build(id_of(name)), fault)
    assert result.where is not None
    assert (result.where.fault in STALE) is (fault in KEPT), result.detail
    assert result.where.fault is Fault.GRAPH or fault in KEPT
    assert any(words in result.detail for words in STALE.values()) is (fault in KEPT)
    assert "was not found" not in result.detail
    assert ("the translation itself is wrong" in result.detail) is (fault not in KEPT)


def asked_first_and_says_so(call: Call, compute: Compute, outputs: Sequence[Tensor]) -> Values:
    """A graph that was there before can be asked for nothing else."""
    _, then = call.session.setdefault(id(call.graph), (call.graph, tuple(outputs)))
    if then != tuple(outputs):
        raise BackendError("no such output")
    return right(call, compute, outputs)


def test_an_error_by_what_the_backend_kept_is_no_translation(run: Callable[[Case, Tamper], Result]) -> None:
    """The step that fails runs on a backend opened anew, from the same caches: place and words say so."""
    result = run(relations.build(id_of("reused")), asked_first_and_says_so)
    assert result.verdict is Verdict.OVERCLAIM
    assert result.where is not None
    assert result.where.fault is Fault.STALE
    assert result.detail.endswith(STALE[Fault.STALE])


def test_every_relation_has_a_planted_fault() -> None:
    """The table above is whole, and the standard level lists every relation."""
    assert set(PLANTED) == set(relations.NAMES)
    listed = {i.partition("/")[2].partition("-")[0] for i in relations.FAMILY.ids("standard")}
    assert listed == set(relations.NAMES)


@pytest.mark.parametrize("case_id", relations.FAMILY.ids("smoke"))
def test_a_relation_is_a_legal_case(case_id: str) -> None:
    """Every id of the level builds, validates, and its relation survives the file."""
    case = relations.build(case_id)
    case.validate()
    assert relation.read(case).runs
    for part in relation.cases_of(case):
        part.validate()


def test_a_saved_relation_is_repeated(tmp_path: Path, run: Callable[[Case, Tamper], Result]) -> None:
    """Out of its file a relation fails as before: same verdict, same numbers, same sentence."""
    case = relations.build(id_of("chunked"))
    path = tmp_path / "x.gguf"
    casefile.write(path, [case])
    (again,) = casefile.read(path)
    assert relation.read(again) == relation.read(case)
    first, second = run(case, large_batch), run(again, large_batch)
    assert (first.verdict, first.detail, first.nmse) == (second.verdict, second.detail, second.nmse)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no runs": lambda d: d.update(runs=[]),
    "a run beyond the case": lambda d: d["runs"][0].update(last=99),
    "an unknown way": lambda d: d["runs"][0].update(how="backwards"),
    "a field too many": lambda d: d["runs"][0].update(colour="red"),
    "nothing to compare": lambda d: d.update(links=[], whole=[]),
    "rows that are not there": lambda d: d["links"][0]["left"][0].__setitem__(4, [99]),
    "an output that is not there": lambda d: d["links"][0]["left"][0].__setitem__(3, 99),
    "a run that is not there": lambda d: d["links"][0]["left"][0].__setitem__(0, 7),
    "another equality": lambda d: d.update(equal="nearly"),
    "a step beyond the run": lambda d: d["runs"][0].update(at=99),
    "caches of a run with other steps": lambda d: d["runs"][1].update(how="handed"),
    "weights of a run with others": lambda d: d["runs"][1].update(how="written", first=0),
    "bytes of itself": lambda d: d["runs"][0].update(how="handed"),
    "no list": lambda d: d.update(links=3),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_malformed_relation_is_refused(what: str) -> None:
    """A stranger's file whose relation points nowhere is one clear error."""
    case = relations.build(id_of("chunked"))
    case.params = deepcopy(case.params)
    BROKEN[what](case.params[relation.KEY])
    with pytest.raises(GraphError, match=r"params\.relation"):
        relation.read(case)


@pytest.mark.parametrize(
    "case_id",
    ["relations/nonsense-run=p1@1", "relations/chunked-run=p9,colour=red@1",
     "relations/after-differs=nothing@1", "relations/renamed-graph=random,nodes=1@1", "relations/batch-run=p3@x",
     "relations/restored-run=p9.d1,at=1@1", "relations/restored-graph=alias,differs=eps@1", "relations/unread-run=p9@1",
     "relations/reused-run=p9.d1@1", "relations/memory-graph=alias,differs=type,shared=1@1"],
)  # fmt: skip
def test_an_unreadable_id_is_refused(case_id: str) -> None:
    """Each part of an id that cannot be read, or relates nothing, is a usage error."""
    with pytest.raises(UsageError):
        relations.build(case_id)


def test_a_graph_is_rebuilt_only_where_the_backend_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any class may say that its sessions compute the graphs of their case only, as a scheduler's do."""
    monkeypatch.setattr(Faulty, "fault", staticmethod(right), raising=False)
    monkeypatch.setattr(Faulty, "fixed_graphs", True)
    runner = Runner()
    monkeypatch.setattr(runner, "open", lambda spec, **_: Faulty(**dict(spec.options)))
    try:
        (result,) = runner.run(SPEC, [relations.build(id_of("memory"))])
    finally:
        runner.close()
    assert result.verdict is Verdict.UNSUPPORTED, result.detail
    assert "splits graphs in advance" in result.detail


@pytest.mark.parametrize(("name", "what"), [("buffers", "the buffer type"), ("threads", "threads")])
def test_no_choice_is_unsupported(name: str, what: str) -> None:
    """A backend without a choice of what a relation varies says so and does not fail."""
    runner = Runner()
    try:
        (result,) = runner.run(Spec("cpu"), [relations.build(id_of(name))])
    finally:
        runner.close()
    assert result.verdict is Verdict.UNSUPPORTED
    assert f"no option for {what}" in result.detail


def test_threads_that_never_meet_are_a_timeout(run: Callable[[Case, Tamper], Result]) -> None:
    """A hang with eight threads alone is a verdict of the relation, which runs with one, three and eight."""
    case = relations.build(id_of("threads"))
    assert [r.options["threads"] for r in relation.read(case).runs] == ["1", "3", "8"]
    assert run(case, at_eight).verdict is Verdict.TIMEOUT
