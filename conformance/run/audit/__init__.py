"""Placement audit: compares a backend's answer for each use of each weight in each buffer type with a run.

llama.cpp decides where a weight lies when it loads it, by asking about one activation that it makes up; the graphs come
later. So a yes must hold for every node of a trajectory that reads the weight, and the numbers must be right there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from conformance.backend.interface import Backend, BufferType
from conformance.backend.registry import Spec, adapter, resolve
from conformance.case import casefile
from conformance.case.case import Case, Placement
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.tensor import Bytes
from conformance.judge.evidence import Error
from conformance.judge.judge import judge_trajectory
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.run.execute import execute, with_values
from conformance.run.isolation.isolate import IsolatedBackend
from conformance.run.runner import Runner
from conformance.run.session import failures
from conformance.run.signature import signature_of
from conformance.suite.varied import Variation, variations

from . import cells
from .cells import FAILING, FOUND, Answers, Cell, Equal, Finding

__all__ = ["CASES", "FAILING", "FOUND", "Cell", "Finding", "audit", "strict"]

_TINY = "l=1,embd=64,heads=2,kv=1,head=32,ff=64,vocab=64"
_WIDE = "l=1,embd=256,heads=4,kv=2,head=64,ff=256,vocab=64"
_KINDS = "attn_q=q4_K,attn_k=q5_K,attn_v=q6_K,attn_output=q2_K,ffn_gate=q3_K,ffn_up=q4_1,ffn_down=mxfp4,output=q5_0"
CASES = (
    *(f"weight_placement/llama-{_TINY},w={w},tied=1,run=p5.d1@0" for w in ("q4_0", "q8_0", "f16")),
    f"weight_placement/llama-{_WIDE},{_KINDS},fa=0,rope=none,alibi=8,run=p5.d1@0",
    f"weight_placement/llama-{_TINY},rope=none,alibi=8,norm=layer,ffn=gelu,run=p5.d1@0",
    f"weight_placement/gpt-oss-{_TINY},w=q4_0,run=p5.d1@0",
    f"weight_placement/gemma2-{_TINY},w=q4_0,run=p5.d1@0",
    f"weight_placement/lfm2-{_TINY.replace('l=1', 'l=2')},w=q4_0,seqs=4,run=p5+3+4+2.d1@0",
)
"""What is audited where no case is named: decoders of many types, experts, soft caps, and short convolutions of 4
sequences, whose products have their sequences in another dimension than their tokens; ALiBi, the only one to whom
`max_bias` says anything."""
MOST_HUNG = 2
"""Cells that may hang in one buffer type; then nothing is run there any more, since each costs the time limit."""
_IDLE = "changes nothing here"
_NEW = object()
_DAMAGING = FAILURES | {Verdict.XFAIL}
_UNRUN = frozenset({Verdict.VACUOUS, Verdict.UNSUPPORTED})
_READ = {
    Verdict.PASS: Finding.AGREED,
    Verdict.XFAIL: Finding.XFAIL,
    Verdict.XPASS: Finding.XPASS,
    **dict.fromkeys(_UNRUN, Finding.UNRUN),
}


def audit(runner: Runner, spec: Spec, cases: Sequence[Case], save: Path | None = None) -> Iterator[Cell]:
    """One cell per weight and buffer type, per op_param, and per case as it is. A fault of the backend never raises;
    ConformanceError if it cannot be opened at all. The cases' own placement is ignored; `save` is a folder for a case
    per finding. Where a crash must cost one cell only, `runner` opens the backend in a process of its own.
    """
    bench = Bench(runner, spec, save)
    bare = [replace(c, placement={}) for c in cases]
    answers = {c: list(_answers(bench, c)) for c in bare}
    equal = {(a.buffer, cells.work(n, a.weight)): n for each in answers.values() for a in each for n in a.taken}
    known: dict[str, Cell | None] = {}
    for case, each in answers.items():
        judge = Judge(bench, case, equal)
        yield judge.whole()
        yield from map(judge.weight, each)
        yield from judge.op_params(known)
    yield from filter(None, known.values())


def strict(runner: Runner, spec: Spec) -> Spec:
    """`spec` with the options with which its adapter finds more faults (`Backend.audited`), where it takes them.
    UsageError if the backend's name or an option is unknown, UnavailableError if this machine cannot have it.
    """
    given = dict(resolve(spec).options)
    more = tuple((k, v) for k, v in adapter(spec.name).audited.items() if k not in given)
    if not more:
        return spec
    try:
        runner.backend(Spec(spec.name, (*spec.options, *more)))
    except UsageError:
        return spec
    return Spec(spec.name, (*spec.options, *more))


def _answers(bench: Bench, case: Case) -> Iterator[Answers]:
    for weight in cells.weights(case):
        for buffer in range(len(bench.types)):
            if bench.hung[buffer] >= MOST_HUNG:
                yield Answers(case, weight, buffer, error=f"not asked: {MOST_HUNG} before it did not answer in time")
                continue
            answers = cells.ask(bench.backend, case, weight, buffer)
            bench.hung[buffer] += answers.hung
            yield answers


class Bench:
    """One backend under audit: runs cases on it and saves those of findings."""

    def __init__(self, runner: Runner, spec: Spec, save: Path | None) -> None:
        self.runner, self.spec, self.save = runner, spec, save
        self.backend: Backend = runner.backend(spec)
        self.types: Sequence[BufferType] = self.backend.buffer_types()
        self.hung: Counter[int] = Counter()
        """Buffer type -> cells that did not answer in time."""

    def run(self, case: Case, buffer: int) -> Result:
        """Run once; a failure runs again in a fresh process, since an earlier cell may have damaged this one. Neither
        looks for something that was kept, in two more processes.
        """
        with self.runner.looking(locates=True, tells_kept=False):
            return self._run(case, buffer)

    def _run(self, case: Case, buffer: int) -> Result:
        result = self._once(case)
        if result.verdict is Verdict.TIMEOUT:
            self.hung[buffer] += 1
        elif result.verdict in _DAMAGING and isinstance(self.backend, IsolatedBackend):
            self.backend.renew()
            again = self._once(case)
            self.backend.renew()
            if again.verdict is not Verdict.PASS:
                return again
            result = result.noted("right in a fresh process, so another case did the damage")
        return result

    def _once(self, case: Case) -> Result:
        (result,) = self.runner.run(self.spec, [case])
        if result.verdict is Verdict.PASS:
            damage, error = cells.attempt(lambda: _damaged(self.backend, case))
            if error or damage:
                why = error or f"computing changed {', '.join(damage or ())}"
                result = replace(result, verdict=Verdict.FAIL, error=Error(why))
        return result

    def kept(self, cell: Cell, case: Case, result: Result | None, buffer: int = 0) -> Cell:
        """`cell` with the signature of `result`, its case saved where something was found."""
        if result is not None and (signature := signature_of(result)) is not None:
            cell.fault = str(signature)
        if self.save is None or cell.finding not in FOUND:
            return cell
        result = result or self.run(case, buffer)
        self.save.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.=@#-]+", "_", f"{case.id}_{self.spec}")
        path = self.save / f"{name[-150:]}.gguf"
        told = replace(case, provenance={**case.provenance, "audit": cell.to_json()})
        _, error = cells.attempt(lambda: casefile.write(path, [failures.with_result(told, result)]))
        cell.saved = None if error else str(path)
        cell.detail += f"; its case could not be saved: {error}" if error else ""
        return cell


@dataclass(frozen=True, slots=True)
class _Changed:
    """One op_param of one node changed."""

    variation: Variation
    unchanged: Case
    """The node alone, as it is."""
    case: Case
    """The node alone, changed."""


class Judge:
    """Judges the cells of one case."""

    def __init__(self, bench: Bench, case: Case, equal: Equal) -> None:
        self._bench, self._case, self._equal = bench, case, equal
        self._plain = bench.run(case, 0)

    @cached_property
    def _recorded(self) -> Case:
        arithmetic = self._bench.backend.arithmetic_in(self._case)
        reference = self._bench.runner.oracle.reference_in(arithmetic)
        every = range(len(self._case.steps))
        return with_values(self._case, execute(reference, self._case, every_node=every).steps)

    def whole(self) -> Cell:
        """The trajectory with nothing placed."""
        nodes = sum(len(s.graph) for s in self._case.steps)
        cell = self._cell("trajectory", "", self._bench.types[0].name, nodes)
        cell.finding, cell.detail = _read(self._plain)
        if self._plain.verdict is Verdict.UNSUPPORTED:
            cell.finding = Finding.AGREED
        else:
            cell.taken = nodes
            cell.ran = 0 if self._plain.verdict is Verdict.VACUOUS else nodes
        return self._bench.kept(cell, self._case, self._plain)

    def weight(self, answers: Answers) -> Cell:
        """One weight in one buffer type."""
        w, bench = answers.weight, self._bench
        cell = self._cell("weight", w.name, bench.types[answers.buffer].name, len(self._case.uses(w)))
        cell.type, cell.ne, cell.taken = str(w.type), list(w.ne), len(answers.taken)
        place = {w: Placement(answers.buffer, must=True)}
        placed = replace(self._case, id=f"{self._case.id}#{w.name}.in.{cell.buffer}", placement=place)
        ran, result = placed, None
        if answers.absent:
            cell.finding, cell.detail = Finding.UNRUN, answers.absent
        elif answers.error:
            cell.finding, cell.detail = Finding.OVERCLAIM, f"when asked: {answers.error}"
        elif answers.taken and bench.hung[answers.buffer] >= MOST_HUNG:
            cell.finding = Finding.UNRUN
            cell.detail = f"not run: {MOST_HUNG} before it in this buffer type did not answer in time"
        elif answers.taken:
            ran, result, cell.ran = self._run_placed(answers, placed)
            cell.finding, cell.detail = _read(result)
        if cell.finding in {Finding.AGREED, Finding.UNRUN}:
            finding, detail = cells.consistent(answers, self._equal)
            cell.detail = cell.detail or detail
            if finding is not Finding.AGREED:  # no use by itself shows it: the whole trajectory is what fails later
                cell.finding, cell.detail, ran, result = finding, detail, placed, None
        return bench.kept(cell, ran, result, answers.buffer)

    def _run_placed(self, answers: Answers, placed: Case) -> tuple[Case, Result, int]:
        """Run the trajectory; or each use by itself, where the backend takes some uses only or fails it anyway.

        Returns the last case that ran, which is the first wrong one, its result, and how many uses ran.
        """
        if self._plain.verdict is Verdict.PASS and not answers.refused:
            return placed, self._bench.run(placed, answers.buffer), len(answers.taken)
        result, case, ran = Result("", "", Verdict.VACUOUS, error=Error("no use computes anything")), placed, 0
        try:
            for made, copies in cells.nodes_alone(replace(self._recorded, placement=placed.placement), answers.taken):
                case = replace(made, id=f"{placed.id}{made.id.removeprefix(self._case.id)}")
                result = self._bench.run(case, answers.buffer)
                ran += len(copies) if result.verdict not in _UNRUN else 0
                if result.verdict is not Verdict.PASS:
                    break
        except ConformanceError as e:
            result = Result("", "", Verdict.VACUOUS, error=Error(f"nothing to check it against: {e}"))
        return case, result, ran

    def op_params(self, known: dict[str, Cell | None]) -> Iterator[Cell]:
        """Each op_param that changes numbers, changed once: one cell for every op and op_param. `known` holds None for
        what is judged, its cell where the change has had no effect so far.
        """
        made: list[_Changed] = []
        _, error = cells.attempt(lambda: made.extend(self._changed(known)))
        if error:
            cell = self._cell("op_param", "", self._bench.types[0].name, 0)
            cell.finding, cell.detail = Finding.UNRUN, f"nothing to check op_params against: {error}"
            yield cell
        for changed in made:
            cell = self._op_param(changed)
            if cell.finding is Finding.UNRUN and not cell.ran and cell.detail.endswith(_IDLE):
                known.setdefault(cell.name, cell)
                continue
            known[cell.name] = None
            yield cell

    def _changed(self, known: Mapping[str, Cell | None]) -> Iterator[_Changed]:
        here: set[str] = set()
        for step, copies in cells.nodes_alone(self._recorded, [n for s in self._case.steps for n in s.graph]):
            for v in variations(n for n in step.steps[0].graph if n in copies):
                if v.name not in here and known.get(v.name, _NEW) is not None:
                    here.add(v.name)
                    case = replace(step, id=f"{self._case.id}#{v.name.replace(' ', '.')}")
                    graph = [v.changed if n is v.node else n for n in step.steps[0].graph]
                    yield _Changed(v, cells.cut_to(case, (v.node,)), cells.cut_to(case, (v.changed,), graph))

    def _op_param(self, c: _Changed) -> Cell:
        bench, node = self._bench, c.variation.changed
        cell = self._cell("op_param", c.variation.name, bench.types[0].name, 1)
        cell.type, cell.ne = str(node.type), list(node.ne)
        what = f"{cells.spell(node)} with {c.variation.values}"
        if bench.hung[0] >= MOST_HUNG:
            cell.finding, cell.detail = Finding.UNRUN, f"not run: {MOST_HUNG} before it did not answer in time"
            return cell
        reference = bench.runner.oracle.reference_in(bench.backend.arithmetic_in(c.case))
        right, error = cells.attempt(lambda: (_value(reference, c.unchanged), _value(reference, c.case)))
        if right is None:
            cell.finding, cell.detail = Finding.UNRUN, f"{what}: nothing to check it against: {error}"
            return cell
        if self._same(c.case, *right):
            cell.finding, cell.detail = Finding.UNRUN, f"{what} {_IDLE}"
            return cell
        result = bench.run(c.case, 0)
        cell.finding, cell.detail = _read(result)
        if result.verdict is Verdict.UNSUPPORTED:
            cell.finding = Finding.AGREED
        else:
            cell.taken = cell.ran = 1
        if result.verdict is Verdict.FAIL:
            own, _ = cells.attempt(lambda: (_value(bench.backend, c.unchanged), _value(bench.backend, c.case)))
            name = c.variation.name.rpartition(" ")[2]
            ignored = own is not None and self._same(c.case, *own)
            said = f"gives what it gives without the change, so {name} is ignored" if ignored else "is wrong"
            cell.detail = f"{what} {said}: {cell.detail}"
        return bench.kept(cell, c.case, result)

    def _same(self, case: Case, expected: Bytes, found: Bytes) -> bool:
        """Whether two values of the one output of `case` are the same within its budget."""
        (node,) = case.steps[0].outputs
        arithmetic = self._bench.backend.arithmetic_in(case)
        return all(j.used <= 1 for j in judge_trajectory(case, [{node: expected}], [{node: found}], arithmetic))

    def _cell(self, subject: str, name: str, buffer: str, uses: int) -> Cell:
        return Cell(self._case.id, subject, name, "", [], buffer, uses, 0, 0, Finding.AGREED)


def _value(backend: Backend, case: Case) -> Bytes:
    (node,) = case.steps[0].outputs
    return execute(backend, case).steps[0].outputs[node]


def _read(result: Result) -> tuple[Finding, str]:
    if result.verdict is Verdict.PASS:
        return Finding.AGREED, ""
    return _READ.get(result.verdict, Finding.OVERCLAIM), f"{result.waived or result.verdict}: {result.detail}"


def _damaged(backend: Backend, case: Case) -> list[str]:
    """Weights whose bytes a run changed."""
    fixed = frozenset(case.persistent).difference(case.caches())
    with backend.open(case) as session:
        for step in case.steps:
            session.compute(step.graph, step.inputs, step.outputs)
        readable = [t for t in case.persistent if t in fixed and t not in session.opaque()]
        return [f"{t.name} {t.type}{list(t.ne)}" for t in readable if (session.read(t) != case.persistent[t]).any()]
