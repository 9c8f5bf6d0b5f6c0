"""Judge relations: compare the values of several runs of a case on one backend.

No reference is involved. If the relation has a tolerance, both sides may err by it, and the errors add up; otherwise
both sides must be bit-exact.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt

import numpy as np

from conformance.backend.interface import Backend, Session, describe
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, contiguous_nb
from conformance.judge.budget import RAW, Budget
from conformance.judge.compare import compare
from conformance.judge.evidence import Error, Fault
from conformance.judge.judge import Chain, Judged, how_wrong
from conformance.judge.verdict import Result, Verdict
from conformance.suite.relations.relation import (
    BITS,
    BUFFERS,
    BY_NODE,
    FOLDER,
    HANDED_OVER,
    OVERWRITTEN,
    PROCESS,
    RESTORED,
    REUSED,
    THREADS,
    UNREAD,
    WRITTEN,
    Place,
    Relation,
    Run,
    case_of,
    read,
)

from . import locate
from .attempt import UnderTest
from .execute import Execution, Memory, PartError, Reuse, StepValues, execute, execute_by_node, nothing
from .failed import unsupported


class NotOfferedError(Exception):
    """The backend lacks the property that the relation varies; this is not a failure."""


Before = Callable[[Session, int], None]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two runs that differ, or a run that failed."""

    what: str
    case: Case
    first: int
    """Step of the relation at which `case` begins."""
    spec: Spec
    """Spec for a fresh backend, with the threads or buffers of this run."""
    ran: Sequence[StepValues]
    """Values of its steps; empty if it failed."""
    before: Callable[[Backend], Before]
    """Returns, for a fresh backend, the function that repeats the writes before each step."""


def judge(
    tested: UnderTest,
    case: Case,
    check: Callable[[Result, Sequence[Side]], Result] = lambda result, _sides: result,
    failed: Callable[[BackendError, Side], Result] | None = None,
) -> Result:
    """Run all sides of a relation and compare them; UNSUPPORTED if the backend lacks an option.

    `check` searches the cause of a difference, `failed` makes the result of a failed run. ConformanceError if the
    relation is malformed, or, without `failed`, a run failed.
    """
    relation = read(case)
    result = Result(*tested.pair(case), Verdict.PASS)
    with ExitStack() as stack:
        runs = _Runs(tested, case, relation, stack)
        try:
            for variant in runs.variants():
                result, differing = _compare(result, runs, variant)
                if differing is not None:
                    result = check(result, [runs.side(i, variant) for i in dict.fromkeys(reversed(differing))])
                    break
        except NotOfferedError as e:
            return unsupported(tested.pair(case), Error(str(e)))
        except BackendError as e:
            if failed is None or runs.failed is None:
                raise
            return failed(e, runs.side(*runs.failed))
        return replace(
            result,
            seconds=sum(x.seconds for x in runs.done.values()),
            steps=sum(len(x.steps) for x in runs.done.values()),
            witness=describe(list(runs.done.values())[-1].witness),
        )


