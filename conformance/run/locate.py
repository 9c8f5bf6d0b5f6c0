"""Locate a failure: the first wrong or failing node, stale state, or a near-tie of experts.

The case runs again with every intermediate value, and each node is judged with the backend's own values of its sources.
So only the first wrong node is named, and none of those that it affects.

Two correct backends may choose different experts if two router scores are closer than their rounding. All later values
then differ beyond any tolerance. This is not a bug if the choice is the first difference, its scores are within their
tolerance, the margin is within their difference, and each node alone is right.

A fresh backend has no state of earlier cases. If a step is wrong there in the whole case, and right alone from the same
caches, the cause is state that an earlier step left, such as a compiled graph, a cache or a log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial as bound
from math import isnan

import numpy as np

from conformance.backend.interface import Backend, Session
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, ConformanceError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Expansion
from conformance.ggml.ops.op import operand, written
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.partial import partial
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, computes, pack
from conformance.judge.budget import RAW
from conformance.judge.compare import Difference, compare, values
from conformance.judge.evidence import Fault, Numbers, Place
from conformance.judge.judge import Chain, Judged, judge_isolated, judge_node, judge_step, judge_trajectory
from conformance.judge.message import innermost
from conformance.judge.text import diverges
from conformance.judge.verdict import Result, Verdict
from conformance.suite.batch import isolated_nodes

from .attempt import Attempt
from .execute import Execution, StepValues, computed_nodes, execute, nothing, with_values
from .oracle import judge_steps
from .signature import error_of

LOST = "right if no node reads it"
BEFORE_AGREES = "everything before it agrees"


def describe(judged: Judged, case: Case, fault: Fault = Fault.NODE) -> Place:
    """Return the location of a wrong tensor."""
    graph = case.steps[judged.step].graph
    t, d = judged.tensor, judged.difference
    numbers = Numbers(d.index, d.expected, d.found, d.nmse, judged.budget.nmse, d.special, judged.budget.profile)
    node = graph.nodes.index(t) if t in graph.nodes else None
    return Place(fault, judged.step, node, t.op, t.name, f"{t.type}{list(t.ne)}", numbers, steps=len(case.steps))


def sentence(judged: Judged, case: Case) -> str:
    """Describe a wrong tensor in words."""
    where = describe(judged, case)
    assert where.numbers is not None
    return diverges(where, where.numbers)


def locate(attempt: Attempt, result: Result) -> Result:
    """Return `result`, the FAIL of a free run, with its first wrong node, if one is wrong alone.

    Return a PASS if a near-tie of experts explains it.

    Raises: LocatingError: a run failed; the error has the result as far as it is known.
    """
    case, execution = attempt.case, attempt.execution
    by_steps, by_reference = attempt.expectation.judge(case, execution)
    wrong = next((j for j in (*by_reference, *by_steps) if j.used > 1), None)
    if wrong is None:  # the free run is right; a step from recorded caches failed
        return result
    if execution.opaque:  # without readable caches no node can run alone
        return replace(result, where=describe(wrong, case, Fault.GRAPH))
    result = replace(result, where=describe(wrong, case, Fault.OUTPUT))
    try:
        return _located(attempt, result, wrong, by_steps, by_reference)
    except Exception as e:
        raise LocatingError(result) from e


class LocatingError(Exception):
    """The search for the first wrong node failed; its cause states why."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


