"""The family `audit`: checks `supports_op` answers against actual runs.

llama.cpp chooses the buffer of a weight at load time, by calling `supports_op` with one example activation; later
graphs have other shapes. So "supported" must be true for every node of a trajectory that reads the weight, and the
results must be right there.

An id is `audit/CASE` for the unchanged trajectory, `audit/CASE#WEIGHT` for a weight in each buffer type, and
`audit/CASE#OP.PARAM` for one node with an op_param changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, adapter, resolve
from conformance.case.case import Case, Placement
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.evidence import Error
from conformance.judge.judge import judge_trajectory
from conformance.judge.verdict import FAILURES, Pair, Result, Verdict
from conformance.run.execute import execute, with_values
from conformance.run.failed import unsupported
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import LiveFamily, without_steps
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite.family import Level
from conformance.suite.varied import Variation, variations

from . import uses
from .uses import Answers, Equal

NAME = "audit"
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
"""Cases of level standard: decoders with many types and features; smoke has the first.

Experts, softcaps, ALiBi (the only user of `max_bias`), and short convolutions of 4 sequences, whose products have
sequences and tokens in different dimensions."""
MOST_HUNG = 2
"""Number of hung runs, each of the time limit, after which a buffer type is skipped."""
_HUNG = f"{MOST_HUNG} earlier ones in this buffer type did not answer in time"
_DAMAGING = FAILURES | {Verdict.XFAIL}


def ids_of(case_id: str) -> list[str]:
    """Return the ids that audit a case. UsageError if no family knows the case."""
    _, weights, params = _subjects(case_id)
    return [f"{NAME}/{case_id}", *(f"{NAME}/{case_id}#{name}" for name in (*weights, *params))]


@lru_cache(maxsize=16)
def _subjects(case_id: str) -> tuple[Case, list[str], list[str]]:
    """Return a case without placement, its weight names, and each `OP.PARAM` to change."""
    case = replace(build(case_id), placement={})
    params = {_param(v): None for v in variations(n for s in case.steps for n in s.graph)}
    return case, [w.name for w in uses.weights(case)], list(params)


def _param(v: Variation) -> str:
    return v.name.replace(" ", ".")


def _ids(level: Level) -> list[str]:
    return [i for case_id in (CASES[:1] if level == "smoke" else CASES) for i in ids_of(case_id)]


def _unlisted(glob: str) -> list[str]:
    """Return the audit ids of a full case id before `#`, or before a trailing `*`."""
    inner, hash_, _ = glob.removeprefix(f"{NAME}/").partition("#")
    inner = inner if hash_ else inner.removesuffix("*")
    return [] if "@" not in inner or set("*?") & set(inner) else ids_of(inner)


def _build(case_id: str) -> Case:
    inner, _, subject = case_id.removeprefix(f"{NAME}/").partition("#")
    _, weights, params = _subjects(inner)
    if subject and subject not in (*weights, *params):
        raise UsageError(
            f"case {case_id!r}: {NAME}/CASE#WEIGHT or #OP.PARAM expected: {', '.join((*weights, *params))}"
        )
    return without_steps(case_id)


def strict(runner: Runner, spec: Spec) -> Spec:
    """Return `spec` plus the options of `Backend.audited`, if the adapter accepts them.

    Raises:
        UsageError: the backend's name or an option is unknown.
        UnavailableError: the backend is not available on this machine.
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


class Auditor:
    """Audits one backend, in separate processes, so that a crash affects only one case."""

    def __init__(self, spec: Spec, isolation: Isolation, save: Path | None) -> None:
        """ConformanceError if the backend cannot be opened."""
        self._named, self.runner = spec, Runner(isolation=isolation, save_failures=save)
        try:
            self.spec = strict(self.runner, spec)
            self.backend: Backend = self.runner.backend(self.spec)
            self.types = self.backend.buffer_types()
        except BaseException:
            self.runner.close()
            raise
        self.hung: Counter[int] = Counter()
        """Buffer type -> number of runs and queries that timed out."""
        self._judge: Judge | None = None

    def play(self, case_id: str) -> Result:
        """Run one case of the family."""
        inner, _, subject = case_id.removeprefix(f"{NAME}/").partition("#")
        case, weights, _ = _subjects(inner)
        if self._judge is None or self._judge.case is not case:
            self._judge = Judge(self, case)
        if not subject:
            result = self._judge.trajectory()
        else:
            result = self._judge.weight(subject) if subject in weights else self._judge.op_param(subject)
        return replace(result, case=case_id, backend=str(self._named))

    def close(self) -> None:
        """Close the backend."""
        self.runner.close()

    def run(self, case: Case, buffer: int) -> Result:
        """Run once; re-run a failure on a fresh backend, since the process may be damaged.

        It skips the two extra processes that look for stale state.
        """
        with self.runner.quick(locates=True, checks_stale_state=False):
            return self._run(case, buffer)

    def _run(self, case: Case, buffer: int) -> Result:
        result = self._once(case)
        if result.verdict is Verdict.TIMEOUT:
            self.hung[buffer] += 1
        elif result.verdict in _DAMAGING:
            self.backend.renew()
            again = self._once(case)
            self.backend.renew()
            if again.verdict is not Verdict.PASS:
                return again
            result = result.noted("right in a fresh process, so an earlier case damaged this one")
        return result

    def _once(self, case: Case) -> Result:
        (result,) = self.runner.run(self.spec, [case])
        if result.verdict is Verdict.PASS:
            damage, error = uses.attempt(lambda: _damaged(self.backend, case))
            if error or damage:
                why = error or f"computing changed {', '.join(damage or ())}"
                result = replace(result, verdict=Verdict.FAIL, error=Error(why))
        return result