class _Runs:
    """The runs of one relation, each done once, and the backends opened for them."""

    def __init__(self, tested: UnderTest, case: Case, relation: Relation, stack: ExitStack) -> None:
        self.tested, self.case, self.relation = tested, case, relation
        self.spec, self.backend = tested.spec, tested.backend
        self.done: dict[tuple[int, str], Execution] = {}
        self.failed: tuple[int, str] | None = None
        """Index and variant of the failed run."""
        self._stack = stack
        self._opened: dict[tuple[int, str], Backend] = {}

    def variants(self) -> Iterator[str]:
        """Yield the names of buffer types to compare; one empty name if they are not varied."""
        if any(r.how == THREADS for r in self.relation.runs) and not self.backend.takes(THREADS):
            raise NotOfferedError(f"{self.spec} has no option for threads")
        if all(r.how != BUFFERS for r in self.relation.runs):
            yield ""
            return
        names = [b.name for b in self.backend.buffer_types()][1:]
        if not names or not self.backend.takes("buffer"):
            raise NotOfferedError(f"{self.spec} has no option for the buffer type of weights")
        yield from names

    def execution(self, i: int, variant: str) -> Execution:
        """Return run `i`, done at the first call."""
        r = self.relation.runs[i]
        key = (i, variant if r.how == BUFFERS else "")
        if key not in self.done:
            try:
                self.done[key] = self._execute(self._open(i, key[1]), case_of(self.case, self.relation, i), r)
            except BackendError as e:
                e.side = f"{r.what} ({variant})" if variant else r.what
                self.failed = i, variant
                raise
        return self.done[key]

    def side(self, i: int, variant: str) -> Side:
        """Return run `i`, done or failed."""
        r, alone = self.relation.runs[i], case_of(self.case, self.relation, i)
        spec = self._spec(r, variant if r.how == BUFFERS else "") if r.how in {THREADS, BUFFERS} else self.spec

        def before(other: Backend) -> Before:
            if r.how not in {RESTORED, WRITTEN, HANDED_OVER}:
                return nothing
            again = _Runs(replace(self.tested, backend=other), self.case, self.relation, self._stack)
            return again._outside(alone, r)

        done = self.done.get((i, variant if r.how == BUFFERS else ""))
        return Side(r.what, alone, r.first, spec, done.steps if done else (), before)

    def _execute(self, backend: Backend, alone: Case, r: Run) -> Execution:
        if r.how in {RESTORED, WRITTEN, HANDED_OVER}:
            return execute(backend, alone, unread=r.how == HANDED_OVER, before=self._outside(alone, r))
        if r.how == BY_NODE:
            try:
                done = execute_by_node(backend, alone)
            except PartError as e:
                raise NotOfferedError(f"{self.spec}: {e}") from e
            if done.opaque:
                raise NotOfferedError(f"{self.spec} has unreadable caches, so no node can start from them alone")
            return done
        if r.how == UNREAD:
            return execute(backend, alone, unread=True)
        if r.how == REUSED:
            return execute(backend, alone, memory=Reuse(alone))
        if r.how == OVERWRITTEN and not backend.fixed_graphs:
            return execute(backend, alone, memory=Memory(alone))
        if r.how == OVERWRITTEN and not all(self.backend.takes(k) for k in r.options):
            raise NotOfferedError(
                f"{self.spec} splits graphs in advance, so the adapter itself must reuse memory: "
                f"it has no option {', '.join(r.options)}"
            )
        return execute(backend, alone)

    def _outside(self, alone: Case, r: Run) -> Before:
        """Return the function that writes tensors between steps of run `r`, whose case is `alone`."""
        caches = alone.caches()
        given: dict[Tensor, Bytes] = {}
        written_at = r.at + 1
        if r.how == WRITTEN:
            given.update(zip(alone.persistent, case_of(self.case, self.relation, 0).persistent.values(), strict=True))
        elif r.how == RESTORED:
            written_at += 1

        def before(session: Session, step: int) -> None:
            if step == 0 and not session.opaque().isdisjoint(caches):
                raise NotOfferedError(f"{self.spec} has unreadable caches, which cannot be saved or set")
            if step == r.at + 1 and r.how == RESTORED:
                given.update((t, session.read(t)) for t in caches)
            if step == written_at:
                if r.how == HANDED_OVER:
                    had = self.execution(0, "").steps[r.at].caches
                    given.update((t, had[t]) for t in caches[::2])
                for t, data in given.items():
                    session.write(t, data)

        return before

    def _open(self, i: int, variant: str) -> Backend:
        r = self.relation.runs[i]
        if not r.opening:
            return self.backend
        key = (r.opening, variant)
        if key not in self._opened:
            spec = self._spec(r, variant)
            try:
                backend = self.tested.keeper.open(spec, own=r.how == PROCESS)
            except UsageError as e:
                if r.how != THREADS:
                    raise
                raise NotOfferedError(str(e)) from e  # the adapter has the option, but this device has no threads
            self._stack.callback(backend.close)
            self._opened[key] = backend
        return self._opened[key]

    def _spec(self, r: Run, variant: str) -> Spec:
        taken = {k: v for k, v in r.options.items() if self.backend.takes(k)}
        options = {k: self._folder if v == FOLDER else v for k, v in taken.items()}
        if variant:
            options["buffer"] = variant
        return replace(self.spec, options=tuple({**dict(self.spec.options), **options}.items()))

    @cached_property
    def _folder(self) -> str:
        return self._stack.enter_context(tempfile.TemporaryDirectory(prefix="relation"))


_Value = tuple[Bytes, Budget]
"""Bytes of some rows, and their tolerance."""