def _located(
    attempt: Attempt, result: Result, wrong: Judged, by_steps: Sequence[Judged], by_reference: Sequence[Judged]
) -> Result:
    backend, case = attempt.tested.backend, attempt.case
    reference = attempt.tested.oracle.reference_in(backend.arithmetic_in(case))
    ran = execute(backend, case, every_node=range(wrong.step + 1)).steps
    probe = Probe({(j.step, j.tensor) for j in by_steps if j.used > 1}, ran, backend, reference, case)
    try:
        suspect = first_divergent(ran, reference, case, wrong.step)
    except ConformanceError:  # a lost value cannot be used, such as an index out of range
        return probe.tell(result, probe.traced(wrong), by_steps)
    found = None if suspect is None else probe.named(suspect)
    if suspect is not None and found is None:  # requesting every node loses a value, so the others tell nothing
        return probe.tell(result, probe.traced(wrong), by_steps)
    if found is None and (flip := _flip(backend, reference, case, attempt.execution)):
        used = max((j.used for j in (*by_steps, *by_reference) if j.step < wrong.step), default=0.0)
        right = replace(result, verdict=Verdict.PASS, where=None, wrong=None, budget_used=used)
        return right.noted(flip, "each node alone is right", "what follows is not judged")
    if found is None:
        located = replace(result, where=describe(wrong, case, Fault.GRAPH)).noted("each node alone is right")
    else:
        located = replace(result, where=describe(found, case)).noted(BEFORE_AGREES)
    origin = None
    if isnan((found or wrong).difference.found):
        origin = first_nan(backend, ran, reference, case, wrong.step)
    if origin is None or (found is not None and (origin[0].step, origin[0].tensor) == (found.step, found.tensor)):
        return located
    judged, cause = origin
    node = judged.tensor in case.steps[judged.step].graph.nodes
    if node and probe.named(judged) is None:
        return located
    first = replace(result, where=describe(judged, case, Fault.NODE if node else Fault.GRAPH))
    return first.noted(f"the first NaN: {cause}")