class Judge:
    """Compares a backend's answers about one case with runs of it."""

    def __init__(self, bench: Auditor, case: Case) -> None:
        self.case, self._bench = case, bench
        self._pair = Pair(case.id, str(bench.spec))

    @cached_property
    def _plain(self) -> Result:
        """The result of the trajectory without placement."""
        return self._bench.run(self.case, 0)

    @cached_property
    def _answers(self) -> dict[str, list[Answers]]:
        """Weight -> the backend's answers for each buffer type."""
        return {w.name: [self._ask(w, b) for b in range(len(self._bench.types))] for w in uses.weights(self.case)}

    def _ask(self, weight: Tensor, buffer: int) -> Answers:
        if self._bench.hung[buffer] >= MOST_HUNG:
            return Answers(self.case, weight, buffer, error=f"not asked: {_HUNG}")
        answers = uses.ask(self._bench.backend, self.case, weight, buffer)
        self._bench.hung[buffer] += answers.hung
        return answers

    @cached_property
    def _equal(self) -> Equal:
        every = (a for own in self._answers.values() for a in own)
        return {(a.buffer, uses.work(n, a.weight)): n for a in every for n in a.taken}

    @cached_property
    def _recorded(self) -> Case:
        arithmetic = self._bench.backend.arithmetic_in(self.case)
        reference = self._bench.runner.oracle.reference_in(arithmetic)
        every = range(len(self.case.steps))
        return with_values(self.case, execute(reference, self.case, every_node=every).steps)

    def trajectory(self) -> Result:
        """Run the trajectory without placement."""
        return _checked(self._plain)

    def weight(self, name: str) -> Result:
        """Run a weight in every buffer type; return the first failure, with the others as notes."""
        found: list[tuple[str, Result]] = []
        metrics = {"uses": float(len(self._answers[name][0].said))}
        for answers in self._answers[name]:
            buffer = self._bench.types[answers.buffer].name
            result, ran = self._placed(answers)
            metrics |= {f"taken in {buffer}": float(len(answers.taken)), f"ran in {buffer}": float(ran)}
            found.append((buffer, result))
        failed = [(b, r) for b, r in found if r.verdict in FAILURES]
        passed = [(b, r) for b, r in found if r.verdict is Verdict.PASS]
        buffer, result = (failed or passed or found)[0]
        notes = [f"in {buffer}"] if failed else []
        notes += [f"in {b} too: {r.verdict}: {r.detail}" for b, r in failed[1:]]
        return replace(result, metrics=metrics).noted(*notes)

    def _placed(self, answers: Answers) -> tuple[Result, int]:
        """Run with a weight in one buffer type; return the result and how many uses ran."""
        hung = self._bench.hung[answers.buffer] >= MOST_HUNG
        result, ran = self._unsupported(answers.said[answers.refused[0]].reason if answers.refused else ""), 0
        if answers.absent:
            result = self._unsupported(answers.absent)
        elif answers.error:
            result = Result(*self._pair, Verdict.OVERCLAIM, error=Error(f"in supports_op: {answers.error}"))
        elif answers.taken and hung:
            result = self._unsupported(f"not run: {_HUNG}")
        elif answers.taken:
            result, ran = self._run_placed(answers)
        if result.verdict in (Verdict.PASS, Verdict.UNSUPPORTED) and (why := uses.contradiction(answers, self._equal)):
            result = Result(*self._pair, Verdict.FAIL, error=Error(why))
        return result, ran

    def _run_placed(self, answers: Answers) -> tuple[Result, int]:
        """Run the trajectory, or each use alone if some are refused or the trajectory fails anyway.

        Returns the result (of the first wrong use, if any) and how many uses ran.
        """
        w, bench = answers.weight, self._bench
        case_id = f"{self.case.id}#{w.name}.in.{bench.types[answers.buffer].name}"
        placed = replace(self.case, id=case_id, placement={w: Placement(answers.buffer, must=True)})
        if self._plain.verdict is Verdict.PASS and not answers.refused:
            return _checked(bench.run(placed, answers.buffer)), len(answers.taken)
        result, ran = self._unsupported("no node that uses the weight computes anything"), 0
        try:
            for made, copies in uses.nodes_alone(replace(self._recorded, placement=placed.placement), answers.taken):
                case = replace(made, id=f"{placed.id}{made.id.removeprefix(self.case.id)}")
                result = _checked(bench.run(case, answers.buffer))
                ran += len(copies) if result.verdict is not Verdict.UNSUPPORTED else 0
                if result.verdict is not Verdict.PASS:
                    break
        except ConformanceError as e:
            result = self._unsupported(f"no reference: {e}")
        return result, ran

    @cached_property
    def _changed(self) -> dict[str, tuple[Variation, Case, Case]]:
        """Op and op_param -> the change, the first node that allows it alone, the changed node."""
        found: dict[str, tuple[Variation, Case, Case]] = {}
        for step, copies in uses.nodes_alone(self._recorded, [n for s in self.case.steps for n in s.graph]):
            for v in variations(n for n in step.steps[0].graph if n in copies):
                if (name := _param(v)) not in found:
                    case = replace(step, id=f"{self.case.id}#{name}")
                    graph = [v.changed if n is v.node else n for n in step.steps[0].graph]
                    changed = uses.cut_to(case, (v.changed,), graph)
                    found[name] = v, uses.cut_to(case, (v.node,)), changed
        return found

    def op_param(self, name: str) -> Result:
        """Run one node with an op_param changed."""
        bench = self._bench
        if bench.hung[0] >= MOST_HUNG:
            return self._unsupported(f"not run: {_HUNG}")
        try:
            variation, unchanged, case = self._changed[name]
        except ConformanceError as e:
            return self._unsupported(f"no reference for op_params: {e}")
        except KeyError:
            return self._unsupported(f"no node has this parameter alone: {name}")
        what = f"{uses.spell(variation.changed)} with {variation.values}"
        reference = bench.runner.oracle.reference_in(bench.backend.arithmetic_in(case))
        right, error = uses.attempt(lambda: (_value(reference, unchanged), _value(reference, case)))
        if right is None:
            return self._unsupported(f"{what}: no reference: {error}")
        if self._same(case, *right):
            return self._unsupported(f"{what} changes nothing here")
        result = _checked(bench.run(case, 0))
        if result.verdict is Verdict.FAIL:
            own, _ = uses.attempt(lambda: (_value(bench.backend, unchanged), _value(bench.backend, case)))
            ignored = own is not None and self._same(case, *own)
            param = name.rpartition(".")[2]
            says = f"the same result without the change, so {param} is ignored" if ignored else "is wrong"
            result = result.noted(f"{what} {says}")
        return result

    def _unsupported(self, why: str) -> Result:
        return unsupported(self._pair, Error(why, why))

    def _same(self, case: Case, expected: Bytes, found: Bytes) -> bool:
        """Return True if two values of the only output of `case` are equal within its budget."""
        (node,) = case.steps[0].outputs
        arithmetic = self._bench.backend.arithmetic_in(case)
        return all(j.used <= 1 for j in judge_trajectory(case, [{node: expected}], [{node: found}], arithmetic))


def _value(backend: Backend, case: Case) -> Bytes:
    (node,) = case.steps[0].outputs
    return execute(backend, case).steps[0].outputs[node]


def _checked(result: Result) -> Result:
    """Turn VACUOUS, which says nothing about the backend's answer, into UNSUPPORTED."""
    return replace(result, verdict=Verdict.UNSUPPORTED) if result.verdict is Verdict.VACUOUS else result


def _damaged(backend: Backend, case: Case) -> list[str]:
    """Return the weights whose bytes a run changed."""
    fixed = frozenset(case.persistent).difference(case.caches())
    with backend.open(case) as session:
        for step in case.steps:
            session.compute(step.graph, step.inputs, step.outputs)
        readable = [t for t in case.persistent if t in fixed and t not in session.opaque()]
        return [f"{t.name} {t.type}{list(t.ne)}" for t in readable if (session.read(t) != case.persistent[t]).any()]


FAMILY = LiveFamily(
    NAME,
    "check supports_op answers for weights, buffer types and op_params against actual runs",
    _ids,
    _build,
    seeded=False,
    player=Auditor,
    unlisted=_unlisted,
)