def _compare(result: Result, runs: _Runs, variant: str) -> tuple[Result, tuple[int, int] | None]:
    """Return `result` with all sides compared, and the first two runs that differ."""
    relation, case = runs.relation, runs.case
    budgets: dict[int, list[dict[Tensor, Budget]]] = {}
    needed = dict.fromkeys([i for pair in relation.whole for i in pair])
    needed |= dict.fromkeys([p.run for k in relation.links for p in (*k.left, *k.right)])
    for i in range(len(relation.runs)):  # in order: later runs depend on earlier ones
        runs.execution(i, variant)
    for i in needed:
        alone = case_of(case, relation, i)
        budgets[i] = [] if relation.equal == BITS else _budgets(alone, runs.backend.arithmetic_in(alone))

    def shown(p: Place) -> bool:
        return p.kind == "output" or p.tensor(case, relation) not in runs.execution(p.run, variant).opaque

    def value(p: Place, t: Tensor) -> _Value:
        left = runs.execution(p.run, variant).steps[p.step]
        data = (left.caches if p.kind == "cache" else left.outputs)[t]
        if p.rows is not None:
            data = data.reshape(t.ne[1] * t.ne[2] * t.ne[3], -1)[list(p.rows)].reshape(-1)
        return data, RAW if relation.equal == BITS else budgets[p.run][p.step][t]

    for left, right in _pairs(case, relation):
        if not all(shown(p) for p in (*left, *right)):
            continue
        t = left[0].tensor(case, relation)
        a = [value(p, p.tensor(case, relation)) for p in left]
        b = [value(p, p.tensor(case, relation)) for p in right]
        same = _judge(t, left[0], a, b)
        used, nmse = max(result.budget_used or 0.0, same.used), max(result.nmse or 0.0, same.difference.nmse)
        result = replace(result, budget_used=used, nmse=nmse)
        if same.used > 1:
            names = [relation.runs[p[0].run].what + (f" ({variant})" if variant else "") for p in (left, right)]
            whole = replace(same, step=relation.runs[left[0].run].first + same.step)
            where = locate.describe(whole, case, Fault.GRAPH)
            wrong = replace(result, verdict=Verdict.FAIL, wrong=how_wrong([same]), where=where)
            said = f"{relation.says}: expected is from {names[0]}, found from {names[1]}"
            return wrong.noted(said), (left[0].run, right[0].run)
    return result, None


def _pairs(case: Case, relation: Relation) -> Iterator[tuple[Sequence[Place], Sequence[Place]]]:
    """Yield both sides of every comparison, step by step."""
    at = {t: i for i, t in enumerate(case.persistent)}
    for a, b in relation.whole:
        left, right = case_of(case, relation, a), case_of(case, relation, b)
        for k, step in enumerate(left.steps):
            for j in range(len(step.outputs)):
                yield [Place(a, k, "output", j)], [Place(b, k, "output", j)]
            for s, t in zip(left.caches(), right.caches(), strict=True):
                yield [Place(a, k, "cache", at[s])], [Place(b, k, "cache", at[t])]
    for link in relation.links:
        yield link.left, link.right


def _judge(t: Tensor, place: Place, left: Sequence[_Value], right: Sequence[_Value]) -> Judged:
    a, b = (np.concatenate([data for data, _ in side]) for side in (left, right))
    budget = RAW
    for side in (left, right):  # both approximate the same right value: errors add up
        worst = max((own for _, own in side), key=lambda x: x.nmse)
        nmse = (sqrt(budget.nmse) + sqrt(worst.nmse)) ** 2
        budget = Budget(nmse, budget.element + worst.element, f"two runs, each: {worst.why}")
    row = t.ne[0] // t.type.blck_size * t.type.type_size
    ne = t.ne if a.nbytes == row * t.ne[1] * t.ne[2] * t.ne[3] else (t.ne[0], a.nbytes // row, 1, 1)
    shaped = replace(t, ne=ne, nb=contiguous_nb(t.type, ne), view_src=None, view_offs=0)
    found = compare(shaped, a, b, unordered=t.op == "TOP_K")
    return Judged(place.step, t, found, budget)


def _budgets(case: Case, arithmetic: Arithmetic) -> list[dict[Tensor, Budget]]:
    """Return, per step, output or cache -> its tolerance in a free run."""
    chain, caches = Chain(arithmetic), case.caches()
    found = []
    for step in case.steps:
        chain.enter(step.graph)
        found.append({t: chain.budget(t) for t in (*step.outputs, *caches)})
    return found