@dataclass(frozen=True, slots=True)
class Probe:
    """Separates wrong nodes from values that are wrong only because every node is an output.

    A backend may lose a result that is both an output and a source of other nodes.
    """

    outputs: Collection[tuple[int, Tensor]]
    """Outputs, each with its step, that are wrong in the free run."""
    ran: Sequence[StepValues]
    """Values of the run with every node as an output."""
    backend: Backend
    reference: Backend
    case: Case
    right: dict[int, Mapping[Tensor, Bytes]] = field(default_factory=dict)
    """Step -> the reference's value of every node, computed on first use."""
    known: dict[tuple[int, Tensor], Judged | None] = field(default_factory=dict)
    """Errors of nodes at the end of a graph; None for a right one."""

    def named(self, judged: Judged) -> Judged | None:
        """Return a node that is wrong also if no other node is an output; `judged` if unknown.

        Return None if it is wrong only because it is an output: it is right if no other node is an output, or if it
        ends its graph, and wrong once the next node reads it.
        """
        k, t = judged.step, judged.tensor
        if t in self.case.steps[k].outputs:
            return judged if (k, t) in self.outputs else None
        nodes = self.case.steps[k].graph.nodes
        reader = next((n for n in nodes[nodes.index(t) + 1 :] if _reads(n, t)), None)
        try:
            if not self._is_as_before(judged, nodes[-1]):
                off = self._off(k, t, nodes[-1])
                return None if off is None else replace(judged, difference=off)
            if reader is None or self._is_as_before(judged, t):
                return judged
            if (ends := self.judged(k, t)) is not None:
                return ends
            return None if self._off(k, t, reader) is not None else judged
        except BackendError:
            return judged

    def _is_as_before(self, judged: Judged, last: Tensor) -> bool:
        """Return True if a node, as the only output up to `last`, has its value in `ran`."""
        k, t = judged.step, judged.tensor
        found = execute(self.backend, self._up_to(k, t, last)).steps[k].outputs[t]
        return judged.budget.used(compare(t, self.ran[k].outputs[t], found)) <= 1

    def ends(self, judged: Judged, least: float) -> bool:
        """Return True if a node is wrong at the end of a graph, and its sources are not.

        Each source ends a graph of its own. An NMSE below `least` counts as right.
        """
        k, t = judged.step, judged.tensor
        with suppress(BackendError):
            sources = _sources(self.case.steps[k].graph.nodes, t)
            return bool(self._at_end(k, t, least)) and not any(self._at_end(k, s, least) for s in sources)
        return False

    def traced(self, wrong: Judged, least: float = 0.0) -> Judged | None:
        """Return the first wrong node behind a wrong value; None if there is none or it is unknown.

        For this node `ends` is true.
        """
        k, nodes = wrong.step, self.case.steps[wrong.step].graph.nodes
        last = next((n for n in reversed(nodes) if computes(n) and n.root is wrong.tensor.root), None)
        if last is None:
            return None
        off = bound(self._at_end, k, least=least)
        with suppress(BackendError):
            while off(last) is not None:
                before = _dependencies(nodes, last)
                right, bad = -1, len(before)
                while bad - right > 1:  # nodes that depend on a wrong one are mostly wrong
                    middle = (right + bad) // 2
                    right, bad = (middle, bad) if off(before[middle]) is None else (right, middle)
                if bad < len(before):
                    last = before[bad]
                elif (other := next((t for t in _sources(nodes, last) if off(t) is not None), None)) is not None:
                    last = other
                else:
                    return off(last)
        return None

    def _at_end(self, k: int, t: Tensor, least: float) -> Judged | None:
        """Judge `t` at the end of a graph; None if it is right."""
        if (k, t) not in self.known:
            self.known[k, t] = self.judged(k, t)
        found = self.known[k, t]
        return found if found is not None and found.difference.nmse >= least else None

    def tell(self, result: Result, found: Judged | None, outputs: Sequence[Judged]) -> Result:
        """Return `result` located at the node `found`, else at the first of `outputs` that is lost."""
        if found is not None:
            return replace(result, where=describe(found, self.case)).noted(BEFORE_AGREES)
        lost = next((j for j in map(self.lost, outputs) if j is not None), None)
        if lost is not None:
            return replace(result, where=describe(lost, self.case)).noted(LOST)
        return result.noted("nodes are wrong only if each is an output")

    def lost(self, judged: Judged) -> Judged | None:
        """Return a wrong output, or the node that it views, if it is right as the last node.

        Such an output is computed and then lost. None if it is right, computed wrongly or unknown.
        """
        k, t = judged.step, judged.tensor
        node = t.root if t.op in VIEW_OPS else t
        if judged.used <= 1 or node not in self.case.steps[k].graph.nodes:
            return None
        with suppress(BackendError):
            return replace(judged, tensor=node) if self._off(k, node, node) is None else None
        return None

    def _off(self, k: int, t: Tensor, last: Tensor) -> Difference | None:
        """Return the error of `t` in step `k` as the only output of a graph up to `last`, or None."""
        judged = self.judged(k, t, last)
        return judged.difference if judged is not None else None

    def judged(self, k: int, t: Tensor, last: Tensor | None = None) -> Judged | None:
        """Judge `t` of step `k` as the only output of a graph up to `last` or `t`; None if right."""
        case = self._up_to(k, t, last or t)
        found, right = execute(self.backend, case).steps[k].outputs[t], self._expected(k, t)
        chain = Chain(self.reference.arithmetic())
        for each in case.steps[:k]:
            chain.enter(each.graph)
        plain = replace(case, tolerance={})
        (judged,) = judge_step(plain, k, {t: right}, {t: found}, self.reference.arithmetic(), chain)
        return judged if judged.used > 1 else None

    def _expected(self, k: int, t: Tensor) -> Bytes:
        if k not in self.right:
            whole = replace(self.case, steps=self.case.steps[: k + 1])
            self.right[k] = execute(self.reference, whole, every_node=[k]).steps[k].outputs
        return self.right[k][t]

    def _up_to(self, k: int, t: Tensor, last: Tensor) -> Case:
        """Return the case up to node `last` of step `k`, with `t` as the only output."""
        step = self.case.steps[k]
        graph = Graph(step.graph.nodes[: step.graph.nodes.index(last) + 1])
        leaves = set(graph.tensors())
        inputs = {x: data for x, data in step.inputs.items() if x in leaves}
        steps = [*self.case.steps[:k], Step(graph, inputs, (t,))]
        leaves.update(x for s in steps[:k] for x in s.graph.tensors())
        persistent = {x: data for x, data in self.case.persistent.items() if x in leaves}
        return replace(self.case, persistent=persistent, steps=steps)


def _sources(nodes: Sequence[Tensor], node: Tensor) -> list[Tensor]:
    """Return the nodes before `node` that compute or write its sources, in order."""
    read = {s.root for s in node.src if s is not None}
    return [n for n in nodes[: nodes.index(node)] if not read.isdisjoint(written(n))]


def _dependencies(nodes: Sequence[Tensor], node: Tensor) -> list[Tensor]:
    """Return all nodes on which `node` depends, in order."""
    found: set[Tensor] = set()
    todo = [node]
    while todo:
        for n in _sources(nodes, todo.pop()):
            if n not in found:
                found.add(n)
                todo.append(n)
    return [n for n in nodes if n in found]


