"""Where a failure comes from that a wrong number alone does not show: the node that a backend cannot run, and whether
something that it keeps, such as a compiled graph, a cache or its log, is at fault and no kernel.

A backend opened anew has kept nothing. So a step that is wrong in the whole case there, and right there by itself from
the same caches, is wrong by what an earlier step left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from conformance.backend.interface import Backend, Session
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError
from conformance.ggml.ops.build import Expansion
from conformance.ggml.partial import partial
from conformance.ggml.tensor import Bytes, Tensor, pack
from conformance.judge.evidence import Fault, Place
from conformance.judge.judge import Judged, judge_step, judge_trajectory
from conformance.judge.verdict import Result
from conformance.suite.batch import isolated_nodes

from .execute import StepValues, execute, nothing, with_values
from .judgement import expected_steps
from .signature import error_of, innermost

TOGETHER = "the step by itself is as wrong, so what its nodes do together (fusion, shared memory) is at fault"
Anew = Callable[[], AbstractContextManager[Backend]]
"""Opens the backend once more, and closes it."""


@dataclass(frozen=True, slots=True)
class Stale:
    """What the backend kept is at fault."""

    fault: Fault
    """STALE or EARLIER."""
    wrong: Judged | None
    """The first tensor that is wrong by it, where one is wrong on a backend opened anew too."""


def stale_state(anew: Anew, reference: Backend, case: Case, arithmetic: Arithmetic) -> Stale | None:
    """Whether a failing case is wrong by what the backend kept. `reference` and backend compute in `arithmetic`.
    BackendError if a run failed.
    """
    with anew() as fresh:
        ran = execute(fresh, case).steps
    wrong = _first_wrong(reference, case, ran, arithmetic)
    if wrong is None:
        return Stale(Fault.EARLIER, None)
    if not wrong.step:
        return None
    caches = ran[wrong.step - 1].caches
    want = _by_itself(reference, case, wrong.step, caches)
    with anew() as fresh:
        got = _by_itself(fresh, case, wrong.step, caches)
    right = all(j.used <= 1 for j in _judge(case, wrong.step, want, got, arithmetic))
    return Stale(Fault.STALE, wrong) if right else None


@dataclass(frozen=True, slots=True)
class Replay:
    """A run on the reference."""

    steps: Sequence[StepValues]
    before: Sequence[Mapping[Tensor, Bytes]]
    """Per step: the persistent tensors that it starts from, where these are caches or were written by somebody."""


def replay(reference: Backend, case: Case, before: Callable[[Session, int], None] = nothing) -> Replay:
    """Run `case` on the reference, with what somebody does `before` each step; BackendError if it failed."""
    states: list[Mapping[Tensor, Bytes]] = []
    caches = case.caches()

    def watched(session: Session, k: int) -> None:
        before(session, k)
        now = {t: session.read(t) for t in case.persistent}
        states.append({t: x for t, x in now.items() if t in caches or not np.array_equal(x, case.persistent[t])})

    return Replay(execute(reference, case, before=watched).steps, states)


def stale(
    anew: Anew, reference: Backend, case: Case, ran: Sequence[StepValues], right: Replay, arithmetic: Arithmetic
) -> Stale | None:
    """The same as `stale_state` of a run that gave `ran`, where a plain one may not show the fault: what somebody does
    between the steps, by which graph a step runs, or what nobody reads is part of it, or the caches cannot be read.
    Each step starts from the state that it has in the reference's run, `right`.
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
        with anew() as fresh:
            got = _by_itself(fresh, case, k, right.before[k])
        want = StepValues(want.outputs, {t: x for t, x in want.caches.items() if t in got.caches})
        if any(j.used > 1 for j in _judge(case, k, want, got, arithmetic)):
            return None
    return Stale(Fault.STALE if wrong.step else Fault.EARLIER, wrong)


def stale_step(anew: Anew, case: Case, k: int, right: Replay) -> Place | None:
    """Where a run failed at step `k`, if a backend opened anew runs that from the state of the reference's run."""
    with anew() as fresh:
        try:
            _by_itself(fresh, case, k, right.before[k])
        except BackendError:
            return None
    return _stale_at(k)


def _stale_at(k: int) -> Place:
    return Place(Fault.STALE if k else Fault.EARLIER, k)


def is_stale(result: Result) -> bool:
    """Whether a failure was found to come from what the backend kept, so that no kernel and no translation is wrong."""
    return result.where is not None and result.where.fault in {Fault.STALE, Fault.EARLIER}