def _reads(n: Tensor, t: Tensor) -> bool:
    return computes(n) and any(s is not None and s.root is t.root for s in n.src)


def first_divergent(ran: Sequence[StepValues], reference: Backend, case: Case, upto: int) -> Judged | None:
    """Return the first node of steps 0 to `upto` that is wrong given its own sources.

    `upto` is the first step with a wrong output or cache. None if every node is right once it is an output: then the
    cause is fusion, or state that a fresh run does not have. Arguments as for `divergent`.
    """
    return next(divergent(ran, reference, case, upto), None)


def divergent(ran: Sequence[StepValues], reference: Backend, case: Case, upto: int) -> Iterator[Judged]:
    """Yield the nodes of steps 0 to `upto` that are wrong given their own sources, in order.

    `ran` has every computed node of these steps in a free run; `reference` computes in the backend's arithmetic.
    """
    arithmetic = reference.arithmetic()
    recorded = with_values(case, ran[: upto + 1])
    for k in range(upto + 1):
        found = recorded.steps[k].expected
        alone, original = isolated_nodes(recorded, k)
        each = arithmetic.copied(original)  # with several devices, each copy has the arithmetic of its node
        ran_alone = execute(reference if each is arithmetic else reference.computing_in(each), alone)
        right = ran_alone.steps[0].outputs
        yield from (j for j in judge_isolated(alone, original, right, found, each, step=k) if j.used > 1)


# -- NaN --------------------------------------------------------------------------------------------------------------


def first_nan(
    backend: Backend, ran: Sequence[StepValues], reference: Backend, case: Case, upto: int
) -> tuple[Judged, str] | None:
    """Return the first value with a NaN where the reference has none, and its origin in words.

    A NaN in a cache reaches every node that reads it, and each of these nodes is right given its sources. So nodes and
    caches are checked in the order in which they got their values, and caches also before the first step: for this
    `backend` opens the case again. Other arguments as for `first_divergent`.
    """
    arithmetic, caches = reference.arithmetic(), case.caches()
    right = execute(reference, case, every_node=range(upto + 1)).steps
    with backend.open(case) as session:
        start = {t: pack(session.read(t), t, 0) for t in caches}
    for t in caches:
        want = pack(case.persistent[t], t, 0)
        if _has_nan(t, want, start[t]):
            return Judged(0, t, compare(t, want, start[t]), RAW), "it contained NaN before the first step"
    for k, (mine, wanted) in enumerate(zip(ran[: upto + 1], right, strict=False)):
        for n in computed_nodes(case.steps[k]):
            if _has_nan(n, wanted.outputs[n], mine.outputs[n]):
                judged = judge_node(n, wanted.outputs[n], mine.outputs[n], arithmetic, step=k)
                return judged, "nothing that it reads contained NaN"
        for t in caches:
            if _has_nan(t, wanted.caches[t], mine.caches[t]):
                return Judged(k, t, compare(t, wanted.caches[t], mine.caches[t]), RAW), "no node of the step wrote it"
    return None


def _has_nan(t: Tensor, expected: Bytes, found: Bytes) -> bool:
    return bool((np.isnan(values(t, found)) & ~np.isnan(values(t, expected))).any())


# -- near-ties --------------------------------------------------------------------------------------------------------

OPS = frozenset({"ARGSORT", "TOP_K"})


def near_tie(
    case: Case, found: Sequence[Mapping[Tensor, Bytes]], right: Sequence[Mapping[Tensor, Bytes]], arithmetic: Arithmetic
) -> str:
    """Describe the first different choice and its margin; empty if no near-tie explains it.

    Also empty if another value differs earlier. `found` and `right` have every computed node of each step in free
    runs of backend and reference.
    """
    chain = Chain(arithmetic)
    for k, (step, mine, wanted) in enumerate(zip(case.steps, found, right, strict=False)):
        chain.enter(step.graph)
        for node in filter(computes, step.graph):
            if node.op in OPS:
                flips = _flips(step.graph, node, mine, wanted)
                scores = operand(node)
                if flips is None or (
                    flips and chain.budget(scores).used(compare(scores, wanted[scores], mine[scores])) > 1
                ):
                    return ""
                if flips:
                    more = f" and {len(flips) - 1} more" if len(flips) > 1 else ""
                    return f"step {k}: {flips[0]}{more}"
            elif chain.budget(node).used(compare(node, wanted[node], mine[node])) > 1:
                return ""
    return ""


def _flips(graph: Graph, node: Tensor, mine: Mapping[Tensor, Bytes], right: Mapping[Tensor, Bytes]) -> list[str] | None:
    """Describe each token's different choice; None if one exceeds the difference of its scores."""
    scores = operand(node)
    if scores not in mine:
        return []
    used = [n.ne[0] for n in graph if n.op == "VIEW" and n.view_src is node]
    k = max(used, default=node.ne[0])
    chosen, wanted = (values(node, v[node]).reshape(-1, node.ne[0])[:, :k] for v in (mine, right))
    a, b = (values(scores, v[scores]).reshape(-1, scores.ne[0]) for v in (mine, right))
    if node.op == "ARGSORT" and node.params.order == SORT_ORDER.ASC:
        a, b = -a, -b
    said = []
    for row, (got, want) in enumerate(zip(chosen.tolist(), wanted.tolist(), strict=True)):
        taken, left = sorted(set(got) - set(want)), sorted(set(want) - set(got))
        if not taken:
            continue
        margin = float(b[row, left].max() - b[row, taken].min())
        difference = float(np.abs(a[row] - b[row]).max())
        if not margin <= 2 * difference:
            return None
        one, other = (" and ".join(map(str, e)) for e in (taken, left))
        where = f"expert {one} for {other} at {node.name}, token {row}"
        said.append(f"{where}: margin {margin:.2g}, scores differ by {difference:.2g}")
    return said


def _flip(backend: Backend, reference: Backend, case: Case, execution: Execution) -> str:
    """Return the near-tie of experts that explains all wrong values; empty if none does."""
    if not any(n.op in OPS for s in case.steps for n in s.graph):
        return ""
    every = range(len(case.steps))
    ran, right = (execute(b, case, every_node=every).steps for b in (backend, reference))
    arithmetic = reference.arithmetic()
    flip = near_tie(case, [v.outputs for v in ran], [v.outputs for v in right], arithmetic)
    whole = [  # an output that is a view is judged by its node
        StepValues({t: v.outputs[t] for t in s.outputs if t in v.outputs}, v.caches)
        for s, v in zip(case.steps, ran, strict=True)
    ]
    same = all(j.used <= 1 for j in judge_steps(case, whole, execution, arithmetic))
    if not flip or not same or first_divergent(ran, reference, case, every[-1]) is not None:
        return ""
    return flip


# --- stale state ------------------------------------------------------------------------------------------------------

TOGETHER = "the step alone is equally wrong, so its nodes together (fusion, shared memory) are the cause"
FreshBackend = Callable[[], AbstractContextManager[Backend]]
"""Context manager that opens another backend and closes it."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Stale state is the cause of a failure."""

    fault: Fault
    """STALE or EARLIER."""
    wrong: Judged | None
    """First tensor that is wrong because of it; None if a fresh backend is right."""


def stale_state(fresh_backend: FreshBackend, reference: Backend, case: Case, arithmetic: Arithmetic) -> Stale | None:
    """Check whether stale state is the cause of a failing case; None if it is not.

    `reference` and backend compute in `arithmetic`. BackendError if a run fails.
    """
    with fresh_backend() as fresh:
        ran = execute(fresh, case).steps
    wrong = _first_wrong(reference, case, ran, arithmetic)
    if wrong is None:
        return Stale(Fault.EARLIER, None)
    if not wrong.step:
        return None
    caches = ran[wrong.step - 1].caches
    want = _by_itself(reference, case, wrong.step, caches)
    with fresh_backend() as fresh:
        got = _by_itself(fresh, case, wrong.step, caches)
    right = all(j.used <= 1 for j in _judge(case, wrong.step, want, got, arithmetic))
    return Stale(Fault.STALE, wrong) if right else None


@dataclass(frozen=True, slots=True)
class Replay:
    """A run on the reference."""

    steps: Sequence[StepValues]
    before: Sequence[Mapping[Tensor, Bytes]]
    """Initial caches of each step, and other persistent tensors that were overwritten."""