def _first_wrong(reference: Backend, case: Case, ran: Sequence[StepValues], arithmetic: Arithmetic) -> Judged | None:
    """The first wrong tensor of the first step that is wrong although it started from the backend's own caches."""
    for k, (want, got) in enumerate(zip(expected_steps(reference, case, ran), ran, strict=True)):
        wrong = next((j for j in _judge(case, k, want, got, arithmetic) if j.used > 1), None)
        if wrong is not None:
            return wrong
    return None


def _judge(case: Case, k: int, want: StepValues, got: StepValues, arithmetic: Arithmetic) -> list[Judged]:
    return list(judge_step(replace(case, tolerance={}), k, want.all, got.all, arithmetic))


def _by_itself(backend: Backend, case: Case, k: int, held: Mapping[Tensor, Bytes]) -> StepValues:
    """Step `k` as the first of a session that opens the whole case with these bytes of its persistent tensors."""
    step = case.steps[k]
    recipes = {t: r for t, r in case.recipes.items() if t not in held}
    with backend.open(replace(case, persistent={**case.persistent, **held}, recipes=recipes)) as session:
        outputs = session.compute(step.graph, step.inputs, step.outputs)
        hidden = session.opaque()
        return StepValues(dict(outputs), {t: pack(session.read(t), t, 0) for t in case.caches() if t not in hidden})


# -- what a backend cannot run -----------------------------------------------------------------------------------------


def place(backend: Backend, anew: Anew, reference: Backend, case: Case, error: BackendError) -> Place | None:
    """Where `backend` failed at `case` with `error`: the step, and the first of its nodes that fails by itself, or else
    the first that fails behind those before it, or that the step runs on a backend opened anew. None where the step is
    unknown. BackendError if another run failed.
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
    found = _first(len(copies), lambda n: _fails(backend, _some(alone, copies[:n]), error))
    if found is not None and _fails(backend, _some(alone, copies[found : found + 1]), error):
        return _failing(Fault.NODE, case, k, original[copies[found]])
    caches = right[k - 1].caches if k else {t: case.persistent[t] for t in case.caches()}
    with anew() as fresh:
        return _behind(fresh, case, k, caches, error)


def _behind(fresh: Backend, case: Case, k: int, caches: Mapping[Tensor, Bytes], error: BackendError) -> Place:
    """Where step `k` fails with `error` on a backend opened anew, from `caches`."""
    graph = case.steps[k].graph
    try:
        _by_itself(fresh, case, k, caches)
    except BackendError:
        found = _first(len(graph), lambda n: _fails(fresh, _beginning(case, k, n, caches), error))
        return Place(Fault.UNLOCATED, k) if found is None else _failing(Fault.GRAPH, case, k, graph.nodes[found])
    return _stale_at(k)


def _failing(fault: Fault, case: Case, k: int, node: Tensor) -> Place:
    sources = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    index = case.steps[k].graph.nodes.index(node)
    return Place(fault, k, index, node.op, node.name, f"{node} of {sources}", steps=len(case.steps))


def _first(n: int, fails: Callable[[int], bool]) -> int | None:
    """The index of the first of `n` items with which those up to it fail; None where all together do not."""
    if not fails(n):
        return None
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high - 1


def _fails(backend: Backend, case: Case, error: BackendError) -> bool:
    """Whether `backend` fails at `case` with `error`: another says nothing, as of a node that it never meets alone."""
    try:
        execute(backend, case)
    except BackendError as e:
        return type(e) is type(error) and (
            isinstance(e, BackendCrashError) or innermost(error_of(e)) == innermost(error_of(error))
        )
    return False


def _some(alone: Case, nodes: Sequence[Tensor]) -> Case:
    """Only `nodes` of a case of isolated ones."""
    growing = Expansion()
    for node in nodes:
        growing.expand(node)
    return _of(alone, Step(growing.graph(), alone.steps[0].inputs, tuple(nodes)), {})


def _beginning(case: Case, k: int, n: int, caches: Mapping[Tensor, Bytes]) -> Case:
    """The first `n` nodes of step `k` as a case, which starts from `caches`."""
    step = case.steps[k]
    part = partial(step.graph, 0, n, persistent=case.persistent, outputs=frozenset(step.outputs))
    inputs = {leaf: step.inputs[root] for leaf, root in part.inputs.items()}
    return _of(case, Step(part.graph, inputs, part.outputs), caches)


def _of(case: Case, step: Step, caches: Mapping[Tensor, Bytes]) -> Case:
    """A case of one step, with the tensors of `case` that it has."""
    used = set(step.graph.tensors())
    persistent = {t: data for t, data in {**case.persistent, **caches}.items() if t in used}
    step.inputs = {t: data for t, data in step.inputs.items() if t in used}
    return Case(case.id, persistent, [step], family=case.family, params=case.params)