def replay(reference: Backend, case: Case, before: Callable[[Session, int], None] = nothing) -> Replay:
    """Run `case` on the reference and call `before` before each step; BackendError if it fails."""
    states: list[Mapping[Tensor, Bytes]] = []
    caches = case.caches()

    def watched(session: Session, k: int) -> None:
        before(session, k)
        now = {t: session.read(t) for t in case.persistent}
        states.append({t: x for t, x in now.items() if t in caches or not np.array_equal(x, case.persistent[t])})

    return Replay(execute(reference, case, before=watched).steps, states)


def stale(
    fresh_backend: FreshBackend,
    reference: Backend,
    case: Case,
    ran: Sequence[StepValues],
    right: Replay,
    arithmetic: Arithmetic,
) -> Stale | None:
    """Check for stale state like `stale_state` in a run that gave `ran`; None if there is none.

    For runs that a plain run does not reproduce: something is written between the steps, a graph is reused, a value is
    not read, or the caches cannot be read. Each step starts from its state in the reference's run, `right`.
    """
    bare = replace(case, tolerance={})
    shown = [{t: x for t, x in w.all.items() if t in got.all} for w, got in zip(right.steps, ran, strict=True)]
    judged = judge_trajectory(bare, shown, [v.all for v in ran], arithmetic)
    wrong = next((j for j in judged if j.used > 1), None)
    if wrong is None:
        return None
    unseen = [k for k in range(wrong.step) if not ran[k].caches]
    for k in (wrong.step, *unseen):
        want = _by_itself(reference, case, k, right.before[k])
        with fresh_backend() as fresh:
            got = _by_itself(fresh, case, k, right.before[k])
        want = StepValues(want.outputs, {t: x for t, x in want.caches.items() if t in got.caches})
        if any(j.used > 1 for j in _judge(case, k, want, got, arithmetic)):
            return None
    return Stale(Fault.STALE if wrong.step else Fault.EARLIER, wrong)


def stale_step(fresh_backend: FreshBackend, case: Case, k: int, right: Replay) -> Place | None:
    """Return the place of a failure at step `k` if a fresh backend runs that step; else None."""
    with fresh_backend() as fresh:
        try:
            _by_itself(fresh, case, k, right.before[k])
        except BackendError:
            return None
    return _stale_at(k)


def _stale_at(k: int) -> Place:
    return Place(Fault.STALE if k else Fault.EARLIER, k)


def is_stale(result: Result) -> bool:
    """Return True if a failure was caused by stale state, not by a kernel or a translation."""
    return result.where is not None and result.where.fault in {Fault.STALE, Fault.EARLIER}


def expected_steps(reference: Backend, case: Case, found: Sequence[StepValues]) -> Iterator[StepValues]:
    """Yield the expected values of each step, started from the caches `found` before it."""
    caches = case.caches()
    with reference.open(case) as session:
        for k, step in enumerate(case.steps):
            for t in caches if k else ():
                session.write(t, found[k - 1].caches[t])
            outputs = session.compute(step.graph, step.inputs, step.outputs)
            yield StepValues(dict(outputs), {t: pack(session.read(t), t, 0) for t in caches})


def _first_wrong(reference: Backend, case: Case, ran: Sequence[StepValues], arithmetic: Arithmetic) -> Judged | None:
    """Return the first wrong tensor of the first step that is wrong given its own caches."""
    for k, (want, got) in enumerate(zip(expected_steps(reference, case, ran), ran, strict=True)):
        wrong = next((j for j in _judge(case, k, want, got, arithmetic) if j.used > 1), None)
        if wrong is not None:
            return wrong
    return None


def _judge(case: Case, k: int, want: StepValues, got: StepValues, arithmetic: Arithmetic) -> list[Judged]:
    return list(judge_step(replace(case, tolerance={}), k, want.all, got.all, arithmetic))


def _by_itself(backend: Backend, case: Case, k: int, held: Mapping[Tensor, Bytes]) -> StepValues:
    """Run step `k` first in a session whose persistent tensors have the bytes `held`."""
    step = case.steps[k]
    recipes = {t: r for t, r in case.recipes.items() if t not in held}
    with backend.open(replace(case, persistent={**case.persistent, **held}, recipes=recipes)) as session:
        outputs = session.compute(step.graph, step.inputs, step.outputs)
        hidden = session.opaque()
        return StepValues(dict(outputs), {t: pack(session.read(t), t, 0) for t in case.caches() if t not in hidden})


# -- what a backend cannot run -----------------------------------------------------------------------------------------


def place(
    backend: Backend, fresh_backend: FreshBackend, reference: Backend, case: Case, error: BackendError
) -> Place | None:
    """Return where `backend` failed at `case` with `error`; None if the step is unknown.

    That is the first node of the step that fails alone, else the first that fails after those before it, or stale state
    if the step runs on a fresh backend. BackendError if another run fails.
    """
    k = error.step
    if k is None:
        return None
    graph = case.steps[k].graph
    if len(graph) == 1:
        (node,) = graph
        return Place(Fault.NODE, k, 0, node.op, node.name)
    if isinstance(error, BackendTimeoutError):  # each try would take as long
        return Place(Fault.UNLOCATED, k)
    start = replace(case, steps=case.steps[: k + 1], tolerance={})
    right = execute(reference, start, every_node=[k]).steps
    alone, original = isolated_nodes(with_values(start, right), k)
    copies = list(original)
    found = bisect_first(len(copies), lambda n: _fails(backend, with_nodes(alone, copies[:n]), error))
    if found is not None and _fails(backend, with_nodes(alone, copies[found : found + 1]), error):
        return _failing(Fault.NODE, case, k, original[copies[found]])
    caches = right[k - 1].caches if k else {t: case.persistent[t] for t in case.caches()}
    with fresh_backend() as fresh:
        return _behind(fresh, case, k, caches, error)


def _behind(fresh: Backend, case: Case, k: int, caches: Mapping[Tensor, Bytes], error: BackendError) -> Place:
    """Return where step `k` fails with `error` on a fresh backend, from `caches`."""
    graph = case.steps[k].graph
    try:
        _by_itself(fresh, case, k, caches)
    except BackendError:
        found = bisect_first(len(graph), lambda n: _fails(fresh, _beginning(case, k, n, caches), error))
        return Place(Fault.UNLOCATED, k) if found is None else _failing(Fault.GRAPH, case, k, graph.nodes[found])
    return _stale_at(k)


def _failing(fault: Fault, case: Case, k: int, node: Tensor) -> Place:
    sources = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    index = case.steps[k].graph.nodes.index(node)
    return Place(fault, k, index, node.op, node.name, f"{node} of {sources}", steps=len(case.steps))


def bisect_first(n: int, fails: Callable[[int], bool]) -> int | None:
    """Return the index of the first item with which a prefix fails; None if all `n` items pass."""
    if not fails(n):
        return None
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high - 1


def _fails(backend: Backend, case: Case, error: BackendError) -> bool:
    """Return True if `backend` fails at `case` with the same error."""
    try:
        execute(backend, case)
    except BackendError as e:
        return type(e) is type(error) and (
            isinstance(e, BackendCrashError) or innermost(error_of(e)) == innermost(error_of(error))
        )
    return False


def with_nodes(alone: Case, nodes: Sequence[Tensor]) -> Case:
    """Return a case of isolated nodes with `nodes` only."""
    growing = Expansion()
    for node in nodes:
        growing.expand(node)
    return one_step_case(alone, Step(growing.graph(), alone.steps[0].inputs, tuple(nodes)), {})


def _beginning(case: Case, k: int, n: int, caches: Mapping[Tensor, Bytes]) -> Case:
    """Return the first `n` nodes of step `k` as a case that starts from `caches`."""
    step = case.steps[k]
    part = partial(step.graph, 0, n, persistent=case.persistent, outputs=frozenset(step.outputs))
    inputs = {leaf: step.inputs[root] for leaf, root in part.inputs.items()}
    return one_step_case(case, Step(part.graph, inputs, part.outputs), caches)


def one_step_case(case: Case, step: Step, caches: Mapping[Tensor, Bytes]) -> Case:
    """Return a one-step case with the tensors of `case` that it uses."""
    used = set(step.graph.tensors())
    persistent = {t: data for t, data in {**case.persistent, **caches}.items() if t in used}
    step.inputs = {t: data for t, data in step.inputs.items() if t in used}
    return Case(case.id, persistent, [step], family=case.family, params=case.params)
